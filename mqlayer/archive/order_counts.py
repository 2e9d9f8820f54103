"""The order audit's counts for one chain, without Spark: the rules of `mqlayer.spark.transforms.order`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from mqlayer.archive.certificates import AuditCounts, ChainKey
from mqlayer.archive.snapshots import SeqRange
from mqlayer.domain.routing import lp_of


class Served(NamedTuple):
    """A partition's LPs, and its first route version."""

    lp_from: int
    lp_to: int
    born: int


Lineage = Mapping[tuple[str, int], Served]
"""By topic and partition."""


class PlacedRecord(NamedTuple):
    """A record's seq, and its place in the archive."""

    seq: int
    partition: int
    batch: int
    offset: int
    key: str | None


NOWHERE: Final = Served(0, 0, -1)


def count_findings(
    key: ChainKey, records: Iterable[PlacedRecord], lineage: Lineage, cut: SeqRange | None
) -> AuditCounts:
    """Count a chain's findings."""
    served = {partition: found for (topic, partition), found in lineage.items() if topic == key.topic}

    def place(record: PlacedRecord) -> tuple[int, int, int, int]:
        return served.get(record.partition, NOWHERE).born, record.partition, record.batch, record.offset

    rows = sorted(records, key=lambda record: (record.seq, *place(record)))
    gaps = _gaps([record.seq for record in rows], cut)
    turns, duplicates, misplaced, last = [], 0, 0, None
    for record in rows:
        there = served.get(record.partition, NOWHERE)
        in_place = there.lp_from <= key.lp < there.lp_to
        again = record.seq == last
        last = record.seq
        duplicates += again
        misplaced += not in_place or (record.key is not None and lp_of(record.key.encode()) != key.lp)
        if in_place and not again:
            turns.append(record)
    return AuditCounts(_inversions(sorted(turns, key=place)), gaps, duplicates, misplaced)


def _gaps(seqs: Sequence[int], cut: SeqRange | None) -> int:
    ends = [] if cut is None else [cut.first_seq - 1, cut.last_seq + 1]
    each = sorted([*seqs, *ends])
    return sum(after - before > 1 for before, after in pairwise(each))


def _inversions(turns: Sequence[PlacedRecord]) -> int:
    count, before, of_key = 0, None, dict[str, int]()
    for record in turns:
        behind = record.key is not None and record.seq < of_key.get(record.key, 0)
        count += behind or (before is not None and record.seq < before)
        before = record.seq
        if record.key is not None:
            of_key[record.key] = record.seq
    return count
