"""An archiver, or retention, killed at each step: whoever comes next goes on, and every record is there once."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from mqlayer.archive import batches
from tests.fixtures.archive_scenes import HIGH, LOW, ArchiveScene
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

PROGRAM = """
import sys
from datetime import timedelta
from mqlayer.archive import archive_pass, batch_writer, retain
from mqlayer.postgres.database import Database
from mqlayer.runtime import Runtime
from mqlayer.settings import Settings
from tests.fixtures.variants import some_of
batch_writer.RECORDS = 30
dsn, prefix, what = sys.argv[1:]
runtime = Runtime(Database(dsn), Settings(key_prefix=prefix))
archive_pass(runtime) if what == "archive" else retain(runtime, older_than=timedelta(days=30))
"""


WAITING = (
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'COPY mqlayer_archive.%%' "
    "AND wait_event = 'ClientRead' AND query_start < now() - interval '0.2 s'"
)


def send(scene: ArchiveScene) -> None:
    for source in (1, 2):
        for key in (LOW, HIGH, "c"):
            scene.send(source, key, *[b"x"] * 20)


def killed(scene: ArchiveScene, what: str, place: str) -> None:
    """Run a pass that ends at a failpoint."""
    process = ask_python("-c", PROGRAM, scene.dsn, scene.prefix, what, env=os.environ | armed(place))
    assert process.returncode == -9, "the place was not reached"


@pytest.mark.parametrize(
    ("place", "nth"),
    some_of(
        [
            ("archive.after_read", 2),
            ("archive.before_copy", 2),
            ("archive.in_copy", 2),
            ("archive.after_copy", 2),
            ("archive.before_commit", 1),
            ("archive.before_commit", 2),
            ("archive.after_commit", 1),
        ],
        7,
    ),
)
def test_an_archiver_killed_in_a_batch_leaves_whole_batches(archive_scene: ArchiveScene, place: str, nth: int) -> None:
    send(archive_scene)
    killed(archive_scene, "archive", f"{place}=kill@{nth}")
    send(archive_scene)
    archive_scene.archive()
    archive_scene.assert_whole()
    ((batch, batches, records),) = archive_scene.rows(
        "SELECT (SELECT batch FROM mqlayer_archive.topic), (SELECT count(DISTINCT batch) FROM mqlayer_archive.record), "
        "(SELECT sum(records) FROM mqlayer_archive.day)"
    )
    assert (batch, records) == (batches, 240)


def test_an_archiver_killed_after_it_made_days_leaves_them(archive_scene: ArchiveScene) -> None:
    send(archive_scene)
    killed(archive_scene, "archive", "archive.after_days=kill")
    archive_scene.archive()
    archive_scene.assert_whole()


@pytest.mark.parametrize("place", some_of(["archive.before_retention", "archive.before_drop_commit"], 2))
def test_retention_killed_before_its_commit_dropped_nothing(archive_scene: ArchiveScene, place: str) -> None:
    send(archive_scene)
    archive_scene.archive()
    archive_scene.age(40)
    killed(archive_scene, "retain", f"{place}=kill")
    archive_scene.assert_whole()
    before = archive_scene.marks()
    ask_python("-c", PROGRAM, archive_scene.dsn, archive_scene.prefix, "retain", env=os.environ).check_returncode()
    assert archive_scene.archived() == []
    assert archive_scene.marks() == {pair: (last + 1, last) for pair, (_, last) in before.items()}


def test_an_archiver_stopped_in_a_copy_is_ended_by_whoever_waits_for_the_topic(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres ends no COPY that waits for its client; woken, the archiver finds its session gone."""
    monkeypatch.setitem(batches.TIMEOUTS, "lock_wait", "200ms")
    monkeypatch.setattr(batches, "STOPPED_S", 0.1)
    monkeypatch.setattr(batches, "CONFLICT_S", 0.5)
    send(archive_scene)
    arguments = PROGRAM, archive_scene.dsn, archive_scene.prefix, "archive"
    stopped = start_python("-c", *arguments, env=os.environ | armed("archive.in_copy=stop"), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: archive_scene.rows(WAITING), what="it is stopped in its COPY", timeout_s=20)
        wait_until(lambda: archive_scene.archive().total == 120, what="another one goes on", timeout_s=20)
        stopped.send_signal(signal.SIGCONT)
        stopped.wait(20)
    finally:
        stopped.kill()
        stopped.wait()
    archive_scene.archive()
    archive_scene.assert_whole()
