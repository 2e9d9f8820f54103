"""A producer's connection to one node, for topics of one durability class."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from mqlayer.domain.durability import NODE, Durability
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
from mqlayer.logs import event_logger
from mqlayer.metrics import Meters, meters_of
from mqlayer.producing.append_answers import AppendAnswer
from mqlayer.producing.append_batch import AppendBatch
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.options import ProducerOptions
from mqlayer.producing.send_queues import NodeQueue, PartitionQueue, PendingSend, TopicQueues
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.durability import DurabilityWait
from mqlayer.redis.node_connection import Node, NodeConnection, is_missing_script
from mqlayer.redis.partition_scripts import AppendReply, Refused, append_once_reply, append_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.wire import append_once_packet, append_packet, append_start
from mqlayer.runtime.runtime import Runtime
from mqlayer.runtime.service import Service
from mqlayer.settings import Settings

log = event_logger(__name__)

LAST_ANSWER_S: Final = 1.0
"""A stopped sender's last wait for an answer."""


class NodeSender(Service):
    """One node's connection, shared by callers and a background thread.

    The holder of `io` sends and receives: a caller between `try_lead` and `resign`, else the thread.
    """

    def __init__(
        self,
        node: Node,
        durability: Durability,
        guarded: GuardedInFlight,
        runtime: Runtime,
        options: ProducerOptions,
        refresh_node: Callable[[NodeId], Node],
    ) -> None:
        super().__init__(
            f"mqlayer-producer-{node.name}" + (f"-{durability}" if durability != NODE else ""),
            title=f"the sender of {node.name}",
            event="producer_sender",
            retry_s=0.0,
        )
        self.queue = NodeQueue(node.node_id, node.name, node.armed_run_id or "", durability)
        self.io = threading.Lock()
        self._node, self._guarded, self._runtime, self._options = node, guarded, runtime, options
        self._refresh_node, self._meters = refresh_node, meters_of(runtime.settings)
        self._connection = self._new_connection(node)
        # Cached: removing the password from a URL costs more than the rest of a settled append.
        self._address = node.address
        self._unanswered: deque[AppendBatch] = deque()
        self._scripts_missing = False
        self._wait = _wait_on(node, durability, options)
        guarded.add_node(self.queue, self.wake_locked)

    @property
    def good(self) -> bool:
        """Whether the connection is usable."""
        return self._connection.facts is not None and not self._scripts_missing

    @property
    def unanswered_count(self) -> int:
        """Unanswered appends."""
        return len(self._unanswered)

    def wait_until(self, deadline: float) -> float | None:
        """Return a caller's deadline; None if the socket timeout comes first."""
        return None if deadline - time.monotonic() > self._runtime.settings.socket_timeout_s else deadline

    def lead(self, pending: PendingSend) -> None:
        """Send a caller's pending send and those due before it, unless another thread sends; wait for the answer."""
        if not self.try_lead():
            return
        try:
            while pending.outcome is None:
                self.push()
                if not self._unanswered or not self.pull(self.wait_until(pending.deadline)):
                    return
        finally:
            self.resign()

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
        if self._unanswered or self.queue.partition_queues:
            self.wake_up()

    def set_node(self, node: Node) -> None:
        """Switch to this run and address; unanswered messages go again. Thread-safe."""
        if self._aim(node):
            self.wake_up()

    def wake_up(self) -> None:
        """Have the thread look for work."""
        with self._guarded:
            self.wake_locked()

    def wake_locked(self) -> None:
        """`wake_up`, with the lock held."""
        if not self.wake.is_set():
            if not self.started:
                self.start()
            self.wake.set()

    def close(self) -> None:
        """Close the connection, ending any wait."""
        self._connection.close()

    # With `io` held

    def push(self) -> None:
        """Send due batches, up to `max_in_flight`."""
        # Read without the lock: `resign` sees additions of the meantime.
        while self.queue.partition_queues and len(self._unanswered) < self._options.max_in_flight and self.good:
            batch = self._guarded.take_batch(self.queue, self._unanswered)
            if batch is None or not self._transmit(batch):
                return

    def send_now(
        self, topic: TopicQueues, pending_sends: Mapping[Lp, PendingSend], partition_queue: PartitionQueue
    ) -> None:
        """Send new pending sends; queue those that must wait."""
        with self._guarded as in_flight:
            batch = in_flight.queues.start_batch(topic, pending_sends, partition_queue, time.monotonic())
            if batch is not None:
                self._unanswered.append(batch)
        if batch is not None:
            self._transmit(batch)

    def _transmit(self, batch: AppendBatch) -> bool:
        try:
            packet = _append_request(self._connection, batch, self._runtime.settings)
            failpoint("producer.before_append")
            if self._meters is not None:
                batch.sent_at = time.perf_counter()
            wait = batch.wait = self._wait
            partition = batch.partition_queue.partition
            waits = wait.packets(self._connection, self._runtime.prefix, partition) if wait.replies else ()
            self._connection.send_packet(packet, *waits)
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
            replies = connection.receive(1 + self._unanswered[0].wait.replies)
            failpoint("producer.after_reply")
            lack = self._settle(replies)
            if lack:
                # Stored, maybe for a while: unknown, as without an answer, so it goes again under its number.
                with self._guarded:
                    known = [*(batch.partition_queue for batch in self._unanswered), *self.queue.partition_queues]
                self._lose(StoreUnavailable(self._address, lack), _on_one_shard(connection, known))
        except StoreUnavailable as error:
            self._lose(error)
            return True
        except BaseException as error:
            self._lose(error)
            raise
        return True

    def _settle(self, replies: list[Any]) -> str:
        """Apply the first batch's answer; return its lack of a class, or nothing."""
        batch, answer = self._unanswered[0], None
        replicas = batch.wait.replicas(replies[1:]) if batch.wait.asked else None
        if is_missing_script(replies[0]):
            # Loaded once no append is unanswered; see `_connected`.
            self._scripts_missing = True
        else:
            answer = _read_reply(batch, replies[0], self._address)
            if isinstance(answer, AppendReply | list) and (lack := batch.wait.lack(replies[1:])):
                return lack
            if self._meters is not None:
                _record(self._meters, batch, _refusal_class(answer))
        self._guarded.apply_answer(self.queue, self._unanswered, answer, replicas)
        return ""

    def _lose(self, error: BaseException, lacking: Iterable[PartitionQueue] = ()) -> None:
        self._connection.close()
        with self._guarded as in_flight:
            unanswered = list(self._unanswered)
            self._unanswered.clear()
            reason = str(error) or type(error).__name__
            in_flight.answers.disconnected(self.queue, unanswered, reason, time.monotonic(), lacking)
        for batch in unanswered if self._meters is not None else ():
            _record(self._meters, batch, type(error).__name__)

    # The thread

    def _wait_s(self) -> float | None:
        if self._unanswered:
            return 0
        with self._guarded:
            return self.queue.due_in_s(time.monotonic())

    def _pass(self) -> None:
        if self._wait_s() != 0:
            return
        with self.io:
            try:
                self._serve()
            except Exception as error:
                with self._guarded as in_flight:
                    in_flight.answers.disconnected(self.queue, (), type(error).__name__, time.monotonic())
                raise

    def _serve(self) -> None:
        # A node that takes connections may still refuse each append.
        while not (self._stopping.is_set() or self.queue.is_unreachable(time.monotonic())) and self._connected():
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
            if isinstance(error, AccessDenied | ConfigurationRefused):
                with self._guarded as in_flight:
                    in_flight.settlement.fail_certain(self.queue.partition_queues, error)
            self._lose(error)
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
        self._wait = _wait_on(node, self.queue.durability, self._options)
        if node == self._node:
            return False
        armed = self.queue.runs[2]
        if node.armed_run_id not in (None, armed):
            self.queue.runs = (node.name, armed, node.armed_run_id or "")
        self._node, self._address, self._connection.node = node, node.address, node
        self.queue.retry_at = 0.0
        return True

    def _new_connection(self, node: Node) -> NodeConnection:
        return self._runtime.connection(node, RedisRole.PUBLISHER)


