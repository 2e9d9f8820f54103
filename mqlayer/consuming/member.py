"""One running consumer of a group: what it holds, and what its threads do with it.

States: *joining* -> *running* -> *stopping* -> *stopped*. While it runs, each partition goes through the states of
`holdings`. Threads: the heart (Postgres), a reader and a settler per node (Redis), the workers (handlers). No thread's
loop ends by an error: it says what is wrong and tries again. Who dies when:

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
import random
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mqlayer.consuming.allowance import Allowance
from mqlayer.consuming.batch_handlers import BatchHandler
from mqlayer.consuming.batch_workers import BatchLoopWorkers, BatchThreadWorkers
from mqlayer.consuming.caution import Caution
from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.faults import described, where
from mqlayer.consuming.gathering import BatchDispatcher
from mqlayer.consuming.heart import Heart
from mqlayer.consuming.holdings import Held, Holdings, Lane, State
from mqlayer.consuming.keeping import Keeper
from mqlayer.consuming.links import Link, Links
from mqlayer.consuming.verdicts import Bury, Park, Verdict, Wait, verdict_of
from mqlayer.consuming.workers import LoopWorkers, ThreadWorkers
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.domain.tags import TagFilter
from mqlayer.errors import MessageTimeout, MqlayerError, NotFound, PauseKey
from mqlayer.events import Event, EventKind, Hook, tell
from mqlayer.health import Health, stuck_after_s
from mqlayer.membership.gates import seal_marks
from mqlayer.membership.groups import Group
from mqlayer.membership.members import Assigned, Beat
from mqlayer.parking import AttemptNote, Burial, KeyEntry, KeyRef, Ledger, ParkingLimit
from mqlayer.postgres.database import Connection, Database, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection, connection_of
from mqlayer.redis.partitions import Holder, Taken
from mqlayer.redis.roles import RedisRole
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)

FENCE_RAISE_S: Final = 2.0
"""How long a member that takes partitions may spend on raising their fences early."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Bounds of one member. Counts are messages, durations seconds.

    `concurrency`: handlers at once, each of another key. `prefetch_count` and `prefetch_bytes` bound what is read and
    not settled, over all partitions; bytes by the size of what was read lately, so a single read may go over.
    `drain_limit_s`: how long a hand-over or stop waits for running handlers. `parked_keys`: how many keys of a
    partition this member parks at most, where that is fewer than its group's `parked_keys_limit`.
    `keep_limit_s`: of a shared group, how long a handler may run before its message is given to others, too.
    """

    concurrency: int = 8
    prefetch_count: int = 4_000
    prefetch_bytes: int = 32 * 1024 * 1024
    drain_limit_s: float = 30.0
    parked_keys: int | None = None
    keep_limit_s: float = 3_600.0
    member_id: str = ""


@dataclass(slots=True)
class MemberStats:
    """Counts since the start; read by anybody, exact when the member has stopped."""

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
    """One member of a group, with its threads. `start` returns when it has joined; `stop` when nothing runs any more.

    `handle(held, record)` is called for each message: on a thread of the pool, or as a coroutine when `is_async`. A
    BatchHandler is called for batches.
    `again`: brings a retired instance of a broadcast group back, which begins anew; any other retired group ends it.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        routes: RouteCache,
        group: Group,
        handle: Callable[[Held, Record], Any] | BatchHandler,
        is_async: bool = False,
        options: MemberOptions | None = None,
        application: Database | None = None,
        hooks: Sequence[Hook] = (),
        again: Callable[[], object] | None = None,
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
        # Whether what becomes of messages is told to an archiver; by the heartbeat, before anything is held.
        self.archived = False
        # How many messages may be begun now, where the group's rate is limited.
        self.allowance = Allowance()
        self._holdings = Holdings()
        self._links = Links()
        self._allocation = -1
        # The epochs that a node refused: asked for again only under higher ones.
        self._refused: dict[PartitionId, int] = {}
        # Until when the release of a dropped holding waits for its handlers; of what is asked back at present only.
        self._give_back_by: dict[PartitionId, float] = {}
        # What the last heartbeat said is ours, for those who ask whether we serve it.
        self._assigned: frozenset[PartitionId] = frozenset()
        self._stopping, self._replaced = False, ""
        self._heart = Heart(
            self,
            database=database,
            group=group,
            member_id=self.member_id,
            settings=settings,
            name=self._name,
            again=again,
        )
        self.dispatcher, self._workers = self._for_handler(handle, is_async=is_async)
        self._keeper = Keeper(
            self,
            Ledger(database, group.group_id, self.member_id),
            started_limit=2 * self.options.concurrency,
            name=self._name,
        )
        self.dispatcher.on_parking = self._keeper.wake.set
        self._caution = Caution()
        self._hooks = hooks

    def _for_handler(
        self, handle: Callable[[Held, Record], Any] | BatchHandler, *, is_async: bool
    ) -> tuple[Dispatcher, ThreadWorkers | LoopWorkers]:
        lease, count, name = self._heart.lease, self.options.concurrency, self._name
        if isinstance(handle, BatchHandler):
            gathering = BatchDispatcher(lease, handle.batch_of)
            self.dispatcher = gathering
            of_batches = BatchLoopWorkers if is_async else BatchThreadWorkers
            return gathering, of_batches(self, handle, gathering, count=count, name=name)
        self.dispatcher = Dispatcher(lease)
        workers = LoopWorkers if is_async else ThreadWorkers
        return self.dispatcher, workers(self, handle, count=count, name=name)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch; nothing runs then."""
        try:
            self._workers.start()
            self._keeper.start()
            self._heart.start()
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop: no new message is started, running handlers are waited for, acks are sent, partitions given away.

        Returns True when every handler had ended; no message is handled after that. After the limit (`drain_limit_s`)
        it gives up what still runs: its ack will be refused, another member handles that message again.
        """
        limit_s = self.options.drain_limit_s if timeout_s is None else timeout_s
        self._stopping = True
        self._holdings.close()
        until = clock() + limit_s
        for held in self._holdings.all():
            self._drain(held, until)
        self._heart.start_leaving()
        self._holdings.wait_empty(until + 1.0 - clock())
        for held in self._holdings.all():
            self._drop(held)
        self.dispatcher.stop()
        ended = self._workers.join(max(0.2, until - clock()))
        self._links.stop(5.0)
        self._keeper.stop(5.0)
        self._heart.stop(10.0)
        return ended

    def nudge(self) -> None:
        """Have it look at its assignments now: they may have changed."""
        self._heart.nudge()

    @property
    def running(self) -> bool:
        """Whether it consumes: False after `stop`, when another process took its id, or when it was evicted."""
        return not self._stopping

    def health(self) -> Health:
        """Say whether its threads turn, and whether it serves all that it is assigned. For any thread."""
        if self._replaced:
            # Nothing brings it back but a new process; where others run beside it here, nobody else would say so.
            return Health(stuck=(self._replaced,))
        if self._stopping:
            return Health(waits=("it is stopping",))
        held = {held.partition for held in self._holdings.all() if held.state is not State.NEW}
        missing = sorted(self._assigned - held)
        own = Health(
            () if self._workers.alive else ("a worker's thread ended",),
            (f"partitions {', '.join(map(str, missing))} are assigned, and not pulled",) if missing else (),
        )
        limit_s = stuck_after_s(self.settings)
        return Health.of_all(self._heart.health(), self._links.health(limit_s), self._keeper.health(limit_s), own)

    def holdings(self) -> dict[int, tuple[int, str]]:
        """Return what is held: partition -> (epoch, state)."""
        return {held.partition: (held.epoch, held.state.name.lower()) for held in self._holdings.all()}

    # -- what workers ask --------------------------------------------------------------------------------------------

    def handled(self, count: int) -> None:
        """Count what was handled, and let the settlers send it."""
        self.stats.handled += count
        self._links.send_some()

    def failed(self, lane: Lane, record: Record, error: BaseException) -> Verdict:
        """Count a failed attempt, unless its handler says that it was none; return what becomes of the message."""
        held, resumed = lane.held, isinstance(record, ParkedRecord)
        before = record.attempts if isinstance(record, ParkedRecord) else held.attempts.get(record.offset, 0)
        text = described(error)
        verdict = verdict_of(
            error,
            self.rules,
            before=before,
            failing_s=0.0 if resumed else clock() - held.failing_since.setdefault(record.offset, clock()),
            share=random.random(),
            parked=resumed,
            text=text,
        )
        if isinstance(verdict, Park) and not resumed and len(held.parked.by_name) >= self._parked_keys_limit:
            self._say_full(held, record.identity.lp, "keys", seq=record.identity.seq)
            verdict = Wait(verdict.attempts, self._wait_s(verdict.attempts, verdict.seconds), verdict.blocked)
        timed_out = isinstance(error, MessageTimeout)
        if timed_out:
            self.stats.timed_out += 1
            self._tell("timed_out", held, record.identity.lp, seq=record.identity.seq, attempts=verdict.attempts,
                       error=where(error))  # fmt: skip
        if verdict.attempts > before:
            self._count(held, record, verdict.attempts, text, resumed=resumed, timed_out=timed_out)
        self._say_failed(held, record, error, verdict)
        return verdict

    @property
    def _parked_keys_limit(self) -> int:
        own, limit = self.options.parked_keys, self.rules.parked_keys_limit
        return limit if own is None else min(own, limit)

    def _wait_s(self, attempts: int, seconds: float | None) -> float:
        """Return how long a message waits in place that was to be parked, perhaps for an operator."""
        return self.rules.wait_s(max(1, attempts), 0.0) if seconds is None else seconds

    def _count(self, held: Held, record: Record, attempts: int, text: str, *, resumed: bool, timed_out: bool) -> None:
        self.stats.failed += 1
        if not resumed:
            held.attempts[record.offset] = attempts
            held.failed.append((record.offset, attempts))
            # A count takes the note of its start off the server.
            held.noted.discard(record.offset)
        self._keeper.note(AttemptNote(record.identity, attempts, text, held.partition, timed_out))

    def _say_failed(self, held: Held, record: Record, error: BaseException, verdict: Verdict) -> None:
        identity = record.identity
        facts = self._facts(held) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= {"attempt": verdict.attempts, "error": where(error), "verdict": type(verdict).__name__.lower()}
        if not isinstance(verdict, Bury):
            facts["wait_s"] = verdict.seconds
        blocked = not isinstance(verdict, Bury) and verdict.blocked
        paused = isinstance(error, PauseKey)
        log.log(
            logging.ERROR if blocked else logging.WARNING, "key_paused" if paused else "handler_failed", extra=facts
        )
        if isinstance(verdict, Bury):
            return
        kind: EventKind = "paused" if paused else "blocked" if blocked else "failed"
        self.stats.paused += paused
        self.stats.blocked += blocked and not paused
        self._tell(kind, held, identity.lp, seq=identity.seq, attempts=verdict.attempts, wait_s=verdict.seconds,
                   error=where(error))  # fmt: skip

    def begin(self, lane: Lane, record: Record) -> bool:
        """Start a message with care: former owners died; False where its holding is gone. Raises NoAnswer."""
        link = self._links.get(lane.held.assigned.node)
        return link is not None and self._caution.begin(lane, record, link.settler.wake)

    def end(self, lane: Lane, record: Record) -> None:
        """Let others start."""
        self._caution.end(lane, record)

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding whose epoch is not in force any more."""
        log.warning("partition_lost", extra=self._facts(held) | {"by": reason})
        self.stats.fenced += 1
        self._refused[held.partition] = held.epoch
        self._drop(held)
        self._heart.nudge()

    # -- what readers and settlers ask -------------------------------------------------------------------------------

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""
        return self._holdings.on(node_id)

    def may_read(self) -> bool:
        """Say whether the lease still holds by our own clock."""
        return self._heart.lease.holds()

    def shares(self, held: Held) -> tuple[int, int]:
        """Return how many records and bytes one partition may have in hand."""
        count = max(1, len(self._holdings))
        messages, most = self.options.prefetch_count // count, self.allowance.most_in_hand(self.options.concurrency)
        if most is not None:
            # Folded lanes count as one each, and must not keep other keys from being read.
            messages = min(messages, max(1, most // count) + held.folded)
        return max(1, messages), max(1, self.options.prefetch_bytes // count)

    def taken(self, pairs: Sequence[tuple[Held, Taken]]) -> None:
        """Start holdings whose pull locks are ours: refuse earlier owners' effects, then go on where they stopped."""
        self._raise_fences([held for held, _ in pairs])
        self._keeper.load(pairs)
        for held, taken in pairs:
            self.dispatcher.open(held, taken)
            log.info("partition_taken", extra=self._facts(held) | {"committed": taken.committed})

    def left_out(self, count: int) -> None:
        """Count messages that the group's filter leaves out, and let the settlers send that."""
        self.stats.unmatched += count
        self._links.send_some()

    def acknowledged(self, held: Held, records: list[Record], committed: int) -> None:
        """Make room for what the server has settled."""
        self.stats.settled += len(records)
        held.committed = max(held.committed, committed)
        self.dispatcher.acknowledged(held, records)
        link = self._links.get(held.assigned.node)
        if link is not None and not link.reader.wake.is_set():
            link.reader.wake.set()

    def released(self, held: Held) -> None:
        """Give a drained holding back in Postgres too, by the heart's thread."""
        self._drop(held)
        self._heart.give_back(held.assigned)

    def sealed(self) -> None:
        """Have the settler look whether everything before the command record is settled."""
        self._links.send_some()

    def drained(self, held: Held) -> None:
        """Say in Postgres that a sealed partition is drained, by the heart's thread: its successors may follow."""
        self._heart.say_drained(held)

    def forgotten(self, held: Held) -> None:
        """Begin a holding anew, under another epoch: the node does not know its pull lock any more.

        Under this one, what is being parked of it could be committed after the new holding looked at what is parked.
        """
        self._refused[held.partition] = held.epoch
        self._drop(held)
        self._heart.nudge()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that restarted, and arm it again unless somebody did. Raises nothing.

        What runs of them is refused at its ack: re-arming put higher epochs in force before the node serves.
        """
        for held in self._holdings.on(node_id):
            self._drop(held)
        self._mend(node_id)

    def partition_refused(self, held: Held) -> None:
        """Drop a holding that its node does not have, and have the node mended. Raises nothing.

        The others on the node go on: if it has lost them too, they say so themselves. It begins anew under another
        epoch, see `forgotten`.
        """
        self._refused[held.partition] = held.epoch
        self._drop(held)
        self._mend(held.assigned.node)

    def follow_nodes(self) -> None:
        """Use no line to another run or address of a node than those that count now. Raises StoreUnavailable."""
        self._links.expect(self._routes.refresh_nodes())

    def _mend(self, node_id: NodeId) -> None:
        link = self._links.get(node_id)
        if link is not None and link.repairing.acquire(blocking=False):
            try:
                self._repair(link, node_id)
            except MqlayerError as error:
                log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
            finally:
                link.repairing.release()
            self._heart.nudge()

    def _repair(self, link: Link, node_id: NodeId) -> None:
        node = self._node(node_id)
        armed = arm_if_allowed(
            self._database,
            node.name,
            prefix=self.settings.key_prefix,
            application=self._application,
            actor=self.member_id,
            unsafe=self.settings.allow_unsafe_redis,
        )
        self._routes.refresh_nodes()
        link.expect(armed)

    # -- what the keeper asks ----------------------------------------------------------------------------------------

    def all_holdings(self) -> list[Held]:
        """Return the holdings that are not gone."""
        return self._holdings.all()

    def parked(self, held: Held, *, keys: list[KeyEntry], messages: int) -> None:
        """Count what is parked, and have the settlers send it."""
        self.stats.parked += messages
        for entry in keys:
            facts = self._facts(held) | {"lp": entry.ref.lp, "cause": entry.cause, "wait_s": entry.wait_s}
            log.warning("key_parked", extra=facts | {"attempts": entry.attempts})
            self._tell("parked", held, entry.ref.lp, attempts=entry.attempts, cause=entry.cause, wait_s=entry.wait_s)
        self._links.send_some()

    def full(self, held: Held, lp: int, limit: ParkingLimit, entry: KeyEntry | None) -> float:
        """Say that a key finds no room; return for how long one that is not parked, and was to be, waits in place."""
        self._say_full(held, lp, limit)
        return 0.0 if entry is None else self._wait_s(entry.attempts, entry.wait_s)

    def _say_full(self, held: Held, lp: int, limit: ParkingLimit, *, seq: int | None = None) -> None:
        self.stats.parking_full += 1
        log.error("parking_full", extra=self._facts(held) | {"lp": lp, "limit": limit})
        self._tell("parking_full", held, lp, seq=seq, cause=limit)

    def unparked(self, held: Held, ref: KeyRef) -> None:
        """Note that a key is in line again."""
        self.stats.unparked += 1
        log.info("key_unparked", extra=self._facts(held) | {"lp": ref.lp})
        self._tell("unparked", held, ref.lp)

    def buried(self, held: Held, burials: list[Burial]) -> None:
        """Count what left the group."""
        for burial in burials:
            self.stats.dead += burial.keep
            self.stats.skipped += not burial.keep
            identity = burial.record.identity
            facts = self._facts(held) | {"lp": identity.lp, "seq": identity.seq, "cause": burial.cause}
            log.warning("message_buried", extra=facts | {"attempts": burial.attempts, "kept": burial.keep})
            self._tell("dead" if burial.keep else "skipped", held, identity.lp, seq=identity.seq,
                       attempts=burial.attempts, cause=burial.cause)  # fmt: skip

    def _tell(self, kind: EventKind, held: Held, lp: int, **facts: Any) -> None:
        tell(Event(kind, self.group.topic, self.group.name, held.partition, lp, **facts), self._hooks)

    # -- what the heart asks -----------------------------------------------------------------------------------------

    def follow(self, answer: Beat) -> None:
        """Follow the assignments: drop what is not ours, drain what is asked for, begin what is new."""
        if answer.allocation < self._allocation:
            return
        self._allocation = answer.allocation
        self._keeper.hear(answer.parking)
        if answer.rules is not None and answer.rules != self.rules:
            self.rules = answer.rules
            # What waits in place may have another end now.
            self.dispatcher.hurry()
        # Counts for what is read from here on; what is read already was chosen.
        self.tag_filter = TagFilter.of(answer.tag_filter)
        self.archived = answer.archived
        wanted = {assigned.partition: assigned for assigned in answer.assignments}
        self._assigned = frozenset(partition for partition, assigned in wanted.items() if not assigned.release)
        self.allowance.follow(answer.rate, len(self._assigned))
        for held in self._holdings.all():
            assigned = wanted.get(held.partition)
            if assigned is None or assigned.epoch != held.epoch:
                self._drop(held)
        self._give_back_by = {
            partition: until
            for partition, until in self._give_back_by.items()
            if partition in wanted and wanted[partition].release and self._holdings.get(partition) is None
        }
        for assigned in answer.assignments:
            try:
                self._follow(assigned)
            except MqlayerError as error:
                log.warning("assignment_waits", extra={"partition": assigned.partition, "reason": str(error)})

    def lease_lost(self) -> None:
        """Drop all holdings."""
        self._allocation = -1
        self._assigned = frozenset()
        self._give_back_by.clear()
        for held in self._holdings.all():
            self._drop(held)

    def replaced(self, reason: str) -> None:
        """End: another process took this member's id, an operator evicted it, or its group is retired."""
        self._stopping, self._replaced = True, reason
        self._holdings.close()
        self.dispatcher.stop()

    def _follow(self, assigned: Assigned) -> None:
        held = self._holdings.get(assigned.partition)
        if assigned.release:
            if held is None:
                self._give_back(assigned)
            elif held.state in (State.NEW, State.OPEN):
                self._drain(held, clock() + self.options.drain_limit_s)
        elif held is not None:
            self._rest(held, assigned)
        elif not self._stopping:
            if self._refused.get(assigned.partition) == assigned.epoch:
                self._heart.renew(assigned)
            else:
                self._hold(assigned)

    def _rest(self, held: Held, assigned: Assigned) -> None:
        """Follow what a replay wants of a stream; the keeper lets it be read again, see `Keeper`."""
        if assigned.resting != held.assigned.resting:
            held.assigned = replace(held.assigned, resting=assigned.resting)
        if assigned.resting:
            held.resting = True
        elif held.resting:
            self._keeper.wake.set()

    def _give_back(self, assigned: Assigned) -> None:
        """Release what is not held any more, once no handler of an earlier holding runs on, or not for long."""
        until = self._give_back_by.setdefault(assigned.partition, clock() + self.options.drain_limit_s)
        if clock() >= until or not self.dispatcher.runs_on(assigned.partition):
            del self._give_back_by[assigned.partition]
            self._heart.give_back(assigned)

    def _hold(self, assigned: Assigned) -> None:
        prefix, group_id = self.settings.key_prefix, self.group.group_id
        link = self._links.get(assigned.node) or self._open_link(assigned.node)
        cut = seal_marks(self._database, assigned.partition) if assigned.cut else {}
        holder = Holder(prefix, assigned.partition, group_id, self.member_id, assigned.epoch)
        # On a best-effort topic a message that fails waits by itself, and the rest goes on.
        held = Held(assigned, holder, ordered=self.group.ordered and self.group.strategy == "strict")
        held.cut = cut
        if self._holdings.add(held):
            link.reader.wake.set()

    # -- holdings ----------------------------------------------------------------------------------------------------

    def _drain(self, held: Held, until: float) -> None:
        """Start nothing more of a holding; the settler releases it when what runs has ended."""
        self.dispatcher.drain(held, until)
        self._links.send_some()

    def _drop(self, held: Held) -> None:
        """Forget a holding: nothing of it is started or settled any more."""
        self.dispatcher.drop(held)
        self._holdings.remove(held)

    def _raise_fences(self, holdings: list[Held]) -> None:
        """Refuse earlier owners' effects already now; else the first fenced effect of each LP does."""
        if self._application is None or not holdings:
            return
        until = clock() + FENCE_RAISE_S
        try:
            with self._application.connection() as connection:
                for held in holdings:
                    if clock() < until and not connection.closed:
                        self._raise_fence(connection, held)
        except MqlayerError as error:
            log.warning("fence_not_raised", extra={"group": self.group.name, "reason": str(error)})

    def _raise_fence(self, connection: Connection, held: Held) -> None:
        """Raise the fence of one partition; where that fails the others are raised nevertheless."""
        try:
            with driver_errors("the application database"), connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '200ms'")
                connection.execute(query("fence_raise"), self._fence_facts(held))
        except MqlayerError as error:
            log.warning("fence_not_raised", extra=self._facts(held) | {"reason": str(error)})

    def _fence_facts(self, held: Held) -> dict[str, int]:
        assigned = held.assigned
        return {
            "group_id": self.group.group_id,
            "lp_from": assigned.lp_from,
            "lp_to": assigned.lp_to,
            "epoch": held.epoch,
        }

    def _facts(self, held: Held) -> dict[str, Any]:
        return {
            "topic": self.group.topic,
            "group": self.group.name,
            "partition": held.partition,
            "epoch": held.epoch,
        }

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _open_link(self, node_id: NodeId) -> Link:
        link = Link(self, self._node(node_id), self._connect, name=self._name)
        self._links.add(node_id, link)
        return link

    def _node(self, node_id: NodeId) -> Node:
        """Return a node as known. Raises StoreUnavailable, or NotFound for one that was removed."""
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        return connection_of(node, self.settings, RedisRole.CONSUMER)


def new_member_id() -> str:
    """Return an id for this process: host, pid and a random part, in the form of names."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "host"
    return f"m-{host[:32]}-{os.getpid()}-{random.randrange(16**6):06x}"
