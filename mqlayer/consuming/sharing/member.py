"""One member of a shared group, with its threads: the heart and the clerk (Postgres), a reader and a settler per node
(Redis), the workers (handlers). Who dies when, and who repairs it: see the package.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from mqlayer.consuming.clock import clock
from mqlayer.consuming.faults import described, where
from mqlayer.consuming.heart import Heart
from mqlayer.consuming.member import MemberOptions, MemberStats, new_member_id
from mqlayer.consuming.sharing.clerk import Clerk, Gone
from mqlayer.consuming.sharing.ledger import Claim, SharedLedger
from mqlayer.consuming.sharing.links import SharedLinks
from mqlayer.consuming.sharing.pool import Batch, Pool
from mqlayer.consuming.sharing.reading import Spot
from mqlayer.consuming.sharing.settling import Back, Begin, Ended
from mqlayer.consuming.sharing.workers import SharedLoop, SharedThreads
from mqlayer.consuming.verdicts import Bury, Verdict, verdict_of
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.domain.tags import TagFilter
from mqlayer.errors import MessageTimeout, MqlayerError, StaleOwner
from mqlayer.events import Event, EventKind, Hook, tell
from mqlayer.health import Health, stuck_after_s
from mqlayer.membership.gates import drained_popped, seal_marks
from mqlayer.membership.groups import INVISIBLE_S, Group
from mqlayer.membership.members import Beat
from mqlayer.membership.popping import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.parking import AttemptNote, Burial
from mqlayer.postgres.database import Database
from mqlayer.redis.outcomes import RangeWord
from mqlayer.redis.sharing import SharedPlace
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

STALE_WAIT_MS: Final = 200
"""How soon a message is tried again whose fence knew a newer epoch than this member did."""
BEGIN_WAIT_S: Final = 15.0


class SharedMember:
    """One member. `start` returns when it has joined; `stop` when nothing runs any more.

    `handle(batch, record)` is called for each message: on a thread of the pool, or as a coroutine when `is_async`.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        routes: RouteCache,
        group: Group,
        handle: Callable[[Any, Record], Any],
        is_async: bool = False,
        options: MemberOptions | None = None,
        application: Database | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.settings, self.group = settings, group
        self.options = options or MemberOptions()
        self.member_id = self.options.member_id or new_member_id()
        self.stats = MemberStats()
        self.rules = group.rules
        self.tag_filter = TagFilter.of(group.tag_filter)
        self.archived = False
        self.invisible_s = group.invisible_s or INVISIBLE_S
        self.keep_limit_s = self.options.keep_limit_s
        self._name = f"mqlayer-{group.name}"
        self._database, self._hooks = database, hooks
        self._spots: dict[PartitionId, Spot] = {}
        self._known: dict[PartitionId, PopPartition] = {}
        self._epoch = self._parking = 0
        self._stopping, self._replaced = False, ""
        self.pool = Pool(
            concurrency=self.options.concurrency,
            prefetch_count=self.options.prefetch_count,
            prefetch_bytes=self.options.prefetch_bytes,
            invisible_s=self.invisible_s,
        )
        self._links = SharedLinks(self, routes, database, application)
        self._ledger = SharedLedger(database, group.group_id, self.member_id)
        self._clerk = Clerk(self, self._ledger, name=self._name)
        self._heart = Heart(
            self, database=database, group=group, member_id=self.member_id, settings=settings, name=self._name
        )
        workers = SharedLoop if is_async else SharedThreads
        self._workers = workers(self, handle, count=self.options.concurrency, name=self._name)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch; nothing runs then."""
        try:
            self._workers.start()
            self._clerk.start()
            self._heart.start()
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop: nothing new is started, running handlers are waited for, the rest is given back at once.

        Returns True when every handler had ended. What runs on after the limit (`drain_limit_s`) comes again after the
        invisible time.
        """
        limit_s = self.options.drain_limit_s if timeout_s is None else timeout_s
        self._stopping = True
        until = clock() + limit_s
        self.pool.stop()
        self._heart.start_leaving()
        ended = self._workers.join(max(0.2, limit_s))
        self._clerk.stop(5.0)
        self._links.stop_readers(5.0)
        self._give_back()
        self._links.stop(max(1.0, min(5.0, until - clock())))
        self._heart.stop(10.0)
        return ended

    def _give_back(self) -> None:
        """Give back what nobody began, and what the clerk could not write."""
        running = self.pool.under_way()
        for batch in self.pool.batches():
            settling = self._links.to_be_settled(batch)
            for offset in batch.open:
                if (id(batch), offset) not in running and offset not in settling:
                    self._back(batch, offset, 0, None)
        self._clerk.finish_back()

    def nudge(self) -> None:
        """Have it look at its partitions now: they may have changed."""
        self._heart.nudge()

    @property
    def running(self) -> bool:
        """Whether it consumes: False after `stop`, when another process took its id, or when it was evicted."""
        return not self._stopping

    def health(self) -> Health:
        """Say whether its threads turn, and whether it serves all partitions. For any thread."""
        if self._replaced:
            return Health(stuck=(self._replaced,))
        if self._stopping:
            return Health(waits=("it is stopping",))
        missing = sorted(partition for partition, spot in self._spots.items() if not spot.taken)
        own = Health(
            () if self._workers.alive else ("a worker's thread ended",),
            (f"partitions {', '.join(map(str, missing))} are not read",) if missing else (),
        )
        limit_s = stuck_after_s(self.settings)
        return Health.of_all(self._heart.health(), self._links.health(limit_s), self._clerk.health(limit_s), own)

    def holdings(self) -> dict[int, tuple[int, str]]:
        """Return what is read: partition -> (epoch, state)."""
        return {
            int(spot.place.partition): (spot.place.epoch, "open" if spot.taken else "new")
            for spot in list(self._spots.values())
        }

    # -- what workers ask --------------------------------------------------------------------------------------------

    def handled(self, batch: Batch, offsets: list[int]) -> None:
        """Count what was handled, and have it settled."""
        self.stats.handled += len(offsets)
        self.end(batch, offsets, "h")

    def begin(self, batch: Batch) -> bool:
        """Count an attempt at a suspect before it is started; False where it is not ours any more."""
        settler = self._links.settler(batch.assigned.node)
        offset = batch.records[0].offset
        if settler is None or batch.dropped:
            return False
        begin = Begin(batch, offset)
        settler.begins.append(begin)
        settler.wake.set()
        begin.noted.wait(BEGIN_WAIT_S)
        if begin.attempts is None:
            # Others have it, or the node did not answer: then it comes again.
            batch.lost.add(offset)
            self.pool.end(batch, (offset,))
            return False
        batch.attempts[offset] = begin.attempts - 1
        return True

    def failed(self, batch: Batch, record: Record, error: BaseException) -> None:
        """Count a failed attempt, unless its handler says that it was none; have done what is to become of it."""
        if isinstance(error, StaleOwner):
            # Somebody acted there under a newer epoch than we know.
            self.stats.fenced += 1
            self._heart.nudge()
            self._back(batch, record.offset, STALE_WAIT_MS, None)
            return
        before = self._before(batch, record)
        text = described(error)
        verdict = verdict_of(
            error, self.rules, before=before, failing_s=0.0, share=random.random(), parked=True, text=text
        )
        timed_out = isinstance(error, MessageTimeout)
        self.stats.timed_out += timed_out
        if verdict.attempts > before:
            self.stats.failed += 1
            self._clerk.notes.append(
                AttemptNote(record.identity, verdict.attempts, text, PartitionId(batch.partition), timed_out)
            )
        self._say_failed(batch, record, error, verdict)
        if isinstance(verdict, Bury):
            burial = Burial(record, verdict.cause, verdict.reason, verdict.attempts, verdict.keep)
            self._clerk.burials.append(Gone(batch, burial))
            self._clerk.wake.set()
        else:
            self._back(batch, record.offset, round(1000 * (verdict.seconds or 0.0)), verdict.attempts)

    @staticmethod
    def _before(batch: Batch, record: Record) -> int:
        return record.attempts if isinstance(record, ParkedRecord) else batch.attempts.get(record.offset, 0)

    def _say_failed(self, batch: Batch, record: Record, error: BaseException, verdict: Verdict) -> None:
        identity = record.identity
        facts = self._facts(batch) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= {"attempt": verdict.attempts, "error": where(error), "verdict": type(verdict).__name__.lower()}
        log.warning("handler_failed", extra=facts)
        if not isinstance(verdict, Bury):
            self._tell("failed", batch, record, attempts=verdict.attempts, wait_s=verdict.seconds, error=where(error))

    # -- what readers, settlers and the clerk ask --------------------------------------------------------------------

    def learn(self, spot: Spot, committed: int) -> None:
        """Ask Postgres what a partition that is taken from an offset on holds that is not to be handled."""
        spot.dead = self._ledger.dead_from(spot.place.partition, committed)
        spot.marks = seal_marks(self._database, spot.place.partition) if spot.one.cut else {}

    def spots_on(self, node_id: NodeId) -> list[Spot]:
        """Return what may be read on a node now."""
        return [spot for spot in self._spots.values() if spot.one.node == node_id]

    def batch(self, spot: Spot, records: Sequence[Record]) -> Batch:
        """Return a batch of records that were read now."""
        return Batch(spot.one, spot.place, self._epoch, records, clock())

    def left_out(self, batch: Batch, offsets: list[int]) -> None:
        """Settle messages that the group's filter leaves out."""
        self.stats.unmatched += len(offsets)
        self.end(batch, offsets, "u")

    def command_read(self, spot: Spot, entry_id: bytes) -> None:
        """Settle a command record."""
        settler = self._links.settler(spot.one.node)
        if settler is not None:
            settler.commands.append((spot.place, entry_id))
            settler.wake.set()

    def suspect(self, batch: Batch) -> None:
        """Ask Postgres about a message that was taken from a member that was not heard of, then have it handled."""
        self._clerk.suspects.append(batch)
        self._clerk.wake.set()

    def worn(self, batch: Batch) -> Burial | None:
        """Return how a message ends whose attempts ran out although nobody answered; None where they did not."""
        record = batch.records[0]
        before = self._before(batch, record)
        if before < self.rules.attempt_limit:
            return None
        keep = self.rules.policy != "skip"
        reason = f"{before} attempts, the last of which nobody answered: it may end its process"
        return Burial(record, "exhausted" if keep else "skipped", reason, before, keep)

    def end(self, batch: Batch, offsets: list[int], word: RangeWord) -> None:
        """Have messages settled."""
        if batch.claim is not None:
            if word == "h":
                self._clerk.handled.append(batch)
                self._clerk.wake.set()
            else:
                self.pool.end(batch, offsets)
            return
        settler = self._links.settler(batch.assigned.node)
        if settler is not None:
            settler.ended.append(Ended(batch, offsets, word))
            if not settler.wake.is_set():
                settler.wake.set()

    def _back(self, batch: Batch, offset: int, ms: int, failed: int | None) -> None:
        if batch.claim is not None:
            ref = batch.claim.ref
            self._clerk.back.append((ref, ref.attempts - 1 if failed is None else failed, ms / 1000))
            self.pool.end(batch, (offset,))
            self._clerk.wake.set()
            return
        settler = self._links.settler(batch.assigned.node)
        if settler is not None:
            settler.back.append(Back(batch, offset, ms, failed))
            settler.wake.set()

    def settled(self, count: int) -> None:
        """Count what the server has settled, and let more be read."""
        self.stats.settled += count
        self._links.wake_readers()

    def buried(self, batch: Batch, burial: Burial) -> None:
        """Tell of a message that left the group."""
        self.stats.dead += burial.keep
        self.stats.skipped += not burial.keep
        identity = burial.record.identity
        facts = self._facts(batch) | {"lp": identity.lp, "seq": identity.seq, "cause": burial.cause}
        log.warning("message_buried", extra=facts | {"attempts": burial.attempts, "kept": burial.keep})
        kind: EventKind = "dead" if burial.keep else "skipped"
        self._tell(kind, batch, burial.record, attempts=burial.attempts, cause=burial.cause)

    def claimed(self, claim: Claim) -> Batch:
        """Return the batch of a message that was given back."""
        known = self._known.get(PartitionId(claim.partition))
        # Its partition may be gone: nothing of it is asked there any more.
        one = known or PopPartition(PartitionId(claim.partition), NodeId(0), None, 1, 0, 0, cut=False, readable=False)
        batch = Batch(one, None, self._epoch, [claim.record], clock())
        batch.claim = claim
        return batch

    def through(self, spot: Spot, seal_id: str) -> None:
        """Tell Postgres that everything before a command record is settled, by the clerk."""
        self._clerk.through[PartitionId(spot.place.partition)] = (spot.place.epoch, seal_id)
        self._clerk.wake.set()

    def say_through(self, partition: PartitionId, epoch: int, seal_id: str) -> bool:
        """Tell Postgres that a sealed partition is through. Where it refuses, a later look says it again."""
        if partition in self._spots and drained_popped(self._database, self.group.group_id, partition, epoch, seal_id):
            log.info("partition_drained", extra={"partition": str(partition), "group": self.group.name})
            self._heart.nudge()
        return True

    def void(self, place: SharedPlace) -> None:
        """Drop what is in hand of a partition under an epoch that is not in force any more."""
        self.pool.drop(lambda batch: batch.place == place)
        spot = self._spots.get(PartitionId(place.partition))
        if spot is not None:
            spot.strays = True
        self._heart.nudge()

    def void_batch(self, batch: Batch) -> None:
        """Drop a batch whose epoch is not in force any more."""
        if batch.place is not None:
            self.void(batch.place)

    def fenced(self, spot: Spot) -> None:
        """Look for a higher epoch; where Postgres has none, its node has seen more than it gave out: ask for one."""
        self.stats.fenced += 1
        place = spot.place
        self.pool.drop(lambda batch: batch.place == place)
        if spot.refused == place.epoch:
            renew_pop_epoch(self._database, self.group.group_id, place.partition, place.epoch)
        spot.refused = place.epoch
        self._heart.nudge()

    def refused(self, spot: Spot) -> None:
        """Have a node mended that does not have a partition. Raises nothing."""
        place = spot.place
        self.pool.drop(lambda batch: batch.place == place)
        self._links.mend(spot.one.node)
        self._heart.nudge()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop what is in hand of a node that is not the armed run, and have it armed. Raises nothing."""
        self.pool.drop(lambda batch: batch.claim is None and batch.assigned.node == node_id)
        for spot in self.spots_on(node_id):
            spot.taken, spot.strays = False, True
        self._links.mend(node_id)
        self._heart.nudge()

    # -- what the heart asks -----------------------------------------------------------------------------------------

    def follow(self, answer: Beat) -> None:
        """Follow the group's settings, and the partitions that it may read."""
        if answer.rules is not None:
            self.rules = answer.rules
        self.tag_filter, self.archived = TagFilter.of(answer.tag_filter), answer.archived
        if answer.parking != self._parking:
            self._parking = answer.parking
            self._clerk.look()
        if self._stopping:
            return
        try:
            self._list()
        except MqlayerError as error:
            log.warning("partitions_not_listed", extra={"reason": str(error)})

    def _list(self) -> None:
        found = pop_partitions(self._database, self.group.group_id)
        self._epoch = max([self._epoch, *(one.epoch for one in found if one.epoch is not None)])
        self._known = {one.partition: one for one in found}
        spots: dict[PartitionId, Spot] = {}
        for one in found:
            if not one.readable or one.epoch is None:
                continue
            known = self._spots.get(one.partition)
            if known is not None and known.one == one:
                spots[one.partition] = known
                continue
            place = SharedPlace(
                self.settings.key_prefix, one.partition, self.group.group_id, one.epoch, one.start, one.seek
            )
            spots[one.partition] = Spot(one, place)
            if known is not None:
                spots[one.partition].refused = known.refused
            if known is not None and known.place != place:
                before = known.place
                self.pool.drop(lambda batch, before=before: batch.place == before)  # type: ignore[misc]
        self._spots = spots
        for node_id in {spot.one.node for spot in spots.values()}:
            self._links.open(node_id)

    def follow_nodes(self) -> None:
        """Use no line to another run or address of a node than those that count now. Raises StoreUnavailable."""
        self._links.follow_nodes()

    def lease_lost(self) -> None:
        """Go on: nothing is this member's own but what the nodes say it has."""

    def replaced(self, reason: str) -> None:
        """End: another process took this member's id, an operator evicted it, or its group is retired."""
        self._stopping, self._replaced = True, reason
        self._spots = {}
        self.pool.stop()

    def _facts(self, batch: Batch) -> dict[str, Any]:
        return {"topic": self.group.topic, "group": self.group.name, "partition": batch.partition}

    def _tell(self, kind: EventKind, batch: Batch, record: Record, **facts: Any) -> None:
        identity = record.identity
        tell(
            Event(kind, self.group.topic, self.group.name, batch.partition, identity.lp, seq=identity.seq, **facts),
            self._hooks,
        )
