"""Run batch handlers, in threads or as coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from inspect import isawaitable
from itertools import groupby
from typing import Any

from mqlayer.consuming.api.batch_handlers import BatchHandler
from mqlayer.consuming.api.batches import Batch, BatchMessage, Failed, Handled, MessageOutcome, Redelivered, is_lost
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher
from mqlayer.consuming.ordered.executors import (
    IDLE_WAIT_S,
    ExecutorOwner,
    OrderedAsyncioExecutor,
    OrderedThreadExecutor,
    decide_failure,
    not_awaited,
    return_queue,
)
from mqlayer.consuming.ordered.owned_partitions import EVERY_OFFSET, KeyQueue, OwnershipState
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)


class BatchThreadExecutor(OrderedThreadExecutor):
    """Threads that run plain batch handlers."""

    def __init__(
        self, owner: ExecutorOwner, handler: BatchHandler, dispatcher: BatchDispatcher, *, count: int, name: str
    ) -> None:
        super().__init__(owner, handler, count=count, name=name)
        self._handler, self._dispatcher = handler, dispatcher

    def _work(self) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.stopping:
            key_queues = startable(self._owner, dispatcher.take_batch(IDLE_WAIT_S))
            if key_queues:
                began = clock()
                done = self._run_batch(self._handler.batch(key_queues))
                self._owner.handled(done)
                dispatcher.note_pace(done, clock() - began)

    def _run_batch(self, batch: Batch[Any]) -> int:
        raised: BaseException | None = None
        try:
            guarded = guarded_message(batch)
            if guarded is None:
                self._call(batch)
            elif self._owner.begin(guarded.queue, guarded.record):
                with ended(self._owner, guarded):
                    self._call(batch)
            else:
                return_queue(self._owner, guarded.queue, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return conclude(self._owner, batch, raised)

    def _call(self, batch: Batch[Any]) -> None:
        answer = self._limits.wrap(self._handler, self._owner.rules)(batch)
        if answer is not None and isawaitable(answer):
            raise not_awaited(answer)


class BatchAsyncioExecutor(OrderedAsyncioExecutor):
    """Coroutines that run async batch handlers."""

    def __init__(
        self, owner: ExecutorOwner, handler: BatchHandler, dispatcher: BatchDispatcher, *, count: int, name: str
    ) -> None:
        super().__init__(owner, handler, count=count, name=name)
        self._handler, self._dispatcher = handler, dispatcher

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.stopping:
            taken = dispatcher.take_batch_now()
            if not taken:
                await self.wait(ready, dispatcher.batch_due_s(IDLE_WAIT_S))
                continue
            key_queues = startable(self._owner, taken)
            if key_queues:
                self._owner.handled(await self._run_batch(self._handler.batch(key_queues)))

    async def _run_batch(self, batch: Batch[Any]) -> int:
        raised: BaseException | None = None
        try:
            guarded = guarded_message(batch)
            if guarded is None:
                await self._call(batch)
            # `begin` waits for other workers; the loop must not.
            elif await asyncio.to_thread(self._owner.begin, guarded.queue, guarded.record):
                with ended(self._owner, guarded):
                    await self._call(batch)
            else:
                return_queue(self._owner, guarded.queue, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return conclude(self._owner, batch, raised)

    async def _call(self, batch: Batch[Any]) -> None:
        await self._limits.wrap(self._answer, self._owner.rules)(batch)

    async def _answer(self, batch: Batch[Any]) -> None:
        answer = self._handler(batch)
        if answer is not None:
            await answer


def startable(owner: ExecutorOwner, key_queues: list[KeyQueue]) -> list[KeyQueue]:
    """Return the key queues that may begin; give back others."""
    found: list[KeyQueue] = []
    late = clock() >= owner.dispatcher.lease.until
    for key_queue in key_queues:
        if late or key_queue.owned.state is not OwnershipState.OPEN:
            return_queue(owner, key_queue, 0)
        else:
            found.append(key_queue)
    return found


def guarded_message(batch: Batch[Any]) -> BatchMessage[Any] | None:
    """Return the batch's suspect message, if any; it is alone."""
    first = batch.everything[0]
    return first if first.record.offset < first.queue.guarded_below else None


@contextlib.contextmanager
def ended(owner: ExecutorOwner, message: BatchMessage[Any]) -> Iterator[None]:
    """End a guarded start on exit."""
    try:
        yield
    finally:
        owner.end(message.queue, message.record)


def conclude(owner: ExecutorOwner, batch: Batch[Any], raised: BaseException | None) -> int:
    """Give back a batch's key queues; return the handled count."""
    outcomes = batch.end(raised)
    if raised is not None and any(isinstance(outcome, Redelivered) for outcome in outcomes):
        facts = {"topic": batch.topic, "group": batch.group, "messages": len(outcomes), "error": where(raised)}
        log.warning("batch_failed", extra=facts)
    done = 0
    pairs = zip(batch.everything, outcomes, strict=True)
    for _, of_queue in groupby(pairs, key=lambda pair: id(pair[0].queue)):
        done += _conclude_queue(owner, list(of_queue))
    return done


def _conclude_queue(owner: ExecutorOwner, pairs: list[tuple[BatchMessage[Any], MessageOutcome]]) -> int:
    key_queue, done = pairs[0][0].queue, 0
    for message, outcome in pairs:
        match outcome:
            case Handled():
                key_queue.handled.append(message.record)
                done += 1
            case Failed(error):
                if is_lost(key_queue.owned, error):
                    break
                return decide_failure(owner, key_queue, done, error)
            case Redelivered(singly):
                if singly:
                    key_queue.singly = EVERY_OFFSET if key_queue.resumed else pairs[-1][0].record.offset + 1
                break
    return_queue(owner, key_queue, done)
    return done
