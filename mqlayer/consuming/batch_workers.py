"""Run batch handlers: on threads, or as coroutines on one event loop thread.

A batch begins only while the lease and all of its holdings are good, and ends as a whole. Between the effects of its
handler and the note that they are there is this process's memory only: where that ends, the batch comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from inspect import isawaitable
from itertools import groupby
from typing import Any

from mqlayer.consuming.batch_handlers import BatchHandler
from mqlayer.consuming.batches import Again, Batch, BatchMessage, Done, Failed, Outcome, is_lost
from mqlayer.consuming.clock import clock
from mqlayer.consuming.faults import where
from mqlayer.consuming.gathering import BatchDispatcher
from mqlayer.consuming.holdings import EVERY_OFFSET, Lane, State
from mqlayer.consuming.workers import IDLE_WAIT_S, LoopWorkers, Owner, ThreadWorkers, give_back, judge, not_awaited
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)


class BatchThreadWorkers(ThreadWorkers):
    """A bounded number of threads that run plain batch handlers."""

    def __init__(
        self, owner: Owner, handler: BatchHandler, dispatcher: BatchDispatcher, *, count: int, name: str
    ) -> None:
        super().__init__(owner, handler, count=count, name=name)
        self._handler, self._dispatcher = handler, dispatcher

    def _work(self) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.stopping:
            lanes = startable(self._owner, dispatcher.take_batch(IDLE_WAIT_S))
            if lanes:
                began = clock()
                done = self._run_batch(self._handler.batch(lanes))
                self._owner.handled(done)
                dispatcher.note_pace(done, clock() - began)

    def _run_batch(self, batch: Batch[Any]) -> int:
        """Handle a batch; return how many of its messages are handled now."""
        raised: BaseException | None = None
        try:
            careful = careful_one(batch)
            if careful is None:
                self._call(batch)
            elif self._owner.begin(careful.lane, careful.record):
                with ended(self._owner, careful):
                    self._call(batch)
            else:
                give_back(self._owner, careful.lane, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return conclude(self._owner, batch, raised)

    def _call(self, batch: Batch[Any]) -> None:
        answer = self._limits.around(self._handler, self._owner.rules)(batch)
        if answer is not None and isawaitable(answer):
            raise not_awaited(answer)


class BatchLoopWorkers(LoopWorkers):
    """A bounded number of coroutines that run async batch handlers."""

    def __init__(
        self, owner: Owner, handler: BatchHandler, dispatcher: BatchDispatcher, *, count: int, name: str
    ) -> None:
        super().__init__(owner, handler, count=count, name=name)
        self._handler, self._dispatcher = handler, dispatcher

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.stopping:
            taken = dispatcher.take_batch_now()
            if not taken:
                await self.rest(ready, dispatcher.batch_due_s(IDLE_WAIT_S))
                continue
            lanes = startable(self._owner, taken)
            if lanes:
                self._owner.handled(await self._run_batch(self._handler.batch(lanes)))

    async def _run_batch(self, batch: Batch[Any]) -> int:
        """Handle a batch; return how many of its messages are handled now."""
        raised: BaseException | None = None
        try:
            careful = careful_one(batch)
            if careful is None:
                await self._call(batch)
            # Others wait for their turn in there, and the loop must not.
            elif await asyncio.to_thread(self._owner.begin, careful.lane, careful.record):
                with ended(self._owner, careful):
                    await self._call(batch)
            else:
                give_back(self._owner, careful.lane, 0)
                return 0
            failpoint("batch.after_handler")
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            raised = error
        return conclude(self._owner, batch, raised)

    async def _call(self, batch: Batch[Any]) -> None:
        await self._limits.around(self._answer, self._owner.rules)(batch)

    async def _answer(self, batch: Batch[Any]) -> None:
        answer = self._handler(batch)
        if answer is not None:
            await answer


def startable(owner: Owner, lanes: list[Lane]) -> list[Lane]:
    """Return the lanes that may be begun now; give the others back."""
    found: list[Lane] = []
    late = clock() >= owner.dispatcher.lease.until
    for lane in lanes:
        if late or lane.held.state is not State.OPEN:
            give_back(owner, lane, 0)
        else:
            found.append(lane)
    return found


def careful_one(batch: Batch[Any]) -> BatchMessage[Any] | None:
    """Return the message of a batch that may have killed former owners; it is alone in there."""
    first = batch.everything[0]
    return first if first.record.offset < first.lane.caution else None


@contextlib.contextmanager
def ended(owner: Owner, message: BatchMessage[Any]) -> Iterator[None]:
    """Let others start once a message that was started with care has ended."""
    try:
        yield
    finally:
        owner.end(message.lane, message.record)


def conclude(owner: Owner, batch: Batch[Any], raised: BaseException | None) -> int:
    """Give the lanes of a batch back, with what became of their messages; return how many are handled."""
    outcomes = batch.end(raised)
    if raised is not None and any(isinstance(outcome, Again) for outcome in outcomes):
        facts = {"topic": batch.topic, "group": batch.group, "messages": len(outcomes), "error": where(raised)}
        log.warning("batch_failed", extra=facts)
    done = 0
    pairs = zip(batch.everything, outcomes, strict=True)
    for _, of_lane in groupby(pairs, key=lambda pair: id(pair[0].lane)):
        done += _conclude_lane(owner, list(of_lane))
    return done


def _conclude_lane(owner: Owner, pairs: list[tuple[BatchMessage[Any], Outcome]]) -> int:
    lane, done = pairs[0][0].lane, 0
    for message, outcome in pairs:
        match outcome:
            case Done():
                lane.line.append(message.record)
                done += 1
            case Failed(error):
                if is_lost(lane.held, error):
                    break
                return judge(owner, lane, done, error)
            case Again(singly):
                if singly:
                    lane.singly = EVERY_OFFSET if lane.resumed else pairs[-1][0].record.offset + 1
                break
    give_back(owner, lane, done)
    return done
