"""Exports of the archive to a lake: each record once, whatever is killed, and what grows meanwhile."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from mqlayer.archive import create_snapshot, retain, set_keep_until_exported
from mqlayer.archive.lake import export, export_archive, forget_lake, lake_statuses, tables, verify_export
from mqlayer.archive.lake.state import lake_location
from mqlayer.archive.lake.tables import LakeTable
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.doctor import diagnose
from mqlayer.doctor.findings import CheckStatus
from mqlayer.doctor.health import system_health
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput, NotFound
from mqlayer.exporter.samples import control_samples
from mqlayer.settings import Settings
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.commands import Commands
from tests.fixtures.lakes import archived_ids, archived_outcome_ids, ids, outcome_ids
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.variants import some_of
from tests.proof.runtimes import runtime_of

import_or_leave_out("deltalake")


def fill(archived: ArchivedTopics, count: int = 3) -> None:
    for number in range(count):
        archived.put("a", "b", "a", outcomes=number % 2 == 0)
        archived.put("ä", None, tags=["eu"], headers='{"x":"ä","n":"\\u0000"}', source=2, body=b"\x00\xff")


def test_an_export_has_what_the_archive_had_and_goes_on_from_there(archived: ArchivedTopics, tmp_path: Path) -> None:
    runtime, lake = runtime_of(archived.database), tmp_path / "lake"
    archived.topic("invoices")
    fill(archived)
    archived.put("x", topic="invoices")
    report = export_archive(runtime, str(lake))
    assert (report.exported, report.ended) == ({"orders": 15, "invoices": 1}, True)
    assert ids(lake) == archived_ids(archived)
    assert outcome_ids(lake) == archived_outcome_ids(archived)
    assert export_archive(runtime, str(lake)).total == 0, "nothing is new"
    fill(archived)
    assert {one.topic: one.batches_behind for one in lake_statuses(archived.database)} == {"orders": 6, "invoices": 0}
    assert export_archive(runtime, str(lake), topics=["orders"]).total == 15
    assert ids(lake) == archived_ids(archived)
    assert outcome_ids(lake) == archived_outcome_ids(archived)
    row = next(row for row in LakeTable(str(lake), "records").delta.to_pyarrow_table().to_pylist() if row["key"] == "ä")
    assert (row["body"], row["tags"], dict(row["headers"])) == (b"\x00\xff", ["eu"], {"x": "ä", "n": "\0"})
    assert all(
        (file["partition.day"], file["partition.partition"]) for file in LakeTable(str(lake), "records").files("orders")
    )


def test_a_commit_has_few_rows_and_whole_batches(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "COMMIT_ROWS", 4)
    fill(archived, 4)
    report = export_archive(runtime_of(archived.database), str(tmp_path / "lake"))
    assert (report.total, report.commits) == (20, 8)
    assert ids(tmp_path / "lake") == archived_ids(archived)


def test_small_files_are_compacted_and_no_row_changes(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = str(tmp_path / "lake")
    for _ in range(tables.SMALL_FILES - 1):
        archived.put("a")
        assert export_archive(runtime_of(archived.database), lake).compacted == 0
    archived.put("a")
    assert export_archive(runtime_of(archived.database), lake).compacted == tables.SMALL_FILES
    assert len(LakeTable(lake, "records").files("orders")) == 1
    assert ids(lake) == archived_ids(archived)


def test_two_exporters_at_once_add_nothing_twice(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "COMMIT_ROWS", 2)
    monkeypatch.setattr(export, "TRIES", 50)
    monkeypatch.setattr(tables, "SMALL_FILES", 2)
    fill(archived, 4)
    lake = str(tmp_path / "lake")
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(export_archive, runtime_of(archived.database), lake) for _ in range(2)]
        assert sum(one.result(60).total for one in done) == 20
    assert ids(lake) == archived_ids(archived)
    assert outcome_ids(lake) == archived_outcome_ids(archived)


def test_one_process_at_a_time_compacts(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs commits two compactions of the same files, and each row is there twice."""
    monkeypatch.setattr(tables, "SMALL_FILES", 2)
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a")
    export_archive(runtime, lake)
    archived.put("a")
    ((lake_id,),) = archived.rows("SELECT lake_id FROM mqlayer_archive.lake")
    archived.rows("SELECT pg_advisory_lock(hashtext('mqlayer.lake'), %s)", lake_id)
    report = export_archive(runtime, lake)
    assert (report.total, report.compacted) == (1, 0)
    archived.rows("SELECT pg_advisory_unlock(hashtext('mqlayer.lake'), %s)", lake_id)
    assert export_archive(runtime, lake).compacted == 2
    assert ids(lake) == archived_ids(archived)


