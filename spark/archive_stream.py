"""The archive as a stream: micro-batches of whole archive batches.

An offset is each topic's last batch. Visible batches never change, so a repeated micro-batch is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from mqlayer.archive.columns import STREAM_QUERIES, ArchiveTable
from mqlayer.archive.read_ranges import lp_ranges
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.arrow_reader import ReadAddress, bound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.spark.data_source import APPLICATION, check_options, chosen, positive_number, read_batches

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS: Final = ("table", "columns", "partitions", "topics", "start", "max_batches")
STARTS: Final = ("earliest", "latest")


class StreamOptions(NamedTuple):
    """`topics` None: all archived; `max_batches`: per topic and micro-batch, None: all."""

    topics: list[str] | None
    start: str
    max_batches: int | None


@dataclass(frozen=True)
class StreamRange(InputPartition):
    """A task's LPs and batches, above `after` up to `upto`."""

    topic_id: int
    after: int
    upto: int
    lp_from: int
    lp_to: int


class TopicPosition(NamedTuple):
    """A topic's last batch, and its first one kept."""

    topic_id: int
    batch: int
    kept_from: int | None


def growth_options(options: Mapping[str, str]) -> StreamOptions:
    """Return a stream's options. Raises InvalidInput."""
    check_options(options, OPTIONS)
    start = options.get("start", "earliest")
    if start not in STARTS:
        raise InvalidInput(f"option start: there is no {start!r}; choose one of {', '.join(STARTS)}")
    named = options.get("topics")
    topics = None if named is None else sorted({part.strip() for part in named.split(",")})
    limit = positive_number(options, "max_batches", 1) if "max_batches" in options else None
    return StreamOptions(topics, start, limit)


class ArchiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what archivers add."""

    def __init__(
        self, address: ReadAddress, options: StreamOptions, table: ArchiveTable, schema: StructType, parts: int
    ) -> None:
        self._address, self._options, self._table, self._schema = address, options, table, schema
        self._ends: dict[str, int] | None = None
        self._ranges = lp_ranges(dict.fromkeys(range(LP_COUNT), 1), parts)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the query's end at the present one."""
        self._ends = {topic: found.batch for topic, found in self._positions().items()}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the start without a checkpoint."""
        latest = self._options.start == "latest"
        return {
            topic: found.batch if latest else (found.kept_from or found.batch + 1) - 1
            for topic, found in self._positions().items()
        }

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the micro-batch's end."""
        # Spark has no limit in batches: each counts as a file.
        most = limit.max_files if isinstance(limit, ReadMaxFiles) else None
        ends = dict(start)
        for topic, found in self._positions().items():
            after = start.get(topic, 0)
            last = found.batch if self._ends is None else min(found.batch, self._ends.get(topic, 0))
            ends[topic] = max(after, last if most is None else min(last, after + most))
        return ends

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit per topic."""
        most = self._options.max_batches
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the archive's end."""
        return {topic: found.batch for topic, found in self._positions().items()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return LP ranges between both. Raises NotFound for a topic that left the archive."""
        found = self._positions()
        parts: list[InputPartition] = []
        for topic, upto in end.items():
            position = found.get(topic)
            # A topic archived since the start belongs to the stream as a whole.
            after = start.get(topic, 0)
            if after >= upto:
                continue
            if position is None:
                raise NotFound("topic", topic, "its archive was read up to now: begin a new stream without it")
            parts += [StreamRange(position.topic_id, after, upto, lp_from, lp_to) for lp_from, lp_to in self._ranges]
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range in one transaction."""
        if not isinstance(partition, StreamRange):
            return
        facts: dict[str, Any] = {
            "topic_id": partition.topic_id,
            "after": partition.after,
            "upto": partition.upto,
            "lp_from": partition.lp_from,
            "lp_to": partition.lp_to,
        }
        statements = [
            bound("stream_there", {"topic_id": partition.topic_id, "after": partition.after}),
            chosen(bound(STREAM_QUERIES[self._table], facts), self._schema),
        ]
        yield from read_batches(self._address, statements, self._schema)

    def _positions(self) -> dict[str, TopicPosition]:
        wanted = self._options.topics
        with Database(self._address.conninfo(application=APPLICATION)) as database, database.connection() as line:
            rows = line.execute(query("stream_topics"), {"topics": wanted}).fetchall()
        found = {name: TopicPosition(*facts) for name, *facts in rows}
        for name in wanted or ():
            if name not in found:
                raise NotFound(
                    "topic", name, "option topics: it is not in the archive; mqlayer topic list shows what is"
                )
        return found
