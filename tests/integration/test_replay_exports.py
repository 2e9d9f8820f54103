"""Replays that read an export of the archive: days that Postgres dropped come from there, in order, once each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mqlayer.archive import set_keep_until_exported
from mqlayer.archive.lake import forget_lake, ordered_records
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput, NotFound
from mqlayer.redelivery import ReplayFilter, count_archived, replay_of, replays, retry_scan
from tests.fixtures.consumers import Stage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.replay_scenes import ALL, ExportedDays, ReplayScene, numbers
from tests.fixtures.variants import some_of

import_or_leave_out("deltalake")


@pytest.fixture
def days(stage: Stage, tmp_path: Path) -> ExportedDays:
    """Two keys and one message without: an old day that is exported, one that both have, one of Postgres alone."""
    scene = ReplayScene(stage)
    days = ExportedDays(scene, tmp_path / "lake")
    stage.send_numbers(2, 10)
    stage.send([(None, b"alone")])
    scene.settle()
    scene.archive.sql("UPDATE mqlayer_archive.record SET tags = '{eu,vip}' WHERE body = '3'")
    scene.archive.sql("""UPDATE mqlayer_archive.record SET headers = '{"a":"ä","b":""}' WHERE body = '4'""")
    scene.archive.sql("UPDATE mqlayer_archive.record SET published_at = '2026-01-01 00:00:00.123' WHERE body = '7'")
    days.note_day(40)
    stage.send_numbers(2, 5, first=11)
    scene.settle()
    days.note_day(0)
    days.export()
    stage.send_numbers(2, 5, first=16)
    scene.settle()
    return days


@pytest.mark.parametrize("batch", some_of([3, 100], 2))
def test_dropped_days_come_from_the_export_as_they_were(
    days: ExportedDays, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Identity, time, headers, tags, key and body, in the order of each key; windows smaller than a batch, too."""
    monkeypatch.setattr(ordered_records, "WINDOW_ROWS", 4)
    monkeypatch.setattr(ordered_records, "FIRST_BATCHES", 1)
    assert days.scene.replay(batch=batch).results == {"sent": 41}
    before = days.parked_rows()
    days.forget_parked()
    days.drop()
    assert days.scene.replay(batch=batch).results == {"sent": 20}, "what Postgres has"
    days.forget_parked()
    assert count_archived(days.scene.stage.database, "orders", "g", days.wanted) == 41
    done = days.scene.replay(days.wanted, batch=batch)
    assert (done.state, done.results, done.filter.export) == ("done", {"sent": 41}, str(days.location))
    assert days.parked_rows() == before
    assert days.scene.failing.parked("key-0") == numbers(1, 20)


