"""The order audit of a snapshot by Spark: how long one run takes, and what it needs of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from mqlayer.routes import apply_change, planned_split
from mqlayer.runtime.route_cache import load_route

RECORDS: Final = int(os.environ.get("BENCH_MESSAGES", "1000000"))
KEYS: Final = 10_000
SAMPLE_S: Final = 0.1

# Half of the records are of before a split, half of behind it; seqs and offsets are dense in this order.
FILL: Final = """
INSERT INTO mqlayer_archive.record
SELECT t.topic_id, 1, 1, r.partition_id,
       row_number() OVER (PARTITION BY r.partition_id ORDER BY n), 1, k.lp,
       row_number() OVER (PARTITION BY k.lp ORDER BY n),
       timestamptz '2026-01-01' + n * interval '1 ms', timestamptz '2026-01-01' + n * interval '1 ms',
       k.key::bytea, NULL, NULL, %(body)s
FROM generate_series(1, %(records)s::bigint) n
JOIN LATERAL (SELECT 'key-' || (n * 7919 %% %(keys)s) AS name) name ON true
JOIN keys k ON k.key = name.name
JOIN mqlayer.topic t ON t.name = 'bench'
JOIN mqlayer.route r ON r.topic_id = t.topic_id AND k.lp >= r.lp_from AND k.lp < r.lp_to
    AND r.version = CASE WHEN n <= %(records)s / 2 THEN 1 ELSE t.version END"""


@bench("audit")
def audit(stage: Stage) -> Iterator[Line]:
    """Seconds of `mqlayer analytics audit` on a snapshot of a million records of 128 bytes over a split, Spark's start
    included; the records per second of that; and the peak of JVM and Python together. BENCH_MESSAGES: so many records
    instead."""
    system = stage.system(partitions=4)
    note(f"  filling an archive with {RECORDS:,} records")
    fill_archive(system, RECORDS)
    seconds, peak_mb = measured(system, "bench")
    yield Line(name="audit", value=round(seconds, 1), unit="s", baseline=None, ratio=None, target=None)
    yield Line(
        name="audit[rate]", value=round(RECORDS / seconds), unit="records/s", baseline=None, ratio=None, target=None
    )
    yield Line(name="audit[memory]", value=round(peak_mb, 1), unit="MB peak", baseline=None, ratio=None, target=None)


def fill_archive(system: System, records: int) -> None:
    """Write records of a topic that was split half-way into the archive, and take the snapshot `bench` of them."""
    first = load_route(system.database, "bench").ranges[0].partition
    apply_change(system.runtime, planned_split(system.runtime, "bench", first, at=[100]))
    with system.database.connection() as connection, connection.transaction():
        connection.execute("UPDATE mqlayer.topic SET archived = true WHERE name = 'bench'")
        connection.execute("CREATE TABLE mqlayer_archive.record_bench PARTITION OF mqlayer_archive.record DEFAULT")
        connection.execute("INSERT INTO mqlayer_archive.topic SELECT topic_id, 1 FROM mqlayer.topic")
        connection.execute(
            "CREATE TEMP TABLE keys AS SELECT key, mqlayer_app.lp_v1(key) AS lp "
            "FROM (SELECT 'key-' || n AS key FROM generate_series(0, %s) n) k", (KEYS - 1,),
        )  # fmt: skip
        connection.execute("ANALYZE keys")
        connection.execute(FILL, {"records": records, "keys": KEYS, "body": b"x" * 128})
        connection.execute(
            "INSERT INTO mqlayer_archive.mark SELECT topic_id, source, lp, min(seq), max(seq) "
            "FROM mqlayer_archive.record GROUP BY 1, 2, 3"
        )
    with system.database.connection() as connection:
        connection.execute("ANALYZE mqlayer_archive.record")
    create_snapshot(system.runtime, "bench", topics=["bench"])


def measured(system: System, snapshot: str) -> tuple[float, float]:
    """Return the seconds that an audit took as a command, and the most MB that its processes held resident."""
    command = [sys.executable, "-m", "mqlayer", "analytics", "audit", "--snapshot", snapshot, "--json"]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=os.environ | {"MQLAYER_DSN": system.dsn, "MQLAYER_KEY_PREFIX": system.settings.key_prefix},
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = Peak(process.pid)
    peak.start()
    said, _ = process.communicate()
    seconds = time.monotonic() - began
    peak.join()
    found = json.loads(said)
    if found["verdict"] != "clean" or found["records"] != RECORDS:
        raise RuntimeError(f"the audit said {found['verdict']} of {found['records']} records")
    note(f"  {seconds:.1f} s, {peak.mb:.0f} MB")
    return seconds, peak.mb


class Peak(threading.Thread):
    """Watches a process and its descendants until it ends; `mb` is the most that they held at a time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.mb = 0.0

    def run(self) -> None:
        while (resident := resident_mb(self._pid)) > 0:
            self.mb = max(self.mb, resident)
            time.sleep(SAMPLE_S)


def resident_mb(pid: int) -> float:
    """Return what a process and all that it started hold resident, in MB; 0 once it has ended."""
    parents, sizes = dict[int, int](), dict[int, float]()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):
            continue
        parents[int(facts["Pid"])] = int(facts["PPid"])
        sizes[int(facts["Pid"])] = float(facts.get("VmRSS", "0").split()[0]) / 1024
    return sum(size for one, size in sizes.items() if pid in ancestry(one, parents))


def ancestry(pid: int, parents: Mapping[int, int]) -> set[int]:
    """Return a process and those that it descends from."""
    found = set[int]()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found
