"""The public API of direct publishing, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self, cast

from mqlayer.arguments import MISFITS, explain, refuse_misfit
from mqlayer.domain.routing import Lp
from mqlayer.errors import InvalidInput, ProducerClosed, ProducerFull, PublishError
from mqlayer.producing.engine import ProducerBase, ProducerEngine
from mqlayer.producing.in_flight import ProducerStats
from mqlayer.producing.loop_inbox import LoopInbox, LoopListener
from mqlayer.producing.message import Body, Message, pending_send_of
from mqlayer.producing.message_bulk import MessageBulk
from mqlayer.producing.options import OnBacklog
from mqlayer.producing.receipts import Receipt, Receipts, partly_published, receipt_of, unknown_outcome
from mqlayer.producing.send_queues import PendingSend, TopicQueues


class AsyncProducer(ProducerBase):
    """`Producer` for an event loop: the same options, errors and guarantees, with awaits in place of waits.

    Start it with `async with` or `start`; all tasks of that loop may use it. Messages of a key are stored in the
    calls' order. Without room, a call waits behind earlier ones, then raises ProducerFull.

    A cancelled call withdraws its unsent messages; the others are stored.
    """

    def _made(self) -> None:
        self._started: ProducerEngine | None = None
        self._inbox: LoopInbox
        # Calls that wait for their turn or for room, first come, first served; usually none.
        self._turn = asyncio.Lock()
        self._turns = 0

    async def start(self) -> None:
        """Register the producer. Raises InvalidInput, StoreUnavailable or SchemaMismatch."""
        if self._started is not None:
            raise InvalidInput("the producer was started already: make one for each start")
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_engine))
        try:
            engine = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.to_thread((await opening).end, 0)
            raise
        self._started, self._inbox = engine, LoopInbox(asyncio.get_running_loop())
        engine.guarded.on_freed = self._inbox.note_change

    async def send(
        self,
        topic: str,
        *,
        body: Body,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
        timeout_s: float | None = None,
        on_backlog: OnBacklog | None = None,
    ) -> Receipt:
        """Publish one message and return its place; see `Producer.send`."""
        try:
            message, spans = Message(key, body, headers, tags, dedup_id), self._engine.spans
            if self._engine.large_bodies.is_large(body):
                message = await asyncio.to_thread(self._engine.large_bodies.stored, topic, message)
            if spans is None:
                return await self._send(topic, message, timeout_s, on_backlog)
            with spans.one(topic, message) as span:
                return span.stored(await self._send(topic, span.carried_by(message), timeout_s, on_backlog))
        except MISFITS as error:
            refuse_misfit(AsyncProducer.send, locals(), error)
            raise

    async def _send(
        self, topic: str, message: Message, timeout_s: float | None, on_backlog: OnBacklog | None
    ) -> Receipt:
        engine = self._engine
        deadline, eager = engine.begin(timeout_s, on_backlog)
        listener = LoopListener(1, self._inbox)
        queues, placed = None if self._turns else engine.known_topic(topic), None
        if queues is not None:
            placed = pending_send_of(message, queues, deadline, engine.rng, eager=eager)
            placed[1].listener = listener
        if queues is None or placed is None or not self._accepts(queues, [placed]):
            async with self._my_turn(deadline):
                queues = await self._topic(topic)
                placed = pending_send_of(message, queues, deadline, engine.rng, eager=eager)
                placed[1].listener = listener
                await self._accept(queues, [placed], deadline)
        pending = placed[1]
        await self._settled(listener, [pending], deadline)
        if pending.outcome is None:
            future = engine.guarded.future(pending)
            if future is not None:
                raise unknown_outcome(pending, future=future)
        return receipt_of(pending)

    @explain
    async def send_many(
        self,
        topic: str,
        messages: Sequence[Message],
        *,
        timeout_s: float | None = None,
        on_backlog: OnBacklog | None = None,
    ) -> Receipts:
        """Publish any number of messages in batches; see `Producer.send_many`."""
        spans = self._engine.spans
        if self._engine.large_bodies.on:
            messages = await asyncio.to_thread(self._engine.large_bodies.all_stored, topic, messages)
        if spans is None:
            return await self._send_many(topic, messages, timeout_s, on_backlog)
        with spans.many(topic, messages) as span:
            return await self._send_many(topic, messages, timeout_s, on_backlog, span.trace)

    async def _send_many(
        self,
        topic: str,
        messages: Sequence[Message],
        timeout_s: float | None,
        on_backlog: OnBacklog | None,
        trace: Mapping[str, str] | None = None,
    ) -> Receipts:
        engine = self._engine
        deadline, eager = engine.begin(timeout_s, on_backlog)
        async with self._my_turn(deadline):
            queues = await self._topic(topic)
            if not messages:
                return Receipts(())
            bulk = MessageBulk(queues, messages, engine.rng, eager=eager, trace=trace)
            listener = LoopListener(len(bulk), self._inbox)
            owners: list[PendingSend | None] = [None] * len(bulk)
            try:
                await self._accept_all(bulk, listener, owners, deadline)
            except asyncio.CancelledError:
                self._withdraw([pending for pending in dict.fromkeys(owners) if pending is not None])
                raise
        settled = cast("list[PendingSend]", owners)
        await self._settled(listener, settled, deadline)
        if listener.all_stored:
            return Receipts(settled)
        raise partly_published(topic, settled)

    @explain
    async def flush(self, timeout_s: float | None = None) -> int:
        """Wait until all messages of earlier calls are settled or the timeout; return how many are not.

        Raises AcknowledgedLoss, once, for unreported losses.
        """
        engine = self._engine
        left = await self._settle(engine, engine.deadline(timeout_s))
        engine.guarded.raise_losses()
        return left

    @explain
    async def stop(self, timeout_s: float | None = None) -> None:
        """Flush and end; messages unsettled after the timeout fail with ProducerClosed.

        Does nothing if stopped or not started. Raises AcknowledgedLoss after stopping.
        """
        await self._end(timeout_s)
        if self._started is not None:
            self._started.guarded.raise_losses()

    @property
    def stats(self) -> ProducerStats:
        """The counts so far; any thread may ask."""
        return (self._started or self._engine).stats

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A loss must not hide the error of the block.
        await (self.stop() if error is None else self._end(None))

    @property
    def _engine(self) -> ProducerEngine:
        if self._started is None:
            raise ProducerClosed("it is not started: use `async with`, or await its start()")
        self._inbox.check_loop()
        return self._started

    # Accepting messages

    async def _topic(self, name: str) -> TopicQueues:
        engine = self._engine
        known = engine.known_topic(name)
        # Reading a topic waits for stores.
        return await asyncio.to_thread(engine.topic, name) if known is None else known

    @asynccontextmanager
    async def _my_turn(self, deadline: float) -> AsyncIterator[None]:
        began = time.monotonic()
        self._turns += 1
        try:
            try:
                async with asyncio.timeout(deadline - began):
                    await self._turn.acquire()
            except TimeoutError:
                raise self._full(began) from None
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._turns -= 1

    def _accepts(self, queues: TopicQueues, placed: Sequence[tuple[Lp, PendingSend]]) -> bool:
        guarded, now = self._engine.guarded, time.monotonic()
        count, size = sum(pending.count for _, pending in placed), sum(pending.size for _, pending in placed)
        with guarded as in_flight:
            if guarded.closed:
                raise ProducerClosed(guarded.closed_because)
            if not in_flight.capacity.has_room(count, size):
                return False
            for lp, pending in placed:
                in_flight.accept(queues, lp, pending, now)
                in_flight.wake_for(pending)
        return True

    async def _accept(self, queues: TopicQueues, placed: Sequence[tuple[Lp, PendingSend]], deadline: float) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline - began):
                while True:
                    changed = self._inbox.next_change()
                    if self._accepts(queues, placed):
                        return
                    await asyncio.shield(changed)
        except TimeoutError:
            raise self._full(began) from None

    async def _accept_all(
        self, bulk: MessageBulk, listener: LoopListener, owners: list[PendingSend | None], deadline: float
    ) -> None:
        """Queue a batch in parts; a refused part refuses later ones: none overtakes it."""
        error: PublishError | None = None
        for placed in bulk.parts(listener, deadline, owners):
            if error is None:
                try:
                    await self._accept(bulk.topic, placed, deadline)
                except PublishError as refusal:
                    error = refusal
            if error is not None:
                with self._engine.guarded:
                    for _, pending in placed:
                        listener.drop(pending, error)
            # Encoding a large batch must not hold up the loop.
            await asyncio.sleep(0)

    def _full(self, began: float) -> ProducerFull:
        stats = self._engine.stats
        return ProducerFull(stats.pending, stats.pending_bytes, time.monotonic() - began)

    # Waiting

    async def _settled(self, listener: LoopListener, pending_sends: Sequence[PendingSend], deadline: float) -> None:
        timer = self._inbox.loop.call_later(deadline - time.monotonic(), self._give_up, listener, pending_sends)
        try:
            await listener.done
        except asyncio.CancelledError:
            self._withdraw(pending_sends)
            raise
        finally:
            timer.cancel()

    def _give_up(self, listener: LoopListener, pending_sends: Sequence[PendingSend]) -> None:
        self._engine.guarded.abandon(pending_sends)
        listener.finish()

    def _withdraw(self, pending_sends: Sequence[PendingSend]) -> None:
        with self._engine.guarded as in_flight:
            for pending in reversed(pending_sends):
                # Without a seq it was never queued.
                if pending.first:
                    in_flight.settlement.withdraw(pending)

    async def _settle(self, engine: ProducerEngine, deadline: float) -> int:
        # Calls that wait for room come first.
        with suppress(ProducerFull):
            async with self._my_turn(deadline):
                pass
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                while True:
                    changed = self._inbox.next_change()
                    if not engine.stats.pending:
                        break
                    await asyncio.shield(changed)
        return engine.stats.pending

    async def _end(self, timeout_s: float | None) -> None:
        engine = self._started
        if engine is None or engine.ending or engine.is_forked:
            return
        self._inbox.check_loop()
        engine.begin_end()
        self._inbox.note_change()
        try:
            await self._settle(engine, engine.deadline(timeout_s))
        finally:
            await asyncio.to_thread(engine.end, engine.stats.pending)
