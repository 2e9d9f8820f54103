"""Repair the partitions of a node that restarted or lost data: `docs/design/arming-nodes.md`.

Runs under the lock on the node's row, before its run is armed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from psycopg.types.json import Jsonb

from mqlayer.domain.route_changes import marks_within
from mqlayer.errors import ConfigurationRefused, Conflict, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import (
    AS_BEFORE,
    MARKS_PER_CALL,
    LogEnds,
    MessageRun,
    Refused,
    Sealed,
    append_command,
    brief_seal_command,
    check_appended,
    clear_commands,
    create_command,
    ends_command,
    ends_reply,
    fence_command,
    load_commands,
    open_command,
    recount_command,
    recount_reply,
    reopen_command,
    retire_command,
    seal_command,
    seal_reply,
    skip_marks_command,
    status_of,
)
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.outbox_access import borrow_outbox, may_lack_commits_of
from mqlayer.topics.outbox_resend import BorrowedOutbox, lost_runs

log = logging.getLogger(__name__)

SCAN_ROUNDS: Final = 1_000
EMPTY: Final = 1 << 52
TOMBSTONES_PER_WRITE: Final = 500
SEEN_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class DesiredPartition:
    """A partition's state according to Postgres; an open one has no `seal_id`."""

    partition: int
    topic_id: int
    topic: str
    lp_from: int
    lp_to: int
    created_by_change: int | None
    change_id: int | None
    seal_id: str
    marks: Mapping[str, int]

    @property
    def change(self) -> int | str:
        """Its route change, as stored on the node."""
        return "" if self.created_by_change is None else self.created_by_change


Flaw = Literal["", "meta", "marks", "tail", "command"]
"""Damage: meta or marks are lost, records lie above the counted end, or the command record is missing."""


class ObservedPartition(NamedTuple):
    """A partition's state on the node; None if it or its records are missing."""

    state: str | None
    seal_id: str
    next_offset: int
    flaw: Flaw = ""

    @classmethod
    def of(cls, ends: LogEnds) -> ObservedPartition:
        """Judge records, marks and meta."""
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
class RepairReport:
    """Repaired partitions, and lost messages per partition."""

    recreated: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return an audit row's facts."""
        lost = {str(partition): count for partition, count in self.lost.items()}
        done = {"partitions_remade": self.recreated, "opened": self.opened, "sealed": self.sealed, "lost": lost}
        return done | ({"counted": self.counted} if self.counted else {})


