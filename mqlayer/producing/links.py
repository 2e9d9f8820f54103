"""The connection to one node: whoever holds it sends what is due and takes the answers, the caller or our thread."""

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
from mqlayer.producing.lanes import Batch, Lane, Slot, TopicLanes
from mqlayer.producing.ledger import Ledger, tell_all
from mqlayer.producing.parcels import Listener, Parcel
from mqlayer.producing.pauses import pause_s
from mqlayer.redis.nodes import Node, NodeConnection, connection_of, is_missing_script
from mqlayer.redis.packets import append_once_packet, append_packet, wait_packet
from mqlayer.redis.partitions import Appended, OnceOutcome, Refused, append_once_reply, append_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

LAST_ANSWER_S: Final = 1.0
"""How long a link that is stopped may go on waiting for an answer."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a producer uses its connections."""

    settings: Settings
    in_flight: int
    """Appends under way at once on a connection; the chain refuses what overtakes."""
    replicas: int
    """Wait until so many replicas received an append; 0: don't ask."""
    replica_timeout_s: float


class Link:
    """One node's connection, and what is under way on it.

    `io` belongs to whoever sends and receives at present. A caller takes it where that needs no waiting
    (`try_lead`), works until its own message is settled, and gives it up (`resign`); otherwise the link's own thread
    does the work: connecting, repeating, background sending.
    """

    def __init__(
        self, node: Node, ledger: Ledger, options: LinkOptions, refresh_node: Callable[[NodeId], Node]
    ) -> None:
        self.slots: deque[Slot] = deque()
        self.io = threading.Lock()
        self._node, self._ledger, self._options, self._refresh_node = node, ledger, options, refresh_node
        self._armed, self._armed_before = node.armed_run_id or "", ""
        self._line = self._new_line(node)
        # Kept: taking the password out of a URL costs more than the rest of a settled append.
        self._address = node.address
        self._flights: deque[Batch] = deque()
        self._work = threading.Condition(ledger.lock)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failures = 0
        self._retry_at = 0.0
        self._scripts_missing = False
        self.trouble = ""
        self._wait_packet = b""
        if options.replicas:
            self._wait_packet = wait_packet(options.replicas, max(1, int(options.replica_timeout_s * 1000)))

    @property
    def node_id(self) -> NodeId:
        """The node's id."""
        return self._node.node_id

    @property
    def runs(self) -> tuple[str, str, str]:
        """The node's name, the run that was armed before, and the one that is; empty where that is not known."""
        return self._node.name, self._armed_before, self._armed

    @property
    def good(self) -> bool:
        """Whether the connection can be used as it is."""
        return self._line.facts is not None and not self._scripts_missing

    @property
    def under_way(self) -> int:
        """How many appends have no answer yet."""
        return len(self._flights)

    def is_away(self, now: float) -> bool:
        """Whether the connection failed last, and it is not time yet to try again."""
        return self._failures > 0 and now < self._retry_at

    def patience(self, deadline: float) -> float | None:
        """Return until when a caller with this deadline waits for an answer; None where the socket gives up first."""
        return None if deadline - time.monotonic() > self._options.settings.socket_timeout_s else deadline

    def try_lead(self) -> bool:
        """Take `io` if nobody has it and the connection is good; then `resign` must be called."""
        if not self.io.acquire(blocking=False):
            return False
        if not self.good:
            self.io.release()
            return False
        return True

    def warm_up(self) -> None:
        """Connect now, so that the first message needs no thread; a failure is left to our thread."""
        if self.io.acquire(blocking=False):
            try:
                self._connected()
            finally:
                self.resign()

    def resign(self) -> None:
        """Give `io` up; what is left is our thread's."""
        self.io.release()
        if self._flights or self.slots:
            self.wake()

    def expect(self, node: Node) -> None:
        """Let the connection go to the run and address that count now; a line to another one is not used any more.

        What is under way on that has an unknown outcome, and is sent again. For any thread.
        """
        if self._aim(node):
            self.wake()

    def wake(self) -> None:
        """Have our thread look for work."""
        with self._ledger.lock:
            self.wake_locked()

    def wake_locked(self) -> None:
        """Have our thread look for work; call with the lock held."""
        if self._thread is None and not self._stopping:
            name = f"mqlayer-producer-{self._node.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._work.notify()

    def end(self) -> None:
        """Have our thread end; what is under way stays unsettled."""
        with self._ledger.lock:
            self._stopping = True
            self._work.notify()

    def join(self, until: float) -> None:
        """Wait until our thread has ended, up to a time (monotonic)."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the connection: that ends a wait for an answer which does not come."""
        self._line.close()

    # With `io` held

    def push(self) -> None:
        """Send what is due, until enough is under way."""
        while len(self._flights) < self._options.in_flight and self.good:
            with self._ledger.lock:
                batch = self._next_batch()
                if batch is None:
                    return
                if batch.once:
                    self._ledger.bar(batch)
                self._flights.append(batch)
            if not self._transmit(batch):
                return

    def launch(self, topic: TopicLanes, parcels: Mapping[Lp, Parcel], slot: Slot) -> None:
        """Give parcels their seqs and send them at once as far as possible; the others are queued."""
        with self._ledger.lock:
            batch = self._ledger.launch(topic, parcels, slot)
            if batch is not None:
                self._flights.append(batch)
        if batch is not None:
            self._transmit(batch)

    def _transmit(self, batch: Batch) -> bool:
        try:
            packet = self._packet(batch)
            failpoint("producer.before_append")
            self._line.send_packet(packet)
            failpoint("producer.after_send")
        except StoreUnavailable as error:
            self._lose(error)
            return False
        except BaseException as error:
            self._lose(error)
            raise
        return True

    def pull(self, until: float | None = None) -> bool:
        """Take the next answer; return False where none came by `until` (monotonic)."""
        line = self._line
        try:
            if until is not None and not line.ready(max(0.0, until - time.monotonic())):
                return False
            replies = line.receive(2 if self._wait_packet else 1)
            failpoint("producer.after_reply")
            with self._ledger.lock:
                told = self._settle(self._flights[0], replies)
            self._failures, self.trouble = 0, ""
        except StoreUnavailable as error:
            self._lose(error)
            return True
        except BaseException as error:
            self._lose(error)
            raise
        tell_all(told)
        return True

    def _packet(self, batch: Batch) -> bytes:
        slot, settings = batch.slot, self._options.settings
        if batch.once:
            packet = append_once_packet(
                self._line,
                settings.key_prefix,
                slot.partition,
                batch.source,
                batch.pieces,
                count=batch.count,
                backlog=slot.backlog_limit,
                window_ms=int(settings.dedup_window_s * 1000),
            )
        else:
            packet = append_packet(
                self._line,
                settings.key_prefix,
                slot.partition,
                batch.source,
                batch.heads,
                batch.pieces,
                count=batch.count,
                backlog=slot.backlog_limit,
            )
        # If it must be sent again, another batch is made of the parcels.
        batch.heads, batch.pieces = [], []
        return packet + self._wait_packet if self._wait_packet else packet

    def _next_batch(self) -> Batch | None:
        """Take a batch of the next partition that is due, in turn."""
        slots = self.slots
        now = time.monotonic()
        for _ in range(len(slots)):
            slot = slots.popleft()
            batch = slot.take() if slot.retry_at <= now else None
            if slot.ready:
                slots.append(slot)
            else:
                slot.listed = False
            if batch is not None:
                return batch
        return None

    def _settle(self, batch: Batch, replies: list[Any]) -> list[Listener]:
        """Do what the answer for the oldest batch under way means. Raises StoreUnavailable: nobody knows."""
        ledger, now = self._ledger, time.monotonic()
        replicas = None
        if self._wait_packet:
            replicas = replies[1] if isinstance(replies[1], int) else 0
        if is_missing_script(replies[0]):
            self._scripts_missing = True
            ledger.repeat(batch)
            told = []
        else:
            try:
                read = append_once_reply if batch.once else append_reply
                told = self._act(batch, read(replies[0], self._address), replicas, now)
            except NodeOutOfMemory as error:
                told = ledger.refused(batch, error, now)
        self._flights.popleft()
        return told + self._resolve(batch, now) if batch.parcels else told

    def _act(
        self, batch: Batch, answer: Appended | list[OnceOutcome] | Refused, replicas: int | None, now: float
    ) -> list[Listener]:
        ledger = self._ledger
        if isinstance(answer, Appended):
            if answer.outcomes is None:
                told = ledger.stored(batch, answer.offset, replicas)
                # The rest is for lanes that are in trouble by an earlier answer.
                batch.parcels = [parcel for parcel in batch.parcels if parcel.lane.trouble is not None]
                return told
            return ledger.mixed(batch, answer.offset, answer.outcomes, replicas)
        if isinstance(answer, list):
            return ledger.each(batch, answer, replicas)
        topic = batch.parcels[0].lane.topic.name
        if answer.word == "full":
            return ledger.refused(batch, BacklogFull(topic, batch.slot.partition, batch.slot.backlog_limit), now)
        if answer.word in ("sealed", "importing", "deleted", "absent"):
            facts = {"topic": topic, "partition": batch.slot.partition, "word": answer.word}
            log.info("publish_rerouted", extra=facts)
            ledger.misrouted(batch)
            return []
        raise StoreUnavailable(self._address, f"unexpected answer to an append: {answer.word} {answer.fact}")

    def _resolve(self, batch: Batch, now: float) -> list[Listener]:
        """Resolve the trouble of a batch's lanes, but of those about which more answers will come."""
        troubled = [lane for lane in batch.lanes() if lane.trouble is not None]
        if not troubled:
            return []
        later = {parcel.lane for flight in self._flights for parcel in flight.parcels}
        return self._resolve_lanes([lane for lane in troubled if lane not in later], now)

    def _resolve_lanes(self, lanes: list[Lane], now: float) -> list[Listener]:
        told = self._ledger.resolve(lanes, now)
        for lane in lanes:
            # A lane may have got another partition meanwhile, on a node whose thread sleeps.
            if lane.queued and lane.slot.link is not self:
                lane.slot.link.wake_locked()
        return told

    def _lose(self, error: BaseException) -> None:
        """The line is of no use any more: everything under way on it has an unknown outcome."""
        self._line.close()
        reason = str(error) or type(error).__name__
        now = time.monotonic()
        with self._ledger.lock:
            flights = list(self._flights)
            self._flights.clear()
            self._ledger.unknown(flights)
            lanes = dict.fromkeys(lane for batch in flights for lane in batch.lanes())
            told = self._resolve_lanes(list(lanes), now)
            self._note_failure(reason)
            self._ledger.avoid(list(self.slots), now)
        tell_all(told)

    def _note_failure(self, reason: str) -> None:
        self._failures += 1
        self._retry_at = time.monotonic() + pause_s(self._failures)
        self.trouble = reason
        self._ledger.counts["lines_lost"] += 1
        if self._failures in (1, 5) or self._failures % 30 == 0:
            facts = {"node": self._node.name, "reason": reason, "failures": self._failures}
            log.warning("producer_line_lost", extra=facts)

    # Our thread

    def _run(self) -> None:
        while self._wait_for_work():
            with self.io:
                try:
                    self._serve()
                except Exception as error:
                    # Whoever waits is better served by another try than by a dead thread.
                    log.exception("producer_thread_failed")
                    with self._ledger.lock:
                        self._note_failure(type(error).__name__)

    def _wait_for_work(self) -> bool:
        """Return True when there is work, False when we are to stop."""
        with self._ledger.lock:
            while not self._stopping:
                wait_s = self._due_in_s()
                if wait_s == 0:
                    return True
                self._work.wait(wait_s)
            return False

    def _due_in_s(self) -> float | None:
        """Return in how many seconds there is something to do, None for not at all."""
        if self._flights:
            return 0
        if not self.slots:
            return None
        return max(0, self._retry_at - time.monotonic(), min(slot.retry_at for slot in self.slots) - time.monotonic())

    def _serve(self) -> None:
        """Work until nothing is due and nothing is under way."""
        while not self._stopping and self._connected():
            self.push()
            if not self._flights:
                return
            self.pull()

    def _connected(self) -> bool:
        """Connect if needed and load scripts if missing; return whether the line is good."""
        if self.good:
            return True
        try:
            self._line.connect()
            if self._scripts_missing and not self._flights:
                self._line.reload_scripts()
                self._scripts_missing = False
        except MqlayerError as error:
            told = []
            if isinstance(error, AccessDenied | ConfigurationRefused):
                with self._ledger.lock:
                    told = self._ledger.fail_certain(self.slots, error)
            self._lose(error)
            tell_all(told)
            self._follow_node()
            return False
        return True

    def _follow_node(self) -> None:
        """Ask Postgres whether the node was armed again or has another address, and connect to that next time."""
        try:
            node = self._refresh_node(self._node.node_id)
        except MqlayerError as error:
            log.debug("producer_node_unknown", extra={"reason": str(error)})
            return
        self._aim(node)

    def _aim(self, node: Node) -> bool:
        """Connect to what is known of the node now; say whether that is something new."""
        if node == self._node:
            return False
        if node.armed_run_id not in (None, self._armed):
            self._armed, self._armed_before = node.armed_run_id or "", self._armed
        self._node, self._address, self._line.node = node, node.address, node
        self._retry_at = 0.0
        return True

    def _new_line(self, node: Node) -> NodeConnection:
        settings = self._options.settings
        return connection_of(node, settings, RedisRole.PUBLISHER)


def stop_links(links: Collection[Link], timeout_s: float) -> None:
    """End the threads of links, and close their connections, side by side."""
    for link in links:
        link.end()
    last_answer = time.monotonic() + LAST_ANSWER_S
    for link in links:
        link.join(last_answer)
        link.close()
    until = time.monotonic() + timeout_s
    for link in links:
        link.join(until)
