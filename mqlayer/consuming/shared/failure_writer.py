"""Write failures of a shared group to Postgres. While Postgres is unavailable, messages stay in hand."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.shared.partitions import SharedPartitions
from mqlayer.consuming.shared.prefetch import FetchedBatch, Prefetch
from mqlayer.consuming.shared.store import ClaimedMessage, ClaimRef, SharedStore
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.health import Health, Liveness
from mqlayer.parking import DeadLetterEntry, FailedAttempt
from mqlayer.redis.outcomes import RangeOutcome

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Interval of checks for redriven messages."""
RETRY_S: Final = 0.2
AT_ONCE: Final = 100
CLAIMS: Final = 20


class FailureWriterOwner(Protocol):
    """The member, as its failure writer uses it."""

    prefetch: Prefetch
    partitions: SharedPartitions
    rate_limiter: RateLimiter
    visibility_timeout_s: float
    extend_limit_s: float

    def end(self, batch: FetchedBatch, offsets: list[int], outcome: RangeOutcome) -> None:
        """Settle messages."""

    def release(self, batch: FetchedBatch, offsets: list[int]) -> None:
        """Give back unstarted messages at once."""

    def dead_lettered(self, batch: FetchedBatch, dead_letter: DeadLetterEntry) -> None:
        """Report a message that left the group."""

    def exhausted(self, batch: FetchedBatch) -> DeadLetterEntry | None:
        """Return the dead letter if attempts ran out."""

    def claimed(self, claim: ClaimedMessage) -> FetchedBatch:
        """Return a redriven message's batch."""


class DeadLetterWrite(NamedTuple):
    """A message to write as dead."""

    batch: FetchedBatch
    dead_letter: DeadLetterEntry


