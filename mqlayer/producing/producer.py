"""The public API of direct publishing."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Literal, Self

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import random_lp
from mqlayer.errors import InvalidInput, ProducerClosed, ProducerFull
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.producing.bulk_send import BulkSend, MessageBulk, send_singly
from mqlayer.producing.in_flight import InFlight, ProducerStats, in_callback, notify_all
from mqlayer.producing.message import (
    NO_KEY_BULK,
    Body,
    Message,
    Receipts,
    chunks_of,
    facts_bulk,
    lp_and_key,
    lp_and_token,
    whole_body,
)
from mqlayer.producing.metadata_refresher import MetadataRefresher, open_source
from mqlayer.producing.node_sender import SenderOptions
from mqlayer.producing.pending_send import Listener, OnewayListener, PendingSend, Receipt, ReceiptPromise
from mqlayer.producing.send_queues import LpQueue, TopicQueues
from mqlayer.producing.send_wait import await_one
from mqlayer.redis.access import use_access
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

MAX_PENDING_MESSAGES: Final = 100_000
MAX_PENDING_BYTES: Final = 64_000_000
REPLICA_TIMEOUT_S: Final = 1.0
STOP_S: Final = 15.0
OnBacklog = Literal["wait", "error"]
"""At a full partition: wait until the message's deadline, or fail at once."""


