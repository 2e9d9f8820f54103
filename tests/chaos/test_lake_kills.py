"""An export killed between any two writes: the next run goes on, and the lake has every row once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mqlayer.archive.lake import export_archive
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import is_stopped, start_python
from tests.fixtures.lakes import PROGRAM, archived_ids, archived_outcome_ids, ids, killed_export, outcome_ids
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

import_or_leave_out("deltalake")

PLACES = [
    ("lake.after_records", 2),
    ("lake.after_outcomes", 2),
    ("lake.in_write", 4),
    ("lake.after_register", 1),
    ("lake.after_create", 2),
    ("lake.after_begin", 1),
    ("lake.after_lineage", 1),
    ("lake.in_write", 1),
    ("lake.in_write", 3),
    ("lake.after_note", 1),
    ("lake.after_compact", 1),
    ("lake.after_compact", 3),
]


def fill(archived: ArchivedTopics) -> None:
    for _ in range(2):
        archived.put("a", "b", "a", outcomes=True)
        archived.put("a", "c", source=2)


@pytest.mark.parametrize(("place", "nth"), some_of(PLACES, 7))
def test_an_export_killed_anywhere_loses_and_doubles_nothing(
    archived: ArchivedTopics, tmp_path: Path, place: str, nth: int
) -> None:
    fill(archived)
    lake = tmp_path / "lake"
    assert killed_export(archived, lake, armed(f"{place}=kill@{nth}")) == -9, "the place was not reached"
    fill(archived)
    export_archive(runtime_of(archived.database), str(lake))
    assert ids(lake) == archived_ids(archived)
    assert outcome_ids(lake) == archived_outcome_ids(archived)
    assert archived.rows("SELECT first_batch, batch FROM mqlayer_archive.lake_topic") == [(1, 8)]


@pytest.mark.full
def test_a_verification_that_is_killed_is_repeated(archived: ArchivedTopics, tmp_path: Path) -> None:
    fill(archived)
    lake = tmp_path / "lake"
    assert killed_export(archived, lake, armed("lake.before_verified=kill")) == -9, "the place was not reached"
    assert archived.rows("SELECT verified_batch FROM mqlayer_archive.lake_topic") == [(0,)]
    fill(archived)
    assert killed_export(archived, lake, {}) == 0
    assert archived.rows("SELECT verified_batch, records FROM mqlayer_archive.lake_topic") == [(8, 20)]


def test_an_exporter_that_was_stopped_in_a_write_adds_nothing_twice(archived: ArchivedTopics, tmp_path: Path) -> None:
    """Another one finishes meanwhile; woken, the commit of the first is refused, and it goes on behind the other's."""
    fill(archived)
    lake = tmp_path / "lake"
    started = start_python("-c", PROGRAM, archived.dsn, str(lake), env=os.environ | armed("lake.in_write=stop@2"))
    try:
        wait_until(lambda: is_stopped(started), what="it is stopped in its write", timeout_s=20)
        export_archive(runtime_of(archived.database), str(lake))
        assert ids(lake) == archived_ids(archived)
        started.send_signal(signal.SIGCONT)
        assert started.wait(30) == 0
    finally:
        started.kill()
        started.wait()
    assert ids(lake) == archived_ids(archived)
    assert outcome_ids(lake) == archived_outcome_ids(archived)