class FailureWriter:
    """The thread. Producers append to its queues and set `wake`."""

    def __init__(self, owner: FailureWriterOwner, store: SharedStore, *, name: str) -> None:
        self._owner, self._store = owner, store
        self.dead_letters: deque[DeadLetterWrite] = deque()
        self.suspects: deque[FetchedBatch] = deque()
        self.attempts: deque[FailedAttempt] = deque()
        self.drained: dict[PartitionId, tuple[int, str]] = {}
        # Claims: handled ones, and retries.
        self.handled: deque[FetchedBatch] = deque()
        self.nacks: deque[tuple[ClaimRef, int, float]] = deque()
        # Dead letters that wait for the node's confirmation.
        self._uncertain: list[DeadLetterWrite] = []
        self.wake = threading.Event()
        self._liveness, self._last_error = Liveness(), ""
        self._stopping = threading.Event()
        self._poll_at = self._extend_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{name}-failure-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what remains, and end."""
        self._stopping.set()
        self.wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def write_nacks(self) -> None:
        """Write retries after the end; failed ones wait out their claims."""
        try:
            self._each(self.nacks, self._store.nack)
        except MqlayerError as error:
            log.warning("claims_left", extra={"reason": str(error)})

    def poll_soon(self) -> None:
        """Check for redriven messages."""
        self._poll_at = 0.0
        self.wake.set()

    def health(self, limit_s: float) -> Health:
        """Report the thread and its last error."""
        if not self._thread.is_alive():
            return Health(stuck=("the failure writer ended",))
        waits = (f"failed messages are not written: {self._last_error}",) if self._last_error else ()
        return Health(self._liveness.stuck("the failure writer", limit_s), waits)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(POLL_S / 4)
            self.wake.clear()
            self._liveness.note_turn()
            if not self._try_pass():
                self._stopping.wait(RETRY_S)
        self._try_pass()

    def _try_pass(self) -> bool:
        try:
            self._pass()
        except MqlayerError as error:
            self._last_error = str(error)
            log.warning("failure_writer_blocked", extra={"reason": self._last_error})
            return False
        except Exception as error:  # noqa: BLE001 - without it failed messages had no end any more
            self._last_error = where(error)
            log.error("failure_writer_failed", extra={"error": self._last_error})
            return False
        self._last_error = ""
        return True

    def _pass(self) -> None:
        self._each(self.suspects, self._judge_suspects)
        uncertain, self._uncertain = self._uncertain, []
        self.dead_letters.extend(uncertain)
        self._each(self.dead_letters, self._dead_letter)
        self._each(self.attempts, self._store.add_attempts)
        self._each(self.handled, self._end_claims)
        self._each(self.nacks, self._store.nack)
        for partition, (epoch, seal_id) in list(self.drained.items()):
            self._owner.partitions.report_drained(partition, epoch, seal_id)
            self.drained.pop(partition, None)
        if self._owner.prefetch.stopping:
            for batch, offsets in self._owner.prefetch.take_unstarted(lambda batch: batch.claim is not None):
                self._owner.release(batch, offsets)
        self._extend_claims()
        self._claim()

    def _each(self, waiting: deque[Any], work: Callable[[list[Any]], None]) -> None:
        while waiting:
            some = [waiting.popleft() for _ in range(min(AT_ONCE, len(waiting)))]
            try:
                work(some)
            except BaseException:
                waiting.extendleft(reversed(some))
                raise

    def _judge_suspects(self, batches: list[FetchedBatch]) -> None:
        dead = self._store.dead(batch.records[0].identity for batch in batches)
        for batch in batches:
            if batch.dropped:
                continue
            dead_letter = self._owner.exhausted(batch)
            if batch.records[0].identity in dead:
                self._owner.end(batch, [batch.records[0].offset], "-")
            elif dead_letter is not None:
                self.dead_letters.append(DeadLetterWrite(batch, dead_letter))
            else:
                self._owner.prefetch.put(batch)

    def _dead_letter(self, gone: list[DeadLetterWrite]) -> None:
        by_place: dict[tuple[PartitionId, int], list[DeadLetterWrite]] = {}
        uncertain: list[DeadLetterWrite] = []
        for one in gone:
            if one.batch.claim is not None:
                self._dead_letter_claimed(one, one.batch.claim)
                continue
            # After a silence of this member, another may have handled it.
            status = self._owner.prefetch.status_of(one.batch, one.dead_letter.record.offset)
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
                    self._owner.partitions.void(group_partition)
        self._uncertain += uncertain

    def _dead_letter_claimed(self, one: DeadLetterWrite, claim: ClaimedMessage) -> None:
        if self._store.dead_letter_claimed(claim, one.dead_letter):
            self._over(one, "-")
        else:
            self._owner.end(one.batch, [one.dead_letter.record.offset], "-")

    def _over(self, one: DeadLetterWrite, outcome: RangeOutcome) -> None:
        self._owner.dead_lettered(one.batch, one.dead_letter)
        self._owner.end(one.batch, [one.dead_letter.record.offset], outcome)

    def _end_claims(self, batches: list[FetchedBatch]) -> None:
        now = clock()
        claims = [batch.claim for batch in batches if batch.claim is not None]
        self._store.end(claims, max(now - batch.read_at for batch in batches))
        for batch in batches:
            self._owner.prefetch.end(batch, [batch.records[0].offset])
        if any(claim.guarded for claim in claims):
            self._poll_at = 0.0

    def _extend_claims(self) -> None:
        now, every = clock(), self._owner.visibility_timeout_s / 3
        if now < self._extend_at:
            return
        self._extend_at = now + every / 4
        hung = self._owner.prefetch.hung(self._owner.extend_limit_s)
        due = [
            batch
            for batch in self._owner.prefetch.batches()
            if batch.claim is not None and now - batch.extended_at >= every
            and (id(batch), batch.records[0].offset) not in hung
        ]  # fmt: skip
        if due:
            kept = self._store.extend(
                [batch.claim.ref for batch in due if batch.claim], self._owner.visibility_timeout_s
            )
            for batch in due:
                batch.extended_at = now
                if batch.claim and batch.claim.ref.token not in kept:
                    offset = batch.records[0].offset
                    batch.lost.add(offset)
                    self._owner.prefetch.end(batch, [offset])

    def _claim(self) -> None:
        owner, now = self._owner, clock()
        if self._stopping.is_set() or owner.prefetch.stopping or now < self._poll_at:
            return
        limit = owner.rate_limiter.available(min(CLAIMS, owner.prefetch.capacity()))
        if limit <= 0:
            return
        guarded = not any(batch.claim is not None and batch.claim.guarded for batch in owner.prefetch.batches())
        claims = self._store.claim(limit, owner.visibility_timeout_s, guarded=guarded)
        owner.rate_limiter.consume(len(claims))
        if claims:
            failpoint("shared.after_claim")
        for claim in claims:
            batch = owner.claimed(claim)
            owner.prefetch.add(batch)
            batch.extended_at = now
            dead_letter = owner.exhausted(batch)
            if dead_letter is not None:
                self.dead_letters.append(DeadLetterWrite(batch, dead_letter))
            else:
                owner.prefetch.put(batch)
        self._poll_at = now if len(claims) == limit else now + POLL_S
        if claims:
            self.wake.set()
