"""Snapshots by Spark's JDBC source, which reads only needed columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import READ_ONLY, ReadAddress, bound
from mqlayer.spark.schemas import TYPES

DRIVER: Final = "org.postgresql.Driver"
# DSN parameters with the same meaning for the JDBC driver.
PASSED_ON: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey")
# Approximate buffer of a task.
FETCH_BYTES: Final = 16_000_000
FETCH_ROWS: Final = (50, 10_000)


def has_driver(spark: SparkSession) -> bool:
    """Whether Postgres' driver is there; never with Spark Connect."""
    jvm: Any = getattr(spark, "_jvm", None)
    return jvm is not None and bool(jvm.org.apache.spark.util.Utils.classIsLoadable(DRIVER))


def snapshot_frame(
    spark: SparkSession,
    address: ReadAddress,
    snapshot_id: int,
    *,
    statement: str,
    columns: Mapping[str, str],
    conditions: Sequence[str],
    width: int,
) -> DataFrame:
    """Return columns of a snapshot, a task per condition; `width`: bytes per row, about."""
    if address.parameters["host"].startswith("/"):
        raise InvalidInput("option method: JDBC can't use a Unix socket; give a dsn with a host, or method='python'")
    frame = spark.read.jdbc(
        url=url_of(address),
        table=f"({statement}) AS snapshot_{snapshot_id}",
        predicates=list(conditions),
        properties={
            **properties_of(address),
            # In the reading transaction: a dropped snapshot is an error, not an empty answer.
            "sessionInitStatement": bound("snapshot_there", {"snapshot_id": snapshot_id}),
            "fetchsize": str(min(max(FETCH_BYTES // max(width, 1), FETCH_ROWS[0]), FETCH_ROWS[1])),
        },
    )
    return frame.select([declared_column(name, word) for name, word in columns.items()])


def url_of(address: ReadAddress) -> str:
    """Return the URL without credentials."""
    host = address.parameters["host"]
    shown = f"[{host}]" if ":" in host else host
    return f"jdbc:postgresql://{shown}:{address.parameters['port']}/{address.parameters['dbname']}"


def properties_of(address: ReadAddress) -> dict[str, str]:
    """Return the other properties; Spark keeps them out of plans."""
    found = {name: address.parameters[name] for name in PASSED_ON if name in address.parameters}
    if address.password:
        found["password"] = address.password
    options = f"{address.parameters.get('options', '')} {READ_ONLY}".strip()
    return found | {
        "driver": DRIVER,
        "user": address.parameters["user"],
        "options": options,
        "ApplicationName": "mqlayer spark",
        "tcpKeepAlive": "true",
    }


def declared_column(name: str, word: str) -> Column:
    """Return a column in its declared type."""
    column = F.col(f"`{name}`")
    return (F.from_json(column, word) if word.startswith("map<") else column.cast(TYPES[word])).alias(name)
