"""The public API of direct publishing, for threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from mqlayer.arguments import MISFITS, explain, refuse_misfit
from mqlayer.errors import ProducerFull
from mqlayer.logs import event_logger
from mqlayer.producing.bulk_send import BulkSend, send_singly
from mqlayer.producing.engine import ProducerBase
from mqlayer.producing.in_flight import ProducerStats
from mqlayer.producing.listeners import OnewayListener, ReceiptFuture, callback, check_may_wait
from mqlayer.producing.message import Body, Message, pending_send_of
from mqlayer.producing.message_bulk import MessageBulk
from mqlayer.producing.options import OnBacklog
from mqlayer.producing.receipts import Receipt, Receipts, receipt_of
from mqlayer.producing.send_spans import SendSpan
from mqlayer.producing.send_wait import await_one

log = event_logger(__name__)


class Producer(ProducerBase):
    """Publishes straight to partitions, without an outbox. Thread-safe; make it after a fork.

    A thread's messages of a key are stored once each, in order: after an unknown outcome, the producer repeats the
    message before later ones of its LP.

    "Stored" is as durable as the node (`appendfsync always`: on disk). If a node loses acknowledged messages (noticed
    seconds after its arming), the next publish in any thread, `flush` or `close` raises AcknowledgedLoss, once; that
    publish stores nothing. If no loss is acceptable, use the outbox.

    A message refused until its deadline (BacklogFull, NodeOutOfMemory) is not stored; those behind it in its LP fail
    with PublishAborted. With `on_backlog="error"`, here or per call, BacklogFull comes at once.

    Without room for a message (`options`), a publish waits up to 5 seconds, then raises ProducerFull.

    Close it, or use it as a context manager, else queued messages are lost at exit. Raises StoreUnavailable if Postgres
    is unavailable at the start; later, known routes serve.
    """

    def _made(self) -> None:
        self._engine = self._open_engine()
        self._guarded = self._engine.guarded
        self._oneway = OnewayListener()
        self._withdraw = self._guarded.withdraw_refused

    def send(
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
        """Publish one message and return its place.

        `tags`: up to 8 names, for groups' filters. `dedup_id`: the message's name within its key. While it is
        remembered (setting dedup_window_s), nothing is stored; the receipt is a `duplicate` with the earlier place.

        Raises InvalidInput or NotFound if nothing was queued. Raises PublishUnknown if the outcome is unknown after
        `timeout_s` (default: setting delivery_timeout_s): the message stays queued, and the error's `future` reports
        it. Other PublishErrors are definite.
        """
        try:
            if callback.now:
                check_may_wait()
            message, spans = Message(key, body, headers, tags, dedup_id), self._engine.spans
            if self._engine.large_bodies.on:
                message = self._engine.large_bodies.stored(topic, message)
            if spans is None:
                return self._send(topic, message, timeout_s, on_backlog)
            with spans.one(topic, message) as span:
                return span.stored(self._send(topic, span.carried_by(message), timeout_s, on_backlog))
        except MISFITS as error:
            refuse_misfit(Producer.send, locals(), error)
            raise

    def _send(self, topic: str, message: Message, timeout_s: float | None, on_backlog: OnBacklog | None) -> Receipt:
        engine = self._engine
        queues, lp, pending = engine.prepare(topic, message, timeout_s, on_backlog)
        # Without a listener no thread is woken for it: this one sends it, or `await_one` wakes the sender's.
        self._guarded.accept(queues, lp, pending, wake=False)
        engine.senders[pending.queue.partition_queue.node.key].lead(pending)
        if pending.outcome is None:
            await_one(self._guarded, pending, pending.deadline)
        return receipt_of(pending)

    def send_async(
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
    ) -> Future[Receipt]:
        """Queue one message and return a future; with asyncio, await `asyncio.wrap_future(future)`.

        It fails only if the message is certainly not stored. `cancel` withdraws a message while its partition refuses
        it, else returns False. Invalid input raises at once; so does ProducerFull in a callback. Callbacks must not
        wait; they may call `send_async` and `send_oneway`.
        """
        try:
            message, spans = Message(key, body, headers, tags, dedup_id), self._engine.spans
            if self._engine.large_bodies.on:
                message = self._engine.large_bodies.stored(topic, message)
            if spans is None:
                return self._send_async(topic, message, timeout_s, on_backlog)
            return self._send_traced(spans.one(topic, message), topic, message, timeout_s, on_backlog)
        except MISFITS as error:
            refuse_misfit(Producer.send_async, locals(), error)
            raise

    def _send_traced(
        self, span: SendSpan, topic: str, message: Message, timeout_s: float | None, on_backlog: OnBacklog | None
    ) -> Future[Receipt]:
        try:
            future = self._send_async(topic, span.carried_by(message), timeout_s, on_backlog)
        except BaseException as error:
            span.fail(error)
            span.end()
            raise
        future.add_done_callback(span.ended)
        return future

    def _send_async(
        self, topic: str, message: Message, timeout_s: float | None, on_backlog: OnBacklog | None
    ) -> Future[Receipt]:
        queues, lp, pending = self._engine.prepare(topic, message, timeout_s, on_backlog)
        future = pending.listener = ReceiptFuture(self._withdraw, pending)
        try:
            self._guarded.accept(queues, lp, pending, wake=True)
        except BaseException:
            # It was not queued, and the garbage collector would not find the cycle.
            pending.listener = None
            raise
        return future

    def send_oneway(
        self,
        topic: str,
        *,
        body: Body,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
    ) -> None:
        """Queue one message. Later failures are logged and counted in `stats`, never raised.

        Without room for 5 seconds, the message is dropped.
        """
        try:
            message, spans = Message(key, body, headers, tags, dedup_id), self._engine.spans
            if self._engine.large_bodies.on:
                message = self._engine.large_bodies.stored(topic, message)
            if spans is None:
                self._send_oneway(topic, message)
                return
            with spans.one(topic, message) as span:
                self._send_oneway(topic, span.carried_by(message))
        except MISFITS as error:
            refuse_misfit(Producer.send_oneway, locals(), error)
            raise

    def _send_oneway(self, topic: str, message: Message) -> None:
        engine = self._engine
        queues, deadline, eager = engine.topic(topic), engine.deadline(None), engine.options.is_eager(None)
        lp, pending = pending_send_of(message, queues, deadline, engine.rng, eager=eager)
        pending.listener = self._oneway
        try:
            self._guarded.accept(queues, lp, pending, wake=True)
        except ProducerFull as error:
            with self._guarded as in_flight:
                in_flight.counts.add(topic, "failed", 1, type(error).__name__)
            log.warning("oneway_publish_failed", extra={"topic": topic, "reason": str(error)})

    @explain
    def send_many(
        self,
        topic: str,
        messages: Sequence[Message],
        *,
        timeout_s: float | None = None,
        on_backlog: OnBacklog | None = None,
    ) -> Receipts:
        """Publish any number of messages in batches; return receipts in their order.

        Messages of a key keep their order. Raises for invalid input (nothing was queued), or PartlyPublished with each
        outcome. `timeout_s`: for the whole call.
        """
        spans = self._engine.spans
        messages = self._engine.large_bodies.all_stored(topic, messages)
        if spans is None:
            return self._send_many(topic, messages, timeout_s, on_backlog)
        with spans.many(topic, messages) as span:
            return self._send_many(topic, messages, timeout_s, on_backlog, span.trace)

    def _send_many(
        self,
        topic: str,
        messages: Sequence[Message],
        timeout_s: float | None,
        on_backlog: OnBacklog | None,
        trace: Mapping[str, str] | None = None,
    ) -> Receipts:
        check_may_wait()
        deadline, eager = self._engine.begin(timeout_s, on_backlog)
        topic_queues = self._engine.topic(topic)
        if not messages:
            return Receipts(())
        bulk = MessageBulk(topic_queues, messages, self._engine.rng, eager=eager, trace=trace)
        if bulk.tokens:
            return send_singly(bulk, self._guarded, deadline)
        return BulkSend(bulk, self._engine, deadline).run()

    @explain
    def flush(self, timeout_s: float | None = None) -> int:
        """Wait until all messages are settled or the timeout; return how many are not.

        Raises AcknowledgedLoss, once, for unreported losses.
        """
        left = self._settle(timeout_s)
        self._guarded.raise_losses()
        return left

    @property
    def stats(self) -> ProducerStats:
        """The counts so far."""
        return self._engine.stats

    @explain
    def close(self, timeout_s: float | None = None) -> None:
        """Flush and end; messages unsettled after the timeout fail with ProducerClosed.

        Does nothing if closed, or in a forked child. Raises AcknowledgedLoss after closing.
        """
        if not self._engine.is_forked:
            self._end(timeout_s)
            self._guarded.raise_losses()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._engine.is_forked:
            # A loss must not hide the error of the block.
            self._end(None)

    def _end(self, timeout_s: float | None) -> None:
        if self._engine.ending:
            return
        check_may_wait()
        self._engine.begin_end()
        self._engine.end(self._settle(timeout_s))

    def _settle(self, timeout_s: float | None) -> int:
        self._engine.check_process()
        check_may_wait()
        deadline = self._engine.deadline(timeout_s)
        with self._guarded:
            return self._guarded.wait_until_settled(deadline)
