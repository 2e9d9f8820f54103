"""The public face of direct publishing."""

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
"""What becomes of a message whose partition is at its backlog limit: it waits until its time is over, or fails."""


class Producer:
    """Publishes straight to partitions, without an outbox. Safe to use from many threads, in one process.

    Messages of one key are stored in the order in which one thread published them, each once, whatever fails in
    between: a message whose outcome is unknown is repeated under its seq, and later ones of its LP wait behind it.
    "Stored" is what the node's durability makes of it (with `appendfsync always`: on disk); what the node loses after
    that is noticed within seconds of its being armed again, or by the next publish to the LP, and raised once as
    AcknowledgedLoss: by the call that publishes next, whatever and by whichever thread, whose message is not stored
    then, or by `flush` or `close`. Where no loss is acceptable, use the outbox.

    A message that a node refuses for good until its time is over (BacklogFull, NodeOutOfMemory) is not stored; those
    of its LP that were queued behind it fail with PublishAborted, so that none overtakes it. `on_backlog`, here or at a
    call: whether a message waits for a partition that is at its backlog limit ("wait", up to its time), or fails with
    BacklogFull as soon as that is known ("error").

    `replicas`: wait up to `replica_timeout_s` (1 by default) until so many replicas received each append; the receipt
    says how many did. With `require_replicas`, too few raise NotReplicated: the message is stored nevertheless.
    `max_pending_messages` and `max_pending_bytes` bound what is not settled yet; a publish that finds no room waits
    `room_timeout_s`, then raises ProducerFull. Close a producer, or use it as a context manager: what is queued when
    the process ends is lost.

    Raises StoreUnavailable when Postgres can't be reached at the start; later on, known routes go on being used.
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
        """Publish one message and return where it is stored.

        `tags`: what groups may filter by, up to 8 names. `dedup_id`: a name of the message within its key; a second one
        with it is not stored while the first is remembered (the setting dedup_window_s), and its receipt, a
        `duplicate`, names the first one's place.

        Raises InvalidInput or NotFound (nothing was queued), PublishUnknown when the outcome is not known after
        `timeout_s` (default: the setting delivery_timeout_s): the message stays queued, and the error's future tells
        the outcome. Other PublishErrors are definite.
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
        """Queue one message and return a future of its receipt; with asyncio, await `asyncio.wrap_future(future)`.

        The future fails only when the message is certainly not stored: a node refused it until `timeout_s` was over,
        or an earlier message of its LP failed. While its partition refuses it, the future can be cancelled: that takes
        the message back, and those behind it go on; else `cancel` is False. Raises at once what the edge checks find,
        and ProducerFull when there is no room within the producer's `room_timeout_s`, at once in a future's callback.
        Callbacks of futures run in a thread that has to send other messages: they may publish by `send_async` and
        `send_oneway`, and must not wait for anything.
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
        """Queue one message and forget it: what goes wrong later is logged and counted in `stats`, never raised.

        It waits for room like `send_async`; without any, the message is dropped.
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
        """Publish messages, any number, in batches; return their receipts in order.

        Messages of one key are stored in their order. Raises what the edge checks find (nothing was queued), or
        PartlyPublished, which says for each message what became of it. `timeout_s` is for the whole call.
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
        """Wait until everything published so far is settled; return how many messages are not, after the time.

        Raises AcknowledgedLoss, once, where messages were lost that had been settled before.
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
        """Flush, then end: what is not settled after the time fails with ProducerClosed.

        Does nothing when it is closed already, or in a forked child. Raises AcknowledgedLoss, when it is closed, as
        `flush` does.
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
            # What went wrong in the block is not to be hidden by what was lost.
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
        """Check a message, give it its seq and queue it."""
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
            # It may have been given another queue since.
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
    """Raise InvalidInput in a future's callback: the thread that it runs in is the one that would be waited for."""
    if in_callback():
        raise InvalidInput("a future's callback must not wait for the producer: use send_async or send_oneway there")
