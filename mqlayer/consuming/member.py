"""One running consumer of a group: heartbeat, assignments, reading, handling, settling, hand-over.

States: *joining* -> *running* -> *stopping* -> *stopped*. While it runs, each partition goes through the states of
`holdings`. Who dies when:

- killed at any line: its lease runs out in Postgres, the next heartbeat of another member gives its partitions on under
  higher epochs; what was handled and not settled is delivered again.
- stopped and woken: its own clock says that the lease ran out, so it starts no message; all its calls carry an epoch
  that is not in force any more.
- Postgres away: it goes on until its lease runs out by its own clock, then pauses; it joins again under new epochs.
- a node restarts: its holdings there are dropped, the node is armed again under new epochs, which come by heartbeat.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held, State
from mqlayer.consuming.reading import Reader
from mqlayer.consuming.settling import Settler
from mqlayer.consuming.workers import LoopWorkers, ThreadWorkers, where
from mqlayer.domain.backoff import backoff_s
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import MqlayerError, NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.membership.groups import Group
from mqlayer.membership.members import Assigned, Beat, Session, beat, join, leave, release, start_leaving
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.partitions import Holder, Taken
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics.nodes import rearm_node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Bounds of one member. Counts are messages, durations seconds.

    `concurrency`: handlers at once, each of another key. `prefetch_count` and `prefetch_bytes` bound what is read and
    not settled, over all partitions; bytes by the size of what was read lately, so a single read may go over.
    `drain_limit_s`: how long a hand-over or stop waits for running handlers.
    """

    concurrency: int = 8
    prefetch_count: int = 4_000
    prefetch_bytes: int = 32 * 1024 * 1024
    drain_limit_s: float = 30.0
    member_id: str = ""


@dataclass(slots=True)
class MemberStats:
    """Counts since the start; read by anybody, exact when the member has stopped."""

    handled: int = 0
    settled: int = 0
    failed: int = 0
    fenced: int = 0


@dataclass(slots=True)
class _Node:
    """The two threads that deal with one node."""

    reader: Reader
    settler: Settler
    run_id: str | None
    links: list[NodeConnection] = field(default_factory=list)


