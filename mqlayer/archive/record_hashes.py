"""Hashes of records and blocks without Spark: the rule of `mqlayer.spark.transforms.certificate`, written once more.

A record's hash is the SHA-256 of its fields as text, each of variable length behind its number of bytes, then the body.
Memory: a row without body per record of a group of files, or of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from mqlayer.archive.certificates import AuditCounts, Block, ChainKey, Contents, Seam, chains_of
from mqlayer.archive.order_counts import Lineage, PlacedRecord, count_findings
from mqlayer.archive.snapshots import SeqRange

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Final = (
    "topic", "version", "partition", "offset", "source", "lp", "seq", "published_at", "archived_at", "key", "tags",
    "headers", "body", "batch",
)  # fmt: skip
DAY_US: Final = 86_400_000_000
ORDER: Final = ("topic", "source", "lp", "seq", "hash")
NAMES: Final = (*ORDER, "day", "partition", "batch", "offset", "key")


def contents_of(
    groups: Iterable[Iterable[pa.RecordBatch]],
    lineage: Lineage,
    cut: Sequence[SeqRange],
    *,
    block_records: int,
    last_seqs: Mapping[ChainKey, int],
) -> Contents:
    """Return the contents; groups have whole chains. `last_seqs`: of an earlier certificate."""
    blocks: list[tuple[ChainKey, int, Block]] = []
    seams: list[Seam] = []
    counts = AuditCounts()
    left = {ChainKey(*one[:3]): one for one in cut}
    for group in groups:
        for key, rows in groupby(_sorted_rows(group), lambda row: ChainKey(*row[:3])):
            each = list(rows)
            counts = _added(counts, count_findings(key, map(_placed, each), lineage, left.pop(key, None)))
            found, joints = _blocks(key, each, block_records, last_seqs.get(key, 0))
            blocks += found
            seams += joints
    for key, one in left.items():
        counts = _added(counts, count_findings(key, (), lineage, one))
    return Contents(chains_of(blocks), counts, sorted(seams))


def record_hash(row: Sequence[Any]) -> str:
    """Return the hash of COLUMNS, times in microseconds."""
    _, version, partition, offset, source, lp, seq, published, archived, key, tags, headers, body, batch = row
    text = (
        f"{source},{lp},{seq},{version},{partition},{offset},{batch},{published},{archived},"
        f"{_field(key)}{_tags(tags)}{_headers(headers)}{len(body)}:"
    )
    return sha256(text.encode() + body).hexdigest()


def _field(value: str | None) -> str:
    return "-" if value is None else f"{len(value.encode())}:{value}"


def _tags(value: Sequence[str] | None) -> str:
    return "-" if value is None else f"{len(value)}[{''.join(map(_field, value))}"


def _headers(value: Sequence[tuple[str, str]] | None) -> str:
    if value is None:
        return "-"
    # Stores may keep a map in another order.
    pairs = sorted(value, key=lambda pair: pair[0].encode())
    return f"{len(pairs)}{{{''.join(_field(name) + _field(each) for name, each in pairs)}"


def _sorted_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield NAMES in order."""
    import pyarrow as pa

    hashed = [_hashed(batch) for batch in batches if batch.num_rows]
    if not hashed:
        return
    table = pa.Table.from_batches(hashed).sort_by([(name, "ascending") for name in ORDER])
    for batch in table.to_batches(max_chunksize=4_096):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _hashed(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    times = {name: batch.column(name).cast(pa.int64()) for name in ("published_at", "archived_at")}
    columns = {name: times.get(name, batch.column(name)) for name in COLUMNS}
    rows = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    made = {
        "hash": pa.array(map(record_hash, rows), pa.string()),
        "day": pa.array((each // DAY_US for each in columns["archived_at"].to_pylist()), pa.int32()),
    }
    return pa.RecordBatch.from_arrays([made.get(name, columns.get(name)) for name in NAMES], names=list(NAMES))


def _placed(row: tuple[Any, ...]) -> PlacedRecord:
    return PlacedRecord(row[3], *row[6:])


def _blocks(
    key: ChainKey, rows: Sequence[tuple[Any, ...]], size: int, end: int
) -> tuple[list[tuple[ChainKey, int, Block]], list[Seam]]:
    blocks, seams = [], []
    # A day's records have seqs without a hole, unless batches of two days overlapped: so sort by day again.
    by_block = sorted(rows, key=lambda row: (row[5], (row[3] - 1) // size))
    for _, each in groupby(by_block, lambda row: (row[5], (row[3] - 1) // size)):
        members = list(each)
        first, last = members[0][3], members[-1][3]
        blocks.append((key, len(members), Block(first, last, _joined(map(itemgetter(4), members)))))
        if first <= end < last:
            seams.append(Seam(*key, first, _joined(row[4] for row in members if row[3] <= end)))
    return blocks, seams


def _joined(hashes: Iterable[str]) -> str:
    return sha256("".join(hashes).encode()).hexdigest()


def _added(one: AuditCounts, other: AuditCounts) -> AuditCounts:
    return AuditCounts(
        one.inversions + other.inversions,
        one.gaps + other.gaps,
        one.duplicates + other.duplicates,
        one.misplaced + other.misplaced,
    )
