"""What an owner writes of the failing messages of its partition: one transaction per partition, under its epoch.

States of a key: *in line* (its messages come from the stream) -> *waiting* (parked, due at a time or never) ->
*started* (its first messages are being handled, from here) -> *waiting* or, with nothing left, *in line*. Its owner
alone takes it through them, an operator may change a waiting or started one under its owner's feet: what the owner then
writes of it finds nothing. Crash points, and who repairs each:

- before the transaction: nothing happened; the message is delivered again.
- after it, before its offset is settled: it is delivered again, found to be parked or dead, and settled.
- parked messages handled, not yet noted: the key is *started*; the next owner handles them again, one by one.
- the key's last message noted, the key not in line yet in the owner's memory: the next owner finds it in line.

A message is settled in its partition only after the transaction that parked or buried it, so it is never in none. An
owner handles what a former one parked only after it settled that; what it parked itself it may handle before, and if it
dies between the two, that is handled again. What the group has yet to come to (it was sent back over a route change)
waits for the owner of its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from mqlayer.domain.message import Identity, ParkedRecord, Record
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

ParkCause = Literal["retry", "exhausted", "rejected", "paused"]
DeathCause = Literal["exhausted", "rejected", "skipped"]

BATCH: Final = 100
BATCH_BYTES: Final = 1_000_000
"""How much of a parked key is handed out at a time."""
PATIENCE: Final = {"lock_wait": "2s", "idle": "5s"}


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


class Burial(NamedTuple):
    """A message that leaves the group without its effect. `keep`: with its body, so that it can be sent again."""

    record: Record
    cause: DeathCause
    reason: str
    attempts: int
    keep: bool


class AttemptNote(NamedTuple):
    """A failed attempt, for people."""

    identity: Identity
    attempt: int
    error: str


@dataclass(slots=True)
class Turn:
    """What its owner has to say of a started or due key, and what is to come next.

    `handled`: of its messages; `burial`: its first message that is not handled. Then `go_on` hands out the next ones:
    `alone`, one only, or as many as go at a time; `careful`: to blame if nobody ever says how that ended. Else it waits
    as `entry` says, for its message that `failed`, or just rests.
    """

    ref: KeyRef
    handled: Sequence[Record] = ()
    burial: Burial | None = None
    go_on: bool = False
    alone: bool = False
    careful: bool = False
    entry: KeyEntry | None = None
    failed: Identity | None = None


@dataclass(slots=True)
class Page:
    """All that an owner has to write of one partition at a time."""

    entries: list[KeyEntry] = field(default_factory=list)
    messages: list[tuple[KeyRef, Record]] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.entries or self.messages or self.burials or self.turns)


@dataclass(slots=True)
class Written:
    """What came of a page: which keys are parked no more, though messages of them were on it; what is next of others.

    No next messages means that the key is in line again, unless it is among those `early`: what waits of these is of
    partitions that the group has yet to come to. `changed`: an operator did something to a key meanwhile.
    """

    gone: set[KeyRef] = field(default_factory=set)
    early: set[KeyRef] = field(default_factory=set)
    changed: bool = False
    next: dict[KeyRef, list[ParkedRecord]] = field(default_factory=dict)


class Loaded(NamedTuple):
    """What a new owner has to know: parked keys; which offsets above committed are parked, as far as known; what of
    them is dead."""

    keys: list[KeyState]
    unsettled: list[tuple[KeyRef, int]]
    dead: set[Identity]


class Ledger:
    """What one member writes, for all partitions of its group.

    Raises NotOwner, StoreUnavailable, TransactionConflict.
    """

    def __init__(self, database: Database, group_id: int, member_id: str) -> None:
        self._database = database
        self._who: dict[str, object] = {"group_id": group_id, "member_id": member_id}

    def load(self, partition: PartitionId, lp_from: int, lp_to: int, committed: int) -> Loaded:
        """Return what is parked and dead of a partition. Call it with the pull lock taken: then nobody adds to it."""
        facts = self._who | {"partition_id": partition, "committed": committed, "lp_from": lp_from, "lp_to": lp_to}
        # On one connection: each is asked for a sign of life when it is lent, and many partitions are taken at a time.
        with self._database.connection() as connection:
            unsettled = connection.execute(query("parked_unsettled"), facts).fetchall()
            return Loaded(
                _keys(connection, facts),
                [(KeyRef(lp, name), offset) for lp, name, offset in unsettled],
                _dead(connection, facts),
            )

    def dead(self, partition: PartitionId, committed: int) -> set[Identity]:
        """Return what is dead of a partition from an offset on."""
        with self._database.connection() as connection:
            return _dead(connection, self._who | {"partition_id": partition, "committed": committed})

    def keys(self, lp_from: int, lp_to: int) -> list[KeyState]:
        """Return the parked keys of a range of LPs."""
        with self._database.connection() as connection:
            return _keys(connection, self._who | {"lp_from": lp_from, "lp_to": lp_to})

    def write(self, partition: PartitionId, epoch: int, page: Page) -> Written:
        """Write a page in one transaction, and return what comes next. Raises NotOwner; nothing is written then."""
        facts = self._who | {"partition_id": partition, "epoch": epoch}

        def work(connection: Connection) -> Written:
            connection.execute(query("transaction_patience"), PATIENCE)
            if connection.execute(query("parking_hold"), facts).fetchone() is None:
                raise NotOwner(f"epoch {epoch} of partition {partition} is not in force")
            written = Written()
            self._hold_keys(connection, page)
            self._put_keys(connection, self._living(connection, page))
            self._put_messages(connection, facts, page, written)
            self._bury(connection, facts, [*page.burials, *(t.burial for t in page.turns if t.burial is not None)])
            for turn in page.turns:
                self._take(connection, facts, turn, written)
            failpoint("parking.before_commit")
            return written

        written = self._database.transaction(work)
        failpoint("parking.after_commit")
        return written

    def note(self, notes: Iterable[AttemptNote]) -> None:
        """Note failed attempts, for people: under no epoch, since an attempt was one whoever made it."""
        rows = [(n.identity.lp, n.identity.source, n.identity.seq, n.attempt, n.error) for n in notes]
        columns = _columns(("lps", "sources", "seqs", "attempts", "errors"), rows)
        with self._database.connection() as connection:
            connection.execute(query("failed_attempts_put"), self._who | columns)

    def _hold_keys(self, connection: Connection, page: Page) -> None:
        refs = [*{ref for ref, _ in page.messages} | {turn.ref for turn in page.turns}]
        if len(refs) > 1:
            connection.execute(query("parked_keys_hold"), self._who | _columns(("lps", "names"), refs))

    def _living(self, connection: Connection, page: Page) -> list[KeyEntry]:
        """Return the keys to be parked but those whose failed message is dead: the answer to parking them was lost, and
        an operator let it die before it was asked for again."""
        if not page.entries:
            return []
        heads: dict[KeyRef, Identity] = {}
        for ref, record in page.messages:
            heads.setdefault(ref, record.identity)
        asked = [(i.lp, i.source, i.seq) for i in (heads[e.ref] for e in page.entries if e.ref in heads)]
        facts = self._who | _columns(("lps", "sources", "seqs"), asked)
        dead = {Identity(*row) for row in connection.execute(query("dead_named"), facts).fetchall()}
        return [entry for entry in page.entries if heads.get(entry.ref) not in dead]

    def _put_keys(self, connection: Connection, entries: Sequence[KeyEntry]) -> None:
        if entries:
            rows = [(*entry.ref, entry.cause, entry.wait_s, entry.attempts) for entry in entries]
            columns = _columns(("lps", "names", "causes", "waits_s", "attempts"), rows)
            connection.execute(query("parked_keys_put"), self._who | columns)

    def _put_messages(
        self,
        connection: Connection,
        facts: dict[str, object],
        page: Page,
        written: Written,
    ) -> None:
        if not page.messages:
            return
        refs = list({ref for ref, _ in page.messages})
        there = connection.execute(query("parked_keys_there"), self._who | _columns(("lps", "names"), refs)).fetchall()
        parked = {KeyRef(*row) for row in there}
        written.gone = set(refs) - parked
        rows = [
            (*ref, record.identity.source, record.identity.seq, record.offset, record.key, record.m, record.body)
            for ref, record in page.messages
            if ref in parked
        ]
        columns = _columns(("lps", "names", "sources", "seqs", "offsets", "keys", "ms", "bodies"), rows)
        put = connection.execute(query("parked_messages_put"), facts | columns).fetchall()
        # What comes again, after a seek or a death, may be in front of what failed. New keys have their own counts.
        new = {entry.ref for entry in page.entries}
        joined = [row for row in put if KeyRef(row[0], row[1]) not in new]
        if joined:
            heads = _columns(("lps", "names"), [row[:2] for row in joined])
            identities = [str(Identity(source, lp, seq)) for lp, _, source, seq in joined]
            connection.execute(query("parked_heads_put"), self._who | heads | {"identities": identities})

    def _bury(self, connection: Connection, facts: dict[str, object], burials: Sequence[Burial]) -> None:
        if not burials:
            return
        rows = [
            (lp, source, seq, record.offset, record.key, record.m, record.body if keep else None, cause, reason, count)
            for (record, cause, reason, count, keep) in burials
            for source, lp, seq in [record.identity]
        ]
        names = ("lps", "sources", "seqs", "offsets", "keys", "ms", "bodies", "causes", "reasons", "attempts")
        connection.execute(query("dead_put"), facts | _columns(names, rows))

    def _take(self, connection: Connection, facts: dict[str, object], turn: Turn, written: Written) -> None:
        key = facts | turn.ref._asdict()
        ended = [*turn.handled, *([turn.burial.record] if turn.burial else [])]
        if ended:
            rows = [(lp, source, seq) for source, lp, seq in (record.identity for record in ended)]
            connection.execute(query("parked_messages_end"), key | _columns(("lps", "sources", "seqs"), rows))
        if turn.go_on:
            written.next[turn.ref] = self._next(connection, turn, key, written)
        elif turn.entry is None or not self._put_off(connection, turn.entry, turn.failed, key):
            connection.execute(query("parked_key_rest"), key | {"ended": bool(ended)})
            written.changed |= turn.entry is not None

    def _put_off(
        self, connection: Connection, entry: KeyEntry, failed: Identity | None, key: dict[str, object]
    ) -> bool:
        """Let a parked key wait for its head, which failed; False where that is not its head any more."""
        if failed is None:
            return False
        facts = {"cause": entry.cause, "wait_s": entry.wait_s, "attempts": entry.attempts}
        put = connection.execute(query("parked_key_put"), key | facts | {"source": failed.source, "seq": failed.seq})
        return put.fetchone() is not None

    def _next(self, connection: Connection, turn: Turn, key: dict[str, object], written: Written) -> list[ParkedRecord]:
        """Hand out what is first of a key; with nothing left, end its being parked."""
        # Locked, so that nobody adds to its line between the look at it and its end.
        held = connection.execute(query("parked_hold"), key).fetchone()
        if held is None:
            return []
        attempts = 0 if turn.handled or turn.burial else int(held[2])
        bounds = {"count": 1 if turn.alone else BATCH, "bytes": BATCH_BYTES}
        rows = connection.execute(query("parked_next"), key | bounds).fetchall()
        if not rows:
            if connection.execute(query("parked_key_end"), key).fetchone() is None:
                connection.execute(query("parked_key_rest"), key | {"ended": bool(turn.handled or turn.burial)})
                written.early.add(turn.ref)
            return []
        connection.execute(query("parked_key_start"), key | {"alone": turn.careful, "attempts": attempts})
        return [
            ParkedRecord.of((offset, m, name, body), attempts=0 if at else attempts, redriven=redriven, replay=replay)
            for at, (offset, m, name, body, redriven, replay) in enumerate(rows)
        ]


def _columns(names: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, object]:
    """Return rows as one array per column."""
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def _keys(connection: Connection, facts: dict[str, object]) -> list[KeyState]:
    rows = connection.execute(query("parked_keys"), facts).fetchall()
    return [KeyState(KeyRef(lp, name), *rest) for lp, name, *rest in rows]


def _dead(connection: Connection, facts: dict[str, object]) -> set[Identity]:
    return {Identity(*row) for row in connection.execute(query("dead_unsettled"), facts).fetchall()}
