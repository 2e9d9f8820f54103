"""Snapshots in Spark: equal by every way, with no password to be seen, and as a stream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqlayer.archive import archive_pass, create_snapshot, drop_snapshot, retain
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.errors import ArchiveBroken, InvalidInput, NotFound
from mqlayer.postgres.arrow_reader import read_address
from mqlayer.postgres.rights import Right
from mqlayer.stack import PostgresServer
from tests.fixtures.archive_scenes import LOW, TOPIC, ArchiveScene
from tests.fixtures.archived import BEGAN, ArchivedTopics
from tests.fixtures.missing_tools import import_or_leave_out, leave_out
from tests.fixtures.roles import role_dsn
from tests.fixtures.spark import QUICK_QUERIES
from tests.fixtures.variants import some_of
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.sockets import by_socket

import_or_leave_out("pyspark")

SECRET = "sentinel-8d1f"
WAYS = ["jdbc", "python", "parquet"]


@pytest.fixture
def filled(archived: ArchivedTopics) -> ArchivedTopics:
    """Two topics with rows of every kind, and the snapshot `s`."""
    archived.topic("invoices")
    archived.put("a", "b", "a", body=b"\x00\xff")
    archived.put("ä\0☃", None, tags=["eu", "vip"], headers='{"x":"ä","n":"\\u0000","e":""}', source=2, outcomes=True)
    archived.put("a", body=b"", headers="{}", tags=[])
    archived.put("a", "b", topic="invoices", at=BEGAN.replace(year=1999))
    archived.put(*[f"key-{number}" for number in range(60)])
    create_snapshot(runtime_of(archived.database), "s")
    archived.put("a", "late", outcomes=True)
    return archived


def read(spark: Any, filled: ArchivedTopics, way: str, tmp_path: Path, **facts: Any) -> Any:
    from mqlayer.spark import read_export, read_snapshot

    if way != "parquet":
        require(spark, way)
        # As the role that has the right to analyze, and no other.
        return read_snapshot(spark, "s", dsn=role_dsn(filled.dsn, Right.ANALYZE), method=way, **facts)  # type: ignore[arg-type]
    if not (tmp_path / "out").exists():
        export_snapshot(runtime_of(filled.database), "s", tmp_path / "out", file_rows=20)
    return read_export(spark, "s", str(tmp_path / "out"), **facts)


def require(spark: Any, way: str) -> None:
    from mqlayer.spark.jdbc import has_driver

    if way == "jdbc" and not has_driver(spark):
        leave_out("Postgres' JDBC driver is not installed")


def rows(frame: Any) -> list[str]:
    return sorted(str(row.asDict()) for row in frame.collect())


@pytest.mark.parametrize("table", some_of(["records", "outcomes", "lineage"], 3))
def test_all_ways_give_the_same_frame(spark: Any, filled: ArchivedTopics, tmp_path: Path, table: Any) -> None:
    """Invariant 18, case 79; what was archived after the snapshot is in none of them."""
    from mqlayer.archive.columns import COLUMNS
    from mqlayer.spark.schemas import declared

    frames = {way: read(spark, filled, way, tmp_path, table=table) for way in WAYS}
    found = {way: rows(frame) for way, frame in frames.items()}
    assert {way: frame.schema for way, frame in frames.items()} == dict.fromkeys(WAYS, declared(COLUMNS[table]))
    assert len(found["jdbc"]) == {"records": 68, "outcomes": 1, "lineage": 2}[table]
    assert found["python"] == found["jdbc"]
    assert found["parquet"] == found["jdbc"]
    assert rows(frames["jdbc"]) == found["jdbc"], "read again"


@pytest.mark.full
def test_records_come_as_they_were_published(spark: Any, filled: ArchivedTopics, tmp_path: Path) -> None:
    frame = read(spark, filled, "python", tmp_path, columns=["key", "headers", "tags", "seq"], partitions=3, check=True)
    assert frame.columns == ["key", "headers", "tags", "seq"]
    (row,) = frame.where("key like 'ä%'").collect()
    assert (row.key, row.headers, row.tags) == ("ä\0☃", {"x": "ä", "n": "\0", "e": ""}, ["eu", "vip"])
    assert frame.rdd.getNumPartitions() <= 3


@pytest.mark.full
@pytest.mark.parametrize("way", some_of(["jdbc", "python"], 2))
def test_filters_give_the_same_rows_and_none_stays_with_the_frame(
    spark: Any, filled: ArchivedTopics, tmp_path: Path, way: str
) -> None:
    """Spark's filters for Python sources stay in a frame for its next query, so none is pushed down there."""
    frame = read(spark, filled, way, tmp_path)
    everything = frame.collect()
    checks: dict[str, Callable[[Any], bool]] = {
        "key = 'a' AND seq >= 2": lambda row: row.key == "a" and row.seq >= 2,
        "topic = 'invoices'": lambda row: row.topic == "invoices",
        "published_at < timestamp'2000-01-01 00:00:00'": lambda row: row.published_at.year < 2000,
        "published_at = timestamp'2026-11-21 09:00:00'": lambda row: row.published_at.year == 2026,
        "source IN (2, 3) AND headers IS NOT NULL": lambda row: row.source == 2 and row.headers is not None,
        "key IS NULL OR key > 'key-5'": lambda row: row.key is None or row.key > "key-5",
        "key = 'it''s'": lambda row: row.key == "it's",
        "key > 'b'": lambda row: row.key is not None and row.key > "b",
    }
    for text, test in checks.items():
        assert rows(frame.where(text)) == sorted(str(row.asDict()) for row in everything if test(row)), text


