"""Workers of ordered groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.executors import Timeouts, Worker, not_awaited
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.process_spans import ProcessSpans, acalled, called
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.poison_guard import PoisonMessageGuard
from mqlayer.consuming.ordered.turn_results import TurnResults
from mqlayer.domain.message import HEADERS_MARK, Record
from mqlayer.failpoints import failpoint

TIME_SLICE_S: Final = 0.1
"""How long a key keeps its worker while others wait."""

Handle = Callable[[OwnedPartition, Record], Any]


class KeyQueueWorker(Worker):
    """Takes key queues, several while handlers are quick."""

    def __init__(
        self,
        handle: Handle,
        dispatcher: Dispatcher,
        spans: ProcessSpans | None,
        settings: LiveSettings,
        guard: PoisonMessageGuard,
        results: TurnResults,
        limits: Timeouts,
    ) -> None:
        self._handle, self._dispatcher, self._settings = handle, dispatcher, settings
        self._guard, self._results, self._limits = guard, results, limits
        self._spans, self._breaker = spans, settings.breaker
        self._local_queue = dispatcher.new_local_queue()

    @property
    def stopping(self) -> bool:
        """Whether to end."""
        return self._dispatcher.stopping

    def take(self, timeout_s: float) -> bool:
        """Take key queues."""
        return self._dispatcher.fill(self._local_queue, timeout_s)

    def run(self) -> None:
        """Handle it, plain."""
        began = now = clock()
        messages, local_queue, breaker, lease = 0, self._local_queue, self._breaker, self._dispatcher.lease
        handle, expiry = self._limits.wrap(self._handle, self._settings.rules), self._settings.expiry
        may_end, finished, spans = expiry is not None and expiry.ttl_ms > 0, self._dispatcher.done, self._spans
        while True:
            try:
                key_queue = local_queue.popleft()
            except IndexError:
                break
            if breaker.engaged and not self._is_admitted(key_queue):
                continue
            batch, owned = key_queue.batch, key_queue.owned
            if (
                may_end
                or spans is not None
                or len(batch) != 1
                or owned.state is not OwnershipState.OPEN
                or now >= lease.until
                or (record := batch[0])[0] < key_queue.guarded_below
                or HEADERS_MARK in record[1]
            ):
                done, now = self._run(key_queue, handle, now)
                messages += done
                continue
            # With one message per key, each message comes here.
            try:
                answer = handle(owned, record)
                if answer is not None and isawaitable(answer):
                    raise not_awaited(answer)
                failpoint("handler.after_success")
                key_queue.handled.append(record)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
                messages += self._results.failed(key_queue, 0, error)
            else:
                messages += 1
                if breaker.watching:
                    self._results.give_back(key_queue, 1)
                else:
                    finished(key_queue)
            now = clock()
        self._results.handled(messages)
        self._dispatcher.note_pace(messages, now - began)

    def _is_admitted(self, key_queue: KeyQueue) -> bool:
        if self._breaker.is_admitted(key_queue):
            return True
        self._results.give_back(key_queue, 0)
        return False

    def _run(self, key_queue: KeyQueue, handle: Handle, now: float) -> tuple[int, float]:
        lease, owned, batch = self._dispatcher.lease, key_queue.owned, key_queue.batch
        settled, until, done, guarded_below = key_queue.handled.append, now + TIME_SLICE_S, 0, key_queue.guarded_below
        spans, expiry, expired = self._spans, self._settings.expiry, 0
        # Its own end is in a message's headers.
        may_end = expiry is not None and expiry.ttl_ms > 0
        try:
            for record in batch:
                if now >= until or owned.state is not OwnershipState.OPEN or now >= lease.until:
                    break
                if (may_end or HEADERS_MARK in record[1]) and expiry is not None and expiry.has_ended(record, now):
                    if not self._results.expired(key_queue, done, expiry, now):
                        return done - expired, now
                    done, expired = done + 1, expired + 1
                    continue
                if record.offset < guarded_below:
                    if not self._handle_with_care(handle, key_queue, record):
                        break
                    answer = None
                elif spans is None or spans.mark not in record[1]:
                    answer = handle(owned, record)
                else:
                    answer = spans.run(handle, owned, record)
                if answer is not None and isawaitable(answer):
                    raise not_awaited(answer)
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return self._results.failed(key_queue, done, error) - expired, clock()
        self._results.give_back(key_queue, done, expired=expired)
        return done - expired, now

    def _handle_with_care(self, handle: Handle, key_queue: KeyQueue, record: Record) -> bool:
        if not self._guard.begin(key_queue, record):
            return False
        try:
            answer = called(self._spans, handle, key_queue.owned, record)
            if answer is not None and isawaitable(answer):
                raise not_awaited(answer)
        finally:
            self._guard.end(key_queue, record)
        return True

    async def arun(self) -> None:
        """Handle it, async."""
        while self._local_queue:
            self._results.handled(await self._arun(self._local_queue.popleft()))

    async def _arun(self, key_queue: KeyQueue) -> int:
        if self._breaker.engaged and not self._is_admitted(key_queue):
            return 0
        lease, owned, batch = self._dispatcher.lease, key_queue.owned, key_queue.batch
        handle = self._limits.wrap(self._handle, self._settings.rules)
        settled, now, done, guarded_below = key_queue.handled.append, clock(), 0, key_queue.guarded_below
        until, expiry, expired = now + TIME_SLICE_S, self._settings.expiry, 0
        try:
            for record in batch:
                if now >= until or owned.state is not OwnershipState.OPEN or now >= lease.until:
                    break
                if expiry is not None and expiry.has_ended(record, now):
                    if not self._results.expired(key_queue, done, expiry, now):
                        return done - expired
                    done, expired = done + 1, expired + 1
                    continue
                if record.offset >= guarded_below:
                    await acalled(self._spans, handle, owned, record)
                elif not await self._ahandle_with_care(handle, key_queue, record):
                    break
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return self._results.failed(key_queue, done, error) - expired
        self._results.give_back(key_queue, done, expired=expired)
        return done - expired

    async def _ahandle_with_care(self, handle: Handle, key_queue: KeyQueue, record: Record) -> bool:
        # `begin` waits for other workers; the loop must not.
        if not await asyncio.to_thread(self._guard.begin, key_queue, record):
            return False
        try:
            await acalled(self._spans, handle, key_queue.owned, record)
        finally:
            self._guard.end(key_queue, record)
        return True
