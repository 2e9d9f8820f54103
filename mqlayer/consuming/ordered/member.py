"""One running consumer of an ordered group. Threads: `docs/design/consuming.md`; crashes:
`docs/design/crash-matrix.md`."""

from __future__ import annotations

import logging
import os
import random
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mqlayer.consuming.api.batch_handlers import BatchHandler
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import described, where
from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction, ParkKey, RetryInPlace, failure_action
from mqlayer.consuming.engine.heartbeat import Heartbeat
from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher
from mqlayer.consuming.ordered.batch_executors import BatchAsyncioExecutor, BatchThreadExecutor
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.executors import OrderedAsyncioExecutor, OrderedThreadExecutor
from mqlayer.consuming.ordered.node_io import MemberNodes, NodeIo
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnedPartitions, OwnershipState
from mqlayer.consuming.ordered.parking_worker import ParkingWorker
from mqlayer.consuming.ordered.poison_guard import PoisonMessageGuard
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.domain.tags import TagFilter
from mqlayer.errors import MessageTimeout, MqlayerError, NotFound, PauseKey
from mqlayer.events import Event, EventKind, Hook, emit
from mqlayer.groups.group import Group
from mqlayer.groups.lineage import seal_marks
from mqlayer.groups.members import Assignment, HeartbeatReply
from mqlayer.health import Health, stuck_after_s
from mqlayer.parking import DeadLetterEntry, FailedAttempt, KeyEntry, KeyRef, ParkingLimit, ParkingStore
from mqlayer.postgres.database import Connection, Database, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection, connection_of
from mqlayer.redis.partition_scripts import LockHolder, LockTaken
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)

FENCE_RAISE_S: Final = 2.0
"""Time limit for raising fences."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Bounds of one member. Counts are messages, durations seconds.

    - `concurrency`: handlers at once, each of another key.
    - `prefetch_count`, `prefetch_bytes`: read and unsettled, over all partitions; bytes are estimated, one read may
      exceed them.
    - `drain_timeout_s`: how long a hand-over or stop waits for handlers.
    - `parked_keys`: parked keys per partition, where below the group's limit.
    - `extend_limit_s`: shared groups only; handler time after which other members get its message too.
    """

    concurrency: int = 8
    prefetch_count: int = 4_000
    prefetch_bytes: int = 32 * 1024 * 1024
    drain_timeout_s: float = 30.0
    parked_keys: int | None = None
    extend_limit_s: float = 3_600.0
    member_id: str = ""


@dataclass(slots=True)
class MemberStats:
    """Counts since the start; readable by any thread, exact once the member stopped."""

    handled: int = 0
    settled: int = 0
    failed: int = 0
    fenced: int = 0
    parked: int = 0
    unparked: int = 0
    dead: int = 0
    skipped: int = 0
    unmatched: int = 0
    timed_out: int = 0
    paused: int = 0
    blocked: int = 0
    parking_full: int = 0


