"""Reading an outbox: one connection, rows as tuples, every read bounded in rows and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.types.string import ByteaBinaryLoader

from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.own_sessions import is_own
from mqlayer.postgres.queries import query
from mqlayer.relay.lanes import Lane, Row
from mqlayer.relay.limits import RelayLimits


class Sweep(NamedTuple):
    """Counters at one moment: everything they count has an id up to `last_id` and is visible to later reads."""

    last_id: int
    counters: dict[int, int]


class OutboxReader:
    """The outbox as a relay reads it. `after` is the id up to which the scan has come.

    What it writes counts for the outbox `outbox_uuid` only, by whose numbers it goes: nothing once another relay
    numbered it anew, however long ours stood still before the statement.
    """

    def __init__(self, connection: Connection, limits: RelayLimits) -> None:
        self.connection, self._limits = connection, limits
        self._cursor = connection.cursor(binary=True)
        # Text of messages goes on as it comes: decoding and encoding it again would cost more than reading it.
        self._messages = connection.cursor(binary=True)
        self._messages.adapters.register_loader("text", ByteaBinaryLoader)
        self.after = 0
        self.outbox_uuid: UUID | None = None
        self.term = ""

    def prepare(self) -> None:
        """Set the connection up for reading; once, before anything else. Not where others share its sessions."""
        if is_own(self.connection):
            self._cursor.execute(query("relay_settings"))

    def scan(self, lp_sets: Sequence[int]) -> list[Row]:
        """Return the next rows by id; advance `after`."""
        limits = self._limits
        rows = self._read(
            "outbox_scan",
            {"after": self.after, "lp_sets": lp_sets, "limit": limits.chunk_rows, "bytes": limits.chunk_bytes},
        )
        if rows:
            self.after = rows[-1][0]
        failpoint("relay.after_read")
        return rows

    def late(self, ids: Sequence[int], lp_sets: Sequence[int]) -> list[Row]:
        """Return those rows of the ids that are visible by now."""
        return self._read("outbox_late", {"ids": ids, "lp_sets": lp_sets, "bytes": self._limits.chunk_bytes})

    def of_lps(self, lanes: Sequence[Lane]) -> tuple[list[Row], int]:
        """Return the next rows of some lanes by seq, and how many at most there are of each."""
        each = max(1, self._limits.chunk_rows // len(lanes))
        rows = self._read(
            "outbox_of_lps",
            {
                "topic_ids": [lane.topic_id for lane in lanes],
                "lps": [lane.lp for lane in lanes],
                "afters": [lane.sent for lane in lanes],
                "each": each,
                "bytes": self._limits.chunk_bytes,
            },
        )
        failpoint("relay.after_read_of_lps")
        return rows, each

    def sweep(self, lp_sets: Sequence[int]) -> Sweep:
        """Read the counters that are past what is recorded as relayed."""
        counters: dict[int, int] = dict(self._rows("counter_news", {"lp_sets": lp_sets}))
        # Asked after the counters: whatever they count had drawn its id by then.
        return Sweep(self.last_id(), counters)

    def last_id(self) -> int:
        """Return the highest id given out."""
        return int(self._rows("outbox_last_id", {})[0][0])

    def backlog(self, lp_sets: Sequence[int]) -> tuple[int, int | None]:
        """Return how many rows wait by what is recorded, and the lowest id to begin with."""
        waiting, first_id = self._rows("outbox_backlog", {"lp_sets": lp_sets})[0]
        return waiting, first_id

    def relayed(self, lp_sets: Sequence[int]) -> list[Row]:
        """Return (chain, seq) recorded as relayed."""
        return self._rows("relayed_list", {"lp_sets": lp_sets})

    def topics(self) -> dict[int, str]:
        """Return the names of the topics that this database may publish to."""
        return {row[0]: row[1] for row in self._rows("outbox_topics", {})}

    def set_aside(self) -> dict[tuple[int, int], int]:
        """Return the seqs of rows set aside, by topic id and LP."""
        return {(row[0], row[2]): row[3] for row in self._rows("set_aside_list", {})}

    def put_aside(self, lane: Lane, seq: int, reason: str) -> None:
        """Set a row aside, for all relays and for operators."""
        failpoint("relay.before_set_aside")
        self._cursor.execute(query("set_aside_put"), self._facts(lane, seq, reason))

    def put_voided(self, lane: Lane, seq: int, reason: str) -> None:
        """Keep a row that is passed over, for operators; its void record may be sent once this is committed."""
        failpoint("relay.before_voided")
        self._cursor.execute(query("voided_put"), self._facts(lane, seq, reason))
        failpoint("relay.after_voided")

    def put_relayed(self, lanes: Iterable[Lane]) -> None:
        """Record how far lanes are in Redis, durably."""
        # Two relays on the same LPs take the rows in the same order, and can't deadlock.
        moved = sorted(lanes, key=_by_chain)
        failpoint("relay.before_progress")
        self._cursor.execute(query("relayed_put"), self._progress(moved))
        failpoint("relay.after_progress")
        for lane in moved:
            lane.recorded = lane.acked

    def lower_relayed(self, lanes: Iterable[Lane]) -> None:
        """Record that Redis fell back: what it lost must stay in the outbox."""
        fallen = sorted(lanes, key=_by_chain)
        failpoint("relay.before_lower")
        self._cursor.execute(query("relayed_lower"), self._progress(fallen))
        failpoint("relay.after_lower")
        for lane in fallen:
            lane.recorded = min(lane.recorded, lane.acked)

    def _progress(self, lanes: Sequence[Lane]) -> dict[str, Any]:
        return {
            "outbox_uuid": self.outbox_uuid,
            "term": self.term,
            "topic_ids": [lane.topic_id for lane in lanes],
            "lps": [lane.lp for lane in lanes],
            "seqs": [lane.acked for lane in lanes],
        }

    def _facts(self, lane: Lane, seq: int, reason: str) -> dict[str, Any]:
        return {
            "outbox_uuid": self.outbox_uuid, "topic_id": lane.topic_id, "lp": lane.lp, "seq": seq, "reason": reason,
        }  # fmt: skip

    def _read(self, name: str, arguments: Mapping[str, Any]) -> list[Row]:
        return self._messages.execute(query(name), arguments).fetchall()

    def _rows(self, name: str, arguments: Mapping[str, Any]) -> list[Row]:
        return self._cursor.execute(query(name), arguments).fetchall()


def _by_chain(lane: Lane) -> int:
    return lane.chain


class LateIds:
    """Ids below the scan whose rows were not visible: not committed yet, or rolled back. Bounded in number and age.

    Each is asked for at growing intervals. What is dropped from here is found by the sweep of the counters.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._ids: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, after: int, rows: Sequence[Row], now: float) -> None:
        """Note the ids that are missing in a chunk that was read after an id."""
        if not rows or rows[-1][0] - after == len(rows):
            return
        expected = after + 1
        for row in rows:
            if row[0] != expected:
                # Of a large hole the last ones are the youngest.
                self._add(range(max(expected, row[0] - self._limits.late_ids), row[0]), now)
            expected = row[0] + 1

    def due(self, now: float) -> list[int]:
        """Return the ids to ask for now; drop those that are too old."""
        if not self._ids:
            return []
        oldest = now - self._limits.late_s
        self._ids = {number: times for number, times in self._ids.items() if times[0] >= oldest}
        due = [number for number, (_, ask_at) in self._ids.items() if ask_at <= now]
        for number in due:
            first_at = self._ids[number][0]
            self._ids[number] = (first_at, now + max(self._limits.poll_min_s, now - first_at))
        return due

    def found(self, rows: Iterable[Row]) -> None:
        """Forget ids whose rows came."""
        for row in rows:
            self._ids.pop(row[0], None)

    def _add(self, ids: range, now: float) -> None:
        for number in ids:
            self._ids[number] = (now, now)
        while len(self._ids) > self._limits.late_ids:
            del self._ids[next(iter(self._ids))]
