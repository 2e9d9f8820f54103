"""Bring the partitions of a node that restarted or lost data to what Postgres says they are.

Runs inside of re-arming: under the node's row lock, before the run is armed, so nobody else is served meanwhile.

| Postgres says | Redis has | what is done |
|---|---|---|
| open | nothing | made again with the marks that its LPs came with; relays send the rest |
| open or sealed | its records, no meta | its meta is made from the records: nothing of it is lost |
| open or sealed | its records, no marks | its marks are counted from them, on top of those that its LPs came with |
| open or sealed | records behind the last one that it tells of | they are counted: a call ended in its middle |
| open or sealed | a meta that tells of records, no records | as nothing; what groups have there goes too |
| sealed | its seal, no command record | the command is appended again |
| open, or about to be | importing | its marks are loaded, it is opened |
| sealed | not sealed | sealed anew, and resent from the outbox up to the recorded marks |
| sealed | sealed by another seal | resent in the same way |
| sealed | its tombstone | it counts as deleted: a Postgres that was replaced lost its retirement |
| deleted | anything | only its tombstone is left, again: an old copy of it must not take what nobody would read |

A new seal gets a new name, and Postgres records that one: whoever read the lost command record can't open the gate.
A sealed partition is never seen open meanwhile: a node that was emptied keeps its run, and lines to it. What is resent
goes in with the seal before it taken back and the next one set, in one transaction of Redis.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from psycopg.types.json import Jsonb

from mqlayer.domain.changes import marks_within
from mqlayer.errors import ConfigurationRefused, Conflict, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.partitions import (
    AS_BEFORE,
    MARKS_PER_CALL,
    LogEnds,
    Refused,
    Run,
    Sealed,
    append_command,
    brief_seal_command,
    check_appended,
    clear_commands,
    count_command,
    count_reply,
    create_command,
    ends_command,
    ends_reply,
    load_commands,
    open_command,
    pass_command,
    raise_command,
    reopen_command,
    retire_command,
    seal_command,
    seal_reply,
    word_of,
)
from mqlayer.topics.outboxes import lent_outbox, may_lack_commits_of
from mqlayer.topics.resending import Lent, lost_runs

log = logging.getLogger(__name__)

SCAN_ROUNDS: Final = 1_000
EMPTY: Final = 1 << 52
"""An offset behind all records."""
TOMBSTONES_PER_WRITE: Final = 500
SEEN_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a partition has to be. `seal_id` is empty where it is open."""

    partition: int
    topic_id: int
    topic: str
    lp_from: int
    lp_to: int
    born_in: int | None
    change_id: int | None
    seal_id: str
    marks: Mapping[str, int]

    @property
    def change(self) -> int | str:
        """The route change that it was made for, as its node keeps it."""
        return "" if self.born_in is None else self.born_in


Flaw = Literal["", "meta", "marks", "tail", "command"]
"""What does not go together in a partition that has its records: meta or marks are gone, the end is not counted, or the
command is not there."""


class Found(NamedTuple):
    """What a partition is on the node: no state where there is none, or where its records are gone."""

    state: str | None
    seal_id: str
    next_offset: int
    flaw: Flaw = ""

    @classmethod
    def of(cls, ends: LogEnds) -> Found:
        """Return what its records, its marks and its meta come to."""
        if not ends.state:
            return cls(None, "", 1) if ends.records < 0 else cls("torn", "", max(1, ends.behind), "meta")
        if ends.state == "deleted":
            return cls(ends.state, "", 1)
        if ends.records < 0 and ends.next_offset > 1:
            return cls(None, "", 1)
        return cls(ends.state, ends.seal_id, max(ends.next_offset, ends.behind), _flaw(ends))


def _flaw(ends: LogEnds) -> Flaw:
    if ends.records > 0 and not ends.has_marks:
        return "marks"
    if ends.behind > ends.next_offset:
        return "tail"
    return "command" if ends.state == "sealed" and not ends.command else ""


