"""Records of a lake in the archive's order, batch and offset, a bounded window at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from mqlayer.archive.lake.reading import batches_wanted, cut_of, in_cut
from mqlayer.archive.lake.state import LIST_HINT, lake_location
from mqlayer.archive.lake.tables import LakeTable, check_packages, lake_errors
from mqlayer.domain.archive_places import BEHIND, ArchivePlace
from mqlayer.errors import ArchiveBroken, Conflict, NotFound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

if TYPE_CHECKING:
    import pyarrow as pa

WINDOW_ROWS: Final = 20_000
WINDOW_BYTES: Final = 32_000_000
"""Bounds of the records in memory; about twice as much while they are sorted."""
ROW_BYTES: Final = 200
"""Of a record without its body, about."""
SCAN_ROWS: Final = 1_000
FIRST_BATCHES: Final = 64
"""Batches of the first window; later ones are as wide as time and memory allow."""
SCAN_S: Final = 1.0
FOUND: Final = ("batch", "partition", "offset", "source", "lp", "seq", "published_at", "key", "tags", "headers", "body")
COUNTED: Final = ("batch", "offset", "source", "lp", "seq", "tags")


@dataclass(frozen=True)
class ExportedBatches:
    """A topic's batches that are read from a lake, both ends included."""

    table: LakeTable
    topic_id: int
    topic: str
    first: int
    upto: int

    @cached_property
    def rows(self) -> pa.dataset.Dataset:
        """The topic's rows."""
        return self.table.rows_of(self.topic)


def exported_batches(
    database: Database, location: str, topic_id: int, *, upto: int, snapshot_id: int | None = None
) -> ExportedBatches:
    """Return the batches of which Postgres may lack records, as far as a registered lake has them.

    Raises NotFound, InvalidInput without the extra, StoreUnavailable, Conflict for another archive's tables,
    ArchiveBroken if the lake lacks dropped batches behind its end, or of the snapshot.
    """
    known = lake_location(location)
    check_packages(f"to read the export at {known}")
    facts = {"location": known, "topic_id": topic_id, "snapshot_id": snapshot_id}
    with database.connection() as connection:
        row = connection.execute(query("lake_of_topic"), facts).fetchone()
    if row is None:
        raise NotFound("export", known, LIST_HINT)
    uuid, topic, first, dropped, exported, elsewhere = row
    table = LakeTable(known, "records")
    if table.owner != uuid:
        raise Conflict(f"the tables at {known} are another export's", LIST_HINT)
    place = 0 if first is None else table.place(topic_id)
    if exported and (not place or first > exported or elsewhere):
        raise ArchiveBroken(f"days of the snapshot are in another export than {known}", LIST_HINT)
    if place < min(dropped, upto):
        raise ArchiveBroken(
            f"the export at {known} has batches up to {place} of topic {topic!r}, some up to {dropped} were dropped",
            f"replay without it what Postgres has; {LIST_HINT}",
        )
    return ExportedBatches(table, topic_id, topic, first or 1, min(place, dropped, upto))


