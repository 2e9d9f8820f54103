"""A Spark session that can read the archive."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

JDBC_DRIVER: Final = "org.postgresql.Driver"
JDBC_JARS: Final = (Path("/usr/share/java/postgresql.jar"), Path("/usr/share/java/postgresql-jdbc.jar"))
"""Where distributions put Postgres' driver."""
REDACTED: Final = "(?i)secret|password|passwd|token|access[.]?key|dsn"
"""Names of settings whose values Spark shows nowhere: its own, and ours."""


def session(name: str = "mqlayer", *, master: str | None = None, **settings: str) -> SparkSession:
    """Return the running Spark session, or a new one that can read the archive.

    Python workers run this program's interpreter, unless PYSPARK_PYTHON or the settings name another; Postgres' JDBC
    driver is on the class path where the distribution installed it; time zone is UTC; values that look like secrets
    are redacted. `settings`: Spark's own, with dots as double underscores: spark__sql__shuffle__partitions="8".
    """
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    wanted = _defaults() | {key.replace("__", "."): value for key, value in settings.items()}
    # Workers are started with the environment that the session was begun in; some ask for nothing but this variable.
    os.environ.setdefault("PYSPARK_PYTHON", wanted.get("spark.pyspark.python", sys.executable))
    for key, value in wanted.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def jdbc_jar() -> Path | None:
    """Return Postgres' JDBC driver as the distribution installed it; None: it is not there."""
    return next((path for path in JDBC_JARS if path.exists()), None)


def _defaults() -> dict[str, str]:
    found = {
        "spark.redaction.regex": REDACTED,
        "spark.sql.session.timeZone": "UTC",
    }
    if (jar := jdbc_jar()) is not None:
        found["spark.jars"] = str(jar)
    return found