class Producer:
    """Publishes straight to partitions, without an outbox. Thread-safe; make it after a fork.

    Messages of a key that one thread publishes are stored once each, in order: after an unknown outcome, the producer
    repeats the message before later ones of its LP.

    "Stored" is as durable as the node (`appendfsync always`: on disk). If a node loses acknowledged messages (noticed
    seconds after its arming), the next publish in any thread, `flush` or `close` raises AcknowledgedLoss, once; that
    publish stores nothing. If no loss is acceptable, use the outbox.

    A message that a node refuses until its deadline (BacklogFull, NodeOutOfMemory) is not stored; those queued behind
    it in its LP fail with PublishAborted. With `on_backlog="error"`, here or per call, BacklogFull comes at once.

    `replicas`: wait up to `replica_timeout_s` (default 1) for this many per append; receipts tell how many have it.
    With `require_replicas`, too few raise NotReplicated; the message is stored. `max_pending_messages` and
    `max_pending_bytes` bound unsettled messages: a publish waits `room_timeout_s` for room, then raises ProducerFull.
    `max_in_flight`: appends per connection, 1 to 16.

    Close it, or use it as a context manager, else queued messages are lost at exit. Raises StoreUnavailable if Postgres
    is unavailable at the start; later, known routes serve.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        name: str = "producer",
        database: Database | None = None,
        routes: RouteCache | None = None,
        replicas: int = 0,
        require_replicas: bool = False,
        replica_timeout_s: float | None = None,
        max_pending_messages: int = MAX_PENDING_MESSAGES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        room_timeout_s: float = 5.0,
        max_in_flight: int = 3,
        on_backlog: OnBacklog = "wait",
    ) -> None:
        check_name("producer", name)
        settings = settings or Settings()
        use_access(settings)
        if replicas == 0 and (require_replicas or replica_timeout_s is not None):
            raise InvalidInput(
                "without replicas to wait for there is nothing to require or time: say how many replicas, or leave "
                "require_replicas and replica_timeout_s out"
            )
        replica_timeout_s = REPLICA_TIMEOUT_S if replica_timeout_s is None else replica_timeout_s
        if replicas < 0 or not 1 <= max_in_flight <= 16 or not 0 < replica_timeout_s < settings.socket_timeout_s:
            raise InvalidInput("replicas: 0 or more; max_in_flight: 1 to 16; replica_timeout_s: below socket_timeout_s")
        if min(max_pending_messages, max_pending_bytes) < 1:
            raise InvalidInput("max_pending_messages and max_pending_bytes are 1 or more")
        self._pid, self._on_backlog = os.getpid(), on_backlog
        self._is_eager(None)
        self._timeout_s, self._room_timeout_s, self._max_in_flight = (
            settings.delivery_timeout_s,
            room_timeout_s,
            max_in_flight,
        )
        self._own_database = database is None
        self._database = database or Database(settings.control_dsn(), application="mqlayer producer")
        self._rng = random.Random()
        self._oneway = OnewayListener()
        try:
            source = open_source(self._database, name)
        except BaseException:
            self._close_database()
            raise
        failpoint("producer.after_source_open")
        self._in_flight = InFlight(
            source=source,
            max_count=max_pending_messages,
            max_bytes=max_pending_bytes,
            require_replicas=replicas if require_replicas else 0,
        )
        self._metadata = MetadataRefresher(
            name=name,
            database=self._database,
            routes=routes or RouteCache(self._database),
            in_flight=self._in_flight,
            options=SenderOptions(settings, max_in_flight, replicas, replica_timeout_s),
        )

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

        `tags`: up to 8 names, for groups' filters. `dedup_id`: the message's name within its key. While an earlier
        message with it is remembered (setting dedup_window_s), nothing is stored; the receipt is a `duplicate` with the
        earlier place.

        Raises InvalidInput or NotFound if nothing was queued. Raises PublishUnknown if the outcome is unknown after
        `timeout_s` (default: setting delivery_timeout_s): the message stays queued, and the error's `future` reports
        it. Other PublishErrors are definite.
        """
        _may_wait()
        self._raise_losses()
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        pending, queue = self._queue(
            topic, key, body, headers, tags, deadline, None, wake=False, dedup_id=dedup_id,
            eager=self._is_eager(on_backlog),
        )  # fmt: skip
        sender = queue.partition_queue.sender
        if sender.try_lead():
            try:
                while pending.outcome is None:
                    sender.push()
                    if not sender.unanswered_count or not sender.pull(sender.wait_until(deadline)):
                        break
            finally:
                sender.resign()
        if pending.outcome is None:
            await_one(self._in_flight, pending, deadline)
        return pending.receipt()

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
        self._raise_losses()
        promise = ReceiptPromise(self._in_flight.withdraw)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        eager = self._is_eager(on_backlog)
        self._queue(topic, key, body, headers, tags, deadline, promise, wake=True, dedup_id=dedup_id, eager=eager)
        return promise.future

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

        Without room for `room_timeout_s`, the message is dropped.
        """
        try:
            deadline = time.monotonic() + self._timeout_s
            self._queue(
                topic, key, body, headers, tags, deadline, self._oneway, wake=True, dedup_id=dedup_id,
                eager=self._is_eager(None),
            )  # fmt: skip
        except ProducerFull as error:
            with self._in_flight.lock:
                self._in_flight.counts["failed"] += 1
            log.warning("oneway_publish_failed", extra={"topic": topic, "reason": str(error)})

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
        _may_wait()
        self._raise_losses()
        queues = self._topic_queues(topic)
        if not messages:
            return Receipts(())
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        bulk = MessageBulk(queues, messages, self._rng, eager=self._is_eager(on_backlog))
        if bulk.tokens:
            return send_singly(bulk, self._in_flight, deadline)
        return BulkSend(bulk, self._in_flight, deadline, self._max_in_flight).run()

    def flush(self, timeout_s: float | None = None) -> int:
        """Wait until all messages are settled or the timeout; return how many are not.

        Raises AcknowledgedLoss, once, for unreported losses.
        """
        left = self._settle(timeout_s)
        self._raise_losses()
        return left

    def _settle(self, timeout_s: float | None) -> int:
        self._check_process()
        _may_wait()
        in_flight = self._in_flight
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        with in_flight.lock:
            self._metadata.wake()
            while in_flight.pending_count and (wait_s := deadline - time.monotonic()) > 0:
                in_flight.wait_for_change(wait_s)
            return in_flight.pending_count

    @property
    def stats(self) -> ProducerStats:
        """The counts so far."""
        with self._in_flight.lock:
            return self._in_flight.stats()

    def close(self, timeout_s: float | None = None) -> None:
        """Flush and end; messages unsettled after the timeout fail with ProducerClosed.

        Does nothing if closed, or in a forked child. Raises AcknowledgedLoss after closing.
        """
        if self._pid == os.getpid():
            self._end(timeout_s)
            self._raise_losses()

    def _end(self, timeout_s: float | None) -> None:
        if self._in_flight.closed_because == CLOSED:
            return
        _may_wait()
        with self._in_flight.lock:
            self._in_flight.closed_because = CLOSED
            self._in_flight.changed.notify_all()
        left = self._settle(timeout_s)
        self._metadata.stop(STOP_S)
        if left:
            log.warning("producer_closed_unsettled", extra={"count": left})
            with self._in_flight.lock:
                listeners = self._in_flight.fail_remaining()
            notify_all(listeners)
        self._metadata.close_sources()
        self._close_database()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pid == os.getpid():
            # A loss must not hide the error of the block.
            self._end(None)

    def _queue(
        self,
        topic: str,
        key: str | None,
        body: Body,
        headers: Mapping[str, str] | None,
        tags: Sequence[str],
        deadline: float,
        listener: Listener | None,
        *,
        wake: bool,
        dedup_id: str | None = None,
        eager: bool = False,
    ) -> tuple[PendingSend, LpQueue]:
        queues = self._topic_queues(topic)
        lp, key_bulk = (random_lp(self._rng), NO_KEY_BULK) if key is None else lp_and_key(key)
        whole = whole_body(topic, body, queues.route.body_limit)
        facts = facts_bulk(time.time_ns() // 1_000_000, headers, tags)
        size = len(facts) + len(key_bulk) + len(whole)
        pending = PendingSend(chunks_of(facts, key_bulk, whole), 1, size, deadline, listener, eager=eager)
        if dedup_id is not None:
            lp, pending.token = lp_and_token(key, dedup_id, lp)
        if isinstance(listener, ReceiptPromise):
            listener.pending = pending
        in_flight = self._in_flight
        with in_flight.lock:
            if in_flight.closed_because or not in_flight.has_capacity(1, size):
                in_flight.wait_for_capacity(1, size, min(deadline, time.monotonic() + self._room_timeout_s))
            in_flight.add(queues, lp, pending)
            listeners = in_flight.refuse_eager(pending, time.monotonic()) if eager else ()
            # `add` may have diverted it to another queue.
            queue = pending.queue
            if wake:
                queue.partition_queue.sender.wake_locked()
        notify_all(listeners)
        return pending, queue

    def _raise_losses(self) -> None:
        if self._in_flight.unreported_losses:
            self._in_flight.raise_losses()

    def _is_eager(self, on_backlog: OnBacklog | None) -> bool:
        choice = self._on_backlog if on_backlog is None else on_backlog
        if choice not in ("wait", "error"):
            raise InvalidInput(f"at a full partition a message can wait, or be an error, not {choice!r}")
        return choice == "error"

    def _topic_queues(self, topic: str) -> TopicQueues:
        self._check_process()
        if self._in_flight.closed_because:
            raise ProducerClosed(self._in_flight.closed_because)
        queues = self._in_flight.topics.get(topic)
        if queues is None:
            return self._metadata.topic(topic)
        self._metadata.refresh_if_old(queues, time.monotonic())
        return queues

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ProducerClosed(f"it was made in process {self._pid}, this is {os.getpid()}: make one after the fork")

    def _close_database(self) -> None:
        if self._own_database:
            self._database.close()


CLOSED: Final = "it is closed"


def _may_wait() -> None:
    # A callback would wait for its own thread.
    if in_callback():
        raise InvalidInput("a future's callback must not wait for the producer: use send_async or send_oneway there")
