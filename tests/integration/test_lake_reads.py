"""Snapshots read across an export and Postgres: the same rows by every way, also of days that only the export has."""

from __future__ import annotations

import datetime as dt
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqlayer.archive import create_snapshot, retain, set_keep_until_exported
from mqlayer.archive.certify import load_certificate
from mqlayer.archive.columns import ArchiveTable
from mqlayer.archive.lake import export_archive, read_snapshot, verify_export
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.errors import ArchiveBroken, InvalidInput, NotFound
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.commands import Commands
from tests.fixtures.missing_tools import import_or_leave_out
from tests.proof.runtimes import runtime_of

import_or_leave_out("deltalake")

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
TABLES: tuple[ArchiveTable, ...] = ("records", "outcomes", "lineage")


def fill(archived: ArchivedTopics) -> None:
    """Two topics; an old day, rows of every kind; a part of the snapshot `s` is exported."""
    runtime = runtime_of(archived.database)
    archived.topic("invoices")
    archived.put("a", "b", "a", body=b"\x00\xff", age_days=40)
    archived.put("ä\0☃", None, tags=["eu", "vip"], headers='{"x":"ä","n":"\\u0000","e":""}', source=2, outcomes=True)
    archived.put("a", topic="invoices")
    export_archive(runtime, lake_of(archived))
    archived.put("a", body=b"", headers="{}", tags=[], outcomes=True)
    archived.put(*[f"key-{number}" for number in range(30)])
    create_snapshot(runtime, "s")
    archived.put("a", "late", outcomes=True)


_LAKES: dict[str, str] = {}


def lake_of(archived: ArchivedTopics) -> str:
    return _LAKES[archived.dsn]


@pytest.fixture
def filled(archived: ArchivedTopics, tmp_path: Path) -> ArchivedTopics:
    _LAKES[archived.dsn] = str(tmp_path / "lake")
    fill(archived)
    return archived


def drop_exported_days(archived: ArchivedTopics) -> None:
    runtime = runtime_of(archived.database)
    verify_export(runtime, lake_of(archived))
    for topic in ("orders", "invoices"):
        set_keep_until_exported(runtime, topic, keep=True)
    assert [day.result for day in retain(runtime, older_than=dt.timedelta(days=30))] == ["dropped"]


def rows_of(batches: Any) -> list[str]:
    """Sorted rows, as text; maps as dictionaries, times in UTC."""
    rows = [row for batch in batches for row in (batch if isinstance(batch, list) else batch.to_pylist())]
    for row in rows:
        if row.get("headers") is not None:
            row["headers"] = dict(sorted(dict(row["headers"]).items()))
        for name, value in row.items():
            if isinstance(value, dt.datetime):
                row[name] = (value - EPOCH) // dt.timedelta(microseconds=1)
    return sorted(map(str, rows))


