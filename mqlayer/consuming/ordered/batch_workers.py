"""Workers of batch handlers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from inspect import isawaitable
from itertools import groupby
from typing import Any

from mqlayer.consuming.api.batch_handlers import BatchHandler
from mqlayer.consuming.api.batch_messages import BatchMessage, Failed, Handled, MessageOutcome, Redelivered
from mqlayer.consuming.api.batches import Batch, is_lost
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.executors import IDLE_WAIT_S, Timeouts, Worker, not_awaited
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.process_spans import ProcessSpans
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher
from mqlayer.consuming.ordered.owned_partitions import EVERY_OFFSET, KeyQueue, OwnershipState
from mqlayer.consuming.ordered.poison_guard import PoisonMessageGuard
from mqlayer.consuming.ordered.turn_results import TurnResults
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.runtime.error_text import where

log = event_logger(__name__)


class BatchWorker(Worker):
    """Takes batches."""

    def __init__(
        self,
        handler: BatchHandler,
        dispatcher: BatchDispatcher,
        spans: ProcessSpans | None,
        settings: LiveSettings,
        guard: PoisonMessageGuard,
        results: TurnResults,
        limits: Timeouts,
    ) -> None:
        self._handler, self._dispatcher, self._settings = handler, dispatcher, settings
        self._guard, self._results, self._limits = guard, results, limits
        self._spans = spans
        self._key_queues: list[KeyQueue] = []

    @property
    def stopping(self) -> bool:
        """Whether to end."""
        return self._dispatcher.stopping

    def idle_s(self) -> float:
        """Return a coroutine's longest wait."""
        return self._dispatcher.batch_due_s(IDLE_WAIT_S)

    def take(self, timeout_s: float) -> bool:
        """Take the key queues of a batch."""
        self._key_queues = self._dispatcher.take_batch(timeout_s)
        return bool(self._key_queues)

    def run(self) -> None:
        """Handle it, plain."""
        key_queues = self._startable()
        if key_queues:
            began = clock()
            done = self._run_batch(self._handler.batch(key_queues))
            self._results.handled(done)
            self._dispatcher.note_pace(done, clock() - began)

    def _run_batch(self, batch: Batch[Any]) -> int:
        raised: BaseException | None = None
        try:
            guarded = _guarded_message(batch)
            if guarded is None:
                self._call(batch)
            elif self._guard.begin(guarded.queue, guarded.record):
                with self._ended(guarded):
                    self._call(batch)
            else:
                self._results.give_back(guarded.queue, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return self._conclude(batch, raised)

    def _call(self, batch: Batch[Any]) -> None:
        handle = self._limits.wrap(self._handler, self._settings.rules)
        answer = handle(batch) if self._spans is None else self._spans.run_batch(handle, batch)
        if answer is not None and isawaitable(answer):
            raise not_awaited(answer)

    async def arun(self) -> None:
        """Handle it, async."""
        key_queues = self._startable()
        if key_queues:
            self._results.handled(await self._arun_batch(self._handler.batch(key_queues)))

    async def _arun_batch(self, batch: Batch[Any]) -> int:
        raised: BaseException | None = None
        try:
            guarded = _guarded_message(batch)
            if guarded is None:
                await self._acall(batch)
            # `begin` waits for other workers; the loop must not.
            elif await asyncio.to_thread(self._guard.begin, guarded.queue, guarded.record):
                with self._ended(guarded):
                    await self._acall(batch)
            else:
                self._results.give_back(guarded.queue, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return self._conclude(batch, raised)

    async def _acall(self, batch: Batch[Any]) -> None:
        handle = self._limits.wrap(self._answer, self._settings.rules)
        await (handle(batch) if self._spans is None else self._spans.arun_batch(handle, batch))

    async def _answer(self, batch: Batch[Any]) -> None:
        if self._handler.has_large_bodies(batch):
            await asyncio.to_thread(self._handler.fetch, batch)
        answer = self._handler(batch)
        if answer is not None:
            await answer

    def _startable(self) -> list[KeyQueue]:
        found: list[KeyQueue] = []
        late = not self._dispatcher.lease.holds()
        for key_queue in self._key_queues:
            if late or key_queue.owned.state is not OwnershipState.OPEN or not self._is_admitted(key_queue):
                self._results.give_back(key_queue, 0)
            elif self._lives(key_queue):
                found.append(key_queue)
        return found

    def _lives(self, key_queue: KeyQueue) -> bool:
        """Leave the first messages whose time is not over; without any, the key queue is given back."""
        expiry = self._settings.expiry
        if expiry is None:
            return True
        now = clock()
        living = next((at for at, one in enumerate(key_queue.batch) if expiry.has_ended(one, now)), None)
        if living is None:
            return True
        if living:
            self._dispatcher.shorten(key_queue, living)
            return True
        ended = expiry.count_ended(key_queue.batch, now)
        for done in range(ended):
            if not self._results.expired(key_queue, done, expiry, now):
                return False
        self._results.give_back(key_queue, ended, expired=ended)
        return False

    def _is_admitted(self, key_queue: KeyQueue) -> bool:
        breaker = self._settings.breaker
        return not breaker.engaged or breaker.is_admitted(key_queue)

    @contextlib.contextmanager
    def _ended(self, message: BatchMessage[Any]) -> Iterator[None]:
        try:
            yield
        finally:
            self._guard.end(message.queue, message.record)

    def _conclude(self, batch: Batch[Any], raised: BaseException | None) -> int:
        outcomes = batch.end(raised)
        if raised is not None and any(isinstance(outcome, Redelivered) for outcome in outcomes):
            facts = {"topic": batch.topic, "group": batch.group, "messages": len(outcomes), "error": where(raised)}
            log.warning("batch_failed", extra=facts)
        done = 0
        pairs = zip(batch.everything, outcomes, strict=True)
        for _, of_queue in groupby(pairs, key=lambda pair: id(pair[0].queue)):
            done += self._conclude_queue(list(of_queue))
        return done

    def _conclude_queue(self, pairs: list[tuple[BatchMessage[Any], MessageOutcome]]) -> int:
        key_queue, done = pairs[0][0].queue, 0
        for message, outcome in pairs:
            match outcome:
                case Handled():
                    key_queue.handled.append(message.record)
                    done += 1
                case Failed(error):
                    if is_lost(key_queue.owned, error):
                        break
                    return self._results.failed(key_queue, done, error)
                case Redelivered(singly):
                    if singly:
                        key_queue.singly = EVERY_OFFSET if key_queue.resumed else pairs[-1][0].record.offset + 1
                    break
        self._results.give_back(key_queue, done)
        return done


def _guarded_message(batch: Batch[Any]) -> BatchMessage[Any] | None:
    first = batch.everything[0]
    return first if first.record.offset < first.queue.guarded_below else None