class NodeRepair:
    """Repairs one node.

    Resends from the outbox of the runtime's application database. `empty`: the node's data are lost; ignore other
    prefixes.
    """

    def __init__(
        self,
        runtime: Runtime,
        connection: Connection,
        node_connection: NodeConnection,
        *,
        accept_loss: bool,
        accept_loss_of: frozenset[int] = frozenset(),
        empty: bool = False,
    ) -> None:
        self._connection, self._node_connection, self._prefix = connection, node_connection, runtime.prefix
        self._application, self._empty = runtime.application, empty
        self._accept_loss, self._accept_loss_of = accept_loss, accept_loss_of
        self._desired = [
            DesiredPartition(*row)
            for row in connection.execute(
                query("node_partitions"), {"node_id": node_connection.node.node_id}
            ).fetchall()
        ]
        self._observed = self._observe()
        self._raised: Sequence[tuple[int, int, int]] = ()
        self._seen = time.monotonic()
        self.report = RepairReport()

    @property
    def needed(self) -> bool:
        """Whether a partition differs from Postgres. Raises ConfigurationRefused for a wrong key prefix."""
        return self.is_empty or self._accept_loss or any(not self._is_right(desired) for desired in self._desired)

    @property
    def is_empty(self) -> bool:
        """Whether all partitions are missing. Raises as `needed`."""
        states = [self._observed[desired.partition].state for desired in self._desired]
        if not states or any(states):
            return False
        if not self._empty:
            self._refuse_other_prefix()
        return True

    def _refuse_other_prefix(self) -> None:
        """Refuse another prefix, unless topic or LP range differ: then it is another system's."""
        for other in _prefixes(self._node_connection, self._desired[0].partition) - {self._prefix}:
            keys = [partition_keys(other, desired.partition).meta for desired in self._desired]
            replies = self._node_connection.call([("HMGET", key, "topic", "lp_from", "lp_to") for key in keys])
            there = [tuple(raise_for_reply(reply, self._node_connection.node.address)) for reply in replies]
            ours = [(w.topic.encode(), b"%d" % w.lp_from, b"%d" % w.lp_to) for w in self._desired]
            # A missing partition or a tombstone proves nothing.
            if all(facts[0] is None or facts == own for facts, own in zip(there, ours, strict=True)):
                raise ConfigurationRefused(
                    self._node_connection.node.address,
                    "MQLAYER_KEY_PREFIX",
                    self._prefix,
                    f"{other!r}, as when it was filled; say --empty where that is another system's, and this one's "
                    "data are gone",
                )

    @property
    def needs_restore(self) -> bool:
        """Whether partitions need creating or refilling."""
        return any(
            self._observed[desired.partition].state is None or (desired.seal_id and not self._is_right(desired))
            for desired in self._desired
        )

    @property
    def is_emptied(self) -> bool:
        """Whether an open partition is missing."""
        return any(not desired.seal_id and self._observed[desired.partition].state is None for desired in self._desired)

    def recheck(self) -> None:
        """Raise StoreUnavailable if a partition disappeared again."""
        gone = [partition for partition, found in self._observe().items() if found.state is None]
        if gone:
            raise StoreUnavailable(
                self._node_connection.node.address, f"it lost partition {gone[0]} again while it was armed"
            )

    @property
    def offsets(self) -> dict[int, int]:
        """Each partition's next offset; 1 for a missing one."""
        return {partition: found.next_offset for partition, found in self._observed.items()}

    def lower(self) -> None:
        """Lower recorded positions above lost offsets: Redis assigns these again.

        Commit before refilling: after a crash the partitions are longer.
        """
        facts = {"partitions": list(self.offsets), "offsets": list(self.offsets.values())}
        self._connection.execute(query("group_starts_lower"), facts)
        self._connection.execute(query("archive_progress_lower"), facts)
        self._connection.execute(query("dead_log_lost"), facts)

    def repair(self, raised: Sequence[tuple[int, int, int]]) -> None:
        """Repair under new epochs (group, partition, epoch). Raises StoreUnavailable, Conflict."""
        self._raised = raised
        self.lower()
        for desired in self._desired:
            if not self._is_right(desired):
                self._repair_one(desired)
            if self._accept_loss and not desired.seal_id:
                self._unblock(desired)
        self._delete_retired()

    def _delete_retired(self) -> None:
        rows = self._connection.execute(
            query("node_tombstones"), {"node_id": self._node_connection.node.node_id}
        ).fetchall()
        for at in range(0, len(rows), TOMBSTONES_PER_WRITE):
            some = rows[at : at + TOMBSTONES_PER_WRITE]
            commands = [
                retire_command(self._node_connection, self._prefix, partition, groups, archived=archived)
                for partition, groups, archived in some
            ]
            for reply in self._node_connection.call(commands):
                raise_for_reply(reply, self._node_connection.node.address)

    def _observe(self) -> dict[int, ObservedPartition]:
        return dict(
            zip([desired.partition for desired in self._desired], self._observe_some(self._desired), strict=True)
        )

    def _observe_some(self, some: Sequence[DesiredPartition]) -> list[ObservedPartition]:
        commands = [ends_command(self._node_connection, self._prefix, desired.partition) for desired in some]
        replies = self._node_connection.call(commands) if commands else []
        return [ObservedPartition.of(ends_reply(reply, self._node_connection.node.address)) for reply in replies]

    def _is_right(self, desired: DesiredPartition) -> bool:
        state, seal, _, flaw = self._observed[desired.partition]
        if desired.seal_id:
            return state == "sealed" and seal == desired.seal_id and not flaw
        # A seal that Postgres has not recorded belongs to a route change in progress, which continues from there.
        return state in ("open", "sealed") and flaw in ("", "command")

    def _repair_one(self, desired: DesiredPartition) -> None:
        if self._observed[desired.partition].flaw:
            self._repair_flaw(desired)
            if self._is_right(desired):
                return
        state = self._observed[desired.partition].state
        if state == "deleted" and desired.seal_id and self._is_retired(desired):
            return
        if state is None:
            self._make(desired)
            self.report.recreated.append(desired.partition)
        if state in (None, "importing"):
            self._load(desired)
        if desired.seal_id:
            self._reseal(desired)
            self.report.sealed.append(desired.partition)
        elif state in (None, "importing"):
            self._open(desired)
        failpoint("repair.after_one")

    def _repair_flaw(self, desired: DesiredPartition) -> None:
        found = self._observed[desired.partition]
        if found.flaw == "command":
            change = desired.change_id or 0
            seal = seal_command(self._node_connection, self._prefix, desired.partition, change, str(uuid.uuid4()))
            self._node_connection.call([seal])
        else:
            self._count(desired, found)
            self.report.counted.append(desired.partition)
        (self._observed[desired.partition],) = self._observe_some([desired])

    def _count(self, desired: DesiredPartition, found: ObservedPartition) -> None:
        connection, address, partition = self._node_connection, self._node_connection.node.address, desired.partition
        marks: list[tuple[str, int]] = []
        start = 0
        if found.flaw != "tail":
            marks, start = list(self._came_with(desired).items()), 1
        if found.flaw == "meta":
            # Not open before all is counted: appends rely on the count.
            self._create(desired)
        for at in range(0, len(marks), MARKS_PER_CALL):
            some = dict(marks[at : at + MARKS_PER_CALL])
            raise_for_reply(
                connection.call([recount_command(connection, self._prefix, partition, start=EMPTY, marks=some)])[0],
                address,
            )
        while True:
            answer = recount_reply(
                connection.call([recount_command(connection, self._prefix, partition, start=start)])[0], address
            )
            if isinstance(answer, Refused):
                raise StoreUnavailable(address, f"partition {partition} can't be counted: {answer.status}")
            if answer[1] == start or start == 0:
                break
            start = answer[1]
        if found.flaw == "meta" and not desired.seal_id:
            self._open(desired)

    def _is_retired(self, desired: DesiredPartition) -> bool:
        facts = {"partition_id": desired.partition}
        if not self._connection.execute(query("partition_retired_before"), facts).rowcount:
            return False
        log.warning("retirement_lost", extra={"partition": desired.partition})
        return True

    def _make(self, desired: DesiredPartition) -> None:
        # In the same transaction: an emptied server has forgotten the epochs and would accept stale ones.
        epochs = [
            fence_command(self._node_connection, self._prefix, partition, group, epoch, whole=True)
            for group, partition, epoch in self._raised
            if partition == desired.partition
        ]
        # Groups' positions refer to lost records, and their offsets are assigned again.
        groups = [row[0] for row in self._connection.execute(query("forgotten_groups"), {"topic_id": desired.topic_id})]
        clear = clear_commands(self._node_connection, self._prefix, desired.partition, groups, whole=True)
        self._create(desired, *clear, *epochs)

    def _create(self, desired: DesiredPartition, *before: Command) -> None:
        made = create_command(
            self._node_connection, self._prefix, desired.partition, desired.topic, desired.lp_from, desired.lp_to,
            "importing",
            desired.change,
        )  # fmt: skip
        word = status_of(self._in_transaction([*before, made])[-1], self._node_connection.node.address)
        if word == "conflict":
            raise Conflict(
                f"partition {desired.partition} is on {self._node_connection.node.address} otherwise than it has to be"
            )

    def _load(self, desired: DesiredPartition) -> None:
        if desired.created_by_change is not None:
            marks = self._came_with(desired)
            self._open_by(
                desired, load_commands(self._node_connection, self._prefix, desired.partition, desired.change, marks)
            )
            self.report.opened.append(desired.partition)

    def _came_with(self, desired: DesiredPartition) -> dict[str, int]:
        if desired.created_by_change is None:
            return {}
        rows = self._connection.execute(query("seal_marks_of"), {"change_id": desired.created_by_change}).fetchall()
        return dict(marks_within((row[0] for row in rows), desired.lp_from, desired.lp_to))

    def _open(self, desired: DesiredPartition) -> None:
        self._open_by(desired, [self._open_command(desired)])

    def _open_by(self, desired: DesiredPartition, commands: list[Command]) -> None:
        for reply in self._node_connection.call(commands) if commands else ():
            self._check_opening(desired, reply)

    def _open_command(self, desired: DesiredPartition) -> Command:
        return open_command(self._node_connection, self._prefix, desired.partition, desired.change)

    def _check_opening(self, desired: DesiredPartition, reply: Any) -> None:
        word, *state = raise_for_reply(reply, self._node_connection.node.address)
        if state == [b"importing"]:
            raise Conflict(
                f"partition {desired.partition} on {self._node_connection.node.address} waits for the marks of "
                f"another route change"
            )
        # Any other conflict: another process opened and sealed it first.
        if word not in (b"loaded", b"open", b"conflict"):
            raise StoreUnavailable(
                self._node_connection.node.address, f"partition {desired.partition} can't be opened: {word.decode()}"
            )

    def _reseal(self, desired: DesiredPartition) -> None:
        """Refill a sealed partition up to its recorded marks; seal it again."""
        state, seal_id, _, _ = self._observed[desired.partition]
        if state in (None, "importing"):
            # Other clients never see it open.
            opened, seal_id = self._at_once(desired, [self._open_command(desired)])
            self._check_opening(desired, opened)
        self._count_lost(desired, self._resend(desired, seal_id) + self._skipped_count(desired))
        failpoint("repair.after_resend")
        seal = seal_command(
            self._node_connection, self._prefix, desired.partition, desired.change_id or 0, str(uuid.uuid4())
        )
        answer = self._sealed(desired, self._node_connection.call([seal])[0])
        failpoint("repair.after_seal")
        facts = {
            "partition_id": desired.partition,
            "change_id": desired.change_id,
            "seal_id": answer.seal_id,
            "next_offset": answer.next_offset,
            "run_id": self._node_connection.connect().run_id,
            "marks": Jsonb(dict(desired.marks)),
            "unreachable": False,
            # Sealed while its node was unavailable, it may hold messages that its successors hold too.
            "cut": any(seq > desired.marks.get(name, seq) for name, seq in answer.marks.items()),
        }
        self._connection.execute(query("seal_put"), facts)

    def _marks(self, desired: DesiredPartition) -> dict[str, int]:
        keys = partition_keys(self._prefix, desired.partition)
        flat = raise_for_reply(
            self._node_connection.call([("HGETALL", keys.marks)])[0], self._node_connection.node.address
        )
        return {name.decode(): int(seq) for name, seq in zip(flat[::2], flat[1::2], strict=True)}

    def _resend(self, desired: DesiredPartition, seal_id: str) -> int:
        """Append missing messages; return the lost direct ones."""
        there = self._marks(desired)
        short: dict[int, dict[int, tuple[int, int]]] = {}
        for name, seq in desired.marks.items():
            source, lp = map(int, name.split(":"))
            if there.get(name, 0) < seq:
                short.setdefault(source, {})[lp] = (there.get(name, 0), seq)
        lost = 0
        for source, lps in short.items():
            seal_id, of_source = self._resend_source(desired, seal_id, source, lps)
            lost += of_source
        return lost

    def _resend_source(
        self, desired: DesiredPartition, seal_id: str, source: int, lps: Mapping[int, tuple[int, int]]
    ) -> tuple[str, int]:
        """Return the new seal id and the messages without outbox."""
        row = self._connection.execute(query("source_outbox"), {"source_id": source}).fetchone()
        if row is None or row[0] is None:
            # No outbox to resend direct messages from.
            return seal_id, _count(lps)
        with borrow_outbox(self._application, row[0]) as outbox:
            if outbox is None:
                whose = f"partition {desired.partition} waits for the relay of outbox {row[0]}"
                raise StoreUnavailable(
                    self._node_connection.node.address, f"{whose}, which can send again what it lost"
                )
            seal_id = self._resend_lps(BorrowedOutbox(source, row[0], outbox), desired, seal_id, lps)
        return seal_id, 0

    def _resend_lps(
        self, borrowed: BorrowedOutbox, desired: DesiredPartition, seal_id: str, lps: Mapping[int, tuple[int, int]]
    ) -> str:
        def give_up(lp: int, after: int, to: int) -> bool:
            self._skip_lost(desired, borrowed.source, lp, after, to)
            return True

        sure = self._sure(borrowed.outbox, desired, lps)
        address = self._node_connection.node.address
        for runs in lost_runs(borrowed, desired.topic_id, sure, give_up, address=address):
            if runs:
                seal_id = self._append(desired, seal_id, borrowed.source, runs)
            self._keep_alive()
        for lp, (_, to) in lps.items():
            if (known := sure[lp][1]) < to:
                give_up(lp, known, to)
        return seal_id

    def _sure(
        self, outbox: Connection, desired: DesiredPartition, lps: Mapping[int, tuple[int, int]]
    ) -> Mapping[int, tuple[int, int]]:
        """Return, per LP, the missing range that the outbox provably has: rows relayed before its loss."""
        if not may_lack_commits_of(outbox, self._connection):
            return lps
        rows = outbox.execute(query("relayed_all"), {"topic_id": desired.topic_id}).fetchall()
        relayed: dict[int, int] = dict(rows)
        return {lp: (mark, max(mark, min(to, relayed.get(lp, 0)))) for lp, (mark, to) in lps.items()}

    def _keep_alive(self) -> None:
        """Keep Postgres's idle limit from ending this transaction."""
        if time.monotonic() - self._seen > SEEN_EVERY_S:
            self._connection.execute(query("clock"))
            self._seen = time.monotonic()

    def _unblock(self, desired: DesiredPartition) -> None:
        """Skip rows that the outbox lost, and release quarantined rows."""
        outboxes = self._connection.execute(query("outbox_sources")).fetchall()
        if len(outboxes) != 1:
            return
        ((source, outbox_uuid),) = outboxes
        there = self._marks(desired)
        facts = {"topic_id": desired.topic_id, "lp_from": desired.lp_from, "lp_to": desired.lp_to}
        with borrow_outbox(self._application, outbox_uuid) as outbox:
            if outbox is None:
                return
            for lp, _, floor in outbox.execute(query("outbox_proof"), facts).fetchall():
                mark = there.get(f"{source}:{lp}", 0)
                if mark < floor:
                    self._skip_lost(desired, source, lp, mark, floor)
                    outbox.execute(query("quarantined_remove"), {"topic_id": desired.topic_id, "lp": lp})
        self._count_lost(desired, self._skipped_count(desired))

    def _append(self, desired: DesiredPartition, seal_id: str, source: int, runs: Sequence[MessageRun]) -> str:
        append = append_command(self._node_connection, self._prefix, desired.partition, source, runs, backlog=AS_BEFORE)
        commands = [append]
        if seal_id:
            short = (f"{source}:{runs[0].lp}", runs[0].first - 1)
            commands.insert(0, reopen_command(self._node_connection, self._prefix, desired.partition, seal_id, *short))
        reply, sealed = self._at_once(desired, commands)
        check_appended(reply, self._node_connection.node.address)
        return sealed

    def _at_once(self, desired: DesiredPartition, commands: list[Command]) -> tuple[Any, str]:
        """Run commands and seal in one transaction; return the last reply and new seal id."""
        # By its text: an emptied server may have reloaded the other scripts, but not this one.
        seal = brief_seal_command(
            self._node_connection, self._prefix, desired.partition, desired.change_id or 0, str(uuid.uuid4())
        )
        *_, last, sealed = self._in_transaction([*commands, seal])
        return last, self._sealed(desired, sealed).seal_id

    def _in_transaction(self, commands: list[Command]) -> list[Any]:
        # No part of it may run by itself.
        _, *queued, done = self._node_connection.call_once([("MULTI",), *commands, ("EXEC",)])
        for reply in queued:
            raise_for_reply(reply, self._node_connection.node.address)
        return [
            raise_for_reply(reply, self._node_connection.node.address)
            for reply in raise_for_reply(done, self._node_connection.node.address)
        ]

    def _sealed(self, desired: DesiredPartition, reply: Any) -> Sealed:
        answer = seal_reply(reply, self._node_connection.node.address)
        if not isinstance(answer, Sealed):
            raise Conflict(
                f"partition {desired.partition} can't be sealed again: {answer.status} {answer.fact}".rstrip()
            )
        return answer

    def _skip_lost(self, desired: DesiredPartition, source: int, lp: int, after: int, to: int) -> None:
        """Advance a mark past lost seqs, if accepted. The partition stores the count, even if the repair is
        interrupted."""
        if not self._accept_loss and desired.partition not in self._accept_loss_of:
            raise Conflict(
                f"partition {desired.partition} lost messages {after + 1} to {to} of LP {lp}, and the outbox does not "
                "hold them any more, or lost commits itself and may have others under these numbers",
                f"mqlayer node rearm {self._node_connection.node.name} --accept-loss goes on without them",
            )
        passed = skip_marks_command(self._node_connection, self._prefix, desired.partition, source, lp, after, to)
        word, fact = raise_for_reply(self._node_connection.call([passed])[0], self._node_connection.node.address)
        if word != b"skipped":
            raise StoreUnavailable(
                self._node_connection.node.address, f"LP {lp} is at {fact} by now: somebody else repairs it too"
            )

    def _skipped_count(self, desired: DesiredPartition) -> int:
        (reply,) = self._node_connection.call([("HGET", partition_keys(self._prefix, desired.partition).meta, "lost")])
        return int(raise_for_reply(reply, self._node_connection.node.address) or 0)

    def _count_lost(self, desired: DesiredPartition, in_all: int) -> None:
        if not in_all:
            return
        row = self._connection.execute(query("lost_audited"), {"partition": str(desired.partition)}).fetchone()
        lost = in_all - (row[0] if row else 0)
        if lost > 0:
            self.report.lost[desired.partition] = lost
            log.error("messages_lost", extra={"partition": desired.partition, "count": lost})


def _prefixes(connection: NodeConnection, partition: int) -> set[str]:
    cursor, prefixes, end = b"0", set[str](), b":{%d}:meta" % partition
    for _ in range(SCAN_ROUNDS):
        (reply,) = connection.call([(b"SCAN", cursor, b"MATCH", b"*" + end, b"COUNT", 1000)])
        cursor, found = raise_for_reply(reply, connection.node.address)
        prefixes.update(key.removesuffix(end).decode() for key in found)
        if cursor == b"0":
            break
    return prefixes


def _count(lps: Mapping[int, tuple[int, int]]) -> int:
    return sum(to - after for after, to in lps.values())
