"""Prove that a reading is the whole cut, each seq once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from mqlayer.archive.snapshots import SeqRange
from mqlayer.errors import ArchiveBroken

COLUMNS: Final = ("topic", "source", "lp", "seq")


def check_chain(records: DataFrame, cut: Iterable[SeqRange], *, name: str) -> int:
    """Return the number of records. Raises ArchiveBroken unless they are the cut.

    `records` needs topic, source, lp and seq; the driver gets a row per chain.
    """
    grouped = records.groupBy("topic", "source", "lp").agg(
        F.count("*").alias("rows"),
        F.count_distinct("seq").alias("seqs"),
        F.min("seq").alias("first"),
        F.max("seq").alias("last"),
    )
    found = {(row.topic, row.source, row.lp): (row.rows, row.seqs, row.first, row.last) for row in grouped.collect()}
    wanted = {(one.topic, one.source, one.lp): one for one in cut}
    for key in sorted(found.keys() | wanted.keys()):
        seq_range = wanted.get(key)
        rows, seqs, first, last = found.get(key, (0, 0, None, None))
        whole = None if seq_range is None else seq_range.last_seq - seq_range.first_seq + 1
        if seq_range is None or (rows, seqs, first, last) != (whole, whole, seq_range.first_seq, seq_range.last_seq):
            topic, source, lp = key
            raise ArchiveBroken(
                f"snapshot {name!r}, topic {topic!r}, source {source}, LP {lp}: {rows} records of {seqs} seqs "
                f"from {first} to {last} were read, the cut has {whole or 0}",
                "use nothing of this reading; mqlayer snapshot show NAME --verify looks at the archive itself",
            )
    return sum(rows for rows, *_ in found.values())