class Member:
    """One member of a group, with its threads. `start` returns when it has joined; `stop` when nothing runs any more.

    `handle(held, record)` is called for each message: on a thread of the pool, or as a coroutine when `is_async`.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        routes: RouteCache,
        group: Group,
        handle: Callable[[Held, Record], Any],
        is_async: bool = False,
        options: MemberOptions | None = None,
        application: Database | None = None,
    ) -> None:
        self.settings, self.group = settings, group
        self.options = options or MemberOptions()
        self.member_id = self.options.member_id or new_member_id()
        self.stats = MemberStats()
        self.dispatcher = Dispatcher(lease_holds=self.may_read)
        self.error: MqlayerError | None = None
        self._database, self._routes, self._application = database, routes, application
        self._backoff_s: tuple[float, ...] = group.backoff_s
        self._holdings: dict[PartitionId, Held] = {}
        self._fenced_epochs: dict[PartitionId, int] = {}
        self._guard = threading.RLock()
        self._nodes: dict[NodeId, _Node] = {}
        self._session: Session | None = None
        self._deadline = 0.0
        self._allocation = -1
        self._to_release: queue.SimpleQueue[Assigned] = queue.SimpleQueue()
        self._nudge = threading.Event()
        self._stopping = False
        self._all_gone = threading.Condition(self._guard)
        name = f"mqlayer-{group.name}"
        workers = LoopWorkers if is_async else ThreadWorkers
        self._workers = workers(self, handle, count=self.options.concurrency, name=name)
        self._heart = threading.Thread(target=self._run_heart, name=f"{name}-heart", daemon=True)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch."""
        self._join()
        self._workers.start()
        self._heart.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop: no new message is started, running handlers are waited for, acks are sent, partitions given away.

        Returns True when every handler had ended; no message is handled after that. After the limit (`drain_limit_s`)
        it gives up what still runs: its ack will be refused, another member handles that message again.
        """
        limit = self.options.drain_limit_s if timeout_s is None else timeout_s
        self._stopping = True
        session = self._session
        if session is not None:
            self._quietly(lambda: start_leaving(self._database, session))
        for held in self._all_holdings():
            self._drain(held, limit)
        until = clock() + limit + 1.0
        with self._all_gone:
            self._all_gone.wait_for(lambda: not self._holdings, timeout=max(0.0, until - clock()))
        for held in self._all_holdings():
            self._drop(held)
        self.dispatcher.stop()
        ended = self._workers.join(max(0.2, until - clock()))
        self._nudge.set()
        self._heart.join(timeout=10)
        for node in self._nodes.values():
            node.reader.stop(5)
            node.settler.stop(5)
        if session is not None:
            self._quietly(lambda: leave(self._database, session))
        return ended

    @property
    def running(self) -> bool:
        """Whether it consumes: False after `stop`, or when another process took its id."""
        return not self._stopping

    def holdings(self) -> dict[int, tuple[int, str]]:
        """Return what is held: partition -> (epoch, state)."""
        return {held.partition: (held.epoch, held.state.name.lower()) for held in self._all_holdings()}

    # -- what workers ask --------------------------------------------------------------------------------------------

    def may_start(self, held: Held) -> bool:
        """Say whether a message of this holding may be started: it is open, and the lease holds by our own clock."""
        return held.state is State.OPEN and clock() < self._deadline

    def settled(self, held: Held, record: Record) -> None:
        """Note that a message is handled."""
        failpoint("handler.after_success")
        self.stats.handled += 1
        held.settled.append(record)

    def settled_some(self) -> None:
        """Let the settlers send what was noted."""
        for node in self._nodes.values():
            if not node.settler.wake.is_set():
                node.settler.wake.set()

    def failed(self, held: Held, record: Record, error: BaseException) -> float:
        """Count a failed attempt; return how many seconds the key waits."""
        attempts = held.attempts.get(record.offset, 0) + 1
        held.attempts[record.offset] = attempts
        held.failed.append(record.offset)
        self.stats.failed += 1
        wait_s = backoff_s(self._backoff_s, attempts)
        identity = record.identity
        facts = {"topic": self.group.topic, "group": self.group.name, "partition": held.partition}
        facts |= {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        log.warning("handler_failed", extra=facts | {"attempt": attempts, "wait_s": wait_s, "error": where(error)})
        return wait_s

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""
        log.warning("partition_lost", extra={"partition": held.partition, "epoch": held.epoch, "by": reason})
        self.stats.fenced += 1
        self._fenced_epochs[held.assigned.partition] = held.epoch
        self._drop(held)
        self._nudge.set()

    # -- what readers and settlers ask -------------------------------------------------------------------------------

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""
        with self._guard:
            return [held for held in self._holdings.values() if held.assigned.node == node_id]

    def may_read(self) -> bool:
        """Say whether the lease still holds by our own clock."""
        return clock() < self._deadline

    def shares(self) -> tuple[int, int]:
        """Return how many records and bytes one partition may have in hand."""
        count = max(1, len(self._holdings))
        return max(1, self.options.prefetch_count // count), max(1, self.options.prefetch_bytes // count)

    def taken(self, held: Held, taken: Taken) -> None:
        """Start a holding whose pull lock is ours: refuse earlier owners' effects, then go on where they stopped."""
        self._raise_fence(held)
        with self.dispatcher.lock:
            if held.state is State.NEW:
                held.start_at(taken)
        facts = {"topic": self.group.topic, "group": self.group.name, "partition": held.partition}
        log.info("partition_taken", extra=facts | {"epoch": held.epoch, "committed": taken.committed})

    def read(self, held: Held, records: list[Record]) -> None:
        """Hand records that were read under the lock to the workers."""
        if held.state is State.OPEN:
            self.dispatcher.put(held, records)

    def acknowledged(self, held: Held, records: list[Record], committed: int) -> None:
        """Make room for what the server has settled."""
        self.stats.settled += len(records)
        held.committed = max(held.committed, committed)
        self.dispatcher.acknowledged(held, records)
        node = self._nodes.get(held.assigned.node)
        if node is not None and not node.reader.wake.is_set():
            node.reader.wake.set()

    def released(self, held: Held) -> None:
        """Give a drained holding back in Postgres too, by the heartbeat's thread."""
        self._drop(held)
        self._to_release.put(held.assigned)
        self._nudge.set()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that restarted, and arm it again unless somebody did.

        What runs of them is refused at its ack: re-arming put higher epochs in force before the node serves.
        """
        for held in self.holdings_on(node_id):
            self._drop(held)
        node = self._routes.refresh_nodes().get(node_id)
        if node is not None:
            try:
                rearm_node(self._database, node.name, prefix=self.settings.key_prefix, actor=self.member_id)
            except MqlayerError as error:
                log.warning("node_not_armed", extra={"node": node.name, "reason": str(error)})
            self._renew_lines(node_id)
        self._nudge.set()

    # -- heartbeat ---------------------------------------------------------------------------------------------------

    def _run_heart(self) -> None:
        every = self.settings.lease_s / 3
        while not (self._stopping and not self._holdings and self._to_release.empty()):
            self._nudge.wait(every * random.uniform(0.8, 1.0))
            self._nudge.clear()
            if self.dispatcher.stopping:
                break
            try:
                self._give_back()
                self._beat()
            except StoreUnavailable as error:
                paused = not self.may_read()
                log.warning("heartbeat_failed", extra={"reason": str(error), "paused": paused})
                self._nudge.wait(min(every, 0.5))
            except MqlayerError as error:
                self.error = error
                log.error("member_failed", extra={"reason": str(error)})
                self._nudge.wait(min(every, 1.0))
        self._quietly(self._give_back)

    def _join(self) -> None:
        began = clock()
        self._session = join(
            self._database, group_id=self.group.group_id, member_id=self.member_id, lease_s=self.settings.lease_s
        )
        self._allocation = -1
        self._extend(began)
        self._beat()

    def _beat(self) -> None:
        session = self._session
        if session is None:
            return
        began = clock()
        answer = beat(self._database, session, lease_s=self.settings.lease_s)
        if answer.known:
            self._extend(began)
            self._take_in(answer)
            return
        for held in self._all_holdings():
            self._drop(held)
        if answer.replaced:
            log.error("member_replaced", extra={"member": self.member_id, "group": self.group.name})
            self._session, self._stopping = None, True
            self.dispatcher.stop()
            return
        log.warning("member_lease_ran_out", extra={"member": self.member_id, "group": self.group.name})
        if not self._stopping:
            self._join()

    def _extend(self, began: float) -> None:
        """Go on until a margin before the database frees our partitions: counted from before we asked."""
        self._deadline = began + self.settings.lease_s * (1 - self.settings.lease_margin)

    def _take_in(self, answer: Beat) -> None:
        """Follow the assignments: drop what is not ours, drain what is asked for, begin what is new."""
        if answer.allocation < self._allocation:
            return
        self._allocation = answer.allocation
        self._backoff_s = answer.backoff_s or self._backoff_s
        wanted = {assigned.partition: assigned for assigned in answer.assignments}
        for held in self._all_holdings():
            assigned = wanted.get(held.assigned.partition)
            if assigned is None or assigned.epoch != held.epoch:
                self._drop(held)
        for assigned in answer.assignments:
            self._follow(assigned)

    def _follow(self, assigned: Assigned) -> None:
        with self._guard:
            held = self._holdings.get(assigned.partition)
        if assigned.release:
            if held is None:
                self._to_release.put(assigned)
                self._nudge.set()
            elif held.state in (State.NEW, State.OPEN):
                self._drain(held, self.options.drain_limit_s)
        elif held is None and not self._stopping and self._fenced_epochs.get(assigned.partition) != assigned.epoch:
            self._hold(assigned)

    def _hold(self, assigned: Assigned) -> None:
        holder = Holder(
            self.settings.key_prefix, assigned.partition, self.group.group_id, self.member_id, assigned.epoch
        )
        with self._guard:
            self._holdings[assigned.partition] = Held(assigned, holder)
        self._node(assigned.node).reader.wake.set()

    def _give_back(self) -> None:
        session = self._session
        while session is not None:
            try:
                assigned = self._to_release.get_nowait()
            except queue.Empty:
                return
            try:
                release(self._database, session, assigned)
            except StoreUnavailable:
                self._to_release.put(assigned)
                raise

    # -- holdings ----------------------------------------------------------------------------------------------------

    def _all_holdings(self) -> list[Held]:
        with self._guard:
            return list(self._holdings.values())

    def _drain(self, held: Held, limit_s: float) -> None:
        """Start nothing more of a holding; the settler releases it when what runs has ended."""
        with self.dispatcher.lock:
            if held.state is State.GONE:
                return
            held.drain_until = clock() + limit_s
            held.state = State.DRAINING
        self.dispatcher.forget(held)
        self.settled_some()

    def _drop(self, held: Held) -> None:
        """Forget a holding: nothing of it is started or settled any more."""
        with self.dispatcher.lock:
            held.state = State.GONE
        self.dispatcher.forget(held)
        with self._all_gone:
            if self._holdings.get(held.assigned.partition) is held:
                del self._holdings[held.assigned.partition]
            self._all_gone.notify_all()

    def _raise_fence(self, held: Held) -> None:
        if self._application is None:
            return
        facts = {
            "group_id": self.group.group_id,
            "lp_from": held.assigned.lp_from,
            "lp_to": held.assigned.lp_to,
            "epoch": held.epoch,
        }
        try:
            with self._application.connection() as connection, connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '200ms'")
                connection.execute(query("fence_raise"), facts)
        except MqlayerError as error:
            # The first fenced effect of each LP raises it too; this only makes it earlier.
            log.warning("fence_not_raised", extra={"partition": held.partition, "reason": str(error)})

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, node_id: NodeId) -> _Node:
        with self._guard:
            node = self._nodes.get(node_id)
            if node is None:
                node = self._nodes[node_id] = self._open_node(node_id)
                node.reader.start()
                node.settler.start()
            return node

    def _open_node(self, node_id: NodeId) -> _Node:
        node = self._routes.node(node_id)
        lines = [self._line(node_id) for _ in range(2)]
        name = f"mqlayer-{self.group.name}-{node.name}"
        return _Node(Reader(self, lines[0], name=name), Settler(self, lines[1], name=name), node.armed_run_id, lines)

    def _line(self, node_id: NodeId) -> NodeConnection:
        return NodeConnection(
            self._routes.node(node_id),
            connect_timeout_s=self.settings.connect_timeout_s,
            timeout_s=self.settings.socket_timeout_s,
            unsafe=self.settings.allow_unsafe_redis,
        )

    def _renew_lines(self, node_id: NodeId) -> None:
        """Let the connections of a node expect the run that is armed now."""
        node = self._nodes.get(node_id)
        if node is not None:
            for line in node.links:
                line.node = self._routes.refresh_nodes()[node_id]

    def _quietly(self, work: Callable[[], Any]) -> None:
        """Do what is only a courtesy: the lease does it later where the store is away."""
        try:
            work()
        except (StoreUnavailable, NodeNotArmed) as error:
            log.info("left_to_the_lease", extra={"reason": str(error)})


def new_member_id() -> str:
    """Return an id for this process: host, pid and a random part, in the form of names."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "host"
    return f"m-{host[:32]}-{os.getpid()}-{random.randrange(16**6):06x}"
