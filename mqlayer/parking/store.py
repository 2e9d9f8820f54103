"""An owner's writes about failing messages: one transaction per call, under its epoch.

A message is settled only after its commit. States: docs/design/parked-keys.md; crashes: docs/design/crash-matrix.md.
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
DeathCause = Literal["exhausted", "rejected", "skipped", "expired"]
ParkingLimit = Literal["keys", "key_messages", "key_bytes", "group_messages", "group_bytes"]
"""Keys of a partition; messages or bytes of a key or group."""

BATCH: Final = 100
BATCH_BYTES: Final = 1_000_000
MAX_CHANGES: Final = 256
"""Operators' acts whose keys Postgres remembers."""
TIMEOUTS: Final = {"lock_wait": "2s", "idle": "5s"}


class NotOwner(MqlayerError):
    """The epoch is not in force; nothing was written."""


class KeyRef(NamedTuple):
    """A key, or a message without one."""

    lp: int
    name: bytes


class KeyEntry(NamedTuple):
    """A key to park. `wait_s`: None until an operator acts."""

    ref: KeyRef
    cause: ParkCause
    wait_s: float | None
    attempts: int


class KeyState(NamedTuple):
    """A parked key. `started`: the epoch that handed it out and reported no end; `due_in_s`: None until an operator
    acts."""

    ref: KeyRef
    cause: str
    attempts: int
    started: int | None
    started_alone: bool
    due_in_s: float | None


class DeadLetterEntry(NamedTuple):
    """A message without effect. `keep_body`: for redrives."""

    record: Record
    cause: DeathCause
    reason: str
    attempts: int
    keep_body: bool

    @property
    def tried(self) -> int:
        """Unrecorded failed attempts."""
        return tried(self.record, self.attempts)


def tried(record: Record, attempts: int) -> int:
    """Return the failed attempts since its read."""
    return max(0, attempts - (record.attempts if isinstance(record, ParkedRecord) else 0))


class FailedAttempt(NamedTuple):
    """A failed attempt."""

    identity: Identity
    attempt: int
    error: str
    partition: PartitionId
    timed_out: bool = False


class Span(NamedTuple):
    """A partition, read from `committed` on."""

    partition: PartitionId
    lp_from: int
    lp_to: int
    committed: int


@dataclass(slots=True)
class KeyUpdate:
    """An owner's report on a parked key, and the next step.

    `dead_letter`: the first message not handled. `go_on` hands out one if `alone`, else up to `count`; if `guarded`,
    the head counts as failed when the owner dies. Otherwise the key waits as `entry` says for its head `failed`, with
    `tried` new failures. `delivered_s`: time since the delivery. `retry_s`: the owner's own delay, not written.
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
    """Writes for one partition. `attempts`: earlier failures of messages parked behind others."""

    entries: list[KeyEntry] = field(default_factory=list)
    messages: list[tuple[KeyRef, Record]] = field(default_factory=list)
    dead_letters: list[DeadLetterEntry] = field(default_factory=list)
    updates: list[KeyUpdate] = field(default_factory=list)
    attempts: dict[Identity, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries or self.messages or self.dead_letters or self.updates)


@dataclass(slots=True)
class ParkingResult:
    """`next`: messages handed out; none: the key is in line again, except in `paused` and `too_early` (the group has
    not reached their partitions).

    `unparked`: no longer parked. `full`: the limit that refused `refused_messages`; `refused_keys` are not parked.
    `changed`: an operator changed a key.
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
    """A group's totals before a batch, and the limits."""

    messages: int = 0
    bytes: int = 0
    messages_limit: int = 1
    bytes_limit: int = 1
    key_messages_limit: int = 1
    key_bytes_limit: int = 1
    keys_limit: int = 1

    @property
    def full(self) -> ParkingLimit | None:
        """The group's limit that is reached."""
        if self.messages >= self.messages_limit:
            return "group_messages"
        return "group_bytes" if self.bytes >= self.bytes_limit else None

    def with_more(self, size: int) -> ParkingCapacity:
        """Add a message of `size` bytes."""
        return replace(self, messages=self.messages + 1, bytes=self.bytes + size)

    def limit_of(self, messages: int, size: int, *, alone: bool) -> ParkingLimit | None:
        """Return the limit that a key has reached; `alone` (no key): only the group's."""
        if self.full or alone:
            return self.full
        if messages >= self.key_messages_limit:
            return "key_messages"
        return "key_bytes" if size >= self.key_bytes_limit else None


class ParkedState(NamedTuple):
    """A new owner's facts. `unsettled`: parked offsets from committed on; `parking_version`: number
    of operators' acts."""

    keys: list[KeyState]
    unsettled: list[tuple[KeyRef, int]]
    dead: set[Identity]
    parking_version: int


