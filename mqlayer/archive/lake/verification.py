"""Hold a lake against the archive, before retention drops days: docs/design/lake.md."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from mqlayer.archive.columns import ArchiveTable
from mqlayer.archive.lake.state import Lake, find_lake
from mqlayer.archive.lake.tables import LakeTable, check_packages, lake_errors
from mqlayer.errors import ArchiveBroken, Conflict
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import columns, query
from mqlayer.runtime.runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa

log = event_logger(__name__)

MODULUS: Final = 1 << 60
"""Digests are sums of numbers of 60 bits, as in Postgres."""
ROWS: Final = 5_000
"""Rows of a file in memory."""
READ_BYTES: Final = 4_000_000
VERIFIED: Final[tuple[ArchiveTable, ...]] = ("records", "outcomes")
NEEDED: Final[dict[ArchiveTable, list[str]]] = {
    "records": ["batch", "offset", "source", "lp", "seq", "key", "body"],
    "outcomes": ["batch", "first_offset", "last_offset", "epoch", "position", "outcome"],
}


@dataclass(slots=True)
class LakeCheck:
    """Verified records and outcomes that are new, and files that were read, per topic."""

    records: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


class _VerifiedFile(NamedTuple):
    path: str
    table: ArchiveTable
    rows: int
    digest: int
    bytes: int
    sha256: str


class _VerifiedPlace(NamedTuple):
    topic_id: int
    topic: str
    first_batch: int
    batch: int
    verified_batch: int
    records: int
    record_digest: int
    outcomes: int
    outcome_digest: int

    @property
    def since(self) -> int:
        """Return the last batch that needs no look at the archive."""
        return max(self.verified_batch, self.first_batch - 1)


def verify_export(runtime: Runtime, location: str, *, whole: bool = False) -> LakeCheck:
    """Compare a lake's new rows with the archive, and all of its rows with those verified before.

    `whole`: hash files that were verified before again. Raises NotFound, ArchiveBroken for a difference, Conflict while
    an export is unfinished.
    """
    check_packages()
    lake = find_lake(runtime.control, location)
    tables = {name: LakeTable(lake.location, name) for name in VERIFIED}
    with runtime.control.connection() as connection:
        rows = connection.execute(query("lake_topics"), {"lake_id": lake.lake_id}).fetchall()
    found = LakeCheck()
    for row in rows:
        _TopicCheck(runtime, lake, tables, _VerifiedPlace(*row), found).run(whole=whole)
    return found


class _TopicCheck:
    def __init__(
        self,
        runtime: Runtime,
        lake: Lake,
        tables: dict[ArchiveTable, LakeTable],
        place: _VerifiedPlace,
        found: LakeCheck,
    ) -> None:
        self._runtime, self._lake, self._tables, self._place, self._found = runtime, lake, tables, place, found
        self._chains: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self._new_outcomes = 0

    def run(self, *, whole: bool) -> None:
        place = self._place
        places = {name: table.place(place.topic_id) for name, table in self._tables.items()}
        if set(places.values()) not in ({place.batch}, {0}):
            raise Conflict(
                f"the export of topic {place.topic!r} at {self._lake.location} is unfinished",
                "finish it first: mqlayer archive export --to PATH",
            )
        with self._runtime.control.connection() as connection:
            facts = {"lake_id": self._lake.lake_id, "topic_id": place.topic_id}
            known = {row[0]: _VerifiedFile(*row) for row in connection.execute(query("lake_files"), facts).fetchall()}
        read: list[_VerifiedFile] = []
        kept: list[_VerifiedFile] = []
        for name, table in self._tables.items():
            for file in table.files(place.topic):
                before = known.get(file["path"])
                if before is None:
                    read.append(self._read(table, name, file))
                    continue
                kept.append(before)
                if whole:
                    self._compare_hash(table, before)
        self._compare(kept + read)
        gone = sorted(known.keys() - {file.path for file in kept})
        failpoint("lake.before_verified")
        self._note(read, gone, self._totals(kept + read))

    def _read(self, table: LakeTable, name: ArchiveTable, file: dict[str, Any]) -> _VerifiedFile:
        import pyarrow.parquet as pq

        path = unquote(file["path"])
        with lake_errors(table.location):
            files = table.file_system()
            sha, size = _hash(files, path)
            rows = digest = 0
            with files.open_input_file(path) as stream:
                for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS, columns=NEEDED[name]):
                    rows += batch.num_rows
                    digest += sum(self._numbers(name, batch, file["partition.partition"]))
        return _VerifiedFile(file["path"], name, rows, digest % MODULUS, size, sha)

    def _numbers(self, name: ArchiveTable, batch: pa.RecordBatch, partition: int) -> Iterator[int]:
        lists = [batch.column(column).to_pylist() for column in NEEDED[name]]
        if name == "outcomes":
            for number, first, last, epoch, position, outcome in zip(*lists, strict=True):
                self._new_outcomes += number > self._place.since
                yield _number(
                    struct.pack(">qiqqqq", number, partition, first, last, epoch, position) + outcome.encode()
                )
            return
        for number, offset, source, lp, seq, key, body in zip(*lists, strict=True):
            packed = struct.pack(">qiqq", number, partition, offset, seq)
            value = _number(b"".join((packed, b"" if key is None else key.encode(), body)))
            if number > self._place.since:
                count, first, last, total = self._chains.get((source, lp), (0, seq, seq, 0))
                self._chains[source, lp] = (
                    count + 1, min(first, seq), max(last, seq), (total + value) % MODULUS
                )  # fmt: skip
            yield value

    def _compare_hash(self, table: LakeTable, before: _VerifiedFile) -> None:
        with lake_errors(table.location):
            sha, _ = _hash(table.file_system(), unquote(before.path))
        if sha != before.sha256:
            raise self._broken(f"file {before.path} of {before.table} changed since it was verified")

    def _compare(self, files: list[_VerifiedFile]) -> None:
        """Compare new rows with the archive per (source, LP), and all rows with the sum of both."""
        place = self._place
        facts = {"topic_id": place.topic_id, "after": place.since, "upto": place.batch}
        with self._runtime.control.connection() as connection, connection.transaction():
            connection.execute(query("statement_time"), {"wait": "0"})
            if place.since < place.batch:
                self._refuse_dropped(connection)
            rows = connection.execute(query("lake_verify_records"), facts).fetchall()
            ((outcomes, digest),) = connection.execute(query("lake_verify_outcomes"), facts).fetchall()
        wanted = {(source, lp): tuple(rest) for source, lp, *rest in rows}
        for source, lp in sorted(wanted.keys() | self._chains.keys()):
            there, here = wanted.get((source, lp)), self._chains.get((source, lp))
            if there != here:
                raise self._broken(
                    f"source {source}, LP {lp}: the archive has {_told(there)}, the export {_told(here)}"
                )
        totals = self._totals(files)
        records = (
            place.records + sum(chain[0] for chain in wanted.values()),
            (place.record_digest + sum(chain[3] for chain in wanted.values())) % MODULUS,
        )
        ends = (place.outcomes + outcomes, (place.outcome_digest + digest) % MODULUS)
        for name, expected in (("records", records), ("outcomes", ends)):
            if totals[name] != expected:
                raise self._broken(f"{totals[name][0]} {name} are there, {expected[0]} were verified or are archived")
        self._found.records[place.topic] = records[0] - place.records
        self._found.outcomes[place.topic] = outcomes

    def _refuse_dropped(self, connection: Connection) -> None:
        rows = connection.execute(query("lake_work"), {"topics": None}).fetchall()
        kept_from = {topic_id: kept for topic_id, _, _, kept in rows}.get(self._place.topic_id)
        if kept_from is None or kept_from > self._place.since + 1:
            raise self._broken("days were dropped from the archive before they were verified")
        # None of these batches is dropped before the end of this transaction.
        facts = {"topic_id": self._place.topic_id, "after": self._place.since}
        connection.execute(query("stream_there"), facts)

    def _totals(self, files: list[_VerifiedFile]) -> dict[str, tuple[int, int]]:
        return {
            name: (
                sum(file.rows for file in files if file.table == name),
                sum(file.digest for file in files if file.table == name) % MODULUS,
            )
            for name in VERIFIED
        }

    def _note(self, read: list[_VerifiedFile], gone: list[str], totals: dict[str, tuple[int, int]]) -> None:
        place = self._place
        facts: dict[str, Any] = {"lake_id": self._lake.lake_id, "topic_id": place.topic_id}
        verified = facts | {"upto": place.batch, "before": place.verified_batch}
        for name, one in (("records", "record_digest"), ("outcomes", "outcome_digest")):
            verified |= {name: totals[name][0], one: totals[name][1]}
        names = ("paths", "tables", "rows", "digests", "sizes", "shas")
        self._runtime.control.transaction(
            partial(_put, facts=facts, verified=verified, gone=gone, read=columns(names, read))
        )
        self._found.files[place.topic] = len(read)
        log.info("export_verified", extra={"topic": place.topic, "batch": place.batch, "files": len(read)})

    def _broken(self, what: str) -> ArchiveBroken:
        return ArchiveBroken(
            f"the export of topic {self._place.topic!r} at {self._lake.location} differs: {what}",
            "retention drops nothing for it; export to a new place, and ask why this one changed",
        )


def _put(
    connection: Connection, facts: dict[str, Any], verified: dict[str, Any], gone: list[str], read: dict[str, Any]
) -> None:
    if connection.execute(query("lake_topic_verified"), verified).fetchone() is None:
        # Another process verified it meanwhile, by other files perhaps: its word holds.
        return
    connection.execute(query("lake_files_forget"), facts | {"paths": gone})
    connection.execute(query("lake_files_put"), facts | read)


def _hash(files: Any, path: str) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with files.open_input_stream(path) as stream:
        while piece := stream.read(READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def _number(content: bytes) -> int:
    # As Postgres' md5() makes it; it guards against faults, not against people.
    return int(hashlib.md5(content, usedforsecurity=False).hexdigest()[:15], 16)


def _told(chain: tuple[int, int, int, int] | tuple[Any, ...] | None) -> str:
    return "nothing" if chain is None else f"{chain[0]} records, seq {chain[1]} to {chain[2]}"
