"""Keep what fails in Postgres: park keys and what follows them, bury messages, hand out what is due again.

One thread per member. What it writes of a partition is one transaction, under the epoch; what could not be written is
kept and tried again, and comes to nothing where its holding is gone. See `mqlayer.parking.ledger` for the states and
who repairs what.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from mqlayer.consuming.allowance import Allowance
from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher, ParkingWork
from mqlayer.consuming.faults import where
from mqlayer.consuming.holdings import Held, Lane, State
from mqlayer.consuming.parked import NEVER, Parking, parking_of
from mqlayer.consuming.verdicts import Bury, Park, Wait
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.health import Health, Turns
from mqlayer.parking import (
    AttemptNote,
    Burial,
    KeyEntry,
    KeyRef,
    Ledger,
    NotOwner,
    Page,
    ParkingLimit,
    Span,
    Turn,
    Written,
    tried,
)
from mqlayer.redis.partitions import Taken

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.25
AGAIN_S: Final = 0.5
FULL_AGAIN_S: Final = 2.0
"""How soon what finds no room among the parked messages is read and tried again."""
FULL_EACH_S: Final = 0.01
"""So much later for each key of its partition that waits beside it: looks for room take no time from other keys."""
EARLY_S: Final = 1.0
"""How soon a key is looked at again of which nothing may be handled before its group comes to another partition."""
RATE_AGAIN_S: Final = 0.05
"""How soon at the earliest a key goes on for which the group's rate had no message."""
NOTES_EVERY_S: Final = 0.2
NOTES_KEPT: Final = 1_000
"""Failed attempts that wait to be written: they are for people, and must not fill the memory while Postgres is away."""
PAGE_COUNT: Final = 500
PAGE_BYTES: Final = 1_000_000
UNKNOWN: Final = -1