@pytest.mark.full
@pytest.mark.parametrize("way", some_of(WAYS, 3))
def test_a_reading_that_is_not_the_cut_is_refused(spark: Any, filled: ArchivedTopics, tmp_path: Path, way: str) -> None:
    read(spark, filled, way, tmp_path, check=True)
    if way == "parquet":
        victim = max((tmp_path / "out" / "records").iterdir(), key=lambda path: path.stat().st_size)
        other = next(path for path in (tmp_path / "out" / "records").iterdir() if path != victim)
        shutil.copy(other, victim)
    else:
        filled.connection.execute("UPDATE mqlayer_archive.record SET seq = 1 WHERE key = 'a' AND seq = 2")
    with pytest.raises(ArchiveBroken, match="use nothing of this reading"):
        read(spark, filled, way, tmp_path, check=True)


@pytest.mark.full
def test_errors_name_the_option_that_is_wrong(spark: Any, filled: ArchivedTopics, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    from mqlayer.spark import read_export, read_snapshot, register

    with pytest.raises(NotFound, match="snapshot list"):
        read_snapshot(spark, "nobody", dsn=filled.dsn)
    for facts, text in (
        ({"table": "x"}, "option table"),
        ({"columns": ["key", "x"]}, "option columns: no 'x'"),
        ({"columns": []}, "option columns"),
        ({"method": "x"}, "option method"),
        ({"method": "parquet"}, "option method"),
        ({"partitions": 0}, "option partitions"),
    ):
        with pytest.raises(InvalidInput, match=text):
            read_snapshot(spark, "s", dsn=filled.dsn, **facts)
    with pytest.raises(InvalidInput, match="option path: no export"):
        read_export(spark, "s", str(tmp_path / "x"))
    register(spark, dsn=filled.dsn)
    for options, text in (
        ({}, "option snapshot"),
        ({"snapshot": "nobody"}, "unknown snapshot 'nobody'"),
        ({"snapshot": "s", "partitions": "no"}, "option partitions"),
        ({"snapshot": "s", "x": "y"}, "option x: unknown"),
        ({"snapshot": "s", "dsn": "y"}, "option dsn.*register"),
    ):
        with pytest.raises(PySparkException, match=f"(?s){text}"):
            spark.read.format("mqlayer").options(**options).load().collect()
    frame = spark.read.format("mqlayer").option("snapshot", "s").load()
    drop_snapshot(runtime_of(filled.database), "s")
    with pytest.raises(PySparkException, match="dropped"):
        frame.collect()


@pytest.mark.parametrize("way", some_of(["jdbc", "python"], 2))
def test_no_password_is_in_a_plan_a_log_or_an_error(
    spark: Any, filled: ArchivedTopics, tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from mqlayer.spark import read_snapshot

    require(spark, way)
    dsn = filled.dsn.replace("postgres@", f"postgres:{SECRET}@")
    assert read_address(dsn).password == SECRET
    spark.sparkContext.setLogLevel("DEBUG" if way == "python" else "INFO")
    try:
        frame = read_snapshot(spark, "s", dsn=dsn, method=way)  # type: ignore[arg-type]
        assert frame.count() == 68
        frame.explain(True)
        shown = [frame._jdf.queryExecution().toString(), repr(read_address(dsn)), str(spark.conf.getAll)]
        filled.connection.execute("ALTER TABLE mqlayer_archive.record RENAME TO gone")
        with pytest.raises((PySparkException, Py4JJavaError)) as refused:
            frame.collect()
        shown += [str(refused.value), repr(refused.value)]
    finally:
        spark.sparkContext.setLogLevel("ERROR")
    output = capfd.readouterr()
    assert [text[:200] for text in (*shown, output.out, output.err) if SECRET in text] == []


def test_passwords_come_from_where_the_client_library_finds_them(
    filled: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mqlayer.spark.jdbc import properties_of, url_of

    passfile = tmp_path / "pass"
    passfile.write_text(f"*:*:*:*:{SECRET}-file\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    assert read_address(filled.dsn).password == f"{SECRET}-file"
    monkeypatch.setenv("PGPASSWORD", f"{SECRET}-environment")
    address = read_address(filled.dsn)
    assert address.password == f"{SECRET}-environment"
    assert properties_of(address)["password"] == f"{SECRET}-environment"
    assert SECRET not in url_of(address) + str(address) + address.display


@pytest.mark.full
def test_a_socket_is_read_by_the_source_in_python(
    spark: Any, filled: ArchivedTopics, postgres_server: Any, tmp_path: Path
) -> None:
    from mqlayer.spark import read_snapshot

    if not isinstance(postgres_server, PostgresServer):
        pytest.skip("only a server of our own has a socket that we know")
    dsn = by_socket(filled.dsn)
    assert read_snapshot(spark, "s", dsn=dsn).count() == 68
    require(spark, "jdbc")
    with pytest.raises(InvalidInput, match=r"option method.*socket"):
        read_snapshot(spark, "s", dsn=dsn, method="jdbc")


def stream(spark: Any, archived: ArchivedTopics, tmp_path: Path, **options: str) -> list[tuple[str, int]]:
    """Run a query over what the archive has, from its checkpoint to the end; return what all runs of it wrote."""
    from mqlayer.spark import register

    register(spark, dsn=archived.dsn)
    query = (
        spark.readStream.format("mqlayer").options(partitions="2", **options).load().select("key", "seq")
        .writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        .option("path", str(tmp_path / "sink")).trigger(availableNow=True).start()
    )  # fmt: skip
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return sorted((row.key, row.seq) for row in spark.read.parquet(str(tmp_path / "sink")).collect())


@pytest.mark.full
def test_a_stream_has_each_batch_once_over_restarts(spark: Any, archived: ArchivedTopics, tmp_path: Path) -> None:
    archived.put("a", "b")
    archived.put("a")
    assert stream(spark, archived, tmp_path) == [("a", 1), ("a", 2), ("b", 1)]
    archived.put("b", "c")
    assert stream(spark, archived, tmp_path) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]
    # A crash before the commit of a micro-batch: Spark asks for the same batches again.
    last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    archived.put("c")
    expected = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("c", 2)]
    assert stream(spark, archived, tmp_path) == expected


@pytest.mark.full
def test_a_stream_that_missed_dropped_batches_fails(spark: Any, archived: ArchivedTopics, tmp_path: Path) -> None:
    from datetime import timedelta

    from pyspark.errors import PySparkException

    archived.put("a", age_days=50)
    assert stream(spark, archived, tmp_path, topics="orders") == [("a", 1)]
    archived.put("a", age_days=40)
    archived.put("a")
    assert [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=30))] == [
        "dropped",
        "dropped",
    ]
    with pytest.raises(PySparkException, match="dropped from the archive"):
        stream(spark, archived, tmp_path, topics="orders")


