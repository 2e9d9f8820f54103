"""Reads of an outbox, bounded in rows and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.types.string import ByteaBinaryLoader

from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.postgres.session_setup import is_own
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursor, Row


class Sweep(NamedTuple):
    """Counters at one moment. Their rows have ids up to `last_id` and are visible to later reads."""

    last_id: int
    counters: dict[int, int]


class OutboxReader:
    """An outbox on one connection. `after`: the last id scanned.

    Writes name `outbox_uuid`, so they change nothing after a renumbering.
    """

    def __init__(self, connection: Connection, limits: RelayLimits) -> None:
        self.connection, self._limits = connection, limits
        self._rows_cursor = connection.cursor(binary=True)
        # Pass text through as bytes: decoding and encoding would cost more than reading.
        self._messages = connection.cursor(binary=True)
        self._messages.adapters.register_loader("text", ByteaBinaryLoader)
        self.after = 0
        self.outbox_uuid: UUID | None = None
        self.term = ""

    def prepare(self) -> None:
        """Set up the connection before any read, unless a pooler shares it."""
        if is_own(self.connection):
            self._rows_cursor.execute(query("relay_settings"))

    def scan(self, lp_sets: Sequence[int]) -> list[Row]:
        """Return the next rows of our source and term; advance `after`."""
        limits = self._limits
        rows = self._read(
            "outbox_scan",
            {"after": self.after, "lp_sets": lp_sets, "limit": limits.chunk_rows, "bytes": limits.chunk_bytes}
            | self._known(),
        )
        if rows:
            self.after = rows[-1][0]
        failpoint("relay.after_read")
        return rows

    def late(self, ids: Sequence[int], lp_sets: Sequence[int]) -> list[Row]:
        """Return these ids' visible rows, as `scan`."""
        facts = {"ids": ids, "lp_sets": lp_sets, "bytes": self._limits.chunk_bytes}
        return self._read("outbox_late", facts | self._known())

    def of_lps(self, cursors: Sequence[LpCursor]) -> tuple[list[Row], int]:
        """Return cursors' next rows by seq, and the limit per cursor."""
        each = max(1, self._limits.chunk_rows // len(cursors))
        rows = self._read(
            "outbox_of_lps",
            {
                "topic_ids": [cursor.topic_id for cursor in cursors],
                "lps": [cursor.lp for cursor in cursors],
                "afters": [cursor.sent for cursor in cursors],
                "each": each,
                "bytes": self._limits.chunk_bytes,
            },
        )
        failpoint("relay.after_read_of_lps")
        return rows, each

    def sweep(self, lp_sets: Sequence[int]) -> Sweep:
        """Read counters past the recorded seqs."""
        counters: dict[int, int] = dict(self._rows("counter_news", {"lp_sets": lp_sets}))
        # Queried after the counters, so it covers every row they count.
        return Sweep(self.last_id(), counters)

    def last_id(self) -> int:
        """Return the highest id."""
        return int(self._rows("outbox_last_id", {})[0][0])

    def backlog(self, lp_sets: Sequence[int]) -> tuple[int, int | None]:
        """Return the unrecorded rows' number and lowest id."""
        waiting, first_id = self._rows("outbox_backlog", {"lp_sets": lp_sets})[0]
        return waiting, first_id

    def relayed(self, lp_sets: Sequence[int]) -> list[Row]:
        """Return (chain, seq) recorded as relayed."""
        return self._rows("relayed_list", {"lp_sets": lp_sets})

    def topics(self) -> dict[int, str]:
        """Return topic names by id."""
        return {row[0]: row[1] for row in self._rows("outbox_topics", {})}

    def quarantined(self) -> dict[tuple[int, int], int]:
        """Return quarantined seqs by (topic id, LP)."""
        return {(row[0], row[2]): row[3] for row in self._rows("quarantined_list", {"limit": None})}

    def quarantine(self, cursor: LpCursor, seq: int, reason: str) -> bool:
        """Quarantine a row; False if its topic was deleted or the outbox renumbered."""
        failpoint("relay.before_quarantine")
        return self._rows_cursor.execute(query("quarantined_put"), self._facts(cursor, seq, reason)).rowcount > 0

    def put_voided(self, cursor: LpCursor, seq: int, reason: str) -> None:
        """Keep a voided row. Commit before sending its void record."""
        failpoint("relay.before_voided")
        self._rows_cursor.execute(query("voided_put"), self._facts(cursor, seq, reason))
        failpoint("relay.after_voided")

    def put_relayed(self, progress: Mapping[LpCursor, int], connection: Connection | None = None) -> None:
        """Record cursors' progress durably. Any thread may, by its own connection."""
        # One order of rows for all relays avoids deadlocks.
        moved = sorted(progress, key=_by_chain)
        facts = self._progress(moved, [progress[cursor] for cursor in moved])
        failpoint("relay.before_progress")
        (self._rows_cursor if connection is None else connection).execute(query("relayed_put"), facts)
        failpoint("relay.after_progress")

    def lower_relayed(self, cursors: Iterable[LpCursor]) -> None:
        """Lower recorded seqs, so that the outbox keeps rows lost by Redis."""
        fallen = sorted(cursors, key=_by_chain)
        failpoint("relay.before_lower")
        self._rows_cursor.execute(query("relayed_lower"), self._progress(fallen, [cursor.acked for cursor in fallen]))
        failpoint("relay.after_lower")
        for cursor in fallen:
            cursor.recorded = min(cursor.recorded, cursor.acked)

    def _known(self) -> dict[str, Any]:
        return {"outbox_uuid": self.outbox_uuid, "term": self.term}

    def _progress(self, cursors: Sequence[LpCursor], seqs: list[int]) -> dict[str, Any]:
        return self._known() | {
            "topic_ids": [cursor.topic_id for cursor in cursors],
            "lps": [cursor.lp for cursor in cursors],
            "seqs": seqs,
        }

    def _facts(self, cursor: LpCursor, seq: int, reason: str) -> dict[str, Any]:
        return {
            "outbox_uuid": self.outbox_uuid, "topic_id": cursor.topic_id, "lp": cursor.lp, "seq": seq, "reason": reason,
        }  # fmt: skip

    def _read(self, name: str, arguments: Mapping[str, Any]) -> list[Row]:
        return self._messages.execute(query(name), arguments).fetchall()

    def _rows(self, name: str, arguments: Mapping[str, Any]) -> list[Row]:
        return self._rows_cursor.execute(query(name), arguments).fetchall()


def _by_chain(cursor: LpCursor) -> int:
    return cursor.chain


class LateIds:
    """Ids below the scan without a visible row, bounded in number and age.

    Each is queried at growing intervals. The sweep finds dropped ids.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._ids: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, after: int, rows: Sequence[Row], now: float) -> None:
        """Note ids missing in a chunk read after an id."""
        if not rows or rows[-1][0] - after == len(rows):
            return
        expected = after + 1
        for row in rows:
            if row[0] != expected:
                # The last ids of a large hole are the youngest.
                self._add(range(max(expected, row[0] - self._limits.late_ids), row[0]), now)
            expected = row[0] + 1

    def due(self, now: float) -> list[int]:
        """Return ids to query; drop old ones."""
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
        """Forget ids with rows."""
        for row in rows:
            self._ids.pop(row[0], None)

    def _add(self, ids: range, now: float) -> None:
        for number in ids:
            self._ids[number] = (now, now)
        while len(self._ids) > self._limits.late_ids:
            del self._ids[next(iter(self._ids))]
