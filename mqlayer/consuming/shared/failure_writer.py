"""Write failures of a shared group to Postgres. While Postgres is unavailable, messages stay in hand."""

from __future__ import annotations

from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.shared.failure_queues import DeadLetterWrite, FailureQueues, write_each
from mqlayer.consuming.shared.failures import exhausted
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.partitions import SharedPartitions
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.consuming.shared.store import ClaimedMessage, SharedStore
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.redis.outcomes import RangeOutcome
from mqlayer.runtime.service import Service

log = event_logger(__name__)

POLL_S: Final = 1.0
"""Interval of checks for redriven messages."""
RETRY_S: Final = 0.2
CLAIMS: Final = 20


class FailureWriter(Service):
    """The thread that writes a member's failures, and claims redriven messages."""

    def __init__(
        self,
        core: MemberCore,
        store: SharedStore,
        prefetch: Prefetch,
        partitions: SharedPartitions,
        results: SharedResults,
        queues: FailureQueues,
        events: MemberEvents,
    ) -> None:
        super().__init__(
            f"{core.name}-failure-writer", title="the failure writer", event="failure_writer", waiting="blocked",
            retry_s=RETRY_S,
        )  # fmt: skip
        self.wake = queues.wake
        self._settings, self._store, self._prefetch, self._partitions = core.settings, store, prefetch, partitions
        self._results, self._queues, self._events = results, queues, events
        self._visibility_timeout_s = prefetch.visibility_timeout_s
        self._extend_limit_s = core.options.extend_limit_s
        # Dead letters that wait for the node's confirmation.
        self._uncertain: list[DeadLetterWrite] = []
        self._poll_at = self._extend_at = 0.0

    def write_nacks(self) -> None:
        """Write retries after the end; failed ones wait out their claims."""
        try:
            write_each(self._queues.nacks, self._store.nack)
        except MqlayerError as error:
            log.warning("claims_left", extra={"reason": str(error)})

    def _wait_s(self) -> float:
        return POLL_S / 4

    def _close(self) -> None:
        self._try_pass()

    def _pass(self) -> None:
        queues, store = self._queues, self._store
        write_each(queues.suspects, self._judge_suspects)
        uncertain, self._uncertain = self._uncertain, []
        queues.dead_letters.extend(uncertain)
        write_each(queues.dead_letters, self._dead_letter)
        write_each(queues.attempts, store.add_attempts)
        write_each(queues.handled, self._end_claims)
        write_each(queues.nacks, store.nack)
        queues.report_drained(self._partitions.report_drained)
        if self._prefetch.stopping:
            for batch, offsets in self._prefetch.take_unstarted(lambda batch: batch.claim is not None):
                self._results.release(batch, offsets)
        self._extend_claims()
        self._claim()

    def _judge_suspects(self, batches: list[FetchedBatch]) -> None:
        dead = self._store.dead(batch.records[0].identity for batch in batches)
        for batch in batches:
            if batch.dropped:
                continue
            dead_letter = exhausted(batch, self._settings.rules)
            if batch.records[0].identity in dead:
                self._results.end(batch, [batch.records[0].offset], "-")
            elif dead_letter is not None:
                self._queues.dead_letters.append(DeadLetterWrite(batch, dead_letter))
            else:
                self._prefetch.put(batch)

    def _dead_letter(self, gone: list[DeadLetterWrite]) -> None:
        by_place: dict[tuple[PartitionId, int], list[DeadLetterWrite]] = {}
        uncertain: list[DeadLetterWrite] = []
        for one in gone:
            if one.batch.claim is not None:
                self._dead_letter_claimed(one, one.batch.claim)
                continue
            # After a silence of this member, another may have handled it.
            status = self._prefetch.status_of(one.batch, one.dead_letter.record.offset)
            if status == "unsure":
                uncertain.append(one)
            elif status == "ours" and one.batch.group_partition is not None:
                by_place.setdefault((one.batch.partition, one.batch.group_partition.epoch), []).append(one)
        for (partition, epoch), of_place in by_place.items():
            if self._store.dead_letter(partition, epoch, [one.dead_letter for one in of_place]):
                for one in of_place:
                    self._over(one, "-")
            else:
                for group_partition in {
                    one.batch.group_partition for one in of_place if one.batch.group_partition is not None
                }:
                    self._partitions.void(group_partition)
        self._uncertain += uncertain

    def _dead_letter_claimed(self, one: DeadLetterWrite, claim: ClaimedMessage) -> None:
        if self._store.dead_letter_claimed(claim, one.dead_letter):
            self._over(one, "-")
        else:
            self._results.end(one.batch, [one.dead_letter.record.offset], "-")

    def _over(self, one: DeadLetterWrite, outcome: RangeOutcome) -> None:
        self._events.dead_lettered(one.batch, one.dead_letter)
        self._results.end(one.batch, [one.dead_letter.record.offset], outcome)

    def _end_claims(self, batches: list[FetchedBatch]) -> None:
        now = clock()
        claims = [batch.claim for batch in batches if batch.claim is not None]
        self._store.end(claims, max(now - batch.read_at for batch in batches))
        for batch in batches:
            self._prefetch.end(batch, [batch.records[0].offset])
        if any(claim.guarded for claim in claims):
            self._poll_at = 0.0

    def _extend_claims(self) -> None:
        now, every = clock(), self._visibility_timeout_s / 3
        if now < self._extend_at:
            return
        self._extend_at = now + every / 4
        hung = self._prefetch.hung(self._extend_limit_s)
        due = [
            batch
            for batch in self._prefetch.batches()
            if batch.claim is not None and now - batch.extended_at >= every
            and (id(batch), batch.records[0].offset) not in hung
        ]  # fmt: skip
        if due:
            kept = self._store.extend([batch.claim.ref for batch in due if batch.claim], self._visibility_timeout_s)
            for batch in due:
                batch.extended(now)
                if batch.claim and batch.claim.ref.token not in kept:
                    offset = batch.records[0].offset
                    self._prefetch.lose(batch, [offset])

    def _claim(self) -> None:
        now, prefetch, rate_limiter = clock(), self._prefetch, self._settings.rate_limiter
        if self._queues.take_poll():
            self._poll_at = 0.0
        if self._stopping.is_set() or prefetch.stopping or now < self._poll_at:
            return
        limit = rate_limiter.available(min(CLAIMS, prefetch.capacity()))
        if limit <= 0:
            return
        guarded = not any(batch.claim is not None and batch.claim.guarded for batch in prefetch.batches())
        claims = self._store.claim(limit, self._visibility_timeout_s, guarded=guarded)
        rate_limiter.consume(len(claims))
        if claims:
            failpoint("shared.after_claim")
        for claim in claims:
            batch = self._partitions.claimed(claim)
            prefetch.add(batch)
            batch.extended(now)
            dead_letter = exhausted(batch, self._settings.rules)
            if dead_letter is not None:
                self._queues.dead_letters.append(DeadLetterWrite(batch, dead_letter))
            else:
                prefetch.put(batch)
        self._poll_at = now if len(claims) == limit else now + POLL_S
        if claims:
            self.wake.set()
