"""A producer's connection to one node."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqlayer.domain.routing import Lp, NodeId
from mqlayer.errors import (
    AccessDenied,
    BacklogFull,
    ConfigurationRefused,
    MqlayerError,
    NodeOutOfMemory,
    StoreUnavailable,
)
from mqlayer.failpoints import failpoint
from mqlayer.producing.backoff import backoff_s
from mqlayer.producing.in_flight import InFlight, notify_all
from mqlayer.producing.pending_send import Listener, PendingSend
from mqlayer.producing.send_queues import AppendBatch, LpQueue, PartitionQueue, TopicQueues
from mqlayer.redis.node_connection import Node, NodeConnection, connection_of, is_missing_script
from mqlayer.redis.partition_scripts import AppendReply, OnceOutcome, Refused, append_once_reply, append_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.wire import append_once_packet, append_packet, wait_packet
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

LAST_ANSWER_S: Final = 1.0
"""A stopped sender's last wait for an answer."""


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """How a producer uses its connections."""

    settings: Settings
    max_in_flight: int
    """Per connection; the chain refuses overtaking appends."""
    replicas: int
    """Replicas to wait for; 0 for none."""
    replica_timeout_s: float


class NodeSender:
    """One node's connection, shared by callers and a background thread.

    The holder of `io` sends and receives. A caller takes it with `try_lead`, works until its message is settled, then
    calls `resign`. The thread does all else.
    """

    def __init__(
        self, node: Node, in_flight: InFlight, options: SenderOptions, refresh_node: Callable[[NodeId], Node]
    ) -> None:
        self.partition_queues: deque[PartitionQueue] = deque()
        self.io = threading.Lock()
        self._node, self._in_flight, self._options, self._refresh_node = node, in_flight, options, refresh_node
        self._armed, self._armed_before = node.armed_run_id or "", ""
        self._connection = self._new_connection(node)
        # Cached: removing the password from a URL costs more than the rest of a settled append.
        self._address = node.address
        self._unanswered: deque[AppendBatch] = deque()
        self._work = threading.Condition(in_flight.lock)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failures = 0
        self._retry_at = 0.0
        self._scripts_missing = False
        self.last_error = ""
        self._wait_packet = b""
        if options.replicas:
            self._wait_packet = wait_packet(options.replicas, max(1, int(options.replica_timeout_s * 1000)))

    @property
    def node_id(self) -> NodeId:
        """The node's id."""
        return self._node.node_id

    @property
    def runs(self) -> tuple[str, str, str]:
        """The node's name, former armed run and present one, or ""."""
        return self._node.name, self._armed_before, self._armed

    @property
    def good(self) -> bool:
        """Whether the connection is usable."""
        return self._connection.facts is not None and not self._scripts_missing

    @property
    def unanswered_count(self) -> int:
        """Unanswered appends."""
        return len(self._unanswered)

    def is_unreachable(self, now: float) -> bool:
        """Whether the connection failed and no retry is due."""
        return self._failures > 0 and now < self._retry_at

    def wait_until(self, deadline: float) -> float | None:
        """Return a caller's deadline; None if the socket timeout comes first."""
        return None if deadline - time.monotonic() > self._options.settings.socket_timeout_s else deadline

    def try_lead(self) -> bool:
        """Take `io` if free and connected; then `resign` must follow."""
        if not self.io.acquire(blocking=False):
            return False
        if not self.good:
            self.io.release()
            return False
        return True

    def warm_up(self) -> None:
        """Connect now; the thread retries."""
        if self.io.acquire(blocking=False):
            try:
                self._connected()
            finally:
                self.resign()

    def resign(self) -> None:
        """Release `io`, and leave remaining work to the thread."""
        self.io.release()
        if self._unanswered or self.partition_queues:
            self.wake()

    def set_node(self, node: Node) -> None:
        """Switch to this run and address; unanswered messages are sent again. Thread-safe."""
        if self._aim(node):
            self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        with self._in_flight.lock:
            self.wake_locked()

    def wake_locked(self) -> None:
        """`wake`, with the lock held."""
        if self._thread is None and not self._stopping:
            name = f"mqlayer-producer-{self._node.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._work.notify()

    def end(self) -> None:
        """Stop the thread; unanswered appends stay unsettled."""
        with self._in_flight.lock:
            self._stopping = True
            self._work.notify()

    def join(self, until: float) -> None:
        """Wait for the thread until a monotonic time."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the connection, ending any wait."""
        self._connection.close()

    # With `io` held

    def push(self) -> None:
        """Send due batches, up to `max_in_flight`."""
        while len(self._unanswered) < self._options.max_in_flight and self.good:
            with self._in_flight.lock:
                batch = self._next_batch()
                if batch is None:
                    return
                if batch.once:
                    self._in_flight.block_behind(batch)
                self._unanswered.append(batch)
            if not self._transmit(batch):
                return

    def send_now(
        self, topic: TopicQueues, pending_sends: Mapping[Lp, PendingSend], partition_queue: PartitionQueue
    ) -> None:
        """Send new pending sends; queue those that must wait."""
        with self._in_flight.lock:
            batch = self._in_flight.start_batch(topic, pending_sends, partition_queue)
            if batch is not None:
                self._unanswered.append(batch)
        if batch is not None:
            self._transmit(batch)

    def _transmit(self, batch: AppendBatch) -> bool:
        try:
            packet = self._packet(batch)
            failpoint("producer.before_append")
            self._connection.send_packet(packet)
            failpoint("producer.after_send")
        except StoreUnavailable as error:
            self._lose(error)
            return False
        except BaseException as error:
            self._lose(error)
            raise
        return True

    def pull(self, until: float | None = None) -> bool:
        """Take the next answer; False if none came by `until` (monotonic)."""
        connection = self._connection
        try:
            if until is not None and not connection.ready(max(0.0, until - time.monotonic())):
                return False
            replies = connection.receive(2 if self._wait_packet else 1)
            failpoint("producer.after_reply")
            with self._in_flight.lock:
                listeners = self._settle(self._unanswered[0], replies)
            self._failures, self.last_error = 0, ""
        except StoreUnavailable as error:
            self._lose(error)
            return True
        except BaseException as error:
            self._lose(error)
            raise
        notify_all(listeners)
        return True

    def _packet(self, batch: AppendBatch) -> bytes:
        partition_queue, settings = batch.partition_queue, self._options.settings
        if batch.once:
            packet = append_once_packet(
                self._connection,
                settings.key_prefix,
                partition_queue.partition,
                batch.source,
                batch.chunks,
                count=batch.count,
                backlog=partition_queue.backlog_limit,
                window_ms=int(settings.dedup_window_s * 1000),
            )
        else:
            packet = append_packet(
                self._connection,
                settings.key_prefix,
                partition_queue.partition,
                batch.source,
                batch.heads,
                batch.chunks,
                count=batch.count,
                backlog=partition_queue.backlog_limit,
            )
        # A repeat encodes another batch, so free these bytes.
        batch.heads, batch.chunks = [], []
        return packet + self._wait_packet if self._wait_packet else packet

    def _next_batch(self) -> AppendBatch | None:
        partition_queues = self.partition_queues
        now = time.monotonic()
        for _ in range(len(partition_queues)):
            partition_queue = partition_queues.popleft()
            batch = partition_queue.take_batch() if partition_queue.retry_at <= now else None
            if partition_queue.ready:
                partition_queues.append(partition_queue)
            else:
                partition_queue.listed = False
            if batch is not None:
                return batch
        return None

    def _settle(self, batch: AppendBatch, replies: list[Any]) -> list[Listener]:
        """Apply an answer. Raises StoreUnavailable if it is unclear."""
        in_flight, now = self._in_flight, time.monotonic()
        replicas = None
        if self._wait_packet:
            replicas = replies[1] if isinstance(replies[1], int) else 0
        if is_missing_script(replies[0]):
            self._scripts_missing = True
            in_flight.repeat(batch)
            listeners = []
        else:
            try:
                read = append_once_reply if batch.once else append_reply
                listeners = self._act(batch, read(replies[0], self._address), replicas, now)
            except NodeOutOfMemory as error:
                listeners = in_flight.refused(batch, error, now)
        self._unanswered.popleft()
        return listeners + self._resolve(batch, now) if batch.pending_sends else listeners

    def _act(
        self, batch: AppendBatch, answer: AppendReply | list[OnceOutcome] | Refused, replicas: int | None, now: float
    ) -> list[Listener]:
        in_flight = self._in_flight
        if isinstance(answer, AppendReply):
            if answer.outcomes is None:
                listeners = in_flight.stored(batch, answer.offset, replicas)
                # Keep queues that an earlier answer blocked, for `_resolve`.
                batch.pending_sends = [
                    pending for pending in batch.pending_sends if pending.queue.blocked_by is not None
                ]
                return listeners
            return in_flight.mixed(batch, answer.offset, answer.outcomes, replicas)
        if isinstance(answer, list):
            return in_flight.each(batch, answer, replicas)
        topic = batch.pending_sends[0].queue.topic.name
        if answer.status == "full":
            return in_flight.refused(
                batch, BacklogFull(topic, batch.partition_queue.partition, batch.partition_queue.backlog_limit), now
            )
        if answer.status in ("sealed", "importing", "deleted", "absent"):
            facts = {"topic": topic, "partition": batch.partition_queue.partition, "word": answer.status}
            log.info("publish_rerouted", extra=facts)
            in_flight.misrouted(batch)
            return []
        raise StoreUnavailable(self._address, f"unexpected answer to an append: {answer.status} {answer.fact}")

    def _resolve(self, batch: AppendBatch, now: float) -> list[Listener]:
        troubled = [queue for queue in batch.queues() if queue.blocked_by is not None]
        if not troubled:
            return []
        later = {pending.queue for sent in self._unanswered for pending in sent.pending_sends}
        return self._resolve_queues([queue for queue in troubled if queue not in later], now)

    def _resolve_queues(self, queues: list[LpQueue], now: float) -> list[Listener]:
        listeners = self._in_flight.resolve(queues, now)
        for queue in queues:
            # A reroute or divert may have moved it to another node, whose thread sleeps.
            if queue.queued and queue.partition_queue.sender is not self:
                queue.partition_queue.sender.wake_locked()
        return listeners

    def _lose(self, error: BaseException) -> None:
        self._connection.close()
        reason = str(error) or type(error).__name__
        now = time.monotonic()
        with self._in_flight.lock:
            unanswered = list(self._unanswered)
            self._unanswered.clear()
            self._in_flight.unknown(unanswered)
            queues = dict.fromkeys(queue for batch in unanswered for queue in batch.queues())
            listeners = self._resolve_queues(list(queues), now)
            self._note_failure(reason)
            self._in_flight.divert(list(self.partition_queues), now)
        notify_all(listeners)

    def _note_failure(self, reason: str) -> None:
        self._failures += 1
        self._retry_at = time.monotonic() + backoff_s(self._failures)
        self.last_error = reason
        self._in_flight.counts["connections_lost"] += 1
        if self._failures in (1, 5) or self._failures % 30 == 0:
            facts = {"node": self._node.name, "reason": reason, "failures": self._failures}
            log.warning("producer_connection_lost", extra=facts)

    # The thread

    def _run(self) -> None:
        while self._wait_for_work():
            with self.io:
                try:
                    self._serve()
                except Exception as error:
                    # Callers wait for this thread, so it must survive.
                    log.exception("producer_thread_failed")
                    with self._in_flight.lock:
                        self._note_failure(type(error).__name__)

    def _wait_for_work(self) -> bool:
        with self._in_flight.lock:
            while not self._stopping:
                wait_s = self._due_in_s()
                if wait_s == 0:
                    return True
                self._work.wait(wait_s)
            return False

    def _due_in_s(self) -> float | None:
        if self._unanswered:
            return 0
        if not self.partition_queues:
            return None
        return max(
            0,
            self._retry_at - time.monotonic(),
            min(partition_queue.retry_at for partition_queue in self.partition_queues) - time.monotonic(),
        )

    def _serve(self) -> None:
        while not self._stopping and self._connected():
            self.push()
            if not self._unanswered:
                return
            self.pull()

    def _connected(self) -> bool:
        if self.good:
            return True
        try:
            self._connection.connect()
            if self._scripts_missing and not self._unanswered:
                self._connection.reload_scripts()
                self._scripts_missing = False
        except MqlayerError as error:
            listeners = []
            if isinstance(error, AccessDenied | ConfigurationRefused):
                with self._in_flight.lock:
                    listeners = self._in_flight.fail_certain(self.partition_queues, error)
            self._lose(error)
            notify_all(listeners)
            self._follow_node()
            return False
        return True

    def _follow_node(self) -> None:
        # The node may have been armed again, or have another address.
        try:
            node = self._refresh_node(self._node.node_id)
        except MqlayerError as error:
            log.debug("producer_node_unknown", extra={"reason": str(error)})
            return
        self._aim(node)

    def _aim(self, node: Node) -> bool:
        if node == self._node:
            return False
        if node.armed_run_id not in (None, self._armed):
            self._armed, self._armed_before = node.armed_run_id or "", self._armed
        self._node, self._address, self._connection.node = node, node.address, node
        self._retry_at = 0.0
        return True

    def _new_connection(self, node: Node) -> NodeConnection:
        settings = self._options.settings
        return connection_of(node, settings, RedisRole.PUBLISHER)


def stop_senders(senders: Collection[NodeSender], timeout_s: float) -> None:
    """Stop senders side by side."""
    for sender in senders:
        sender.end()
    last_answer = time.monotonic() + LAST_ANSWER_S
    for sender in senders:
        sender.join(last_answer)
        sender.close()
    until = time.monotonic() + timeout_s
    for sender in senders:
        sender.join(until)
