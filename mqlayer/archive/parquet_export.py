"""Export snapshots as Parquet files.

A rename publishes the directory, whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqlayer.archive.columns import COLUMNS, SNAPSHOT_QUERIES, ArchiveTable
from mqlayer.archive.read_ranges import lp_ranges
from mqlayer.archive.snapshots import SeqRange, Snapshot, find_snapshot, lp_weights, snapshot_cut, snapshot_schemas
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.postgres.arrow_reader import ReadAddress, arrow_batches, bound, read_address
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
APPLICATION: Final = "mqlayer export"
FILE_ROWS: Final = 1_000_000
GROUP_BYTES: Final = 32_000_000
"""Approximate Arrow data of a row group in memory."""
CHAIN: Final = ("topic", "source", "lp", "seq")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file's path in the export, rows, bytes, SHA-256."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export."""

    directory: Path
    snapshot: Snapshot
    files: Mapping[ArchiveTable, Sequence[ExportedFile]]

    @property
    def bytes(self) -> int:
        """All files' size."""
        return sum(file.bytes for files in self.files.values() for file in files)


def export_snapshot(
    runtime: Runtime, name: str, directory: Path, *, jobs: int = 2, file_rows: int = FILE_ROWS
) -> Export:
    """Write a snapshot's records, outcomes and lineage as Parquet into a new directory.

    Memory: some row groups of 32 MB per job. Raises NotFound, Conflict if the directory exists, InvalidInput without
    its parent or pyarrow, ArchiveBroken if seqs of the cut are missing; then nothing is left.
    """
    _check_packages()
    found = find_snapshot(runtime.control, name)
    if directory.exists():
        raise Conflict(f"{directory} exists", "an export never changes one: name a directory that is not there")
    if not directory.absolute().parent.is_dir():
        raise InvalidInput(f"{directory.absolute().parent} is no directory: make it first")
    unfinished = directory.absolute().parent / f".{directory.name}.{uuid.uuid4().hex[:12]}"
    try:
        files = _write(runtime.control, found, unfinished, jobs=jobs, file_rows=file_rows)
        failpoint("export.before_rename")
        unfinished.rename(directory)
        _sync(directory.absolute().parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    exported = Export(directory, found, files)
    facts = {"directory": str(directory.absolute()), "records": found.records, "bytes": exported.bytes}
    runtime.control.transaction(
        lambda connection: write_audit(connection, runtime.actor, "snapshot export", name, facts)
    )
    return exported


def _check_packages() -> None:
    try:
        import pyarrow.parquet  # noqa: F401 - whether it is there
    except ImportError:
        raise InvalidInput("exports need more packages: pip install 'mqlayer[parquet]'") from None


def _write(
    database: Database, found: Snapshot, directory: Path, *, jobs: int, file_rows: int
) -> dict[ArchiveTable, list[ExportedFile]]:
    address = read_address(database.dsn)
    cut, weights = snapshot_cut(database, found.snapshot_id), lp_weights(database, found.snapshot_id)
    ranges: dict[ArchiveTable, list[tuple[int, int]]] = {
        "records": lp_ranges(weights, max(1, -(-found.records // file_rows))),
        "outcomes": [(0, LP_COUNT)],
        "lineage": [(0, LP_COUNT)],
    }
    files: dict[ArchiveTable, list[ExportedFile]] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for table, parts in ranges.items():
            (directory / table).mkdir(parents=True)
            write = partial(_write_file, address, found, table, directory, cut)
            files[table] = list(pool.map(write, range(len(parts)), parts))
    manifest = _manifest(found, cut, files) | {"schemas": snapshot_schemas(database, found.snapshot_id)}
    _write_synced(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    for inner in (*(directory / table for table in ranges), directory):
        _sync(inner)
    return files


def _write_file(
    address: ReadAddress,
    found: Snapshot,
    table: ArchiveTable,
    directory: Path,
    cut: Sequence[SeqRange],
    number: int,
    lps: tuple[int, int],
) -> ExportedFile:
    import pyarrow.parquet as pq

    from mqlayer.archive.arrow_types import arrow_schema, formed

    schema, rows, seen = arrow_schema(COLUMNS[table]), 0, []
    facts = {"snapshot_id": found.snapshot_id, "lp_from": lps[0], "lp_to": lps[1]}
    statements = [bound("snapshot_there", {"snapshot_id": found.snapshot_id}), bound(SNAPSHOT_QUERIES[table], facts)]
    path = directory / table / f"part-{number:05d}.parquet"
    with (
        arrow_batches(address, statements, application=APPLICATION) as batches,
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
    ):
        for group in _groups(formed(batch, schema) for batch in batches):
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            rows += group.num_rows
            if table == "records":
                seen.append(group.select(CHAIN))
    if table == "records":
        _check_chain(found.name, seen, [one for one in cut if lps[0] <= one.lp < lps[1]])
    with path.open("rb") as written:
        os.fsync(written.fileno())
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return ExportedFile(f"{table}/{path.name}", rows, path.stat().st_size, digest)


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    import pyarrow as pa

    buffered: list[pa.RecordBatch] = []
    for batch in batches:
        buffered.append(batch)
        if sum(one.nbytes for one in buffered) >= GROUP_BYTES:
            yield pa.Table.from_batches(buffered)
            buffered = []
    if buffered:
        yield pa.Table.from_batches(buffered)


def _check_chain(name: str, seen: Sequence[pa.Table], cut: Sequence[SeqRange]) -> None:
    import pyarrow as pa

    if not seen:
        found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    else:
        counts = [("seq", "count"), ("seq", "count_distinct"), ("seq", "min"), ("seq", "max")]
        grouped = pa.concat_tables(seen).group_by(["topic", "source", "lp"]).aggregate(counts)
        found = {tuple(row.values())[:3]: tuple(row.values())[3:] for row in _keys_first(grouped).to_pylist()}
    for one in cut:
        size = one.last_seq - one.first_seq + 1
        rows = found.pop((one.topic, one.source, one.lp), None)
        if rows != (size, size, one.first_seq, one.last_seq):
            raise ArchiveBroken(
                f"snapshot {name!r}, topic {one.topic!r}, source {one.source}, LP {one.lp}: the archive does not hold "
                f"seqs {one.first_seq} to {one.last_seq} once each",
                f"nothing was exported; mqlayer snapshot show {name} --verify says what is there",
            )


def _keys_first(grouped: pa.Table) -> pa.Table:
    return grouped.select(["topic", "source", "lp", "seq_count", "seq_count_distinct", "seq_min", "seq_max"])


def _manifest(
    found: Snapshot, cut: Sequence[SeqRange], files: Mapping[ArchiveTable, Sequence[ExportedFile]]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "snapshot": found.name,
        "created_at": found.created_at.isoformat(),
        "upto_at": found.upto_at.isoformat() if found.upto_at else None,
        "topics": [asdict(topic) for topic in found.topics],
        "tables": {
            table: {
                "columns": dict(COLUMNS[table]),
                "rows": sum(file.rows for file in written),
                "files": [asdict(file) for file in written],
            }
            for table, written in files.items()
        },
        "cut": [list(one) for one in cut],
    }


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
