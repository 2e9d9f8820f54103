"""Exports to an object store, by the S3 API: as to a directory, by one process at a time."""

from __future__ import annotations

import datetime as dt
import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from mqlayer.archive import create_snapshot, retain, set_keep_until_exported
from mqlayer.archive.lake import export_archive, lake_statuses, read_snapshot, verify_export
from mqlayer.archive.lake.tables import LakeTable
from mqlayer.errors import Conflict, TransactionConflict
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python, is_stopped, start_python
from tests.fixtures.lakes import PROGRAM, archived_ids, ids
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.object_stores import BUCKET, KEY, ObjectServer
from tests.fixtures.s3_front import store_before
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

import_or_leave_out("deltalake")


PATIENT_S = 180.0
"""An export makes some hundred requests."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, s3_server: ObjectServer) -> Iterator[ObjectServer]:
    """A store that heeds no condition of a PUT; this process has its credentials."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY[1])
    with store_before(s3_server, conditional=False) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield s3_server


@pytest.fixture
def lake() -> str:
    """An address of its own in the bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"


def fill(archived: ArchivedTopics) -> None:
    for _ in range(2):
        archived.put("a", "b", "a", outcomes=True)
        archived.put("ä/ö", None, source=2)


@pytest.mark.full
@pytest.mark.usefixtures("store")
def test_exports_to_a_store_are_as_those_to_a_directory(
    archived: ArchivedTopics, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, increments, compaction, verifying, reading across days that Postgres dropped."""
    runtime = runtime_of(archived.database)
    archived.put("a", "b", age_days=40)
    assert export_archive(runtime, lake).total == 2
    fill(archived)
    assert export_archive(runtime, lake).total == 10
    fill(archived)
    monkeypatch.setattr("mqlayer.archive.lake.tables.SMALL_FILES", 2)
    assert export_archive(runtime, lake).compacted > 0
    create_snapshot(runtime, "s")
    before = sorted(str(row) for batch in read_snapshot(archived.database, "s") for row in batch.to_pylist())
    set_keep_until_exported(runtime, "orders", keep=True)
    assert [day.result for day in retain(runtime, older_than=dt.timedelta(days=30))] == ["unexported"]
    verify_export(runtime, lake, whole=True)
    assert [day.result for day in retain(runtime, older_than=dt.timedelta(days=30))] == ["dropped"]
    across = [row for batch in read_snapshot(archived.database, "s", export=lake) for row in batch.to_pylist()]
    assert sorted(map(str, across)) == before
    assert [(one.location, one.batches_behind) for one in lake_statuses(archived.database)] == [(lake, 0)]


@pytest.mark.full
@pytest.mark.usefixtures("store")
def test_a_store_has_one_exporter_at_a_time_and_the_next_one_goes_on(archived: ArchivedTopics, lake: str) -> None:
    """As a store that heeds no condition loses one of two commits; a killed exporter leaves it at once."""
    fill(archived)
    runtime = runtime_of(archived.database)
    started = start_python("-c", PROGRAM, archived.dsn, lake, env=os.environ | armed("lake.in_write=stop@2"))
    try:
        wait_until(lambda: is_stopped(started), what="it is stopped in its write", timeout_s=PATIENT_S)
        with pytest.raises(Conflict, match="another process exports"):
            export_archive(runtime, lake)
        started.send_signal(signal.SIGKILL)
        started.wait(20)
        wait_until(lambda: _free(archived), what="its session ended")
    finally:
        started.kill()
        started.wait()
    export_archive(runtime, lake)
    assert ids(lake) == archived_ids(archived)
    verify_export(runtime, lake)


LOCKED = """FROM pg_locks WHERE locktype = 'advisory' AND classid::int8 = hashtext('mqlayer.lake')::int8 & 4294967295
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


def _free(archived: ArchivedTopics) -> bool:
    return not archived.rows(f"SELECT 1 {LOCKED}")


@pytest.mark.full
@pytest.mark.usefixtures("store")
def test_an_exporter_whose_session_ended_commits_nothing(archived: ArchivedTopics, lake: str) -> None:
    """Another one may be at it since."""
    fill(archived)
    started = start_python("-c", PROGRAM, archived.dsn, lake, env=os.environ | armed("lake.in_write=stop@2"))
    try:
        wait_until(lambda: is_stopped(started), what="it is stopped in its write", timeout_s=PATIENT_S)
        assert archived.rows(f"SELECT pg_terminate_backend(pid) {LOCKED}") == [(True,)]
        wait_until(lambda: _free(archived), what="its session ended")
        export_archive(runtime_of(archived.database), lake)
        started.send_signal(signal.SIGCONT)
        assert started.wait(PATIENT_S) != 0
    finally:
        started.kill()
        started.wait()
    assert ids(lake) == archived_ids(archived)


@pytest.mark.full
def test_a_store_that_heeds_conditions_refuses_the_second_of_two_commits(
    archived: ArchivedTopics, lake: str, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the lock: as a commit is one conditional put."""
    fill(archived)
    with store_before(store, conditional=True) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        export_archive(runtime_of(archived.database), lake)
        first, second = LakeTable(lake, "outcomes"), LakeTable(lake, "outcomes")
        first.append(iter([]), 1, 90, group_rows=100)
        with pytest.raises(TransactionConflict):
            second.append(iter([]), 1, 90, group_rows=100)
        assert LakeTable(lake, "outcomes").place(1) == 90


@pytest.mark.full
@pytest.mark.usefixtures("store")
def test_credentials_are_in_no_log_no_error_and_no_table(archived: ArchivedTopics, lake: str) -> None:
    """They come from the environment only."""
    fill(archived)
    places = os.environ | {"MQLAYER_DSN": archived.dsn, "MQLAYER_LOG_LEVEL": "debug"}
    done = ask_python("mqlayer", "archive", "export", "--to", lake, env=places, timeout=PATIENT_S)
    assert done.returncode == 0, done.stderr
    refused = ask_python(
        "mqlayer",
        "archive",
        "export",
        "--to",
        lake,
        env=places | {"AWS_SECRET_ACCESS_KEY": "wrong-" + KEY[1]},
        timeout=PATIENT_S,
    )
    assert refused.returncode != 0
    assert lake in refused.stderr
    for text in (done.stdout, done.stderr, refused.stdout, refused.stderr, _all_rows(archived)):
        assert KEY[1] not in text
        assert KEY[0] not in text


def _all_rows(archived: ArchivedTopics) -> str:
    tables = archived.rows(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE schemaname LIKE 'mqlayer%%'"
    )
    return "\n".join(str(archived.rows(f"SELECT t::text FROM {name} t")) for (name,) in tables)
