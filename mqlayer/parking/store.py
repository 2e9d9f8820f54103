"""What an owner writes of the failing messages of its partition: one transaction per partition, under its epoch.

States of a key: *in line* (its messages come from the stream) -> *waiting* (parked, due at a time or never) ->
*started* (its first messages are being handled, from here) -> *waiting* or, with nothing left, *in line*. Its owner
alone takes it through them, an operator may change a waiting or started one under its owner's feet: what the owner then
writes of it finds nothing. Crash points, and who repairs each:

- before the transaction: nothing happened; the message is delivered again.
- after it, before its offset is settled: it is delivered again, found to be parked or dead, and settled.
- parked messages handled, not yet noted: the key is *started*; the next owner handles them again, one by one.
- the key's last message noted, the key not in line yet in the owner's memory: the next owner finds it in line.

A message is settled in its partition only after the transaction that parked or dead-lettered it, so it is never in
none. An owner handles what a former one parked only after it settled that; what it parked itself it may handle before,
and if it dies between the two, that is handled again. What the group has yet to come to (it was sent back over a route
change) waits for the owner of its partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.message import NO_KEY, Identity, ParkedRecord, Record
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.event_counts import add_counts
from mqlayer.postgres.queries import columns, query

ParkCause = Literal["retry", "exhausted", "rejected", "paused"]
DeathCause = Literal["exhausted", "rejected", "skipped"]
ParkingLimit = Literal["keys", "key_messages", "key_bytes", "group_messages", "group_bytes"]
"""What there may be too many of: parked keys of a partition; messages or bytes of one key, or of a whole group."""

BATCH: Final = 100
BATCH_BYTES: Final = 1_000_000
"""How much of a parked key is handed out at a time."""
MAX_CHANGES: Final = 256
"""Of how many acts on a group's parked keys it is known which keys they changed: `parking_raise` forgets others."""
TIMEOUTS: Final = {"lock_wait": "2s", "idle": "5s"}


class NotOwner(MqlayerError):
    """The epoch is not in force any more: nothing was written."""


class KeyRef(NamedTuple):
    """A key that is parked, or a message that stands alone: its LP and name."""

    lp: int
    name: bytes


class KeyEntry(NamedTuple):
    """A key that is to be parked: why, for how many seconds (None: until an operator says), failed attempts so far."""

    ref: KeyRef
    cause: ParkCause
    wait_s: float | None
    attempts: int


class KeyState(NamedTuple):
    """A parked key as the server has it. `started`: somebody began with it and never said how that ended."""

    ref: KeyRef
    cause: str
    attempts: int
    started: int | None
    started_alone: bool
    due_in_s: float | None


class DeadLetterEntry(NamedTuple):
    """A message that leaves the group without its effect. `keep_body`: with its body, so that it can be sent again."""

    record: Record
    cause: DeathCause
    reason: str
    attempts: int
    keep_body: bool

    @property
    def tried(self) -> int:
        """How many of its attempts nobody has written as yet: of a parked message all but those before this turn."""
        return tried(self.record, self.attempts)


def tried(record: Record, attempts: int) -> int:
    """Return how many of a message's failed attempts are new since it was read, or handed out."""
    return max(0, attempts - (record.attempts if isinstance(record, ParkedRecord) else 0))


class FailedAttempt(NamedTuple):
    """A failed attempt, for people. `timed_out`: it took longer than its time limit."""

    identity: Identity
    attempt: int
    error: str
    partition: PartitionId
    timed_out: bool = False


class Span(NamedTuple):
    """A partition that a member takes, and from which offset on it reads."""

    partition: PartitionId
    lp_from: int
    lp_to: int
    committed: int


@dataclass(slots=True)
class KeyUpdate:
    """What its owner has to say of a started or due key, and what is to come next.

    `handled`: of its messages; `dead_letter`: its first message that is not handled. Then `go_on` hands out the next
    ones:
    `alone`, one only, or as many as go at a time; `guarded`: to blame if nobody ever says how that ended. Else it waits
    as `entry` says, for its message that `failed`, `tried` so many times more, or just rests. `delivered_s`: how long
    ago it was handed out. `count`: hand out no more at a time; `retry_s`: for its owner, when it goes on although it
    was to go on now.
    """

    ref: KeyRef
    handled: Sequence[Record] = ()
    dead_letter: DeadLetterEntry | None = None
    go_on: bool = False
    alone: bool = False
    guarded: bool = False
    entry: KeyEntry | None = None
    failed: Identity | None = None
    tried: int = 0
    delivered_s: float = 0.0
    count: int = BATCH
    retry_s: float | None = None


