"""Tables, parameters and results of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.autopilot.what_if import WhatIfParams
from mqlayer.errors import InvalidInput
from mqlayer.spark.html_report import Section

# No job reads a body or a header.
RECORD_COLUMNS: Final = (
    "topic",
    "partition",
    "batch",
    "offset",
    "source",
    "lp",
    "seq",
    "published_at",
    "archived_at",
    "key",
)


@dataclass(frozen=True, slots=True)
class SnapshotTables:
    """A snapshot's records without bodies, outcomes, lineage, and cut."""

    snapshot: str
    records: DataFrame
    outcomes: DataFrame
    lineage: DataFrame
    cut: DataFrame | None = None

    def of_topics(self, topics: Sequence[str]) -> SnapshotTables:
        """Return these topics' part. Raises InvalidInput for unknown ones."""
        there = {row["topic"] for row in self.lineage.select("topic").distinct().collect()}
        if unknown := sorted(set(topics) - there):
            holds = ", ".join(sorted(there)) or "no topic"
            raise InvalidInput(f"snapshot {self.snapshot!r} has no topic {', '.join(unknown)}; it holds {holds}")
        chosen = F.col("topic").isin(*topics)
        cut = None if self.cut is None else self.cut.filter(chosen)
        records, outcomes, lineage = (frame.filter(chosen) for frame in (self.records, self.outcomes, self.lineage))
        return SnapshotTables(self.snapshot, records, outcomes, lineage, cut)


@dataclass(frozen=True, slots=True)
class JobParams:
    """Partitions to balance for, the split report's path, what `what-if` tries, the console's address, and a reader of
    effects."""

    partitions: int | None = None
    split_report: Path | None = None
    what_if: WhatIfParams = field(default_factory=WhatIfParams)
    console: str | None = None
    effects: Callable[[SparkSession], DataFrame] | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A result; `good`: False for found faults.

    `facts`: for programs. `rows`: tables by title. `frames`: for Parquet, persisted until `release`.
    """

    job: str
    facts: Mapping[str, Any]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    section: Section
    frames: Mapping[str, DataFrame] = field(default_factory=dict)
    good: bool = True

    def write(self, directory: Path) -> None:
        """Overwrite `directory`/job/frame with Parquet."""
        for name, frame in self.frames.items():
            frame.write.mode("overwrite").parquet(str(directory / self.job / name))

    def release(self) -> None:
        """Free memory."""
        for frame in self.frames.values():
            frame.unpersist()


def rows_of(frame: DataFrame, *by: str, most: int | None = None) -> list[dict[str, Any]]:
    """Return ordered rows; `-name` sorts down. Without `most`, all come to the driver."""
    if most is not None:
        order = [F.desc(name[1:]) if name.startswith("-") else F.asc(name) for name in by]
        return [row.asDict() for row in frame.orderBy(*order).limit(most).collect()]
    rows = [row.asDict() for row in frame.collect()]
    for name in reversed(by):
        rows.sort(key=itemgetter(name.removeprefix("-")), reverse=name.startswith("-"))
    return rows