def test_a_column_of_a_later_release_is_null_in_older_rows(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    monkeypatch.setattr(tables, "lake_columns", lambda table, whole=tables.lake_columns: {
        name: word for name, word in whole(table).items() if name != "tags"
    })  # fmt: skip
    archived.put("a", tags=["old"])
    export_archive(runtime, lake)
    monkeypatch.undo()
    archived.put("a", tags=["new"])
    export_archive(runtime, lake)
    found = LakeTable(lake, "records").delta.to_pyarrow_table(columns=["batch", "tags"]).to_pylist()
    assert sorted((row["batch"], row["tags"]) for row in found) == [(1, None), (2, ["new"])]
    monkeypatch.setattr(tables, "lake_columns", lambda table, whole=tables.lake_columns: {
        name: word for name, word in whole(table).items() if name != "headers"
    })  # fmt: skip
    archived.put("a", headers='{"x":"y"}')
    assert export_archive(runtime, lake).total == 1, "an older release goes on"


def test_days_that_were_dropped_before_their_export_stop_it(archived: ArchivedTopics, tmp_path: Path) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a", age_days=9)
    archived.put("a", age_days=8)
    retain(runtime, older_than=dt.timedelta(days=8))
    export_archive(runtime, lake)
    assert [row[1] for row in ids(lake)] == [2], "it begins with the first day that is there"
    assert archived.rows("SELECT first_batch, batch FROM mqlayer_archive.lake_topic") == [(2, 2)]
    archived.put("a", age_days=5)
    archived.put("a")
    retain(runtime, older_than=dt.timedelta(days=2))
    with pytest.raises(ArchiveBroken, match="dropped"):
        export_archive(runtime, lake)
    assert [row[1] for row in ids(lake)] == [2]


def test_a_place_of_another_archive_is_refused(archived: ArchivedTopics, tmp_path: Path) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a")
    export_archive(runtime, lake)
    forget_lake(runtime, lake)
    with pytest.raises(Conflict, match="another export's"):
        export_archive(runtime, lake)
    with pytest.raises(NotFound):
        forget_lake(runtime, str(tmp_path / "none"))


def test_an_archive_that_was_restored_to_an_earlier_time_is_refused(archived: ArchivedTopics, tmp_path: Path) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a")
    archived.put("a")
    export_archive(runtime, lake)
    archived.connection.execute("UPDATE mqlayer_archive.topic SET batch = 1")
    with pytest.raises(ArchiveBroken, match="earlier time"):
        export_archive(runtime, lake)


def test_an_address_has_no_credentials(tmp_path: Path) -> None:
    for text in ("s3://key:sentinel@bucket/x", "s3://bucket/x?secret=sentinel"):
        with pytest.raises(InvalidInput) as raised:
            lake_location(text)
        assert "sentinel" not in str(raised.value)
    assert lake_location("s3://bucket/x/") == "s3://bucket/x"
    assert lake_location(f"file://{tmp_path}") == str(tmp_path)


def test_the_commands_export_list_and_forget(
    archived: ArchivedTopics, run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    lake = str(tmp_path / "lake")
    assert "nothing is exported" in run.text("archive", "exports")
    archived.put("a", "b")
    assert "2 records exported in 1 commit" in run.text("archive", "export", "--to", lake)
    (found,) = run.lines("archive", "exports")
    assert (found["topic"], found["batch"], found["batches_behind"]) == ("orders", 1, 0)
    assert "would be forgotten" in run.text("archive", "forget-export", lake)
    assert "forgotten" in run.text("archive", "forget-export", lake, "--yes")


def test_an_export_is_verified_against_the_archive_and_says_what_differs(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    fill(archived)
    export_archive(runtime, lake)
    found = verify_export(runtime, lake)
    assert (found.records, found.outcomes) == ({"orders": 15}, {"orders": 2})
    assert verify_export(runtime, lake, whole=True).files == {"orders": 0}
    monkeypatch.setattr(tables, "SMALL_FILES", 2)
    fill(archived)
    assert export_archive(runtime, lake).compacted > 0
    found = verify_export(runtime, lake)
    assert (found.records, found.files) == ({"orders": 15}, {"orders": 2}), "compacted files are read again"
    assert [one.verified_batch for one in lake_statuses(archived.database)] == [12]
    (path,) = (tmp_path / "lake" / "records").rglob(_current(lake))
    path.write_bytes(path.read_bytes().replace(b"PAR1", b"PAR1", 1)[:-1] + b"2")
    with pytest.raises(ArchiveBroken, match="changed since"):
        verify_export(runtime, lake, whole=True)


def _current(lake: str) -> str:
    (file,) = LakeTable(lake, "records").files("orders")
    return str(file["path"]).rpartition("/")[2]


@pytest.mark.parametrize(
    ("change", "said"),
    some_of(
        [
            ("UPDATE mqlayer_archive.record SET body = 'other' WHERE batch = 2 AND seq = 1", "source 2, LP"),
            ("DELETE FROM mqlayer_archive.record WHERE batch = 2 AND seq = 1", "the archive has nothing"),
            ("UPDATE mqlayer_archive.record SET key = 'z' WHERE batch = 1", "source 1, LP"),
            ("UPDATE mqlayer_archive.outcome SET outcome = 'skipped' WHERE batch = 1", "outcomes are there"),
        ],
        4,
    ),
)
def test_a_row_that_differs_is_found(archived: ArchivedTopics, tmp_path: Path, change: str, said: str) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    fill(archived, 1)
    export_archive(runtime, lake)
    archived.connection.execute(change.encode())
    with pytest.raises(ArchiveBroken, match=said):
        verify_export(runtime, lake)
    assert [one.verified_batch for one in lake_statuses(archived.database)] == [0]


@pytest.mark.full
def test_rows_that_a_faulty_compaction_lost_are_found(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also verified ones, in files that replaced verified files."""
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    fill(archived)
    export_archive(runtime, lake)
    verify_export(runtime, lake)
    table = LakeTable(lake, "records")
    table.delta.delete("batch = 2 AND seq = 1")
    with pytest.raises(ArchiveBroken, match="13 records are there, 15 were verified"):
        verify_export(runtime, lake)


def test_retention_waits_for_a_verified_export_and_then_drops_days_under_snapshots(
    archived: ArchivedTopics, tmp_path: Path
) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a", "b", age_days=40)
    archived.put("a")
    create_snapshot(runtime, "s")
    assert set_keep_until_exported(runtime, "orders", keep=True)

    def drop() -> list[str]:
        return [day.result for day in retain(runtime, older_than=dt.timedelta(days=30))]

    assert drop() == ["unexported"]
    export_archive(runtime, lake)
    assert drop() == ["unexported"], "no one looked at it yet"
    verify_export(runtime, lake)
    assert drop() == ["dropped"]
    assert archived.rows("SELECT exported_batch FROM mqlayer_archive.snapshot_topic") == [(1,)]
    with pytest.raises(ArchiveBroken, match="with its export"):
        export_snapshot(runtime, "s", tmp_path / "out")
    with pytest.raises(Conflict, match="only this export has days of snapshots: s"):
        forget_lake(runtime, lake)
    # A later snapshot begins behind the dropped day.
    assert create_snapshot(runtime, "later").records == 1
    assert export_snapshot(runtime, "later", tmp_path / "later").snapshot.records == 1
    assert not set_keep_until_exported(runtime, "orders", keep=True)


def test_a_late_export_is_told_by_the_doctor_the_exporter_and_the_console(
    archived: ArchivedTopics, tmp_path: Path
) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")

    def told() -> tuple[CheckStatus, str, list[tuple[float, dict[str, str]]]]:
        (found,) = [one for one in diagnose(Settings(dsn=SecretStr(archived.dsn))) if one.check == "exports"]
        samples = control_samples(runtime)["mqlayer.archive.export_delay"]
        return found.verdict, found.seen, [(round(value / 3600), dict(labels)) for value, labels in samples]

    assert told() == (CheckStatus.OK, "the archive is not exported", [])
    fill(archived, 1)
    export_archive(runtime, lake)
    fill(archived, 1)
    labels = {"topic": "orders", "export": lake}
    assert told() == (CheckStatus.OK, "exports of the archive: 1; none is late", [(0, labels)])
    archived.connection.execute("UPDATE mqlayer_archive.lake_topic SET exported_at = now() - interval '49 h'")
    verdict, seen, samples = told()
    assert (verdict, samples) == (CheckStatus.WARNING, [(49, labels)])
    assert f"at {lake} lacks 2 batches" in seen
    (late,) = [one for one in system_health(runtime).problems if one.alert.name == "MqlayerExportLate"]
    assert (late.topic, late.item) == ("orders", lake)
    assert (late.text, late.command) == (f"The export at {lake} lacks 2 batches, since 2 d", "mqlayer archive exports")
    export_archive(runtime, lake)
    assert told()[0] is CheckStatus.OK


def test_without_the_setting_snapshots_keep_their_days(archived: ArchivedTopics, tmp_path: Path) -> None:
    runtime, lake = runtime_of(archived.database), str(tmp_path / "lake")
    archived.put("a", age_days=40)
    create_snapshot(runtime, "s")
    export_archive(runtime, lake)
    verify_export(runtime, lake)
    assert [day.result for day in retain(runtime, older_than=dt.timedelta(days=30))] == ["spared"]