@dataclass(slots=True)
class ParkingBatch:
    """All that an owner has to write of one partition at a time.

    `attempts`: what messages failed before, where they are parked behind others; 0 where they are not named.
    """

    entries: list[KeyEntry] = field(default_factory=list)
    messages: list[tuple[KeyRef, Record]] = field(default_factory=list)
    dead_letters: list[DeadLetterEntry] = field(default_factory=list)
    updates: list[KeyUpdate] = field(default_factory=list)
    attempts: dict[Identity, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries or self.messages or self.dead_letters or self.updates)


@dataclass(slots=True)
class ParkingResult:
    """What came of a page: which keys are parked no more, though messages of them were on it; what is next of others.

    No next messages means that the key is in line again, unless it is among those `too_early`: what waits of these is
    of partitions that the group has yet to come to; or those `paused` by an operator. `changed`: an operator did
    something to a key meanwhile.

    `full`: the limit for which a key's messages that are `refused_messages` found no room; `refused_keys`: those of
    these keys that are not parked at all.
    """

    unparked: set[KeyRef] = field(default_factory=set)
    full: dict[KeyRef, ParkingLimit] = field(default_factory=dict)
    refused_keys: set[KeyRef] = field(default_factory=set)
    refused_messages: set[Identity] = field(default_factory=set)
    too_early: set[KeyRef] = field(default_factory=set)
    paused: set[KeyRef] = field(default_factory=set)
    changed: bool = False
    next: dict[KeyRef, list[ParkedRecord]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParkingCapacity:
    """How much a group has parked, and how much of it and of one key may be. A group's is judged before a page."""

    messages: int = 0
    bytes: int = 0
    messages_limit: int = 1
    bytes_limit: int = 1
    key_messages_limit: int = 1
    key_bytes_limit: int = 1
    keys_limit: int = 1

    @property
    def full(self) -> ParkingLimit | None:
        """The limit that the group has come to."""
        if self.messages >= self.messages_limit:
            return "group_messages"
        return "group_bytes" if self.bytes >= self.bytes_limit else None

    def with_more(self, size: int) -> ParkingCapacity:
        """Return it with one more message of so many bytes."""
        return replace(self, messages=self.messages + 1, bytes=self.bytes + size)

    def limit_of(self, messages: int, size: int, *, alone: bool) -> ParkingLimit | None:
        """Return the limit that keeps a parked key with so much from getting more; one that is `alone` has no own."""
        if self.full or alone:
            return self.full
        if messages >= self.key_messages_limit:
            return "key_messages"
        return "key_bytes" if size >= self.key_bytes_limit else None


class ParkedState(NamedTuple):
    """What a new owner has to know: parked keys; which offsets above committed are parked, as far as known; what of
    them is dead; and how often others had acted on parked keys by then."""

    keys: list[KeyState]
    unsettled: list[tuple[KeyRef, int]]
    dead: set[Identity]
    parking_version: int


class ParkingStore:
    """What one member writes, for all partitions of its group.

    Raises NotOwner, StoreUnavailable, TransactionConflict.
    """

    def __init__(self, database: Database, group_id: int, member_id: str) -> None:
        self._database = database
        self._who: dict[str, object] = {"group_id": group_id, "member_id": member_id}

    def load(self, spans: Sequence[Span]) -> dict[PartitionId, ParkedState]:
        """Return what is parked and dead of partitions. Call it with the pull locks taken: then nobody adds to it."""
        facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), spans)
        with self._database.connection() as connection:
            # First: what is changed after it is looked at again.
            parking_version = connection.execute(query("parking_number"), facts).fetchone()
            keys = connection.execute(query("parked_keys"), facts).fetchall()
            unsettled = connection.execute(query("parked_unsettled"), facts).fetchall()
            dead = connection.execute(query("dead_unsettled"), facts).fetchall()
        return {
            span.partition: ParkedState(
                [_state(row) for at, *row in keys if at == span.partition],
                [(KeyRef(lp, name), offset) for at, lp, name, offset in unsettled if at == span.partition],
                {Identity(*identity) for at, *identity in dead if at == span.partition},
                int(parking_version[0]) if parking_version else 0,
            )
            for span in spans
        }

    def dead(self, span: Span) -> set[Identity]:
        """Return what is dead of a partition from an offset on."""
        with self._database.connection() as connection:
            facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), [span])
            rows = connection.execute(query("dead_unsettled"), facts).fetchall()
        return {Identity(*identity) for _, *identity in rows}

    def changes(self, after: int, upto: int) -> list[KeyRef] | None:
        """Return which parked keys others changed in their acts behind a number; None where it may be any."""
        if not 0 <= upto - after <= MAX_CHANGES:
            return None
        with self._database.connection() as connection:
            facts = self._who | {"after": after, "upto": upto}
            rows = connection.execute(query("parking_changes"), facts).fetchall()
        if len({row[0] for row in rows}) < upto - after or any(lp < 0 for _, lp, _ in rows):
            return None
        return [KeyRef(lp, name) for _, lp, name in rows]

    def keys(self, span: Span, named: Sequence[KeyRef] | None = None) -> list[KeyState]:
        """Return the parked keys of a partition's LPs, or those of these that are parked."""
        with self._database.connection() as connection:
            if named is None:
                facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), [span])
                return [_state(row[1:]) for row in connection.execute(query("parked_keys"), facts).fetchall()]
            facts = self._who | columns(("lps", "names"), list(set(named)))
            return [_state(row) for row in connection.execute(query("parked_keys_named"), facts).fetchall()]

    def write(self, partition: PartitionId, epoch: int, batch: ParkingBatch) -> ParkingResult:
        """Write a page in one transaction, and return what comes next. Raises NotOwner; nothing is written then."""
        facts = self._who | {"partition_id": partition, "epoch": epoch}

        def work(connection: Connection) -> ParkingResult:
            connection.execute(query("transaction_patience"), TIMEOUTS)
            if connection.execute(query("parking_hold"), facts).fetchone() is None:
                raise NotOwner(f"epoch {epoch} of partition {partition} is not in force")
            result = ParkingResult()
            counts: Counter[str] = Counter()
            self._hold_keys(connection, batch)
            capacity = self._capacity(connection) if batch.messages else ParkingCapacity()
            new = self._put_keys(connection, [] if capacity.full else self._living(connection, batch))
            counts["parked"] = len(new)
            self._put_messages(connection, facts, batch, capacity, new, result)
            dead_letters = [*batch.dead_letters, *(t.dead_letter for t in batch.updates if t.dead_letter is not None)]
            counts += self._dead_letter(connection, facts, dead_letters)
            for update in batch.updates:
                counts["unparked"] += self._apply(connection, facts, update, result)
            # Last: nobody waits for another one's counts with something that others want.
            add_counts(connection, facts, {partition: counts})
            failpoint("parking.before_commit")
            return result

        result = self._database.transaction(work)
        failpoint("parking.after_commit")
        return result

    def add_attempts(self, notes: Iterable[FailedAttempt]) -> None:
        """Note failed attempts, for people: under no epoch, since an attempt was one whoever made it."""
        rows, counts = [], dict[int, Counter[str]]()
        for note in notes:
            rows.append((note.identity.lp, note.identity.source, note.identity.seq, note.attempt, note.error))
            counted = counts.setdefault(note.partition, Counter())
            counted["failed"] += 1
            counted["timed_out"] += note.timed_out
        arrays = columns(("lps", "sources", "seqs", "attempts", "errors"), rows)
        with self._database.connection() as connection, connection.transaction():
            connection.execute(query("failed_attempts_put"), self._who | arrays)
            add_counts(connection, self._who, counts)

    def _hold_keys(self, connection: Connection, batch: ParkingBatch) -> None:
        refs = [*{ref for ref, _ in batch.messages} | {update.ref for update in batch.updates}]
        if len(refs) > 1:
            connection.execute(query("parked_keys_hold"), self._who | columns(("lps", "names"), refs))

    def _living(self, connection: Connection, batch: ParkingBatch) -> list[KeyEntry]:
        """Return the keys to be parked but those whose failed message is dead: the answer to parking them was lost, and
        an operator let it die before it was asked for again."""
        if not batch.entries:
            return []
        heads: dict[KeyRef, Identity] = {}
        for ref, record in batch.messages:
            heads.setdefault(ref, record.identity)
        dead = self._dead_among(connection, [heads[entry.ref] for entry in batch.entries if entry.ref in heads])
        return [entry for entry in batch.entries if heads.get(entry.ref) not in dead]

    def _dead_among(self, connection: Connection, identities: Sequence[Identity]) -> set[Identity]:
        asked = [(identity.lp, identity.source, identity.seq) for identity in identities]
        facts = self._who | columns(("lps", "sources", "seqs"), asked)
        return {Identity(*row) for row in connection.execute(query("dead_named"), facts).fetchall()}

    def _capacity(self, connection: Connection) -> ParkingCapacity:
        row = connection.execute(query("parked_room"), self._who).fetchone()
        return ParkingCapacity(*row) if row is not None else ParkingCapacity()

    def _put_keys(self, connection: Connection, entries: Sequence[KeyEntry]) -> set[KeyRef]:
        """Park keys; return those that were not."""
        if not entries:
            return set()
        rows = [(*entry.ref, entry.cause, entry.wait_s, entry.attempts) for entry in entries]
        arrays = columns(("lps", "names", "causes", "waits_s", "attempts"), rows)
        rows_put = connection.execute(query("parked_keys_put"), self._who | arrays).fetchall()
        return {KeyRef(lp, bytes(name)) for lp, name in rows_put}

    def _put_messages(
        self,
        connection: Connection,
        facts: dict[str, object],
        batch: ParkingBatch,
        capacity: ParkingCapacity,
        new: set[KeyRef],
        result: ParkingResult,
    ) -> None:
        if not batch.messages:
            return
        refs = list({ref for ref, _ in batch.messages})
        there = connection.execute(query("parked_keys_there"), self._who | columns(("lps", "names"), refs)).fetchall()
        parked = {KeyRef(lp, name): (messages, size) for lp, name, messages, size in there}
        if capacity.full:
            result.refused_keys = {entry.ref for entry in batch.entries} - set(parked)
            result.full = dict.fromkeys(result.refused_keys, capacity.full)
        result.unparked = set(refs) - set(parked) - result.refused_keys
        # Looked at while the keys are held: an operator may have let some of a key die that its owner has read since.
        dead = self._dead_among(connection, [record.identity for _, record in batch.messages])
        living = [(ref, record) for ref, record in batch.messages if record.identity not in dead]
        self._refuse(connection, facts, living, capacity, parked, result)
        # What failed is the first one of its key, and has been counted there; not where somebody else parked that.
        counted = {entry.ref: entry.attempts for entry in batch.entries}
        rows = [
            (*ref, record.identity.source, record.identity.seq, record.offset, record.key, record.m, record.body,
             0 if ref in new else before, before)
            for ref, record in batch.messages
            for before in [counted.pop(ref, batch.attempts.get(record.identity, 0))]
            if ref in parked and record.identity not in result.refused_messages and record.identity not in dead
        ]  # fmt: skip
        names = ("lps", "names", "sources", "seqs", "offsets", "keys", "ms", "bodies", "attempts", "tried")
        arrays = columns(names, rows)
        put = connection.execute(query("parked_messages_put"), facts | arrays).fetchall()
        # What comes again, after a seek or a death, may be in front of what failed. New keys have their own counts.
        joined = [row for row in put if KeyRef(row[0], row[1]) not in new]
        if joined:
            heads = columns(("lps", "names"), [row[:2] for row in joined])
            identities = [str(Identity(source, lp, seq)) for lp, _, source, seq in joined]
            connection.execute(query("parked_heads_put"), self._who | heads | {"identities": identities})

    def _refuse(
        self,
        connection: Connection,
        facts: dict[str, object],
        messages: Sequence[tuple[KeyRef, Record]],
        capacity: ParkingCapacity,
        parked: dict[KeyRef, tuple[int, int]],
        result: ParkingResult,
    ) -> None:
        """Note what finds no room: of each key what is behind its limit, of a full group all.

        What is parked already, or belongs in front of what is, goes on: its key could not without it.
        """
        over: list[tuple[KeyRef, Record]] = []
        for ref, record in messages:
            if ref in result.refused_keys:
                result.refused_messages.add(record.identity)
            elif ref in parked:
                limit = result.full.get(ref) or capacity.limit_of(*parked[ref], alone=ref.name[:1] == NO_KEY)
                if limit:
                    result.full[ref] = limit
                    over.append((ref, record))
                else:
                    count, size = parked[ref]
                    parked[ref] = count + 1, size + len(record.body) + len(record.key) + len(record.m)
        if not over:
            return
        asked = [(*ref, record.identity.source, record.identity.seq, record.offset) for ref, record in over]
        arrays = columns(("lps", "names", "sources", "seqs", "offsets"), asked)
        in_front = {Identity(*row) for row in connection.execute(query("parked_in_front"), facts | arrays).fetchall()}
        result.refused_messages |= {record.identity for _, record in over} - in_front
        result.full = {
            ref: limit
            for ref, limit in result.full.items()
            if ref in result.refused_keys
            or any(r == ref and record.identity in result.refused_messages for r, record in over)
        }

    def _dead_letter(
        self, connection: Connection, facts: dict[str, object], dead_letters: Sequence[DeadLetterEntry]
    ) -> Counter[str]:
        if not dead_letters:
            return Counter()
        rows = [
            (lp, source, seq, record.offset, record.key, record.m, record.body if dead_letter.keep_body else None,
            dead_letter.cause,
             dead_letter.reason, dead_letter.attempts, dead_letter.tried)
            for dead_letter in dead_letters
            for record in [dead_letter.record]
            for source, lp, seq in [record.identity]
        ]  # fmt: skip
        names = ("lps", "sources", "seqs", "offsets", "keys", "ms", "bodies", "causes", "reasons", "attempts", "tried")
        put = connection.execute(query("dead_put"), facts | columns(names, rows)).fetchall()
        return Counter("dead" if kept else "skipped" for (kept,) in put)

    def _apply(
        self, connection: Connection, facts: dict[str, object], update: KeyUpdate, result: ParkingResult
    ) -> bool:
        """Do what an owner says of a key; say whether that is in line again."""
        key = facts | update.ref._asdict()
        ended = [
            *((record, True) for record in update.handled),
            *([(update.dead_letter.record, False)] if update.dead_letter else []),
        ]
        if ended:
            rows = [(lp, source, seq, handled) for record, handled in ended for source, lp, seq in [record.identity]]
            arrays = columns(("lps", "sources", "seqs", "handled"), rows)
            connection.execute(query("parked_messages_end"), key | arrays | {"given_s": update.delivered_s})
        if update.go_on:
            records = result.next[update.ref] = self._next(connection, update, key, result)
            return not records and update.ref not in result.too_early | result.paused
        if update.entry is None:
            connection.execute(query("parked_key_reschedule"), key | {"ended": bool(ended)})
            return False
        put = self._reschedule(connection, update, update.entry, key)
        if put is None:
            connection.execute(query("parked_key_reschedule"), key | {"ended": bool(ended)})
        # Released while it was in hand, or not the head any more: its owner has to look again.
        result.changed |= put is not False
        return False

    def _reschedule(
        self, connection: Connection, update: KeyUpdate, entry: KeyEntry, key: dict[str, object]
    ) -> bool | None:
        """Let a parked key wait for its head, which failed; say whether it was released meanwhile: then it is due.

        None where another message is its head by now.
        """
        if update.failed is None:
            return None
        facts = {"cause": entry.cause, "wait_s": entry.wait_s, "attempts": entry.attempts, "tried": update.tried}
        head = {"source": update.failed.source, "seq": update.failed.seq}
        row = connection.execute(query("parked_key_put"), key | facts | head).fetchone()
        return None if row is None else bool(row[0])

    def _next(
        self, connection: Connection, update: KeyUpdate, key: dict[str, object], result: ParkingResult
    ) -> list[ParkedRecord]:
        """Hand out what is first of a key; with nothing left, end its being parked."""
        # Locked, so that nobody adds to its line between the look at it and its end.
        locked = connection.execute(query("parked_hold"), key).fetchone()
        if locked is None:
            return []
        attempts = 0 if update.handled or update.dead_letter else int(locked[2])
        if locked[3]:
            # An owner that did not hear of it as yet, or had the key in hand then.
            connection.execute(
                query("parked_key_reschedule"), key | {"ended": bool(update.handled or update.dead_letter)}
            )
            result.paused.add(update.ref)
            return []
        bounds = {"count": 1 if update.alone else update.count, "bytes": BATCH_BYTES}
        rows = connection.execute(query("parked_next"), key | bounds).fetchall()
        if not rows:
            if connection.execute(query("parked_key_end"), key).fetchone() is None:
                connection.execute(
                    query("parked_key_reschedule"), key | {"ended": bool(update.handled or update.dead_letter)}
                )
                result.too_early.add(update.ref)
            return []
        # What is new at the head brings its own ones.
        attempts = attempts or rows[0][-1]
        connection.execute(query("parked_key_start"), key | {"alone": update.guarded, "attempts": attempts})
        return [
            ParkedRecord.of((offset, m, name, body), attempts=own if at else attempts, redriven=redriven, replay=replay)
            for at, (offset, m, name, body, redriven, replay, own) in enumerate(rows)
        ]


def _state(row: Sequence[Any]) -> KeyState:
    lp, name, *rest = row
    return KeyState(KeyRef(lp, name), *rest)