class KeepingOwner(Protocol):
    """What a keeper asks of its member."""

    dispatcher: Dispatcher
    allowance: Allowance

    def all_holdings(self) -> list[Held]:
        """Return the holdings that are not gone."""

    def parked(self, held: Held, *, keys: list[KeyEntry], messages: int) -> None:
        """Note that keys and messages are parked, and have the settlers send that."""

    def full(self, held: Held, lp: int, limit: ParkingLimit, entry: KeyEntry | None) -> float:
        """Note that a key finds no room; return how long one waits in place that is not parked for that."""

    def unparked(self, held: Held, ref: KeyRef) -> None:
        """Note that a key is in line again."""

    def buried(self, held: Held, burials: list[Burial]) -> None:
        """Note that messages left the group."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""


class Keeper:
    """The thread that keeps a member's parked keys."""

    def __init__(self, owner: KeepingOwner, ledger: Ledger, *, started_limit: int, name: str) -> None:
        self._owner, self._ledger, self._started_limit = owner, ledger, started_limit
        self.wake = threading.Event()
        self._stopping = threading.Event()
        self._turns, self._trouble = Turns(), ""
        self._notes: deque[AttemptNote] = deque(maxlen=NOTES_KEPT)
        self._note_at = 0.0
        # How often others have acted on parked keys, as heard last; each holding has how much of it is followed there.
        self._heard = 0
        self._thread = threading.Thread(target=self._run, name=f"{name}-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what there is, and end."""
        self._stopping.set()
        self.wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def health(self, limit_s: float) -> Health:
        """Say whether it turns, and what keeps it from writing."""
        if not self._thread.is_alive():
            return Health(stuck=("the keeper ended",))
        waits = (f"parking: {self._trouble}",) if self._trouble else ()
        return Health(self._turns.stuck("the keeper", limit_s), waits)

    def note(self, attempt: AttemptNote) -> None:
        """Have a failed attempt written, for people."""
        self._notes.append(attempt)

    def hear(self, parking: int) -> None:
        """Note how often others have acted on parked keys of the group: if more often than known, look at them."""
        if parking != self._heard:
            self._heard = parking
            self.wake.set()

    def load(self, pairs: Sequence[tuple[Held, Taken]]) -> None:
        """Learn what is parked and dead of partitions whose pull locks are ours now. Raises StoreUnavailable."""
        found = self._ledger.load([_span_of(held, taken.committed) for held, taken in pairs])
        now = clock()
        for held, taken in pairs:
            loaded = found[held.partition]
            held.followed = loaded.parking
            self._owner.dispatcher.load_parked(held, loaded, [parking_of(state, now) for state in loaded.keys], taken)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(max(0.0, min(IDLE_WAIT_S, self._next_due_s())))
            self.wake.clear()
            if not self._try_pass():
                self._stopping.wait(AGAIN_S)
        self._try_pass()

    def _next_due_s(self) -> float:
        holdings = self._owner.all_holdings()
        due_s = self._owner.dispatcher.next_parking_s(holdings)
        if self._owner.allowance.limit is not None and any(held.parked.has_ripe for held in holdings):
            return min(due_s, RATE_AGAIN_S)
        return due_s

    def _try_pass(self) -> bool:
        """Make a pass; say whether it went well. Whatever went wrong is said, and tried again."""
        self._turns.note()
        try:
            self._pass()
        except MqlayerError as error:
            self._trouble = str(error)
            log.warning("parking_waits", extra={"reason": str(error)})
        except Exception as error:  # noqa: BLE001 - a thread that died would leave a member that parks no more
            self._trouble = where(error)
            log.error("parking_failed", extra={"error": where(error)})
        else:
            self._trouble = ""
            return True
        return False

    def _pass(self) -> None:
        heard = self._heard
        holdings = self._owner.all_holdings()
        started = sum(p.lane is not None for held in holdings for p in list(held.parked.by_name.values()))
        failed: MqlayerError | None = None
        for held in holdings:
            starts = self._owner.allowance.look(self._started_limit - started)
            work = self._owner.dispatcher.parking_work(held, (PAGE_COUNT, PAGE_BYTES, starts))
            started += len(work.due)
            if not starts and held.parked.has_ripe and started < self._started_limit:
                self._owner.allowance.keep_aside()
            try:
                self._serve(held, work, heard)
            except MqlayerError as error:
                # Somebody may hold what one holding needs; the others go on.
                failed = error
        if failed is not None:
            raise failed
        if self._notes and (clock() >= self._note_at or self._stopping.is_set()):
            self._write_notes()

    def _serve(self, held: Held, work: ParkingWork, heard: int) -> None:
        if work:
            self._keep(held, work)
        # Looked at before what is parked is read: a replay that is over then has parked all that it was to give.
        over = held.resting and not held.assigned.resting
        if over:
            held.followed = UNKNOWN
        if held.followed < heard and held.state is State.OPEN:
            self._reload(held, heard)
            if over:
                held.resting = False

    def _keep(self, held: Held, work: ParkingWork) -> None:
        """Write what there is of one holding, and go on from what the server says."""
        page, turns = _page_of(held, work)
        taken = self._pace(page.turns)
        try:
            written = self._ledger.write(held.partition, held.epoch, page)
            if written.gone:
                self._learn_dead(held)
        except BaseException as error:
            self._owner.allowance.settle_portions(taken, 0)
            self._owner.dispatcher.not_kept(held, work)
            if not isinstance(error, NotOwner):
                raise
            self._owner.fenced(held, "parking")
            return
        held.unsure = False
        self._owner.allowance.settle_portions(taken, sum(map(len, written.next.values())))
        self._follow(held, work, turns, written)
        if written.changed:
            held.followed = UNKNOWN
            self.wake.set()
        burials = [*page.burials, *(turn.burial for turn in page.turns if turn.burial is not None)]
        if burials:
            self._owner.buried(held, burials)
        if page.messages:
            keys = [entry for entry in page.entries if entry.ref not in written.refused]
            self._owner.parked(held, keys=keys, messages=len(page.messages) - len(written.left))

    def _pace(self, turns: Sequence[Turn]) -> int:
        """Let keys go on as far as the group's rate gives messages; return how many were taken for them."""
        allowance, taken = self._owner.allowance, 0
        going = [turn for turn in turns if turn.go_on]
        if allowance.limit is None:
            return 0
        for number, turn in enumerate(going):
            if allowance.look(1) == 0:
                allowance.keep_aside()
                turn.go_on, turn.again_s = False, max(RATE_AGAIN_S, allowance.fetch_wait_s())
                continue
            turn.count = allowance.portion(1 if turn.alone else turn.count, len(going) - number)
            taken += turn.count
        return taken

    def _follow(self, held: Held, work: ParkingWork, turns: list[tuple[Parking, Turn]], written: Written) -> None:
        dispatcher = self._owner.dispatcher
        for lane in work.lanes:
            parking = lane.parking
            if parking is not None and parking.ref in written.full:
                self._leave(held, lane, parking, written)
                continue
            if parking is not None:
                parking.has_room(more_waits=bool(lane.records or lane.later))
            dispatcher.kept(held, lane, parked=parking is not None and parking.ref not in written.gone)
        for lane, _ in work.burials:
            dispatcher.buried(lane)
        for parking, turn in turns:
            self._follow_turn(held, parking, turn, written)
        if work.burials or work.lanes:
            # Settled now, as far as the group goes.
            self._owner.parked(held, keys=[], messages=0)

    def _follow_turn(self, held: Held, parking: Parking, turn: Turn, written: Written) -> None:
        """Go on with a parked key as the server says."""
        dispatcher = self._owner.dispatcher
        # Attempts are those of its head.
        attempts = 0 if turn.handled or turn.burial else parking.attempts
        if turn.ref in written.early:
            dispatcher.rest(held, parking, 0, clock() + EARLY_S)
        elif turn.ref in written.paused:
            # Its owner hears when it is resumed.
            dispatcher.rest(held, parking, attempts, NEVER)
        elif turn.go_on:
            records = written.next[turn.ref]
            failpoint("parking.before_resume")
            dispatcher.resume(held, parking, records)
            if not records:
                self._owner.unparked(held, turn.ref)
        elif turn.entry is None and turn.again_s is not None:
            dispatcher.rest(held, parking, attempts, clock() + turn.again_s)
        else:
            wait_s = turn.entry.wait_s if turn.entry is not None else None
            attempts = turn.entry.attempts if turn.entry is not None else 0
            dispatcher.rest(held, parking, attempts, NEVER if wait_s is None else clock() + wait_s)

    def _leave(self, held: Held, lane: Lane, parking: Parking, written: Written) -> None:
        """Have the rest of a key that finds no room wait in the stream; say so once, while that lasts."""
        limit = written.full[parking.ref]
        refused = parking.ref in written.refused
        wait_s = 0.0
        if refused or parking.full != limit:
            wait_s = self._owner.full(held, parking.ref.lp, limit, parking.entry if refused else None)
        parking.full, parking.tight = limit, True
        again_s = wait_s if refused else max(FULL_AGAIN_S, FULL_EACH_S * held.asleep)
        self._owner.dispatcher.left(held, lane, written.left, parked=not refused, again_s=again_s)

    def _reload(self, held: Held, heard: int) -> None:
        """Follow what others did to parked keys of a holding."""
        assigned = held.assigned
        changed = None if held.followed == UNKNOWN else self._ledger.changes(held.followed, heard)
        named = None if changed is None else [r for r in changed if assigned.lp_from <= r.lp < assigned.lp_to]
        if named is None or named:
            self._reload_keys(held, named)
        held.followed = heard

    def _reload_keys(self, held: Held, named: list[KeyRef] | None) -> None:
        now = clock()
        states = self._ledger.keys(_span_of(held, held.committed), named)
        parkings = [parking_of(state, now, own_epoch=held.epoch) for state in states]
        if held.parked.by_offset or held.unsure:
            # What a former owner parked and may not have settled comes once more; what we may have parked is in hand.
            self._learn_dead(held)
        self._owner.dispatcher.reload_parked(held, parkings, None if named is None else {ref.name for ref in named})
        self._owner.parked(held, keys=[], messages=0)

    def _learn_dead(self, held: Held) -> None:
        """Learn what died since it was parked and is not settled: its key is in line again, and it is not of it."""
        self._owner.dispatcher.learn_dead(held, self._ledger.dead(_span_of(held, held.committed)))

    def _write_notes(self) -> None:
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        self._note_at = clock() + NOTES_EVERY_S
        try:
            self._ledger.note(notes)
        except BaseException:
            self._notes.extendleft(reversed(notes))
            raise


def _span_of(held: Held, committed: int) -> Span:
    return Span(held.partition, held.assigned.lp_from, held.assigned.lp_to, committed)


def _page_of(held: Held, work: ParkingWork) -> tuple[Page, list[tuple[Parking, Turn]]]:
    """Return what is to be written for some work, and the parkings whose turn it is."""
    page = Page()
    for lane in work.lanes:
        parking = lane.parking
        if parking is None:
            continue
        if parking.entry is not None:
            page.entries.append(parking.entry)
        page.messages += [(parking.ref, record) for record in lane.batch]
        if parking.entry is None and held.attempts:
            counted = held.attempts
            page.attempts |= {r.identity: counted[r.offset] for r in lane.batch if r.offset in counted}
    page.burials = [burial for _, burial in work.burials]
    turns = [(lane.parking, _turn_of(held, lane, lane.parking)) for lane in work.back if lane.parking is not None]
    turns += [(p, Turn(p.ref, go_on=True, alone=p.alone, careful=p.careful > 0)) for p in work.due]
    page.turns = [turn for _, turn in turns]
    return page, turns


def _turn_of(held: Held, lane: Lane, parking: Parking) -> Turn:
    """Return what is to be said of a parked key whose messages workers gave back."""
    go_on = held.state is State.OPEN and not held.finished
    careful = parking.careful > 0
    turn = Turn(parking.ref, handled=list(lane.line), alone=careful, careful=careful)
    turn.given_s = max(0.0, clock() - parking.given)
    match lane.verdict:
        case Bury(attempts, cause, reason, keep):
            turn.burial, turn.go_on = Burial(lane.records[0], cause, reason, attempts, keep), go_on
        case Park(attempts, cause, seconds):
            turn.entry = KeyEntry(parking.ref, cause, seconds, attempts)
            turn.failed, turn.tried = lane.records[0].identity, tried(lane.records[0], attempts)
        case Wait(attempts, seconds):
            turn.entry = KeyEntry(parking.ref, "retry", seconds, attempts)
            turn.failed, turn.tried = lane.records[0].identity, tried(lane.records[0], attempts)
        case None:
            turn.go_on, turn.alone = go_on, careful or (not turn.handled and parking.attempts > 0)
    return turn
