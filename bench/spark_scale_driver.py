"""The driver of `bench.spark_scale` under spark-submit: reads a snapshot by each way, then runs jobs on it.

Prints a line of JSON as each act begins and as it ends, and the most that Java's heaps held in the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import mqlayer.spark
from mqlayer.postgres.arrow_reader import read_address
from mqlayer.settings import Settings
from mqlayer.spark import jdbc
from mqlayer.spark.jobs import certify
from mqlayer.spark.jobs.job import JobParams
from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of

WARM: Final = "warm"
"""The act of this name does the others on a small snapshot of this name: a first read finds Java and Python cold."""
BLOCK_RECORDS: Final = 256
MB: Final = 1e6
PLAIN: Final = (
    "(SELECT 'bench' AS topic, version, partition_id AS partition, log_offset AS \"offset\", source, lp, seq, "
    "published_at, archived_at, key, tags, headers, body, batch FROM mqlayer_archive.record) AS plain"
)


class Source(NamedTuple):
    """What acts read: a snapshot of the archive's first so many batches, and its export; `parts`: by so many tasks."""

    snapshot: str
    parts: int
    batches: int
    export: Path


def plain(spark: Any, source: Source) -> Any:
    """Return the same rows by Spark's JDBC source alone, divided by batches, keys as texts and headers as maps."""
    from mqlayer.archive.columns import COLUMNS

    address = read_address(Settings().control_dsn())
    edges = [source.batches * number // source.parts for number in range(source.parts + 1)]
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


def job(spark: Any, source: Source, name: str) -> dict[str, Any]:
    """Run a job on the snapshot; return its facts."""
    found = SPARK_JOBS[name](tables_of(spark, source.snapshot, partitions=source.parts), JobParams())
    facts = found.facts
    rows = facts["records"] if name == "audit" else sum(one["records"] for one in facts["topics"][0]["partitions"])
    found.release()
    return {"good": found.good, "records": rows}


def certified(spark: Any, source: Source) -> dict[str, Any]:
    """Compute a certificate's contents; return its facts."""
    _, contents = certify.snapshot_contents(
        spark, source.snapshot, dsn=Settings().control_dsn(), block_records=BLOCK_RECORDS
    )
    return {"good": contents.audit.verdict == "clean", "records": contents.records}


def acts(spark: Any, source: Source) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Return the acts, by name."""
    name, parts = source.snapshot, source.parts
    return {
        "plain": lambda: read(plain(spark, source)),
        "jdbc": lambda: read(mqlayer.spark.read_snapshot(spark, name, method="jdbc", partitions=parts)),
        "python": lambda: read(mqlayer.spark.read_snapshot(spark, name, method="python", partitions=parts)),
        "parquet": lambda: read(mqlayer.spark.read_export(spark, name, str(source.export))),
        "audit": lambda: job(spark, source, "audit"),
        "skew": lambda: job(spark, source, "skew"),
        "certify": lambda: certified(spark, source),
    }


class SpillCounter:
    """MB that sorts and shuffles wrote to disk for want of memory, since the last look."""

    def __init__(self, spark: Any) -> None:
        context = spark.sparkContext
        self._jvm, self._store = context._jvm, context._jsc.sc().statusStore()  # noqa: SLF001 - no public way
        self._none = context._gateway.new_array(self._jvm.double, 0)  # noqa: SLF001
        self._before = 0.0

    def take(self) -> float:
        """Return the MB."""
        stages = self._store.stageList(None, False, False, self._none, self._jvm.java.util.ArrayList())
        total = sum(stages.apply(number).diskBytesSpilled() for number in range(stages.size())) / MB
        taken, self._before = total - self._before, total
        return taken

    def heaps(self) -> dict[str, float]:
        """Return the most MB that the heaps of the driver and of the largest executor held at a time."""
        found = dict[str, float]()
        executors = self._store.executorList(False)
        for number in range(executors.size()):
            one = executors.apply(number)
            if one.peakMemoryMetrics().isDefined():
                name = "driver" if one.id() == "driver" else "executor"
                mb = one.peakMemoryMetrics().get().getMetricValue("JVMHeapMemory") / MB
                found[name] = max(found.get(name, 0.0), mb)
        return found


def main() -> None:
    """Do the acts that are named."""
    snapshot, parts, batches, export, warm_batches, *names = sys.argv[1:]
    spark = mqlayer.spark.session("mqlayer scale")
    whole = acts(spark, Source(snapshot, int(parts), int(batches), Path(export)))
    small = acts(spark, Source(WARM, 2, int(warm_batches), Path(export).with_name(WARM)))
    spilled = SpillCounter(spark)
    for name in names:
        say({"begins": name})
        began = time.perf_counter()
        found = {} if name == WARM else whole[name]()
        if name == WARM:
            for other in dict.fromkeys(names):
                small.get(other, dict)()
        seconds = time.perf_counter() - began
        say({"ended": name, "seconds": seconds, "spilled_mb": spilled.take(), **found})
    say({"heaps": spilled.heaps()})
    spark.stop()


def say(fact: dict[str, Any]) -> None:
    """Print a line at once."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
