"""A member's dealings with Postgres for messages of a shared group that fail: one thread, beside the usual way.

What it is told waits while Postgres is away; messages whose end it has to write stay in hand meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from mqlayer.consuming.allowance import Allowance
from mqlayer.consuming.clock import clock
from mqlayer.consuming.faults import where
from mqlayer.consuming.sharing.ledger import Claim, ClaimRef, SharedLedger
from mqlayer.consuming.sharing.pool import Batch, Pool
from mqlayer.consuming.sharing.spots import SharedSpots
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.health import Health, Turns
from mqlayer.parking import AttemptNote, Burial
from mqlayer.redis.outcomes import RangeWord

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often it looks for messages that were given back, unless it is told."""
AGAIN_S: Final = 0.2
AT_ONCE: Final = 100
CLAIMS: Final = 20


class ClerkOwner(Protocol):
    """What a clerk asks of its member."""

    pool: Pool
    spots: SharedSpots
    allowance: Allowance
    invisible_s: float
    keep_limit_s: float

    def end(self, batch: Batch, offsets: list[int], word: RangeWord) -> None:
        """Have messages settled."""

    def give_back(self, batch: Batch, offsets: list[int]) -> None:
        """Have messages that nobody began given to others at once."""

    def buried(self, batch: Batch, burial: Burial) -> None:
        """Tell of a message that left the group."""

    def worn(self, batch: Batch) -> Burial | None:
        """Return how a message ends whose attempts ran out although nobody answered; None where they did not."""

    def claimed(self, claim: Claim) -> Batch:
        """Return the batch of a message that was given back."""


class Gone(NamedTuple):
    """A message that is to leave the group."""

    batch: Batch
    burial: Burial