@dataclass(slots=True)
class Mended:
    """What was done: partitions made again, opened again with their parents' marks, sealed again, counted again from
    their records; messages that nobody can bring back."""

    remade: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return it for an audit row."""
        lost = {str(partition): count for partition, count in self.lost.items()}
        done = {"partitions_remade": self.remade, "opened": self.opened, "sealed": self.sealed, "lost": lost}
        return done | ({"counted": self.counted} if self.counted else {})


class Mender:
    """Mends one node. `application` is the database whose outbox this process can read; `empty` says that the node's
    data are gone, whatever is there under another prefix."""

    def __init__(
        self,
        connection: Connection,
        line: NodeConnection,
        *,
        prefix: str,
        application: Database | None,
        accept_loss: bool,
        accept_loss_of: frozenset[int] = frozenset(),
        empty: bool = False,
    ) -> None:
        self._connection, self._line, self._prefix = connection, line, prefix
        self._application, self._empty = application, empty
        self._accept_loss, self._accept_loss_of = accept_loss, accept_loss_of
        self._wanted = [
            Wanted(*row)
            for row in connection.execute(query("node_partitions"), {"node_id": line.node.node_id}).fetchall()
        ]
        self._found = self._look()
        self._raised: Sequence[tuple[int, int, int]] = ()
        self._seen = time.monotonic()
        self.mended = Mended()

    @property
    def needed(self) -> bool:
        """Whether any partition is not what it has to be. Raises ConfigurationRefused for a wrong key prefix."""
        return self.is_empty or self._accept_loss or any(not self._is_right(wanted) for wanted in self._wanted)

    @property
    def is_empty(self) -> bool:
        """Whether the node has none of the partitions that it has to have. Raises ConfigurationRefused as `needed`."""
        states = [self._found[wanted.partition].state for wanted in self._wanted]
        if not states or any(states):
            return False
        if not self._empty:
            self._refuse_other_prefix()
        return True

    def _refuse_other_prefix(self) -> None:
        """Refuse to begin anew where partitions are there under another prefix: then it is we who look wrong.

        Unless one of them is another system's: numbers are the same in all, topics and ranges seldom.
        """
        for other in _prefixes(self._line, self._wanted[0].partition) - {self._prefix}:
            keys = [partition_keys(other, wanted.partition).meta for wanted in self._wanted]
            replies = self._line.call([("HMGET", key, "topic", "lp_from", "lp_to") for key in keys])
            there = [tuple(raise_for_reply(reply, self._line.node.address)) for reply in replies]
            ours = [(w.topic.encode(), b"%d" % w.lp_from, b"%d" % w.lp_to) for w in self._wanted]
            # One that is not there, or a tombstone, says nothing.
            if all(facts[0] is None or facts == own for facts, own in zip(there, ours, strict=True)):
                raise ConfigurationRefused(
                    self._line.node.address,
                    "MQLAYER_KEY_PREFIX",
                    self._prefix,
                    f"{other!r}, as when it was filled; say --empty where that is another system's, and this one's "
                    "data are gone",
                )

    @property
    def refills(self) -> bool:
        """Whether partitions have to be made or filled up again: who dies meanwhile leaves them longer than before."""
        return any(
            self._found[wanted.partition].state is None or (wanted.seal_id and not self._is_right(wanted))
            for wanted in self._wanted
        )

    @property
    def is_emptied(self) -> bool:
        """Whether an open partition is gone."""
        return any(not wanted.seal_id and self._found[wanted.partition].state is None for wanted in self._wanted)

    def look_again(self) -> None:
        """Raise StoreUnavailable where a partition is gone that was mended."""
        gone = [partition for partition, found in self._look().items() if found.state is None]
        if gone:
            raise StoreUnavailable(self._line.node.address, f"it lost partition {gone[0]} again while it was armed")

    @property
    def offsets(self) -> dict[int, int]:
        """Which offset each partition gives out next; 1 where it is gone."""
        return {partition: found.next_offset for partition, found in self._found.items()}

    def lower(self) -> None:
        """Note what goes by offsets that are gone: they are given out again, to messages that nobody has seen there.

        To be committed before partitions are filled up again: whoever does that anew after a crash finds them longer.
        """
        facts = {"partitions": list(self.offsets), "offsets": list(self.offsets.values())}
        self._connection.execute(query("group_starts_lower"), facts)
        self._connection.execute(query("archive_progress_lower"), facts)
        self._connection.execute(query("dead_adrift"), facts)

    def mend(self, raised: Sequence[tuple[int, int, int]]) -> None:
        """Do what is needed, under the epochs (group, partition, epoch). Raises StoreUnavailable or Conflict."""
        self._raised = raised
        self.lower()
        for wanted in self._wanted:
            if not self._is_right(wanted):
                self._mend_one(wanted)
            if self._accept_loss and not wanted.seal_id:
                self._let_go_on(wanted)
        self._bury()

    def _bury(self) -> None:
        rows = self._connection.execute(query("node_tombstones"), {"node_id": self._line.node.node_id}).fetchall()
        for at in range(0, len(rows), TOMBSTONES_PER_WRITE):
            some = rows[at : at + TOMBSTONES_PER_WRITE]
            commands = [
                retire_command(self._line, self._prefix, partition, groups, archived=archived)
                for partition, groups, archived in some
            ]
            for reply in self._line.call(commands):
                raise_for_reply(reply, self._line.node.address)

    def _look(self) -> dict[int, Found]:
        return dict(zip([wanted.partition for wanted in self._wanted], self._look_at(self._wanted), strict=True))

    def _look_at(self, some: Sequence[Wanted]) -> list[Found]:
        commands = [ends_command(self._line, self._prefix, wanted.partition) for wanted in some]
        replies = self._line.call(commands) if commands else []
        if any(map(is_missing_script, replies)):
            self._line.reload_scripts()
            replies = self._line.call(commands)
        return [Found.of(ends_reply(reply, self._line.node.address)) for reply in replies]

    def _is_right(self, wanted: Wanted) -> bool:
        state, seal, _, flaw = self._found[wanted.partition]
        if wanted.seal_id:
            return state == "sealed" and seal == wanted.seal_id and not flaw
        # Sealed for a change that Postgres has not recorded as sealed: whoever drives it goes on from there.
        return state in ("open", "sealed") and flaw in ("", "command")

    def _mend_one(self, wanted: Wanted) -> None:
        if self._found[wanted.partition].flaw:
            self._mend_flaw(wanted)
            if self._is_right(wanted):
                return
        state = self._found[wanted.partition].state
        if state == "deleted" and wanted.seal_id and self._is_retired(wanted):
            return
        if state is None:
            self._make(wanted)
            self.mended.remade.append(wanted.partition)
        if state in (None, "importing"):
            self._load(wanted)
        if wanted.seal_id:
            self._seal_again(wanted)
            self.mended.sealed.append(wanted.partition)
        elif state in (None, "importing"):
            self._open(wanted)
        failpoint("mend.after_one")

    def _mend_flaw(self, wanted: Wanted) -> None:
        """Have a partition tell of the records that it holds; look what it is then."""
        found = self._found[wanted.partition]
        if found.flaw == "command":
            change = wanted.change_id or 0
            seal = seal_command(self._line, self._prefix, wanted.partition, change, str(uuid.uuid4()))
            self._line.call([seal])
        else:
            self._count(wanted, found)
            self.mended.counted.append(wanted.partition)
        (self._found[wanted.partition],) = self._look_at([wanted])

    def _count(self, wanted: Wanted, found: Found) -> None:
        """Count what a partition holds, from its first record where its meta or its marks are gone."""
        line, address, partition = self._line, self._line.node.address, wanted.partition
        marks: list[tuple[str, int]] = []
        start = 0
        if found.flaw != "tail":
            marks, start = list(self._came_with(wanted).items()), 1
        if found.flaw == "meta":
            # Not open before all is counted: whoever appends goes by it.
            self._create(wanted)
        for at in range(0, len(marks), MARKS_PER_CALL):
            some = dict(marks[at : at + MARKS_PER_CALL])
            raise_for_reply(
                line.call([count_command(line, self._prefix, partition, start=EMPTY, marks=some)])[0], address
            )
        while True:
            answer = count_reply(line.call([count_command(line, self._prefix, partition, start=start)])[0], address)
            if isinstance(answer, Refused):
                raise StoreUnavailable(address, f"partition {partition} can't be counted: {answer.word}")
            if answer[1] == start or start == 0:
                break
            start = answer[1]
        if found.flaw == "meta" and not wanted.seal_id:
            self._open(wanted)

    def _is_retired(self, wanted: Wanted) -> bool:
        facts = {"partition_id": wanted.partition}
        if not self._connection.execute(query("partition_retired_before"), facts).rowcount:
            return False
        log.warning("retirement_was_lost", extra={"partition": wanted.partition})
        return True

    def _make(self, wanted: Wanted) -> None:
        # At once: one that was emptied a moment ago has forgotten them, and lets in whoever has an epoch of before.
        epochs = [
            raise_command(self._line, self._prefix, partition, group, epoch, whole=True)
            for group, partition, epoch in self._raised
            if partition == wanted.partition
        ]
        # What groups have there goes by offsets of records that are gone: they are given out again.
        groups = [row[0] for row in self._connection.execute(query("forgotten_groups"), {"topic_id": wanted.topic_id})]
        clear = clear_commands(self._line, self._prefix, wanted.partition, groups, whole=True)
        self._create(wanted, *clear, *epochs)

    def _create(self, wanted: Wanted, *before: Command) -> None:
        """Make a partition's meta, not open yet, with nobody's calls between that and what is done before."""
        made = create_command(
            self._line, self._prefix, wanted.partition, wanted.topic, wanted.lp_from, wanted.lp_to, "importing",
            wanted.change,
        )  # fmt: skip
        word = word_of(self._in_one([*before, made])[-1], self._line.node.address)
        if word == "conflict":
            raise Conflict(f"partition {wanted.partition} is on {self._line.node.address} otherwise than it has to be")

    def _load(self, wanted: Wanted) -> None:
        """Give a partition that is not open yet the marks that its LPs came with."""
        if wanted.born_in is not None:
            marks = self._came_with(wanted)
            self._open_by(wanted, load_commands(self._line, self._prefix, wanted.partition, wanted.change, marks))
            self.mended.opened.append(wanted.partition)

    def _came_with(self, wanted: Wanted) -> dict[str, int]:
        if wanted.born_in is None:
            return {}
        rows = self._connection.execute(query("seal_marks_of"), {"change_id": wanted.born_in}).fetchall()
        return dict(marks_within((row[0] for row in rows), wanted.lp_from, wanted.lp_to))

    def _open(self, wanted: Wanted) -> None:
        self._open_by(wanted, [self._open_command(wanted)])

    def _open_by(self, wanted: Wanted, commands: list[Command]) -> None:
        for reply in self._line.call(commands) if commands else ():
            self._check_opening(wanted, reply)

    def _open_command(self, wanted: Wanted) -> Command:
        return open_command(self._line, self._prefix, wanted.partition, wanted.change)

    def _check_opening(self, wanted: Wanted, reply: Any) -> None:
        word, *state = raise_for_reply(reply, self._line.node.address)
        if state == [b"importing"]:
            raise Conflict(
                f"partition {wanted.partition} on {self._line.node.address} waits for the marks of another route change"
            )
        # A conflict otherwise: it was opened, and closed, by who is ahead of us.
        if word not in (b"loaded", b"open", b"conflict"):
            raise StoreUnavailable(
                self._line.node.address, f"partition {wanted.partition} can't be opened: {word.decode()}"
            )

    def _seal_again(self, wanted: Wanted) -> None:
        """Bring a sealed partition that fell back up to its recorded marks, sealed under a new name."""
        state, seal_id, _, _ = self._found[wanted.partition]
        if state in (None, "importing"):
            # For others it goes from not being open to being closed.
            opened, seal_id = self._at_once(wanted, [self._open_command(wanted)])
            self._check_opening(wanted, opened)
        self._count_lost(wanted, self._resend(wanted, seal_id) + self._given_up(wanted))
        failpoint("mend.after_resend")
        seal = seal_command(self._line, self._prefix, wanted.partition, wanted.change_id or 0, str(uuid.uuid4()))
        answer = self._sealed(wanted, self._line.call([seal])[0])
        failpoint("mend.after_seal")
        facts = {
            "partition_id": wanted.partition,
            "change_id": wanted.change_id,
            "seal_id": answer.seal_id,
            "next_offset": answer.next_offset,
            "run_id": self._line.connect().run_id,
            "marks": Jsonb(dict(wanted.marks)),
            "away": False,
            # A partition that was sealed while its node was away may hold what its successors hold too.
            "cut": any(seq > wanted.marks.get(name, seq) for name, seq in answer.marks.items()),
        }
        self._connection.execute(query("seal_put"), facts)

    def _marks(self, wanted: Wanted) -> dict[str, int]:
        keys = partition_keys(self._prefix, wanted.partition)
        flat = raise_for_reply(self._line.call([("HGETALL", keys.marks)])[0], self._line.node.address)
        return {name.decode(): int(seq) for name, seq in zip(flat[::2], flat[1::2], strict=True)}

    def _resend(self, wanted: Wanted, seal_id: str) -> int:
        """Append again what the partition had to hold and does not; return how many direct messages are lost.

        `seal_id` is the seal that it has, empty where it is open.
        """
        there = self._marks(wanted)
        short: dict[int, dict[int, tuple[int, int]]] = {}
        for name, seq in wanted.marks.items():
            source, lp = map(int, name.split(":"))
            if there.get(name, 0) < seq:
                short.setdefault(source, {})[lp] = (there.get(name, 0), seq)
        lost = 0
        for source, lps in short.items():
            seal_id, of_source = self._resend_source(wanted, seal_id, source, lps)
            lost += of_source
        return lost

    def _resend_source(
        self, wanted: Wanted, seal_id: str, source: int, lps: Mapping[int, tuple[int, int]]
    ) -> tuple[str, int]:
        """Append what a source's outbox holds; return the seal then, and how many are lost for want of an outbox."""
        row = self._connection.execute(query("source_outbox"), {"source_id": source}).fetchone()
        if row is None or row[0] is None:
            # Directly published: what Redis lost of it is lost.
            return seal_id, _count(lps)
        with lent_outbox(self._application, row[0]) as outbox:
            if outbox is None:
                whose = f"partition {wanted.partition} waits for the relay of outbox {row[0]}"
                raise StoreUnavailable(self._line.node.address, f"{whose}, which can send again what it lost")
            seal_id = self._resend_lps(Lent(source, row[0], outbox), wanted, seal_id, lps)
        return seal_id, 0

    def _resend_lps(self, lent: Lent, wanted: Wanted, seal_id: str, lps: Mapping[int, tuple[int, int]]) -> str:
        """Append what many LPs lack, a page at a time: nobody is served by the node before that is done."""

        def give_up(lp: int, after: int, to: int) -> bool:
            self._give_up(wanted, lent.source, lp, after, to)
            return True

        sure = self._sure(lent.outbox, wanted, lps)
        address = self._line.node.address
        for runs in lost_runs(lent, wanted.topic_id, sure, give_up, address=address):
            if runs:
                seal_id = self._append(wanted, seal_id, lent.source, runs)
            self._stay()
        for lp, (_, to) in lps.items():
            if (known := sure[lp][1]) < to:
                give_up(lp, known, to)
        return seal_id

    def _sure(
        self, outbox: Connection, wanted: Wanted, lps: Mapping[int, tuple[int, int]]
    ) -> Mapping[int, tuple[int, int]]:
        """Return of what LPs lack the part of which the outbox has these very messages, and no others by their numbers.

        What is recorded as relayed was committed before the outbox lost commits. Of what is behind, nothing is known.
        """
        if not may_lack_commits_of(outbox, self._connection):
            return lps
        rows = outbox.execute(query("relayed_all"), {"topic_id": wanted.topic_id}).fetchall()
        relayed: dict[int, int] = dict(rows)
        return {lp: (mark, max(mark, min(to, relayed.get(lp, 0)))) for lp, (mark, to) in lps.items()}

    def _stay(self) -> None:
        """Have Postgres see that this transaction goes on: one that stands still does not keep its locks."""
        if time.monotonic() - self._seen > SEEN_EVERY_S:
            self._connection.execute(query("clock"))
            self._seen = time.monotonic()

    def _let_go_on(self, wanted: Wanted) -> None:
        """Have LPs go on whose next rows the outbox does not hold any more, and let go what was held for them."""
        outboxes = self._connection.execute(query("outbox_sources")).fetchall()
        if len(outboxes) != 1:
            return
        ((source, outbox_uuid),) = outboxes
        there = self._marks(wanted)
        facts = {"topic_id": wanted.topic_id, "lp_from": wanted.lp_from, "lp_to": wanted.lp_to}
        with lent_outbox(self._application, outbox_uuid) as outbox:
            if outbox is None:
                return
            for lp, _, floor in outbox.execute(query("outbox_proof"), facts).fetchall():
                mark = there.get(f"{source}:{lp}", 0)
                if mark < floor:
                    self._give_up(wanted, source, lp, mark, floor)
                    outbox.execute(query("set_aside_remove"), {"topic_id": wanted.topic_id, "lp": lp})
        self._count_lost(wanted, self._given_up(wanted))

    def _append(self, wanted: Wanted, seal_id: str, source: int, runs: Sequence[Run]) -> str:
        """Append rows of some LPs to a sealed partition; return the seal that it has then."""
        append = append_command(self._line, self._prefix, wanted.partition, source, runs, backlog=AS_BEFORE)
        commands = [append]
        if seal_id:
            short = (f"{source}:{runs[0].lp}", runs[0].first - 1)
            commands.insert(0, reopen_command(self._line, self._prefix, wanted.partition, seal_id, *short))
        reply, sealed = self._at_once(wanted, commands)
        check_appended(reply, self._line.node.address)
        return sealed

    def _at_once(self, wanted: Wanted, commands: list[Command]) -> tuple[Any, str]:
        """Do what needs a partition to be open, and seal it before anybody else comes.

        Return the reply to the last of the commands, and the name of the seal that it has then.
        """
        # By its text: a server that forgot all scripts may know the others again, and not this one.
        seal = brief_seal_command(self._line, self._prefix, wanted.partition, wanted.change_id or 0, str(uuid.uuid4()))
        *_, last, sealed = self._in_one([*commands, seal])
        return last, self._sealed(wanted, sealed).seal_id

    def _in_one(self, commands: list[Command]) -> list[Any]:
        """Do commands with nobody else's in between; return the replies."""
        _, *queued, done = self._line.call([("MULTI",), *commands, ("EXEC",)])
        for reply in queued:
            raise_for_reply(reply, self._line.node.address)
        return [
            raise_for_reply(reply, self._line.node.address) for reply in raise_for_reply(done, self._line.node.address)
        ]

    def _sealed(self, wanted: Wanted, reply: Any) -> Sealed:
        answer = seal_reply(reply, self._line.node.address)
        if not isinstance(answer, Sealed):
            raise Conflict(f"partition {wanted.partition} can't be sealed again: {answer.word} {answer.fact}".rstrip())
        return answer

    def _give_up(self, wanted: Wanted, source: int, lp: int, after: int, to: int) -> None:
        """Go on behind seqs that the outbox does not hold any more, where an operator said so.

        The partition itself counts them with the mark, or nobody would know of them after a mending that broke off.
        """
        if not self._accept_loss and wanted.partition not in self._accept_loss_of:
            raise Conflict(
                f"partition {wanted.partition} lost messages {after + 1} to {to} of LP {lp}, and the outbox does not "
                "hold them any more, or lost commits itself and may have others under these numbers",
                f"mqlayer node rearm {self._line.node.name} --accept-loss goes on without them",
            )
        passed = pass_command(self._line, self._prefix, wanted.partition, source, lp, after, to)
        word, fact = raise_for_reply(self._line.call([passed])[0], self._line.node.address)
        if word != b"passed":
            raise StoreUnavailable(self._line.node.address, f"LP {lp} is at {fact} by now: somebody else mends it too")

    def _given_up(self, wanted: Wanted) -> int:
        """Return how many seqs were passed by in a partition, in all its mendings and those that broke off."""
        (reply,) = self._line.call([("HGET", partition_keys(self._prefix, wanted.partition).meta, "lost")])
        return int(raise_for_reply(reply, self._line.node.address) or 0)

    def _count_lost(self, wanted: Wanted, in_all: int) -> None:
        """Count what a partition lost in all, but for what the audit rows of earlier mendings count."""
        if not in_all:
            return
        row = self._connection.execute(query("lost_audited"), {"partition": str(wanted.partition)}).fetchone()
        lost = in_all - (row[0] if row else 0)
        if lost > 0:
            self.mended.lost[wanted.partition] = lost
            log.error("messages_lost", extra={"partition": wanted.partition, "count": lost})


def _prefixes(line: NodeConnection, partition: int) -> set[str]:
    """Return the prefixes under which a node has a partition of that number, as far as it is looked at."""
    cursor, prefixes, end = b"0", set[str](), b":{%d}:meta" % partition
    for _ in range(SCAN_ROUNDS):
        (reply,) = line.call([(b"SCAN", cursor, b"MATCH", b"*" + end, b"COUNT", 1000)])
        cursor, found = raise_for_reply(reply, line.node.address)
        prefixes.update(key.removesuffix(end).decode() for key in found)
        if cursor == b"0":
            break
    return prefixes


def _count(lps: Mapping[int, tuple[int, int]]) -> int:
    return sum(to - after for after, to in lps.values())