@pytest.mark.full
def test_a_snapshot_during_a_split_replays_in_order(
    spark: Any, database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    """Case 79, through streams, the archiver and a split; order by lineage and offset."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    from mqlayer.spark import read_snapshot

    scene = ArchiveScene(database_dsn, key_prefix, redis_url)
    try:
        scene.send(1, LOW, *(str(number).encode() for number in range(20)))
        scene.archive()
        scene.send(1, LOW, *(str(number).encode() for number in range(20, 30)))
        split(runtime_of(scene.database, scene.prefix), TOPIC, 1, at=[100])
        scene.send(1, LOW, *(str(number).encode() for number in range(30, 40)))
        archive_pass(runtime_of(scene.database, scene.prefix))
        create_snapshot(runtime_of(scene.database), "s")
        scene.send(1, LOW, b"late")
        scene.archive()
    finally:
        scene.close()
    records = read_snapshot(spark, "s", dsn=database_dsn, check=True)
    lineage = {row.partition: row for row in read_snapshot(spark, "s", table="lineage", dsn=database_dsn).collect()}
    found = records.where(F.col("key") == LOW).collect()
    assert len({row.partition for row in found}) == 2
    assert len({(row.source, row.lp, row.seq) for row in found}) == len(found)
    found.sort(key=lambda row: (lineage[row.partition].first_version, row.offset))
    assert [int(row.body) for row in found] == list(range(40))
    parents = {row.partition: row.parents for row in lineage.values() if row.parents}
    assert set(map(tuple, parents.values())) == {(1,)}
    assert {row.last_version for row in lineage.values()} == {1, None}


@pytest.mark.parametrize("known", ["", "/srv/lib"])
def test_planning_processes_get_the_zip_that_the_driver_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Once, behind what is known; nothing where mqlayer is installed."""
    from mqlayer.spark.package_path import share_package

    environment = {"PYTHONPATH": known} if known else {}
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(environment=environment))
    share_package(session)
    assert environment.get("PYTHONPATH", "") == known
    package = tmp_path / "mqlayer.zip"
    package.touch()
    monkeypatch.setattr("mqlayer.__file__", str(package / "mqlayer" / "__init__.py"))
    share_package(session)
    share_package(session)
    assert environment["PYTHONPATH"] == os.pathsep.join(filter(None, [known, str(package)]))