def test_a_filter_narrows_an_export_as_it_does_postgres(days: ExportedDays) -> None:
    """By key, tag, time and snapshot; a snapshot with dropped days needs the export."""
    scene = days.scene
    scene.archive.snapshot("early")
    early, late = datetime(2025, 12, 31, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    wanted = [
        (ReplayFilter(key="key-1"), 20),
        (ReplayFilter(tag="eu"), 2),
        (ReplayFilter(since=early, until=late), 2),
        (ReplayFilter(key="key-0", tag="vip", since=late), 1),
        (ReplayFilter(key="nobody"), 0),
        (ReplayFilter(snapshot="early"), 41),
        (ReplayFilter(snapshot="early", key="key-0"), 20),
    ]
    set_keep_until_exported(days.runtime, "orders", keep=True)
    days.drop()
    for one, found in wanted:
        across = replace(one, export=str(days.location))
        assert count_archived(scene.stage.database, "orders", "g", across) == found, one
        assert scene.replay(across).sent == found, one
        days.forget_parked()
    for refused in (count_archived, lambda *_: scene.begin(wanted[-1][0])):
        with pytest.raises(ArchiveBroken, match="--from-export"):
            refused(scene.stage.database, "orders", "g", wanted[-1][0])


def test_days_of_postgres_and_of_the_export_are_given_once(days: ExportedDays) -> None:
    """Also where retention left rows of days that it dropped, and where it dropped nothing."""
    assert days.scene.replay(days.wanted).results == {"sent": 41}
    days.forget_parked()
    days.scene.archive.sql("UPDATE mqlayer_archive.topic SET dropped_batch = 2")
    assert days.scene.replay(days.wanted).results == {"sent": 41}


def test_an_export_that_lacks_dropped_days_is_refused(days: ExportedDays, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = days.scene
    scene.archive.sql("UPDATE mqlayer_archive.topic SET dropped_batch = batch")
    with pytest.raises(ArchiveBroken, match="has batches up to"):
        scene.begin(days.wanted)
    with pytest.raises(NotFound, match="archive exports"):
        scene.begin(ReplayFilter(export="/nowhere"))
    with pytest.raises(InvalidInput, match="no credentials"):
        scene.begin(ReplayFilter(export="s3://someone:secret@bucket/lake"))
    scene.archive.sql("UPDATE mqlayer_archive.lake SET lake_uuid = gen_random_uuid()")
    with pytest.raises(Conflict, match="another export's"):
        scene.begin(days.wanted)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidInput, match=r"mqlayer\[lake\].*to read the export at " + str(days.location)):
        scene.begin(days.wanted)
    scene.archive.sql("UPDATE mqlayer.protocol SET serves_from = 1, in_force = 1")
    with pytest.raises(Conflict, match="upgrade finalize"):
        scene.begin(days.wanted)
    assert replays(scene.stage.database) == []


def test_a_worker_that_can_not_read_the_export_says_so_and_another_one_goes_on(days: ExportedDays) -> None:
    scene = days.scene
    days.drop()
    replay_id, _ = scene.begin(days.wanted, worker=None)
    away = days.location.rename(days.location.with_name("away"))
    retry_scan(scene.stage.database)
    found = replay_of(scene.stage.database, replay_id)
    assert (found.state, found.sent) == ("running", 0)
    assert found.blocked_by is not None
    assert str(days.location) in found.blocked_by
    away.rename(days.location)
    scene.archive.sql("UPDATE mqlayer.redrive SET lease_until = NULL")
    retry_scan(scene.stage.database)
    done = replay_of(scene.stage.database, replay_id)
    assert (done.state, done.sent, done.blocked_by) == ("done", 41, None)
    days.forget_parked()
    replay_id, _ = scene.begin(days.wanted, worker=None)
    forget_lake(days.runtime, str(days.location))
    retry_scan(scene.stage.database)
    assert "archive exports" in str(replay_of(scene.stage.database, replay_id).blocked_by)


# -- kills -----------------------------------------------------------------------------------------------------------


def command(stage: Stage, *typed: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    places = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    return ask_python("mqlayer", *typed, env=os.environ | places | armed(failpoint))


@pytest.mark.parametrize(
    ("place", "state", "came"),
    some_of(
        [
            ("replay.before_commit=kill@2", "running", 200),
            ("replay.before_start=kill", None, 0),
            ("replay.after_start=kill", "running", 0),
            ("replay.before_commit=kill", "running", 0),
            ("replay.after_commit=kill", "running", 200),
            ("replay.after_commit=kill@2", "running", 240),
        ],
        9,
    ),
)
def test_a_replay_of_an_export_that_is_killed_goes_on_and_gives_nothing_twice(
    stage: Stage, tmp_path: Path, place: str, state: str | None, came: int
) -> None:
    """Before, in and behind the export's part."""
    scene = ReplayScene(stage)
    scene.archive.per_batch = 50
    days = ExportedDays(scene, tmp_path / "lake")
    stage.send_numbers(3, 80)
    scene.settle()
    days.note_day(40)
    days.export()
    stage.send_numbers(3, 20, first=81)
    scene.settle()
    days.drop()
    typed = ("replay", "start", "orders", "g", "--all", "--from-export", str(days.location), "--yes")
    done = command(stage, *typed, failpoint=place)
    assert done.returncode == -9, done.stderr
    left = replays(stage.database)
    assert [(one.state, one.sent) for one in left] == ([] if state is None else [(state, came)])
    over = command(stage, *(("replay", "resume", str(left[0].replay_id)) if left else typed), "--json")
    assert over.returncode == 0, over.stderr
    for key in ("key-0", "key-1", "key-2"):
        assert scene.failing.parked(key) == numbers(1, 100)
    (one,) = replays(stage.database)
    assert (one.state, one.results) == ("done", {"sent": 300})
    assert one.filter == replace(ALL, export=str(days.location))