class ParkingStore:
    """One member's writes. Raises NotOwner, StoreUnavailable, TransactionConflict."""

    def __init__(self, database: Database, group_id: int, member_id: str) -> None:
        self._database = database
        self._who: dict[str, object] = {"group_id": group_id, "member_id": member_id}

    def load(self, spans: Sequence[Span]) -> dict[PartitionId, ParkedState]:
        """Return parked and dead messages. Take the pull locks first: then no other owner adds any."""
        facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), spans)
        with self._database.connection() as connection:
            # First: later changes are then read again.
            parking_version = connection.execute(query("parking_number"), facts).fetchone()
            keys = connection.execute(query("parked_keys"), facts).fetchall()
            unsettled = connection.execute(query("parked_unsettled"), facts).fetchall()
            dead = connection.execute(query("dead_unsettled"), facts).fetchall()
        found = {
            span.partition: ParkedState([], [], set(), int(parking_version[0]) if parking_version else 0)
            for span in spans
        }
        for partition, *state in keys:
            found[partition].keys.append(_state(state))
        for partition, lp, name, offset in unsettled:
            found[partition].unsettled.append((KeyRef(lp, name), offset))
        for partition, *identity in dead:
            found[partition].dead.add(Identity(*identity))
        return found

    def dead(self, span: Span) -> set[Identity]:
        """Return dead messages from `span.committed` on."""
        with self._database.connection() as connection:
            facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), [span])
            rows = connection.execute(query("dead_unsettled"), facts).fetchall()
        return {Identity(*identity) for _, *identity in rows}

    def changes(self, after: int, upto: int) -> list[KeyRef] | None:
        """Return the keys of operators' acts after number `after`; None: any may have changed."""
        if not 0 <= upto - after <= MAX_CHANGES:
            return None
        with self._database.connection() as connection:
            facts = self._who | {"after": after, "upto": upto}
            rows = connection.execute(query("parking_changes"), facts).fetchall()
        if len({row[0] for row in rows}) < upto - after or any(lp < 0 for _, lp, _ in rows):
            return None
        return [KeyRef(lp, name) for _, lp, name in rows]

    def keys(self, span: Span, named: Sequence[KeyRef] | None = None) -> list[KeyState]:
        """Return a partition's parked keys, or those of `named`."""
        with self._database.connection() as connection:
            if named is None:
                facts = self._who | columns(("partitions", "lps_from", "lps_to", "committed"), [span])
                return [_state(row[1:]) for row in connection.execute(query("parked_keys"), facts).fetchall()]
            facts = self._who | columns(("lps", "names"), list(set(named)))
            return [_state(row) for row in connection.execute(query("parked_keys_named"), facts).fetchall()]

    def write(self, partition: PartitionId, epoch: int, batch: ParkingBatch) -> ParkingResult:
        """Write a batch. Raises NotOwner."""
        facts = self._who | {"partition_id": partition, "epoch": epoch}

        def work(connection: Connection) -> ParkingResult:
            connection.execute(query("transaction_patience"), TIMEOUTS)
            if not self._holds(connection, facts):
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
            # Last: owners share these rows, so their locks should be held briefly.
            add_counts(connection, facts, {partition: counts})
            failpoint("parking.before_commit")
            return result

        result = self._database.transaction(work)
        failpoint("parking.after_commit")
        return result

    def _holds(self, connection: Connection, facts: dict[str, object]) -> bool:
        return connection.execute(query("parking_hold"), facts).fetchone() is not None

    def add_attempts(self, notes: Iterable[FailedAttempt]) -> None:
        """Record failed attempts, under any epoch."""
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
        # Under the keys' locks: an operator may have discarded messages that the owner has read.
        dead = self._dead_among(connection, [record.identity for _, record in batch.messages])
        living = [(ref, record) for ref, record in batch.messages if record.identity not in dead]
        self._refuse(connection, facts, living, capacity, parked, result)
        # The head of a new key is counted in the key's row already.
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
        # Redelivered messages (seek, crash) may precede the failed head. New keys have their own counts.
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
        """Refuse messages over a limit, unless a parked message behind them needs them."""
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
        return death_counts(put)

    def _apply(
        self, connection: Connection, facts: dict[str, object], update: KeyUpdate, result: ParkingResult
    ) -> bool:
        key = facts | update.ref._asdict()
        ended = [
            *((record, True) for record in update.handled),
            *([(update.dead_letter.record, False)] if update.dead_letter else []),
        ]
        if ended:
            name = update.ref.name
            rows = [
                (lp, name, source, seq, handled) for record, handled in ended for source, lp, seq in [record.identity]
            ]
            arrays = columns(("lps", "names", "sources", "seqs", "handled"), rows)
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
        # An operator released the key, or its head changed: the owner must read it again.
        result.changed |= put is not False
        return False

    def _reschedule(
        self, connection: Connection, update: KeyUpdate, entry: KeyEntry, key: dict[str, object]
    ) -> bool | None:
        """Whether an operator released the key; None: the head changed."""
        if update.failed is None:
            return None
        facts = {"cause": entry.cause, "wait_s": entry.wait_s, "attempts": entry.attempts, "tried": update.tried}
        head = {"source": update.failed.source, "seq": update.failed.seq}
        row = connection.execute(query("parked_key_put"), key | facts | head).fetchone()
        return None if row is None else bool(row[0])

    def _next(
        self, connection: Connection, update: KeyUpdate, key: dict[str, object], result: ParkingResult
    ) -> list[ParkedRecord]:
        # Locked: no message may join the key between the check and its end.
        locked = connection.execute(query("parked_hold"), key).fetchone()
        if locked is None:
            return []
        attempts = 0 if update.handled or update.dead_letter else int(locked[2])
        if locked[3]:
            # An operator paused the key; its owner did not know yet, or was handling it.
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
        # A new head has its own attempts.
        attempts = attempts or rows[0][-1]
        connection.execute(query("parked_key_start"), key | {"alone": update.guarded, "attempts": attempts})
        return [
            ParkedRecord.of((offset, m, name, body), attempts=own if at else attempts, redriven=redriven, replay=replay)
            for at, (offset, m, name, body, redriven, replay, own) in enumerate(rows)
        ]


def death_counts(put: Iterable[tuple[bool, bool]]) -> Counter[str]:
    """Return the events of dead messages, by whether their bodies are kept and their time to live ended."""
    counts: Counter[str] = Counter()
    for kept, expired in put:
        counts["expired"] += expired
        counts["dead" if kept else "skipped"] += kept or not expired
    return counts


def _state(row: Sequence[Any]) -> KeyState:
    lp, name, *rest = row
    return KeyState(KeyRef(lp, name), *rest)