JOB = """
import runpy, sys, mqlayer.spark
assert 'mqlayer.zip' in mqlayer.__file__, mqlayer.__file__
spark = mqlayer.spark.session('job')
frame = mqlayer.spark.read_snapshot(spark, 's', method='python', check=True)
where = frame.rdd.map(lambda row: __import__('mqlayer').__file__).collect()
print('read', len(where), all('mqlayer.zip' in path for path in where))
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("plain_install")  # where the wheel is built
def test_the_wheel_as_a_zip_serves_as_py_files(
    filled: ArchivedTopics, built_wheel: Path, spark_python: Path, tmp_path: Path
) -> None:
    """Packaged data is read out of the archive; workers find the package there and nowhere else; a job's file is a
    program of spark-submit."""
    if shutil.which("java") is None:
        leave_out("Spark needs Java 17 or newer")
    package = Path(shutil.copy(built_wheel, tmp_path / "mqlayer.zip"))
    with zipfile.ZipFile(package) as archive:
        archive.extract("mqlayer/spark/jobs/audit.py", tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    environment = os.environ | {"MQLAYER_DSN": filled.dsn, "PYSPARK_PYTHON": str(spark_python), "PYTHONSAFEPATH": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[1]", "--py-files", str(package)]
    settings = QUICK_QUERIES | {
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "1",
    }  # fmt: skip
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    job = ["job.py", "mqlayer/spark/jobs/audit.py", "--snapshot", "s", "--method", "python", "--out", "found"]
    done = subprocess.run([*command, *job], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said, found = done.stdout.splitlines()
    assert said == "read 68 True"
    assert (json.loads(found)["verdict"], json.loads(found)["records"]) == ("clean", 68)
    assert list((tmp_path / "found" / "audit" / "chains").glob("*.parquet"))