class Clerk:
    """The thread. Everything is handed to it by appending to a queue and setting `wake`."""

    def __init__(self, owner: ClerkOwner, ledger: SharedLedger, *, name: str) -> None:
        self._owner, self._ledger = owner, ledger
        self.burials: deque[Gone] = deque()
        self.suspects: deque[Batch] = deque()
        self.notes: deque[AttemptNote] = deque()
        self.through: dict[PartitionId, tuple[int, str]] = {}
        # Of claims: handled, and those to be tried again.
        self.handled: deque[Batch] = deque()
        self.back: deque[tuple[ClaimRef, int, float]] = deque()
        # Those to be written off once their node has said that they are ours.
        self._unsure: list[Gone] = []
        self.wake = threading.Event()
        self._turns, self._trouble = Turns(), ""
        self._stopping = threading.Event()
        self._look_at = self._keep_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{name}-clerk", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what is there, and end."""
        self._stopping.set()
        self.wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def finish_back(self) -> None:
        """Write what is to be tried again, once the thread has ended; what can't be is due after its claim."""
        try:
            self._each(self.back, self._ledger.back)
        except MqlayerError as error:
            log.warning("claims_left", extra={"reason": str(error)})

    def look(self) -> None:
        """Look for messages that were given back."""
        self._look_at = 0.0
        self.wake.set()

    def health(self, limit_s: float) -> Health:
        """Say whether it turns, and what keeps it from writing."""
        if not self._thread.is_alive():
            return Health(stuck=("the clerk ended",))
        waits = (f"failed messages are not written: {self._trouble}",) if self._trouble else ()
        return Health(self._turns.stuck("the clerk", limit_s), waits)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(LOOK_S / 4)
            self.wake.clear()
            self._turns.note()
            if not self._try_pass():
                self._stopping.wait(AGAIN_S)
        self._try_pass()

    def _try_pass(self) -> bool:
        try:
            self._pass()
        except MqlayerError as error:
            self._trouble = str(error)
            log.warning("clerk_waits", extra={"reason": self._trouble})
            return False
        except Exception as error:  # noqa: BLE001 - without it failed messages had no end any more
            self._trouble = where(error)
            log.error("clerk_failed", extra={"error": self._trouble})
            return False
        self._trouble = ""
        return True

    def _pass(self) -> None:
        self._each(self.suspects, self._judge_suspects)
        unsure, self._unsure = self._unsure, []
        self.burials.extend(unsure)
        self._each(self.burials, self._bury)
        self._each(self.notes, self._ledger.note)
        self._each(self.handled, self._end_claims)
        self._each(self.back, self._ledger.back)
        for partition, (epoch, seal_id) in list(self.through.items()):
            self._owner.spots.say_through(partition, epoch, seal_id)
            self.through.pop(partition, None)
        if self._owner.pool.stopping:
            for batch, offsets in self._owner.pool.unbegun(lambda batch: batch.claim is not None):
                self._owner.give_back(batch, offsets)
        self._keep_claims()
        self._claim()

    def _each(self, waiting: deque[Any], work: Callable[[list[Any]], None]) -> None:
        """Work on what waits, some at a time; what could not be done stays in front."""
        while waiting:
            some = [waiting.popleft() for _ in range(min(AT_ONCE, len(waiting)))]
            try:
                work(some)
            except BaseException:
                waiting.extendleft(reversed(some))
                raise

    def _judge_suspects(self, batches: list[Batch]) -> None:
        """Settle what is dead already, bury what has no attempt left, and have the others handled with care."""
        dead = self._ledger.dead(batch.records[0].identity for batch in batches)
        for batch in batches:
            if batch.dropped:
                continue
            burial = self._owner.worn(batch)
            if batch.records[0].identity in dead:
                self._owner.end(batch, [batch.records[0].offset], "-")
            elif burial is not None:
                self.burials.append(Gone(batch, burial))
            else:
                self._owner.pool.put(batch)

    def _bury(self, gone: list[Gone]) -> None:
        by_place: dict[tuple[PartitionId, int], list[Gone]] = {}
        unsure: list[Gone] = []
        for one in gone:
            if one.batch.claim is not None:
                self._bury_claimed(one, one.batch.claim)
                continue
            # Others may have handled it since, where nobody heard of us for a while.
            standing = self._owner.pool.standing(one.batch, one.burial.record.offset)
            if standing == "unsure":
                unsure.append(one)
            elif standing == "ours" and one.batch.place is not None:
                by_place.setdefault((one.batch.partition, one.batch.place.epoch), []).append(one)
        for (partition, epoch), of_place in by_place.items():
            if self._ledger.bury(partition, epoch, [one.burial for one in of_place]):
                for one in of_place:
                    self._over(one, "-")
            else:
                for place in {one.batch.place for one in of_place if one.batch.place is not None}:
                    self._owner.spots.void(place)
        self._unsure += unsure

    def _bury_claimed(self, one: Gone, claim: Claim) -> None:
        if self._ledger.bury_claimed(claim, one.burial):
            self._over(one, "-")
        else:
            self._owner.end(one.batch, [one.burial.record.offset], "-")

    def _over(self, one: Gone, word: RangeWord) -> None:
        self._owner.buried(one.batch, one.burial)
        self._owner.end(one.batch, [one.burial.record.offset], word)

    def _end_claims(self, batches: list[Batch]) -> None:
        now = clock()
        claims = [batch.claim for batch in batches if batch.claim is not None]
        self._ledger.end(claims, max(now - batch.read_at for batch in batches))
        for batch in batches:
            self._owner.pool.end(batch, [batch.records[0].offset])
        if any(claim.care for claim in claims):
            self._look_at = 0.0

    def _keep_claims(self) -> None:
        now, every = clock(), self._owner.invisible_s / 3
        if now < self._keep_at:
            return
        self._keep_at = now + every / 4
        hung = self._owner.pool.hung(self._owner.keep_limit_s)
        due = [
            batch
            for batch in self._owner.pool.batches()
            if batch.claim is not None and now - batch.kept_at >= every
            and (id(batch), batch.records[0].offset) not in hung
        ]  # fmt: skip
        if due:
            kept = self._ledger.keep([batch.claim.ref for batch in due if batch.claim], self._owner.invisible_s)
            for batch in due:
                batch.kept_at = now
                if batch.claim and batch.claim.ref.token not in kept:
                    offset = batch.records[0].offset
                    batch.lost.add(offset)
                    self._owner.pool.end(batch, [offset])

    def _claim(self) -> None:
        owner, now = self._owner, clock()
        if self._stopping.is_set() or owner.pool.stopping or now < self._look_at:
            return
        limit = owner.allowance.look(min(CLAIMS, owner.pool.room()))
        if limit <= 0:
            return
        careful = not any(batch.claim is not None and batch.claim.care for batch in owner.pool.batches())
        claims = self._ledger.claim(limit, owner.invisible_s, careful=careful)
        owner.allowance.spend(len(claims))
        if claims:
            failpoint("shared.after_claim")
        for claim in claims:
            batch = owner.claimed(claim)
            owner.pool.add(batch)
            batch.kept_at = now
            burial = owner.worn(batch)
            if burial is not None:
                self.burials.append(Gone(batch, burial))
            else:
                owner.pool.put(batch)
        self._look_at = now if len(claims) == limit else now + LOOK_S
        if claims:
            self.wake.set()
