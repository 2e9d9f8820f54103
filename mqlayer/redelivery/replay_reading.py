"""Archived records for replays, in the order of batch and offset: from Postgres, and dropped ones from an export."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from mqlayer.domain.archive_places import BEHIND, ArchivePlace
from mqlayer.domain.message import NO_KEY, Identity, Record, encode_facts
from mqlayer.domain.tags import tags_text
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.filters import ReplayFilter

if TYPE_CHECKING:
    from mqlayer.archive.lake.ordered_records import ExportedBatches, OrderedRecords

BATCH_BYTES: Final = 2_000_000
WINDOW: Final = 5_000
SCAN_S: Final = 1.0
"""A search without a match notes its progress after this time."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class ArchivedRecord:
    """A record as it is given to a group. `m`: its field of the stream."""

    partition: int
    offset: int
    batch: int
    identity: Identity
    key: bytes
    m: bytes
    body: bytes
    tags: tuple[str, ...]
    void: bool

    @classmethod
    def of(cls, row: Sequence[Any]) -> ArchivedRecord:
        """Return the record of a row of `replay_read`."""
        partition, offset, batch, source, lp, seq, at, key, tags, headers, body, _ = row
        parsed = msgspec.json.decode(headers, type=dict[str, str]) if headers else None
        key = None if key is None else bytes(key)
        return cls._made(
            (partition, offset, batch), Identity(source, lp, seq), Decimal(at) * 1000, key, tags, parsed, bytes(body)
        )

    @classmethod
    def of_export(cls, row: Mapping[str, Any]) -> ArchivedRecord:
        """Return the record of an export's row."""
        at_us = (row["published_at"] - _EPOCH) // _MICROSECOND
        key = None if row["key"] is None else row["key"].encode()
        return cls._made(
            (row["partition"], row["offset"], row["batch"]),
            Identity(row["source"], row["lp"], row["seq"]),
            Decimal(at_us) / 1000,
            key,
            row["tags"],
            dict(row["headers"]) if row["headers"] else None,
            row["body"],
        )

    @classmethod
    def _made(
        cls,
        place: tuple[int, int, int],
        identity: Identity,
        at_ms: Decimal,
        key: bytes | None,
        tags: Sequence[str] | None,
        headers: Mapping[str, str] | None,
        body: bytes,
    ) -> ArchivedRecord:
        facts = encode_facts(int(at_ms.to_integral_value()), headers, tags_text(tags) if tags else "")
        name = NO_KEY if key is None else key
        m = b"%d:%d:%d:%b" % (*identity, facts)
        return cls(*place, identity, name, m, body, tuple(tags or ()), Record(place[1], m, name, b"").void)


class _BatchRun(NamedTuple):
    """Batches up to one that come from one place."""

    upto: int
    exported: bool


class ReplayReader:
    """The records of a replay behind a place."""

    def __init__(
        self,
        database: Database,
        wanted: ReplayFilter,
        *,
        topic_id: int,
        snapshot_id: int | None,
        upto: int,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        """Raises NotFound, InvalidInput, Conflict, StoreUnavailable, ArchiveBroken for an export that can't be read."""
        self._database, self._upto = database, upto
        self._facts = wanted.facts() | {"topic_id": topic_id, "snapshot_id": snapshot_id}
        with database.connection() as connection:
            self._facts["partitions"] = _partitions(connection, self._facts)
        self._exported: OrderedRecords | None = None
        if wanted.export is not None:
            from mqlayer.archive.lake.ordered_records import OrderedRecords, exported_batches

            batches = exported_batches(database, wanted.export, topic_id, upto=upto, snapshot_id=snapshot_id)
            self._exported = OrderedRecords(database, batches, self._facts, alive=alive)
        self._runs = _runs(upto, None if self._exported is None else self._exported.batches)

    def read(self, at: ArchivePlace, limit: int) -> tuple[list[ArchivedRecord], ArchivePlace | None]:
        """Return the next records, `limit` at most, and the place they come to; None: the end."""
        until = time.monotonic() + SCAN_S
        while True:
            batch = at[0] + (at[1] == BEHIND)
            run = next((one for one in self._runs if batch <= one.upto), None)
            if run is None:
                return [], None
            if run.exported and self._exported is not None:
                rows, at = self._exported.read(at, limit, BATCH_BYTES)
                found = list(map(ArchivedRecord.of_export, rows))
            else:
                found, at = self._read_postgres(at, batch, run.upto, limit)
            if found or time.monotonic() > until:
                return found, at

    def count(self) -> int:
        """Return the number of all records, from both."""
        exported = self._exported
        if exported is None or exported.batches.first > exported.batches.upto:
            first = upto = 0
        else:
            first, upto = exported.batches.first, exported.batches.upto
        facts = self._facts | {"upto": self._upto, "exported_first": first, "exported_upto": upto}
        with self._database.connection() as connection:
            ((count,),) = connection.execute(query("replay_count"), facts).fetchall()
        return int(count) + (exported.count() if exported is not None and upto else 0)

    def _read_postgres(
        self, at: ArchivePlace, batch: int, upto: int, limit: int
    ) -> tuple[list[ArchivedRecord], ArchivePlace]:
        with self._database.connection() as connection:
            facts = self._facts | {"batch": batch, "upto": upto, "rows": WINDOW}
            ((first, beyond),) = connection.execute(query("replay_window"), facts, prepare=False).fetchall()
            if first is None:
                return [], (upto, BEHIND)
            last = upto if beyond is None else max(beyond - 1, first)
            facts |= {"first": first, "last": last, "at_batch": at[0], "at_record": at[1], "limit": limit,
                      "bytes": BATCH_BYTES}  # fmt: skip
            rows = connection.execute(query("replay_read"), facts, prepare=False).fetchall()
        found = list(map(ArchivedRecord.of, rows))
        return found, (rows[-1][2], rows[-1][1]) if rows and rows[0][-1] > len(rows) else (last, BEHIND)


def _runs(upto: int, exported: ExportedBatches | None) -> list[_BatchRun]:
    """Divide batches: an export's are its alone, whatever Postgres still has of them."""
    if exported is None or exported.first > exported.upto:
        return [_BatchRun(upto, exported=False)]
    return [
        _BatchRun(exported.first - 1, exported=False),
        _BatchRun(exported.upto, exported=True),
        _BatchRun(upto, exported=False),
    ]


def _partitions(connection: Connection, facts: Mapping[str, Any]) -> list[int] | None:
    if facts["lp"] is None:
        return None
    ((found,),) = connection.execute(query("replay_partitions"), facts).fetchall()
    return list(found)
