"""Snapshots, jobs and streams on a Spark cluster: results as in local mode, with a worker or the driver killed.

Tests that are not about a driver's start share one on the cluster and one in local mode (`SparkCluster.program`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqlayer.archive import create_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.spark_cluster import PROGRAM, Driver, SparkCluster, thin_python
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

import_or_leave_out("pyspark")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("plain_install"),  # where the wheel is built
]

LOCAL = "local[2]"
BATCHES = 6
EXECUTORS_NEED = (
    "adbc-driver-postgresql", "adbc-driver-manager", "msgspec", "psycopg", "psycopg-binary", "psycopg-pool", "pyarrow",
    "pydantic", "annotated-types", "pydantic-core", "typing-extensions", "typing-inspection", "pydantic-settings",
    "python-dotenv", "redis", "tenacity",
)  # fmt: skip
"""Those of the page 'Run Spark on a cluster', with what they need themselves."""
START_S = 120.0


@pytest.fixture
def filled(archived: ArchivedTopics) -> ArchivedTopics:
    """Two topics, batches enough for four tasks, outcomes, and the snapshot `s`."""
    archived.topic("invoices")
    for number in range(BATCHES):
        archived.put(*[f"key-{n % 37}" for n in range(40)], source=1 + number % 2, outcomes=number % 3 == 0)
        archived.put("ä", None, topic="invoices", headers='{"n":"1"}', tags=["eu"])
    create_snapshot(runtime_of(archived.database), "s")
    archived.put("late")
    return archived


@pytest.fixture
def two_workers(spark_cluster: SparkCluster) -> Iterator[SparkCluster]:
    """The cluster, with the workers that it had."""
    yield spark_cluster
    spark_cluster.end_drivers()
    wait_until(lambda: spark_cluster.alive() == len(spark_cluster.workers), timeout_s=START_S, what="dead workers gone")
    spark_cluster.add_workers(2 - len(spark_cluster.workers))


def test_executors_take_mqlayer_from_the_zip(two_workers: SparkCluster, filled: ArchivedTopics) -> None:
    executors, driver = two_workers.program().run("where", dsn=filled.dsn)
    assert len({number for number, *_ in executors}) == 2
    for _, prefix, package in executors:
        assert Path(prefix) == two_workers.python.parents[1]
        assert "mqlayer.zip/" in package
    assert "mqlayer.zip/" in driver


def test_all_ways_give_the_rows_of_local_mode(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    export = tmp_path / "out"
    export_snapshot(runtime_of(filled.database), "s", export, file_rows=100)
    found, local = on_both(two_workers, "reads", export, dsn=filled.dsn)
    for table in found:
        ((name, hashes),) = table.items()
        assert len(set(hashes.values())) == 1, (name, hashes)
    assert found == local


def test_all_jobs_find_the_same_as_in_local_mode(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    found, local = on_both(two_workers, "jobs", tmp_path, dsn=filled.dsn)
    assert found == local
    (audit,) = [one for one in found if one.get("job") == "audit"]
    assert (audit["good"], audit["facts"]["records"]) == (True, BATCHES * 42)


def test_the_command_audits_on_a_cluster(two_workers: SparkCluster, filled: ArchivedTopics) -> None:
    """Its driver has mqlayer installed; executors get the zip. Python and queries as in production."""
    (found,) = two_workers.analytics("audit", "--snapshot", "s", "--json", dsn=filled.dsn)
    assert (found["verdict"], found["records"]) == ("clean", BATCHES * 42)


def test_a_jobs_file_is_a_program_for_a_cluster(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    with zipfile.ZipFile(two_workers.package) as package:
        package.extract("mqlayer/spark/jobs/audit.py", tmp_path)
    job = tmp_path / "mqlayer" / "spark" / "jobs" / "audit.py"
    (found,) = two_workers.run(job, "--snapshot", "s", "--out", tmp_path / "found", dsn=filled.dsn)
    assert (found["verdict"], found["records"]) == ("clean", BATCHES * 42)
    assert list((tmp_path / "found" / "audit" / "chains").glob("*.parquet"))


def test_jobs_by_jdbc_need_no_package_on_executors(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    """Executors run no Python then."""
    bare = thin_python(tmp_path / "bare", ())
    found = two_workers.run(PROGRAM, "jobs", tmp_path / "cluster", dsn=filled.dsn, python=bare)
    assert {one["job"] for one in found if "job" in one} >= {"audit", "latency", "skew", "journeys"}


def test_executors_read_and_stream_with_the_few_packages_that_the_page_names(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    export = tmp_path / "out"
    export_snapshot(runtime_of(filled.database), "s", export, file_rows=100)
    thin = thin_python(tmp_path / "thin", EXECUTORS_NEED)
    found = two_workers.run(PROGRAM, "reads", export, dsn=filled.dsn, python=thin)
    for table in found:
        ((name, hashes),) = table.items()
        assert len(set(hashes.values())) == 1, (name, hashes)


def test_spark_submit_runs_each_command_with_its_options(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    with zipfile.ZipFile(two_workers.package) as package:
        package.extract("mqlayer/__main__.py", tmp_path)
    words = ["analytics", "what-if", "--snapshot", "s", "--topic", "orders", "--json", "--handler-ms", "5"]
    words += ["--partitions", "2", "--partitions", "4", "--members", "3"]
    (found,) = two_workers.run(tmp_path / "mqlayer" / "__main__.py", *words, dsn=filled.dsn)
    tried = [(one["route"], one["members"]) for one in found["scenarios"]]
    assert tried == [("present, 1", 3), ("even, 2", 3), ("even, 4", 3)]


def test_a_planted_fault_is_found_on_a_cluster(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    filled.rows("DELETE FROM mqlayer_archive.record WHERE key = 'key-7' AND seq = 3 AND source = 1 RETURNING 1")
    (tmp_path / "go").touch()
    (facts,) = two_workers.program().run("held-audit", tmp_path, dsn=filled.dsn)
    assert (facts["verdict"], facts["gaps"], facts["inversions"]) == ("not clean", 1, 0)


def test_a_job_whose_worker_is_killed_ends_right_on_the_other_one(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    program = two_workers.program()
    program.begin("held-audit", tmp_path, dsn=filled.dsn)
    await_tasks(program.driver, tmp_path)
    two_workers.kill_worker()
    wait_until(lambda: two_workers.alive() == 1, timeout_s=START_S, what="the worker is missed")
    (tmp_path / "go").touch()
    (facts,) = program.answer()
    assert (facts["verdict"], facts["records"]) == ("clean", BATCHES * 42)
    assert [facts] == two_workers.program(LOCAL).run("held-audit", tmp_path, dsn=filled.dsn)


def test_after_the_drivers_death_another_one_finds_the_same(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    driver = two_workers.submit(PROGRAM, "held-audit", tmp_path, dsn=filled.dsn)
    await_tasks(driver, tmp_path)
    driver.kill()
    (tmp_path / "go").touch()
    (facts,) = two_workers.program().run("held-audit", tmp_path, dsn=filled.dsn)
    assert (facts["verdict"], facts["records"]) == ("clean", BATCHES * 42)
    # Nothing of the dead driver is left: neither an application, nor a session at the database.
    wait_until(lambda: len(two_workers.state()["activeapps"]) == 1, timeout_s=START_S, what="the dead one's end")
    reading = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'mqlayer spark'"
    wait_until(lambda: not filled.rows(reading), timeout_s=START_S, what="readers' sessions end")


def test_a_stream_goes_on_at_its_checkpoint_after_its_driver_and_a_worker_died(
    two_workers: SparkCluster, filled: ArchivedTopics, tmp_path: Path
) -> None:
    """Neither is a record lost, nor does one come twice."""

    def committed() -> int:
        return len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*")))

    first = two_workers.submit(PROGRAM, "stream", tmp_path, "1", dsn=filled.dsn)
    first.await_that(lambda: committed() >= 2, what="two micro-batches")
    first.kill()
    done = committed()
    assert done < BATCHES, "it was killed in the middle"
    second = two_workers.program()
    second.begin("stream", tmp_path, "1", dsn=filled.dsn)
    second.driver.await_that(lambda: committed() > done, what="a micro-batch of the second driver")
    two_workers.kill_worker()
    found, packages = second.answer()
    # Each executor has it in its own folder: a path of the driver's machine may be none of theirs.
    assert packages == ["./mqlayer.zip/mqlayer/__init__.py"]
    there = filled.rows("SELECT count(*), count(DISTINCT (topic_id, source, lp, seq)) FROM mqlayer_archive.record")
    assert [(found["rows"], found["different"])] == there
    local, _ = two_workers.program(LOCAL).run("stream", fresh(tmp_path), str(BATCHES), dsn=filled.dsn)
    assert local == found


def on_both(cluster: SparkCluster, *words: str | Path, dsn: str) -> tuple[list[Any], list[Any]]:
    """Do an act on the cluster and in local mode, side by side."""
    programs = cluster.program(), cluster.program(LOCAL)
    for program in programs:
        program.begin(*words, dsn=dsn)
    found, local = (program.answer() for program in programs)
    return found, local


def await_tasks(driver: Driver, place: Path) -> None:
    """Wait until a task of each executor stands in the middle."""
    driver.await_that(
        lambda: len({path.name.split("-")[1] for path in place.glob("held-*")}) == 2, what="tasks on both executors"
    )


def fresh(place: Path) -> Path:
    """Return another place beside it."""
    other = place / "other"
    other.mkdir()
    return other
