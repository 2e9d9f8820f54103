"""Snapshots of the archive as DataFrames, by three ways below one declared schema.

- ``jdbc``: Spark's own JDBC source with our cut and ranges of LPs; where Postgres' driver is on the class path.
- ``python``: a data source in Python, by Arrow; needs no jar.
- ``parquet``: what ``mqlayer snapshot export`` wrote; needs no database.

No password is ever part of a plan: JDBC gets it as a property, Python workers inside of the pickled source.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Literal

from pyspark.sql import DataFrame, SparkSession

from mqlayer.archiving.ranges import lp_ranges
from mqlayer.archiving.snapshots import find_snapshot, lp_weights, sample_width
from mqlayer.archiving.tables import Table, check_table, chosen_columns
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.reading import ReadAddress, read_address
from mqlayer.settings import Settings
from mqlayer.spark import jdbc
from mqlayer.spark.source import APPLICATION, bound_source

Way = Literal["jdbc", "python", "parquet"]
WAYS: Final = ("jdbc", "python", "parquet")
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

_registering = threading.Lock()


def read_snapshot(
    spark: SparkSession,
    name: str,
    *,
    table: Table = "records",
    dsn: str | None = None,
    columns: Sequence[str] | None = None,
    way: Way | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Return a snapshot's records, outcomes or lineage; reading it again, by any way, gives the same rows.

    `dsn`: the control database; MQLAYER_DSN where it is not given. `columns`: only these, in this order. `way`: by
    default JDBC where Postgres' driver is on the class path, else Python. `partitions`: how many tasks at most, each
    for a range of LPs, so that an LP's records are in one; by default as many as Spark runs at once.
    Raises NotFound for an unknown snapshot, InvalidInput naming the option that is wrong.
    """
    known = check_table(table)
    chosen = chosen_columns(known, None if columns is None else list(columns))
    if partitions is not None and partitions < 1:
        raise InvalidInput(f"option partitions: {partitions} tasks can't read; say 1 or more")
    address = read_address(dsn or Settings().control_dsn())
    by = _way(spark, way, address)
    with Database(address.conninfo(application=APPLICATION)) as database:
        snapshot = find_snapshot(database, name)
        weights = lp_weights(database, snapshot.snapshot_id)
        width = sample_width(database, snapshot.snapshot_id)
    count = partitions or _parallelism(spark)
    if by == "jdbc":
        ranges = lp_ranges(weights, count)
        return jdbc.snapshot_frame(
            spark, address, snapshot.snapshot_id, table=known, columns=chosen, ranges=ranges, width=width
        )
    options = {"snapshot": name, "table": known, "columns": ",".join(chosen), "partitions": str(count)}
    with _registering:
        _register(spark, address, "mqlayer_bound")
        return spark.read.format("mqlayer_bound").options(**options).load()


def register(spark: SparkSession, *, dsn: str | None = None) -> None:
    """Let `spark.read.format("mqlayer")` and `spark.readStream.format("mqlayer")` read the archive of this database;
    MQLAYER_DSN where it is not given."""
    _register(spark, read_address(dsn or Settings().control_dsn()), "mqlayer")


def _register(spark: SparkSession, address: ReadAddress, called: str) -> None:
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(bound_source(address, called=called, pushing=True))


def _way(spark: SparkSession, way: str | None, address: ReadAddress) -> str:
    if way is None:
        reachable = not address.parameters["host"].startswith("/")
        return "jdbc" if reachable and jdbc.has_driver(spark) else "python"
    if way not in WAYS:
        raise InvalidInput(f"option way: there is no {way!r}; choose one of {', '.join(WAYS)}")
    if way == "jdbc" and not jdbc.has_driver(spark):
        raise InvalidInput(
            "option way: Postgres' JDBC driver is not on Spark's class path; install it (Debian: "
            "libpostgresql-jdbc-java), name its jar in spark.jars, or say way='python'"
        )
    return way


def _parallelism(spark: SparkSession) -> int:
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except (AttributeError, NotImplementedError):
        # Spark Connect does not tell.
        return 4
