"""The driver of `bench.spark_scale` under spark-submit: reads a snapshot by each way, then audits it.

Prints a line of JSON as each act begins and as it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mqlayer.spark
from mqlayer.postgres.arrow_reader import read_address
from mqlayer.settings import Settings
from mqlayer.spark import jdbc
from mqlayer.spark.jobs.job import JobParams
from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of

WARM_BATCHES = 50
PLAIN = (
    "(SELECT 'bench' AS topic, version, partition_id AS partition, log_offset AS \"offset\", source, lp, seq, "
    "published_at, archived_at, key, tags, headers, body, batch FROM mqlayer_archive.record) AS plain"
)


def plain(spark: Any, parts: int, batches: int) -> Any:
    """Return the same rows by Spark's JDBC source alone, divided by batches, keys as texts and headers as maps."""
    from mqlayer.archive.columns import COLUMNS

    address = read_address(Settings().control_dsn())
    edges = [batches * number // parts for number in range(parts + 1)]
    frame = spark.read.jdbc(
        jdbc.url_of(address),
        PLAIN,
        predicates=[f"batch > {after} AND batch <= {upto}" for after, upto in pairwise(edges)],
        properties={"driver": jdbc.DRIVER, "user": address.parameters["user"], "fetchsize": "10000"},
    )
    return frame.select([jdbc.declared_column(name, word) for name, word in COLUMNS["records"].items()])


def read(frame: Any) -> dict[str, Any]:
    """Read all of a frame, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()
    return {}


def job(spark: Any, snapshot: str, name: str, parts: int) -> dict[str, Any]:
    """Run a job on the snapshot; return what it says of its records."""
    found = SPARK_JOBS[name](tables_of(spark, snapshot, partitions=parts), JobParams())
    facts = found.facts
    rows = facts["records"] if name == "audit" else sum(one["records"] for one in facts["topics"][0]["partitions"])
    found.release()
    return {"good": found.good, "records": rows}


def main() -> None:
    """Do the acts that are named."""
    snapshot, parts, batches, export, *names = sys.argv[1:]
    count = int(parts)
    spark = mqlayer.spark.session("mqlayer scale")
    acts: dict[str, Callable[[], dict[str, Any]]] = {
        # A first read finds Java cold, whichever way it goes.
        "warm": lambda: read(plain(spark, count, min(int(batches), WARM_BATCHES))),
        "plain": lambda: read(plain(spark, count, int(batches))),
        "jdbc": lambda: read(mqlayer.spark.read_snapshot(spark, snapshot, method="jdbc", partitions=count)),
        "python": lambda: read(mqlayer.spark.read_snapshot(spark, snapshot, method="python", partitions=count)),
        "parquet": lambda: read(mqlayer.spark.read_export(spark, snapshot, export)),
        "audit": lambda: job(spark, snapshot, "audit", count),
        "skew": lambda: job(spark, snapshot, "skew", count),
    }
    for name in names:
        say({"begins": name})
        began = time.perf_counter()
        found = acts[name]()
        say({"ended": name, "seconds": time.perf_counter() - began, **found})
    spark.stop()


def say(fact: dict[str, Any]) -> None:
    """Print a line at once."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
