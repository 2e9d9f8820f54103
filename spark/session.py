"""A Spark session for the archive."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

JDBC_DRIVER: Final = "org.postgresql.Driver"
JDBC_JARS: Final = (Path("/usr/share/java/postgresql.jar"), Path("/usr/share/java/postgresql-jdbc.jar"))
REDACTED: Final = "(?i)secret|password|passwd|token|access[.]?key|dsn"


def session(name: str = "mqlayer", *, master: str | None = None, **settings: str) -> SparkSession:
    """Return the running Spark session, or a new one that can read the archive.

    A new one has UTC, an installed JDBC driver of Postgres, masked secrets, and this interpreter unless PYSPARK_PYTHON
    or settings name another. `settings`: as spark__sql__shuffle__partitions="8".
    """
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    wanted = _defaults() | {key.replace("__", "."): value for key, value in settings.items()}
    # Workers inherit the session's environment; some read only this variable.
    os.environ.setdefault("PYSPARK_PYTHON", wanted.get("spark.pyspark.python", sys.executable))
    for key, value in wanted.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def jdbc_jar() -> Path | None:
    """Return an installed JDBC driver, or None."""
    return next((path for path in JDBC_JARS if path.exists()), None)


def parallelism(spark: SparkSession) -> int:
    """Return the number of concurrent tasks."""
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except (AttributeError, NotImplementedError):
        # Spark Connect has no such value.
        return 4


def _defaults() -> dict[str, str]:
    found = {
        "spark.redaction.regex": REDACTED,
        "spark.sql.session.timeZone": "UTC",
    }
    if (jar := jdbc_jar()) is not None:
        found["spark.jars"] = str(jar)
    return found