class OrderedRecords:
    """Records of a lake that a replay wants, in order.

    `wanted`: the query's parameters (key, lp, partitions, tag, since, until, snapshot_id). `alive` is called often
    while files are read.
    """

    def __init__(
        self, database: Database, batches: ExportedBatches, wanted: Mapping[str, Any], *, alive: Callable[[], object]
    ) -> None:
        self.batches, self._wanted, self._alive = batches, wanted, alive
        snapshot_id = wanted["snapshot_id"]
        self._cut = None if snapshot_id is None else cut_of(database, snapshot_id, batches.topic_id)
        self._width = FIRST_BATCHES
        self._at: ArchivePlace | None = None
        self._end: ArchivePlace = (0, 0)
        self._window: list[dict[str, Any]] = []

    def read(self, at: ArchivePlace, limit: int, size: int) -> tuple[list[dict[str, Any]], ArchivePlace]:
        """Return the next records behind a place, and the place they come to; none: nothing up to there.

        At most `limit`, and about `size` bytes of bodies.
        """
        if at != self._at or not self._window:
            self._fill(at)
        count = _fitting(self._window, limit, size)
        found, self._window = self._window[:count], self._window[count:]
        self._at = place_of(found[-1]) if self._window else self._end
        return found, self._at

    def count(self) -> int:
        """Return the number of all."""
        whole = self._rows((-1, 0), self.batches.first, self.batches.upto, COUNTED)
        return sum(1 for _ in whole)

    def _fill(self, at: ArchivePlace) -> None:
        first = max(at[0] + (at[1] == BEHIND), self.batches.first)
        last = min(first + self._width - 1, self.batches.upto)
        began, nearest = time.monotonic(), _Nearest()
        for row in self._rows(at, first, last, FOUND):
            nearest.add(row)
        self._window = nearest.end()
        self._end = (last, BEHIND) if nearest.whole else place_of(self._window[-1])
        if not nearest.whole or time.monotonic() - began > SCAN_S:
            self._width = max(1, self._width // 2)
        elif 4 * len(self._window) < WINDOW_ROWS:
            self._width = min(2 * self._width, BEHIND)

    def _rows(self, at: ArchivePlace, first: int, last: int, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        tag = self._wanted["tag"]
        with lake_errors(self.batches.table.location):
            scanner = self.batches.rows.scanner(
                columns=list(columns),
                filter=self._condition(first, last),
                batch_size=SCAN_ROWS,
                batch_readahead=2,
                fragment_readahead=1,
            )
            for batch in scanner.to_batches():
                self._alive()
                kept = batch if self._cut is None else in_cut(batch, self._cut)
                for row in kept.to_pylist():
                    if place_of(row) > at and (tag is None or tag in (row["tags"] or ())):
                        yield row

    def _condition(self, first: int, last: int) -> pa.dataset.Expression:
        """Apart from tag and snapshot."""
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted = self._wanted
        condition = batches_wanted(self.batches.topic_id, first, last)
        if wanted["partitions"] is not None:
            condition &= pc.field("partition").isin(pa.array(wanted["partitions"], pa.int32()))
        if wanted["key"] is not None:
            condition &= (pc.field("lp") == wanted["lp"]) & (pc.field("key") == wanted["key"].decode())
        if wanted["since"] is not None:
            condition &= pc.field("published_at") >= wanted["since"]
        if wanted["until"] is not None:
            condition &= pc.field("published_at") < wanted["until"]
        return condition


def place_of(row: Mapping[str, Any]) -> ArchivePlace:
    """Return a record's place."""
    return row["batch"], row["offset"]


class _Nearest:
    """The first records of a scan in any order, as many as fit. `whole`: all did."""

    def __init__(self) -> None:
        self.whole = True
        self._rows: list[dict[str, Any]] = []
        self._size = 0
        self._last: ArchivePlace | None = None

    def add(self, row: dict[str, Any]) -> None:
        if self._last is not None and place_of(row) > self._last:
            return
        self._rows.append(row)
        self._size += _size_of(row)
        if len(self._rows) > 2 * WINDOW_ROWS or self._size > 2 * WINDOW_BYTES:
            self._cut()

    def end(self) -> list[dict[str, Any]]:
        self._cut()
        return self._rows

    def _cut(self) -> None:
        self._rows.sort(key=place_of)
        count = _fitting(self._rows, WINDOW_ROWS, WINDOW_BYTES)
        if count < len(self._rows):
            del self._rows[count:]
            self.whole, self._last = False, place_of(self._rows[-1])
        self._size = sum(map(_size_of, self._rows))


def _size_of(row: Mapping[str, Any]) -> int:
    return len(row["body"]) + ROW_BYTES


def _fitting(rows: list[dict[str, Any]], limit: int, size: int) -> int:
    """Return how many of the first rows are taken: one at the least."""
    taken = before = 0
    for row in rows:
        if taken == limit or before >= size:
            break
        taken += 1
        before += _size_of(row)
    return taken
