"""One member of a shared group, with its threads."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import described, where
from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction, failure_action
from mqlayer.consuming.engine.heartbeat import Heartbeat
from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.ordered.member import MemberOptions, MemberStats, new_member_id
from mqlayer.consuming.shared.executors import SharedAsyncioExecutor, SharedThreadExecutor
from mqlayer.consuming.shared.failure_writer import DeadLetterWrite, FailureWriter
from mqlayer.consuming.shared.node_io import SharedMemberNodes
from mqlayer.consuming.shared.partitions import SharedPartition, SharedPartitions
from mqlayer.consuming.shared.prefetch import FetchedBatch, Prefetch
from mqlayer.consuming.shared.settler import AttemptStart, Nack, Settlement
from mqlayer.consuming.shared.store import ClaimedMessage, SharedStore
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import PartitionId
from mqlayer.domain.tags import TagFilter
from mqlayer.errors import MessageTimeout, MqlayerError, StaleOwner
from mqlayer.events import Event, EventKind, Hook, emit
from mqlayer.groups.group import VISIBILITY_TIMEOUT_S, Group
from mqlayer.groups.members import HeartbeatReply
from mqlayer.health import Health, stuck_after_s
from mqlayer.parking import DeadLetterEntry, FailedAttempt
from mqlayer.postgres.database import Database
from mqlayer.redis.outcomes import RangeOutcome
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

STALE_WAIT_MS: Final = 200
"""Delay where the fence found a newer epoch."""
BEGIN_WAIT_S: Final = 15.0


class SharedMember:
    """One member of a shared group. Workers call `handle(batch, record)` in a thread or, with `is_async`, as a
    coroutine."""

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
        self.may_be_void = group.strategy == "best_effort"
        self.archived = False
        self.visibility_timeout_s = group.visibility_timeout_s or VISIBILITY_TIMEOUT_S
        self.extend_limit_s = self.options.extend_limit_s
        self._name = f"mqlayer-{group.name}"
        self._database, self._hooks = database, hooks
        self._parking_store = 0
        self._stopping, self._replaced = False, ""
        self.rate_limiter = RateLimiter()
        self.prefetch = Prefetch(
            concurrency=self.options.concurrency,
            prefetch_count=self.options.prefetch_count,
            prefetch_bytes=self.options.prefetch_bytes,
            visibility_timeout_s=self.visibility_timeout_s,
        )
        self._nodes = SharedMemberNodes(self, routes, database, application)
        self._store = SharedStore(database, group.group_id, self.member_id)
        self.partitions = SharedPartitions(
            database, group, self._store, self.prefetch, self.stats,
            prefix=settings.key_prefix, repair=self._nodes.repair, wake_heartbeat=self.wake,
        )  # fmt: skip
        self._failure_writer = FailureWriter(self, self._store, name=self._name)
        self._heartbeat = Heartbeat(
            self, database=database, group=group, member_id=self.member_id, settings=settings, name=self._name
        )
        workers = SharedAsyncioExecutor if is_async else SharedThreadExecutor
        self._workers = workers(self, handle, count=self.options.concurrency, name=self._name)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch; nothing runs then."""
        try:
            self._workers.start()
            self._failure_writer.start()
            self._heartbeat.start()
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for running handlers, give back other messages; return whether every handler ended.

        Messages of handlers that outlast `timeout_s` (default `drain_timeout_s`) come again after the visibility
        timeout.
        """
        limit_s = self.options.drain_timeout_s if timeout_s is None else timeout_s
        self._stopping = True
        until = clock() + limit_s
        self.prefetch.stop()
        self._heartbeat.start_leaving()
        ended = self._workers.join(max(0.2, limit_s))
        self._failure_writer.stop(5.0)
        self._nodes.stop_readers(5.0)
        self._release()
        self._nodes.stop(max(1.0, min(5.0, until - clock())))
        self._heartbeat.stop(10.0)
        return ended

    def _release(self) -> None:
        running = self.prefetch.running()
        for batch in self.prefetch.batches():
            settling = self._nodes.unsettled(batch)
            for offset in batch.open:
                if (id(batch), offset) not in running and offset not in settling:
                    self._nack(batch, offset, 0, None)
        self._failure_writer.write_nacks()

    def wake(self) -> None:
        """Refresh the partitions now."""
        self._heartbeat.wake()

    @property
    def running(self) -> bool:
        """Whether it consumes; False after `stop`, eviction, or replacement."""
        return not self._stopping

    def health(self) -> Health:
        """Report whether threads respond and all partitions are read. Thread-safe."""
        if self._replaced:
            return Health(stuck=(self._replaced,))
        if self._stopping:
            return Health(waits=("it is stopping",))
        missing = sorted(
            partition.group_partition.partition for partition in self.partitions.all() if not partition.acquired
        )
        own = Health(
            () if self._workers.alive else ("a worker's thread ended",),
            (f"partitions {', '.join(map(str, missing))} are not read",) if missing else (),
        )
        limit_s = stuck_after_s(self.settings)
        return Health.of_all(
            self._heartbeat.health(), self._nodes.health(limit_s), self._failure_writer.health(limit_s), own
        )

    def owned(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return {
            int(partition.group_partition.partition): (
                partition.group_partition.epoch,
                "open" if partition.acquired else "new",
            )
            for partition in self.partitions.all()
        }

    # -- what workers ask --------------------------------------------------------------------------------------------

    def handled(self, batch: FetchedBatch, offsets: list[int]) -> None:
        """Count and settle handled messages."""
        self.stats.handled += len(offsets)
        self.end(batch, offsets, "h")

    def begin(self, batch: FetchedBatch) -> bool:
        """Count a suspect's attempt; False where it must not start."""
        settler = self._nodes.settler(batch.assignment.node)
        offset = batch.records[0].offset
        if settler is None or batch.dropped:
            return False
        begin = AttemptStart(batch, offset)
        settler.attempt_starts.append(begin)
        settler.wake.set()
        begin.counted.wait(BEGIN_WAIT_S)
        if begin.attempts is None:
            # Another member has it, or the node did not answer; then it comes again.
            batch.lost.add(offset)
            self.prefetch.end(batch, (offset,))
            return False
        batch.attempts[offset] = begin.attempts - 1
        return True

    def failed(self, batch: FetchedBatch, record: Record, error: BaseException) -> None:
        """Count a failed attempt, where the error counts; act on it."""
        if isinstance(error, StaleOwner):
            # Another owner acted under a newer epoch.
            self.stats.fenced += 1
            self._heartbeat.wake()
            self._nack(batch, record.offset, STALE_WAIT_MS, None)
            return
        before = self._before(batch, record)
        text = described(error)
        action = failure_action(
            error, self.rules, before=before, failing_s=0.0, share=random.random(), parked=True, text=text
        )
        timed_out = isinstance(error, MessageTimeout)
        self.stats.timed_out += timed_out
        if action.attempts > before:
            self.stats.failed += 1
            self._failure_writer.attempts.append(
                FailedAttempt(record.identity, action.attempts, text, PartitionId(batch.partition), timed_out)
            )
        self._log_failure(batch, record, error, action)
        if isinstance(action, DeadLetter):
            dead_letter = DeadLetterEntry(record, action.cause, action.reason, action.attempts, action.keep_body)
            self._failure_writer.dead_letters.append(DeadLetterWrite(batch, dead_letter))
            self._failure_writer.wake.set()
        else:
            self._nack(batch, record.offset, round(1000 * (action.seconds or 0.0)), action.attempts)

    @staticmethod
    def _before(batch: FetchedBatch, record: Record) -> int:
        return record.attempts if isinstance(record, ParkedRecord) else batch.attempts.get(record.offset, 0)

    def _log_failure(self, batch: FetchedBatch, record: Record, error: BaseException, action: FailureAction) -> None:
        identity = record.identity
        facts = self._facts(batch) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= {"attempt": action.attempts, "error": where(error), "verdict": type(action).__name__.lower()}
        log.warning("handler_failed", extra=facts)
        if not isinstance(action, DeadLetter):
            self._emit("failed", batch, record, attempts=action.attempts, wait_s=action.seconds, error=where(error))

    # -- what readers, settlers and the failure writer ask -------------------------------------------------------------

    def make_batch(self, partition: SharedPartition, records: Sequence[Record]) -> FetchedBatch:
        """Return a batch."""
        return FetchedBatch(partition.info, partition.group_partition, self.partitions.epoch, records, clock())

    def unmatched(self, batch: FetchedBatch, offsets: list[int]) -> None:
        """Settle filtered and void messages."""
        self.stats.unmatched += len(offsets)
        self.end(batch, offsets, "u")

    def command_read(self, partition: SharedPartition, entry_id: bytes) -> None:
        """Settle a command record."""
        settler = self._nodes.settler(partition.info.node)
        if settler is not None:
            settler.commands.append((partition.group_partition, entry_id))
            settler.wake.set()

    def release(self, batch: FetchedBatch, offsets: list[int]) -> None:
        """Give back unstarted messages at once."""
        for offset in offsets:
            self._nack(batch, offset, 0, None)

    def settle_missing(self, partition: SharedPartition, offsets: Sequence[int]) -> None:
        """Settle offsets without records."""
        log.error(
            "records_missing", extra={"partition": partition.group_partition.partition, "offsets": list(offsets)[:10]}
        )
        self.end(self.make_batch(partition, ()), list(offsets), "-")

    def suspect(self, batch: FetchedBatch) -> None:
        """Check a suspect in Postgres, then handle it."""
        self._failure_writer.suspects.append(batch)
        self._failure_writer.wake.set()

    def exhausted(self, batch: FetchedBatch) -> DeadLetterEntry | None:
        """Return the dead letter if attempts ran out."""
        record = batch.records[0]
        before = self._before(batch, record)
        if before < self.rules.attempt_limit:
            return None
        keep = self.rules.policy != "skip"
        reason = f"{before} attempts, the last of which nobody answered: it may end its process"
        return DeadLetterEntry(record, "exhausted" if keep else "skipped", reason, before, keep)

    def end(self, batch: FetchedBatch, offsets: list[int], outcome: RangeOutcome) -> None:
        """Settle messages."""
        if batch.claim is not None:
            if outcome == "h":
                self._failure_writer.handled.append(batch)
                self._failure_writer.wake.set()
            else:
                self.prefetch.end(batch, offsets)
            return
        settler = self._nodes.settler(batch.assignment.node)
        if settler is not None:
            settler.settlements.append(Settlement(batch, offsets, outcome))
            if not settler.wake.is_set():
                settler.wake.set()

    def _nack(self, batch: FetchedBatch, offset: int, ms: int, failed: int | None) -> None:
        if batch.claim is not None:
            before = batch.claim.record.attempts
            self._failure_writer.nacks.append((batch.claim.ref, before if failed is None else failed, ms / 1000))
            self.prefetch.end(batch, (offset,))
            self._failure_writer.wake.set()
            return
        settler = self._nodes.settler(batch.assignment.node)
        if settler is not None:
            settler.nacks.append(Nack(batch, offset, ms, failed))
            settler.wake.set()

    def settled(self, count: int) -> None:
        """Count settled messages."""
        self.stats.settled += count
        self._nodes.wake_readers()

    def dead_lettered(self, batch: FetchedBatch, dead_letter: DeadLetterEntry) -> None:
        """Report a message that left the group."""
        self.stats.dead += dead_letter.keep_body
        self.stats.skipped += not dead_letter.keep_body
        identity = dead_letter.record.identity
        facts = self._facts(batch) | {"lp": identity.lp, "seq": identity.seq, "cause": dead_letter.cause}
        log.warning(
            "message_dead_lettered", extra=facts | {"attempts": dead_letter.attempts, "kept": dead_letter.keep_body}
        )
        kind: EventKind = "dead" if dead_letter.keep_body else "skipped"
        self._emit(kind, batch, dead_letter.record, attempts=dead_letter.attempts, cause=dead_letter.cause)

    def claimed(self, claim: ClaimedMessage) -> FetchedBatch:
        """Return a redriven message's batch."""
        batch = FetchedBatch(
            self.partitions.known(claim.partition), None, self.partitions.epoch, [claim.record], clock()
        )
        batch.claim = claim
        return batch

    def drained(self, partition: SharedPartition, seal_id: str) -> None:
        """Report a drained partition."""
        self._failure_writer.drained[PartitionId(partition.group_partition.partition)] = (
            partition.group_partition.epoch,
            seal_id,
        )
        self._failure_writer.wake.set()

    # -- what the heartbeat asks ---------------------------------------------------------------------------------------

    def apply_assignments(self, answer: HeartbeatReply) -> None:
        """Follow settings and partitions."""
        if answer.rules is not None:
            self.rules = answer.rules
        self.tag_filter, self.archived = TagFilter.of(answer.tag_filter), answer.archived
        if answer.parking_version != self._parking_store:
            self._parking_store = answer.parking_version
            self._failure_writer.poll_soon()
        if self._stopping:
            return
        try:
            self.partitions.refresh()
            partitions = self.partitions.all()
            self.rate_limiter.configure(partitions[0].info.rate if partitions else None, len(partitions))
            for node_id in {partition.info.node for partition in partitions}:
                self._nodes.open(node_id)
        except MqlayerError as error:
            log.warning("partitions_not_listed", extra={"reason": str(error)})

    def refresh_nodes(self) -> None:
        """Follow changed nodes. Raises StoreUnavailable."""
        self._nodes.refresh_nodes()

    def lease_lost(self) -> None:
        """Do nothing: the nodes decide who has messages."""

    def replaced(self, reason: str) -> None:
        """End: id taken, member evicted, or group retired."""
        self._stopping, self._replaced = True, reason
        self.partitions.forget()
        self.prefetch.stop()

    def _facts(self, batch: FetchedBatch) -> dict[str, Any]:
        return {"topic": self.group.topic, "group": self.group.name, "partition": batch.partition}

    def _emit(self, kind: EventKind, batch: FetchedBatch, record: Record, **facts: Any) -> None:
        identity = record.identity
        emit(
            Event(kind, self.group.topic, self.group.name, batch.partition, identity.lp, seq=identity.seq, **facts),
            self._hooks,
        )
