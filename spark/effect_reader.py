"""Fence and inbox rows of an application's database, read in parts by Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive import find_snapshot
from mqlayer.domain.routing import LP_COUNT
from mqlayer.postgres.arrow_reader import arrow_batches, bound, read_address
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.spark.transforms.effects import EFFECTS

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION: Final = "mqlayer effects"
PARTS: Final = 4
ROWS: Final = "group_id bigint, kind string, source bigint, lp int, key string, seq bigint, seek int, read_at timestamp"
GROUPS: Final = "group_id bigint, topic string, group string"


def effects_reader(
    snapshot: str, *, dsn: str, application_dsn: str, parts: int = PARTS
) -> Callable[[SparkSession], DataFrame]:
    """Return a function that reads the effects of a snapshot's groups, EFFECTS. Nothing is read before it is called."""

    def read(spark: SparkSession) -> DataFrame:
        with Database(dsn) as database:
            found = find_snapshot(database, snapshot)
            with database.connection() as connection:
                groups = connection.execute(query("snapshot_groups"), {"snapshot_id": found.snapshot_id}).fetchall()
        if not groups:
            return spark.createDataFrame([], EFFECTS)
        rows = read_rows(spark, application_dsn, [group_id for group_id, *_ in groups], parts=parts)
        named = spark.createDataFrame(groups, GROUPS)
        columns = [part.split()[0] for part in EFFECTS.split(", ")]
        return rows.join(named.hint("broadcast"), "group_id").select(*columns)

    return read


def read_rows(spark: SparkSession, dsn: str, group_ids: Sequence[int], *, parts: int = PARTS) -> DataFrame:
    """Return groups' rows, a task per range of LPs."""
    address = read_address(dsn)
    wanted = ", ".join(str(int(group_id)) for group_id in group_ids)
    edges = [LP_COUNT * number // parts for number in range(parts + 1)]

    def part(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from mqlayer.archive.arrow_types import formed

        schema = pa.schema([
            ("group_id", pa.int64()), ("kind", pa.string()), ("source", pa.int64()),
            ("lp", pa.int32()), ("key", pa.string()), ("seq", pa.int64()), ("seek", pa.int32()),
            ("read_at", pa.timestamp("us", tz="UTC")),
        ])  # fmt: skip
        for batch in batches:
            for number in batch.column(0).to_pylist():
                facts = {"lp_from": edges[number], "lp_to": edges[number + 1]}
                for name in ("effects_fence", "effects_inbox"):
                    # Numbers only.
                    statement = f"SELECT * FROM ({bound(name, facts)}) AS read WHERE group_id IN ({wanted})"  # noqa: S608
                    with arrow_batches(address, [statement], application=APPLICATION) as found:
                        for one in found:
                            yield formed(one, schema)

    return spark.range(0, parts, 1, parts).mapInArrow(part, ROWS)