class Member:
    """One member of a group, with its threads.

    Workers call `handle(owned, record)` per message, in a thread or, with `is_async`, as a coroutine. `rejoin` revives
    a retired broadcast instance.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        routes: RouteCache,
        group: Group,
        handle: Callable[[OwnedPartition, Record], Any] | BatchHandler,
        is_async: bool = False,
        options: MemberOptions | None = None,
        application: Database | None = None,
        hooks: Sequence[Hook] = (),
        rejoin: Callable[[], object] | None = None,
    ) -> None:
        self.settings, self.group = settings, group
        self.options = options or MemberOptions()
        self.member_id = self.options.member_id or new_member_id()
        self.stats = MemberStats()
        self._name = f"mqlayer-{group.name}"
        self._database, self._routes, self._application = database, routes, application
        self.rules = group.rules
        self.tag_filter = TagFilter.of(group.tag_filter)
        self.may_be_void = group.strategy == "best_effort"
        # Whether the topic is archived; the heartbeat sets it before anything is owned.
        self.archived = False
        self.rate_limiter = RateLimiter()
        self._partitions = OwnedPartitions()
        self._nodes = MemberNodes()
        self._allocation = -1
        # Epochs that a node refused; these partitions need higher ones.
        self._refused: dict[PartitionId, int] = {}
        # Deadline by which the release of a dropped partition waits for its handlers.
        self._release_by: dict[PartitionId, float] = {}
        # Partitions of the last heartbeat; `health` compares them with those served.
        self._assigned: frozenset[PartitionId] = frozenset()
        self._stopping, self._replaced = False, ""
        self._heartbeat = Heartbeat(
            self,
            database=database,
            group=group,
            member_id=self.member_id,
            settings=settings,
            name=self._name,
            rejoin=rejoin,
        )
        self.dispatcher, self._workers = self._for_handler(handle, is_async=is_async)
        self._parking_worker = ParkingWorker(
            self,
            ParkingStore(database, group.group_id, self.member_id),
            started_limit=2 * self.options.concurrency,
            name=self._name,
        )
        self.dispatcher.on_parking = self._parking_worker.wake.set
        self._poison_guard = PoisonMessageGuard()
        self._hooks = hooks

    def _for_handler(
        self, handle: Callable[[OwnedPartition, Record], Any] | BatchHandler, *, is_async: bool
    ) -> tuple[Dispatcher, OrderedThreadExecutor | OrderedAsyncioExecutor]:
        lease, count, name = self._heartbeat.lease, self.options.concurrency, self._name
        if isinstance(handle, BatchHandler):
            gathering = BatchDispatcher(lease, handle.batch_of)
            self.dispatcher = gathering
            of_batches = BatchAsyncioExecutor if is_async else BatchThreadExecutor
            return gathering, of_batches(self, handle, gathering, count=count, name=name)
        self.dispatcher = Dispatcher(lease)
        workers = OrderedAsyncioExecutor if is_async else OrderedThreadExecutor
        return self.dispatcher, workers(self, handle, count=count, name=name)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch; nothing runs then."""
        try:
            self._workers.start()
            self._parking_worker.start()
            self._heartbeat.start()
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for running handlers, settle, release; return whether every handler ended.

        Handlers that outlast `timeout_s` (default `drain_timeout_s`) can't settle: others handle their messages again.
        """
        limit_s = self.options.drain_timeout_s if timeout_s is None else timeout_s
        self._stopping = True
        self._partitions.close()
        until = clock() + limit_s
        for owned in self._partitions.all():
            self._drain(owned, until)
        self._heartbeat.start_leaving()
        self._partitions.wait_empty(until + 1.0 - clock())
        for owned in self._partitions.all():
            self._drop(owned)
        self.dispatcher.stop()
        ended = self._workers.join(max(0.2, until - clock()))
        self._nodes.stop(5.0)
        self._parking_worker.stop(5.0)
        self._heartbeat.stop(10.0)
        return ended

    def wake(self) -> None:
        """Fetch the assignments now."""
        self._heartbeat.wake()

    @property
    def running(self) -> bool:
        """Whether it consumes; False after `stop`, eviction, or replacement."""
        return not self._stopping

    def health(self) -> Health:
        """Report whether threads respond and all partitions are served. Thread-safe."""
        if self._replaced:
            # Only a new process recovers from this, and other members here would hide it.
            return Health(stuck=(self._replaced,))
        if self._stopping:
            return Health(waits=("it is stopping",))
        owned = {owned.partition for owned in self._partitions.all() if owned.state is not OwnershipState.NEW}
        missing = sorted(self._assigned - owned)
        own = Health(
            () if self._workers.alive else ("a worker's thread ended",),
            (f"partitions {', '.join(map(str, missing))} are assigned, and not pulled",) if missing else (),
        )
        limit_s = stuck_after_s(self.settings)
        return Health.of_all(
            self._heartbeat.health(), self._nodes.health(limit_s), self._parking_worker.health(limit_s), own
        )

    def owned(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return {owned.partition: (owned.epoch, owned.state.name.lower()) for owned in self._partitions.all()}

    # -- what workers ask --------------------------------------------------------------------------------------------

    def handled(self, count: int) -> None:
        """Count handled messages; wake the settlers."""
        self.stats.handled += count
        self._nodes.wake_settlers()

    def failed(self, key_queue: KeyQueue, record: Record, error: BaseException) -> FailureAction:
        """Count a failed attempt, where the error counts; return what follows."""
        owned, resumed = key_queue.owned, isinstance(record, ParkedRecord)
        before = record.attempts if isinstance(record, ParkedRecord) else owned.attempts.get(record.offset, 0)
        text = described(error)
        action = failure_action(
            error,
            self.rules,
            before=before,
            failing_s=0.0 if resumed else clock() - owned.failing_since.setdefault(record.offset, clock()),
            share=random.random(),
            parked=resumed,
            text=text,
        )
        if isinstance(action, ParkKey) and not resumed and len(owned.parked.by_name) >= self._parked_keys_limit:
            self._report_full(owned, record.identity.lp, "keys", seq=record.identity.seq)
            action = RetryInPlace(action.attempts, self._wait_s(action.attempts, action.seconds), action.blocked)
        timed_out = isinstance(error, MessageTimeout)
        if timed_out:
            self.stats.timed_out += 1
            self._emit("timed_out", owned, record.identity.lp, seq=record.identity.seq, attempts=action.attempts,
                       error=where(error))  # fmt: skip
        if action.attempts > before:
            self._count(owned, record, action.attempts, text, resumed=resumed, timed_out=timed_out)
        self._log_failure(owned, record, error, action)
        return action

    @property
    def _parked_keys_limit(self) -> int:
        own, limit = self.options.parked_keys, self.rules.parked_keys_limit
        return limit if own is None else min(own, limit)

    def _wait_s(self, attempts: int, seconds: float | None) -> float:
        return self.rules.wait_s(max(1, attempts), 0.0) if seconds is None else seconds

    def _count(
        self, owned: OwnedPartition, record: Record, attempts: int, text: str, *, resumed: bool, timed_out: bool
    ) -> None:
        self.stats.failed += 1
        if not resumed:
            owned.attempts[record.offset] = attempts
            owned.failed.append((record.offset, attempts))
            # Counting removes the note of the start from the node.
            owned.starts_recorded.discard(record.offset)
        self._parking_worker.add_attempt(FailedAttempt(record.identity, attempts, text, owned.partition, timed_out))

    def _log_failure(self, owned: OwnedPartition, record: Record, error: BaseException, action: FailureAction) -> None:
        identity = record.identity
        facts = self._facts(owned) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= {"attempt": action.attempts, "error": where(error), "verdict": type(action).__name__.lower()}
        if not isinstance(action, DeadLetter):
            facts["wait_s"] = action.seconds
        blocked = not isinstance(action, DeadLetter) and action.blocked
        paused = isinstance(error, PauseKey)
        log.log(
            logging.ERROR if blocked else logging.WARNING, "key_paused" if paused else "handler_failed", extra=facts
        )
        if isinstance(action, DeadLetter):
            return
        kind: EventKind = "paused" if paused else "blocked" if blocked else "failed"
        self.stats.paused += paused
        self.stats.blocked += blocked and not paused
        self._emit(kind, owned, identity.lp, seq=identity.seq, attempts=action.attempts, wait_s=action.seconds,
                   error=where(error))  # fmt: skip

    def begin(self, key_queue: KeyQueue, record: Record) -> bool:
        """Start a suspect message; False where its partition is gone. Raises ConsumerCrashed."""
        node_io = self._nodes.get(key_queue.owned.assignment.node)
        return node_io is not None and self._poison_guard.begin(key_queue, record, node_io.settler.wake)

    def end(self, key_queue: KeyQueue, record: Record) -> None:
        """End a guarded start."""
        self._poison_guard.end(key_queue, record)

    def fenced(self, owned: OwnedPartition, reason: str) -> None:
        """Drop a partition whose epoch was replaced."""
        log.warning("partition_lost", extra=self._facts(owned) | {"by": reason})
        self.stats.fenced += 1
        self._refused[owned.partition] = owned.epoch
        self._drop(owned)
        self._heartbeat.wake()

    # -- what readers and settlers ask -------------------------------------------------------------------------------

    def partitions_on(self, node_id: NodeId) -> list[OwnedPartition]:
        """Return a node's owned partitions."""
        return self._partitions.on(node_id)

    def may_read(self) -> bool:
        """Say whether the lease holds."""
        return self._heartbeat.lease.holds()

    def shares(self, owned: OwnedPartition) -> tuple[int, int]:
        """Return a partition's bounds in flight: records, bytes."""
        count = max(1, len(self._partitions))
        messages, most = self.options.prefetch_count // count, self.rate_limiter.max_in_flight(self.options.concurrency)
        if most is not None:
            # Spilled key queues count as one each, and must not keep other keys from being read.
            messages = min(messages, max(1, most // count) + owned.spilled)
        return max(1, messages), max(1, self.options.prefetch_bytes // count)

    def locks_acquired(self, pairs: Sequence[tuple[OwnedPartition, LockTaken]]) -> None:
        """Open partitions whose locks were acquired."""
        self._raise_fences([owned for owned, _ in pairs])
        self._parking_worker.load(pairs)
        for owned, taken in pairs:
            self.dispatcher.open(owned, taken)
            log.info("partition_acquired", extra=self._facts(owned) | {"committed": taken.committed})

    def unmatched(self, count: int) -> None:
        """Count filtered messages; wake the settlers."""
        self.stats.unmatched += count
        self._nodes.wake_settlers()

    def settled(self, owned: OwnedPartition, records: list[Record], committed: int) -> None:
        """Free the room of settled messages."""
        self.stats.settled += len(records)
        owned.committed = max(owned.committed, committed)
        self.dispatcher.settled(owned, records)
        node_io = self._nodes.get(owned.assignment.node)
        if node_io is not None and not node_io.reader.wake.is_set():
            node_io.reader.wake.set()

    def released(self, owned: OwnedPartition) -> None:
        """Drop a drained partition and release it in Postgres."""
        self._drop(owned)
        self._heartbeat.release(owned.assignment)

    def sealed(self) -> None:
        """Check for drained partitions."""
        self._nodes.wake_settlers()

    def drained(self, owned: OwnedPartition) -> None:
        """Record a sealed partition as drained."""
        self._heartbeat.report_drained(owned)

    def lock_lost(self, owned: OwnedPartition) -> None:
        """Drop a partition whose lock the node lost; it needs another epoch.

        Under the old one, a late parking transaction could commit unseen.
        """
        self._refused[owned.partition] = owned.epoch
        self._drop(owned)
        self._heartbeat.wake()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all partitions of a restarted node, then arm it. Raises nothing."""
        for owned in self._partitions.on(node_id):
            self._drop(owned)
        self._request_repair(node_id)

    def partition_refused(self, owned: OwnedPartition) -> None:
        """Drop a partition that its node lost, then arm the node. Raises nothing."""
        self._refused[owned.partition] = owned.epoch
        self._drop(owned)
        self._request_repair(owned.assignment.node)

    def refresh_nodes(self) -> None:
        """Follow changed nodes. Raises StoreUnavailable."""
        self._nodes.set_nodes(self._routes.refresh_nodes())

    def _request_repair(self, node_id: NodeId) -> None:
        node_io = self._nodes.get(node_id)
        if node_io is not None and node_io.repairing.acquire(blocking=False):
            try:
                self._repair(node_io, node_id)
            except MqlayerError as error:
                log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
            finally:
                node_io.repairing.release()
            self._heartbeat.wake()

    def _repair(self, node_io: NodeIo, node_id: NodeId) -> None:
        node = self._node(node_id)
        runtime = Runtime(self._database, self.settings, self._application, self.member_id)
        armed = arm_if_allowed(runtime, node.name)
        self._routes.refresh_nodes()
        node_io.set_node(armed)

    # -- what the parking worker asks ----------------------------------------------------------------------------------

    def all_partitions(self) -> list[OwnedPartition]:
        """Return all owned partitions."""
        return self._partitions.all()

    def parked(self, owned: OwnedPartition, *, keys: list[KeyEntry], messages: int) -> None:
        """Report parked keys; wake the settlers."""
        self.stats.parked += messages
        for entry in keys:
            facts = self._facts(owned) | {"lp": entry.ref.lp, "cause": entry.cause, "wait_s": entry.wait_s}
            log.warning("key_parked", extra=facts | {"attempts": entry.attempts})
            self._emit("parked", owned, entry.ref.lp, attempts=entry.attempts, cause=entry.cause, wait_s=entry.wait_s)
        self._nodes.wake_settlers()

    def parking_is_full(self, owned: OwnedPartition, lp: int, limit: ParkingLimit, entry: KeyEntry | None) -> float:
        """Report missing room; return seconds to wait in place."""
        self._report_full(owned, lp, limit)
        return 0.0 if entry is None else self._wait_s(entry.attempts, entry.wait_s)

    def _report_full(self, owned: OwnedPartition, lp: int, limit: ParkingLimit, *, seq: int | None = None) -> None:
        self.stats.parking_full += 1
        log.error("parking_full", extra=self._facts(owned) | {"lp": lp, "limit": limit})
        self._emit("parking_full", owned, lp, seq=seq, cause=limit)

    def unparked(self, owned: OwnedPartition, ref: KeyRef) -> None:
        """Report a key that left parking."""
        self.stats.unparked += 1
        log.info("key_unparked", extra=self._facts(owned) | {"lp": ref.lp})
        self._emit("unparked", owned, ref.lp)

    def dead_lettered(self, owned: OwnedPartition, dead_letters: list[DeadLetterEntry]) -> None:
        """Report messages that left the group."""
        for dead_letter in dead_letters:
            self.stats.dead += dead_letter.keep_body
            self.stats.skipped += not dead_letter.keep_body
            identity = dead_letter.record.identity
            facts = self._facts(owned) | {"lp": identity.lp, "seq": identity.seq, "cause": dead_letter.cause}
            log.warning(
                "message_dead_lettered", extra=facts | {"attempts": dead_letter.attempts, "kept": dead_letter.keep_body}
            )
            self._emit("dead" if dead_letter.keep_body else "skipped", owned, identity.lp, seq=identity.seq,
                       attempts=dead_letter.attempts, cause=dead_letter.cause)  # fmt: skip

    def _emit(self, kind: EventKind, owned: OwnedPartition, lp: int, **facts: Any) -> None:
        emit(Event(kind, self.group.topic, self.group.name, owned.partition, lp, **facts), self._hooks)

    # -- what the heartbeat asks ---------------------------------------------------------------------------------------

    def apply_assignments(self, answer: HeartbeatReply) -> None:
        """Follow a heartbeat's reply."""
        if answer.allocation < self._allocation:
            return
        self._allocation = answer.allocation
        self._parking_worker.follow_parking_version(answer.parking_version)
        if answer.rules is not None and answer.rules != self.rules:
            self.rules = answer.rules
            # Other rules may end waits in place.
            self.dispatcher.retry_now()
        # Applies to later reads; fetched records were chosen by the old filter.
        self.tag_filter = TagFilter.of(answer.tag_filter)
        self.archived = answer.archived
        wanted = {assignment.partition: assignment for assignment in answer.assignments}
        self._assigned = frozenset(partition for partition, assignment in wanted.items() if not assignment.release)
        self.rate_limiter.configure(answer.rate, len(self._assigned))
        for owned in self._partitions.all():
            assignment = wanted.get(owned.partition)
            if assignment is None or assignment.epoch != owned.epoch:
                self._drop(owned)
        self._release_by = {
            partition: until
            for partition, until in self._release_by.items()
            if partition in wanted and wanted[partition].release and self._partitions.get(partition) is None
        }
        for assignment in answer.assignments:
            try:
                self._apply_assignments(assignment)
            except MqlayerError as error:
                log.warning("assignment_delayed", extra={"partition": assignment.partition, "reason": str(error)})

    def lease_lost(self) -> None:
        """Drop all partitions."""
        self._allocation = -1
        self._assigned = frozenset()
        self._release_by.clear()
        for owned in self._partitions.all():
            self._drop(owned)

    def replaced(self, reason: str) -> None:
        """End: id taken, member evicted, or group retired."""
        self._stopping, self._replaced = True, reason
        self._partitions.close()
        self.dispatcher.stop()

    def _apply_assignments(self, assignment: Assignment) -> None:
        owned = self._partitions.get(assignment.partition)
        if assignment.release:
            if owned is None:
                self._release(assignment)
            elif owned.state in (OwnershipState.NEW, OwnershipState.OPEN):
                self._drain(owned, clock() + self.options.drain_timeout_s)
        elif owned is not None:
            self._follow_replay(owned, assignment)
        elif not self._stopping:
            if self._refused.get(assignment.partition) == assignment.epoch:
                self._heartbeat.renew(assignment)
            else:
                self._own(assignment)

    def _follow_replay(self, owned: OwnedPartition, assignment: Assignment) -> None:
        if assignment.waits_for_replay != owned.assignment.waits_for_replay:
            owned.assignment = replace(owned.assignment, waits_for_replay=assignment.waits_for_replay)
        if assignment.waits_for_replay:
            owned.waits_for_replay = True
        elif owned.waits_for_replay:
            self._parking_worker.wake.set()

    def _release(self, assignment: Assignment) -> None:
        until = self._release_by.setdefault(assignment.partition, clock() + self.options.drain_timeout_s)
        if clock() >= until or not self.dispatcher.runs_on(assignment.partition):
            del self._release_by[assignment.partition]
            self._heartbeat.release(assignment)

    def _own(self, assignment: Assignment) -> None:
        prefix, group_id = self.settings.key_prefix, self.group.group_id
        node_io = self._nodes.get(assignment.node) or self._open_node_io(assignment.node)
        cut = seal_marks(self._database, assignment.partition) if assignment.cut else {}
        lock_holder = LockHolder(prefix, assignment.partition, group_id, self.member_id, assignment.epoch)
        # On a best-effort topic a failing message waits alone.
        owned = OwnedPartition(assignment, lock_holder, ordered=self.group.ordered and self.group.strategy == "strict")
        owned.cut = cut
        if self._partitions.add(owned):
            node_io.reader.wake.set()

    # -- owned partitions ----------------------------------------------------------------------------------------------

    def _drain(self, owned: OwnedPartition, until: float) -> None:
        self.dispatcher.drain(owned, until)
        self._nodes.wake_settlers()

    def _drop(self, owned: OwnedPartition) -> None:
        self.dispatcher.drop(owned)
        self._partitions.remove(owned)

    def _raise_fences(self, partitions: list[OwnedPartition]) -> None:
        """Refuse earlier owners' effects early."""
        if self._application is None or not partitions:
            return
        until = clock() + FENCE_RAISE_S
        try:
            with self._application.connection() as connection:
                for owned in partitions:
                    if clock() < until and not connection.closed:
                        self._raise_fence(connection, owned)
        except MqlayerError as error:
            log.warning("fence_not_raised", extra={"group": self.group.name, "reason": str(error)})

    def _raise_fence(self, connection: Connection, owned: OwnedPartition) -> None:
        try:
            with driver_errors("the application database"), connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '200ms'")
                connection.execute(query("fence_raise"), self._fence_facts(owned))
        except MqlayerError as error:
            log.warning("fence_not_raised", extra=self._facts(owned) | {"reason": str(error)})

    def _fence_facts(self, owned: OwnedPartition) -> dict[str, int]:
        assignment = owned.assignment
        return {
            "group_id": self.group.group_id,
            "lp_from": assignment.lp_from,
            "lp_to": assignment.lp_to,
            "epoch": owned.epoch,
        }

    def _facts(self, owned: OwnedPartition) -> dict[str, Any]:
        return {
            "topic": self.group.topic,
            "group": self.group.name,
            "partition": owned.partition,
            "epoch": owned.epoch,
        }

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _open_node_io(self, node_id: NodeId) -> NodeIo:
        node_io = NodeIo(self, self._node(node_id), self._connect, name=self._name)
        self._nodes.add(node_id, node_io)
        return node_io

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        return connection_of(node, self.settings, RedisRole.CONSUMER)


def new_member_id() -> str:
    """Return host, pid and a random part as a name."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "host"
    return f"m-{host[:32]}-{os.getpid()}-{random.randrange(16**6):06x}"