def digest(rows: list[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def everything(archived: ArchivedTopics, **how: Any) -> dict[str, str]:
    return {table: digest(rows_of(read_snapshot(archived.database, "s", table=table, **how))) for table in TABLES}


def test_every_way_gives_the_same_rows_before_and_after_days_are_dropped(
    filled: ArchivedTopics, tmp_path: Path
) -> None:
    """Invariant 18, by hash of sorted rows: Postgres, a Parquet export, across, and the lake alone."""
    import pyarrow.parquet as pq

    before = everything(filled)
    count = len(rows_of(read_snapshot(filled.database, "s")))
    assert count == 37
    export_snapshot(runtime_of(filled.database), "s", tmp_path / "out", file_rows=20)
    exported = {
        table: digest(rows_of(pq.read_table(path).to_batches()[0] for path in (tmp_path / "out" / table).iterdir()))
        for table in TABLES
    }
    assert exported == before
    assert everything(filled, export=lake_of(filled)) == before
    drop_exported_days(filled)
    with pytest.raises(ArchiveBroken, match="with its export"):
        everything(filled)
    assert everything(filled, export=lake_of(filled)) == before
    export_archive(runtime_of(filled.database), lake_of(filled))
    assert everything(filled, export=lake_of(filled)) == before
    moved = Path(lake_of(filled)).rename(tmp_path / "moved")
    assert everything(filled, export=str(moved)) == before, "wherever the tables are"
    assert rows_of(read_snapshot(filled.database, "s", export=str(moved), columns=["key"]))


@pytest.mark.full
def test_spark_gives_the_rows_that_the_lake_gives(filled: ArchivedTopics, tmp_path: Path, request: Any) -> None:
    """By JDBC, by the source in Python, from a Parquet export; from the lake alone, and across it and Postgres."""
    import_or_leave_out("pyspark")
    from mqlayer.spark import read_export
    from mqlayer.spark import read_snapshot as read_by_spark
    from mqlayer.spark.jdbc import has_driver

    spark = request.getfixturevalue("spark")
    expected = everything(filled)
    by_export = partial(read_by_spark, spark, "s", dsn=filled.dsn, export=lake_of(filled), partitions=3)

    def in_spark() -> dict[str, str]:
        return {table: digest(rows_of_spark(by_export(table=table, check=True))) for table in TABLES}

    found = {"across": everything(filled, export=lake_of(filled)), "across, by Spark": in_spark()}
    export_archive(runtime_of(filled.database), lake_of(filled))
    found |= {"lake": everything(filled, export=lake_of(filled)), "lake, by Spark": in_spark()}
    export_snapshot(runtime_of(filled.database), "s", tmp_path / "out", file_rows=20)
    ways: dict[str, Any] = {
        way: partial(read_by_spark, spark, "s", dsn=filled.dsn, method=way) for way in ("jdbc", "python")
    }
    if not has_driver(spark):
        del ways["jdbc"]
    ways["parquet"] = partial(read_export, spark, "s", str(tmp_path / "out"))
    for way, read in ways.items():
        found[way] = {table: digest(rows_of_spark(read(table=table))) for table in TABLES}
    assert found == dict.fromkeys(found, expected)
    before = audit_of(spark, filled, None), contents_of(spark, filled, None)
    drop_exported_days(filled)
    assert (audit_of(spark, filled, lake_of(filled)), contents_of(spark, filled, lake_of(filled))) == before
    with pytest.raises(Exception, match=r"snapshot .* with its export"):
        read_by_spark(spark, "s", dsn=filled.dsn, method="python").collect()
    assert in_spark() == expected, "with days that only the export has"
    with pytest.raises(InvalidInput, match="jdbc reads no export to a lake"):
        by_export(method="jdbc")


@pytest.mark.full
def test_a_certificate_is_checked_on_days_that_only_the_export_has(
    filled: ArchivedTopics, tmp_path: Path, request: Any, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_or_leave_out("pyspark")
    request.getfixturevalue("spark")
    monkeypatch.setenv("MQLAYER_DSN", filled.dsn)
    export_archive(runtime_of(filled.database), lake_of(filled))
    certify, file = ("analytics", "certify"), str(tmp_path / "s.json")
    run(*certify, "--snapshot", "s", "--out", file)
    drop_exported_days(filled)
    assert "with its export" in run.failure(*certify, "--check", file)
    across = ("--from-export", lake_of(filled))
    assert "certificate of s: accepted; 37 records" in run.text(*certify, "--check", file, *across)
    run(*certify, "--snapshot", "s", "--out", str(tmp_path / "again.json"), *across)
    assert load_certificate(tmp_path / "again.json").chains == load_certificate(Path(file)).chains
    assert "leave --no-spark out" in run.failure(*certify, "--check", file, "--no-spark", *across)


def audit_of(spark: Any, filled: ArchivedTopics, export: str | None) -> dict[str, Any]:
    """What `mqlayer analytics audit` finds."""
    from mqlayer.spark.jobs.runner import names_of, perform, tables_of

    (found,) = perform(tables_of(spark, "s", dsn=filled.dsn, export=export), names_of("audit"))
    return {"good": found.good, **found.facts}


def contents_of(spark: Any, filled: ArchivedTopics, export: str | None) -> Any:
    """What `mqlayer analytics certify` certifies."""
    from mqlayer.spark.jobs.certify import snapshot_contents

    return snapshot_contents(spark, "s", dsn=filled.dsn, block_records=16, export=export)


def rows_of_spark(frame: Any) -> list[str]:
    """Sorted rows as `rows_of` has them; times by their numbers, as Spark's come in the session's zone."""
    from pyspark.sql import functions

    times = [field.name for field in frame.schema if field.dataType.typeName() == "timestamp"]
    rows = [row.asDict() for row in frame.withColumns({name: functions.unix_micros(name) for name in times}).collect()]
    for row in rows:
        for name in times:
            row[name] = None if row[name] is None else EPOCH + dt.timedelta(microseconds=row[name])
        row |= {name: bytes(value) for name, value in row.items() if isinstance(value, bytearray)}
    return rows_of([rows])


def test_a_record_that_is_nowhere_is_missed_at_the_end(filled: ArchivedTopics) -> None:
    filled.connection.execute("DELETE FROM mqlayer_archive.record WHERE batch = 4 AND key = 'key-7'")
    with pytest.raises(ArchiveBroken, match="has 37 records, 36 were read"):
        rows_of(read_snapshot(filled.database, "s", export=lake_of(filled)))


def test_another_archives_tables_are_refused(filled: ArchivedTopics) -> None:
    filled.connection.execute("UPDATE mqlayer_archive.lake SET lake_uuid = gen_random_uuid()")
    with pytest.raises(NotFound, match="another archive"):
        rows_of(read_snapshot(filled.database, "s", export=lake_of(filled)))