def _on_one_shard(connection: NodeConnection, queues: Sequence[PartitionQueue]) -> list[PartitionQueue]:
    """Return the first queue and those on its shard; none of a single server, which has all."""
    if not isinstance(connection, ClusterConnection):
        return []
    shard = connection.shard_of(queues[0].partition)
    return [one for one in dict.fromkeys(queues) if connection.shard_of(one.partition) == shard]


def _wait_on(node: Node, durability: Durability, options: ProducerOptions) -> DurabilityWait:
    return DurabilityWait.of(durability, node, asked=options.replicas, wait_ms=options.wait_ms)


def _append_request(connection: NodeConnection, batch: AppendBatch, settings: Settings) -> bytes:
    """Return a batch's request, and free its encoding: a repeat encodes again."""
    partition_queue = batch.partition_queue
    if batch.once:
        packet = append_once_packet(
            connection,
            settings.key_prefix,
            partition_queue.partition,
            batch.source,
            batch.chunks,
            count=batch.count,
            backlog=partition_queue.backlog_limit,
            window_ms=int(settings.dedup_window_s * 1000),
        )
    else:
        digest, partition = connection.digest("log_append"), partition_queue.partition
        start = append_start(
            digest,
            settings.key_prefix,
            partition,
            batch.source,
            partition_queue.backlog_limit,
            cluster=connection.is_cluster,
        )
        packet = append_packet(start, batch.heads, batch.chunks, count=batch.count)
    batch.heads, batch.chunks = [], []
    return packet


def _read_reply(batch: AppendBatch, reply: Any, address: str) -> AppendAnswer:
    """Parse the answer. Raises StoreUnavailable if it is unclear."""
    try:
        answer = (append_once_reply if batch.once else append_reply)(reply, address)
    except NodeOutOfMemory as error:
        return error
    if not isinstance(answer, Refused):
        return answer
    if answer.status == "full":
        partition_queue = batch.partition_queue
        return BacklogFull(batch.topic, partition_queue.partition, partition_queue.backlog_limit)
    if answer.status in ("sealed", "importing", "deleted", "absent"):
        return answer
    raise StoreUnavailable(address, f"unexpected answer to an append: {answer.status} {answer.fact}")


def _record(meters: Meters | None, batch: AppendBatch, error: str) -> None:
    # A batch of which nothing was sent has no time.
    if meters is not None and batch.sent_at:
        meters.sent(batch.topic, batch.count, time.perf_counter() - batch.sent_at, error)


def _refusal_class(answer: AppendAnswer) -> str:
    if isinstance(answer, MqlayerError):
        return type(answer).__name__
    return answer.status if isinstance(answer, Refused) else ""


def stop_senders(senders: Collection[NodeSender], timeout_s: float) -> None:
    """Stop senders side by side."""
    for sender in senders:
        sender.end()
    last_answer = time.monotonic() + LAST_ANSWER_S
    for sender in senders:
        sender.join(last_answer - time.monotonic())
        sender.close()
    until = time.monotonic() + timeout_s
    for sender in senders:
        sender.join(until - time.monotonic())
