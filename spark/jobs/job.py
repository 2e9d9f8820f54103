"""What jobs have in common: the tables that they read, what they are asked for, and what they hand back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.errors import InvalidInput
from mqlayer.spark.html_report import Section

RECORD_COLUMNS: Final = ("topic", "partition", "batch", "offset", "source", "lp", "seq", "published_at", "key")
"""No job ever reads a body or a header."""


@dataclass(frozen=True, slots=True)
class SnapshotTables:
    """A snapshot: its records without bodies, outcomes, lineage, and the cut where it is known."""

    snapshot: str
    records: DataFrame
    outcomes: DataFrame
    lineage: DataFrame
    cut: DataFrame | None = None

    def of_topics(self, topics: Sequence[str]) -> SnapshotTables:
        """Return what these topics have of it. Raises InvalidInput for a topic that the snapshot does not hold."""
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
    """What is asked of jobs: how many partitions a topic is to be balanced for, and where the split report goes."""

    partitions: int | None = None
    split_report: Path | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job hands back.

    `facts`: figures for programs. `rows`: what a person sees, as tables by title. `frames`: what is written as Parquet,
    persisted until `release`. `good`: False where something is wrong with what was looked at.
    """

    job: str
    facts: Mapping[str, Any]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    section: Section
    frames: Mapping[str, DataFrame] = field(default_factory=dict)
    good: bool = True

    def write(self, directory: Path) -> None:
        """Write the frames as Parquet: a directory for the job, one within for each; what was there goes."""
        for name, frame in self.frames.items():
            frame.write.mode("overwrite").parquet(str(directory / self.job / name))

    def release(self) -> None:
        """Let go of what Spark keeps in memory of it."""
        for frame in self.frames.values():
            frame.unpersist()


def rows_of(frame: DataFrame, *by: str, most: int | None = None) -> list[dict[str, Any]]:
    """Return rows as dicts, ordered; `-name` counts down. Only with `most` is it Spark that orders them: all come here
    anyway, and few they are."""
    if most is not None:
        order = [F.desc(name[1:]) if name.startswith("-") else F.asc(name) for name in by]
        return [row.asDict() for row in frame.orderBy(*order).limit(most).collect()]
    rows = [row.asDict() for row in frame.collect()]
    for name in reversed(by):
        rows.sort(key=itemgetter(name.removeprefix("-")), reverse=name.startswith("-"))
    return rows
