"""The matrix of versions: its rows name what is there, and choose the servers that they say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.matrix.plan import LEFT_OUT_OF_UNIT, PARTS, ROWS, VALKEY_9, MatrixRow
from tests.matrix.programs import UnpackedSeries
from tests.matrix.report import RowResult, table
from tests.matrix.runs import ROOT, row_environment

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="no"/></testcase>
<testcase classname="tests.a" name="broken"><error message="no"/></testcase>
<testcase classname="tests.a" name="left"><skipped message="no browser"/></testcase>
</testsuite></testsuites>"""


def row(name: str) -> MatrixRow:
    """Return the row of that name."""
    return next(row for row in ROWS if row.name == name)


def test_every_row_has_a_name_of_its_own_and_parts_that_there_are() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(part in PARTS for row in ROWS for part in row.parts)
    assert set(PARTS) == {part for row in ROWS for part in row.parts}


def test_every_file_of_a_part_is_there_and_in_no_other_part() -> None:
    files = [file for part in PARTS.values() for file in part]
    assert [file for file in (*files, *LEFT_OUT_OF_UNIT) if not (ROOT / file).exists()] == []
    assert len(set(files)) == len(files)


def test_a_row_runs_the_files_of_the_parts_that_are_wanted() -> None:
    assert row("valkey-9").arguments(("archive",)) == [*PARTS["archive"]]
    assert row("postgres-17").arguments(("users",)) == []
    assert row("python-3.14").arguments(("unit",))[0] == "tests/unit"
    assert row("cluster-valkey-9").arguments(("cluster",)) == [*PARTS["cluster"], "--full"]


@pytest.mark.parametrize(("version", "fits"), [("9.1.2", True), ("9", True), ("90.1", False), ("8.1.1", False)])
def test_a_series_has_the_versions_that_begin_with_its_number(version: str, fits: bool) -> None:
    assert VALKEY_9.has(version) == fits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a Redis and another program in PATH."""
    place = tmp_path / "machine"
    place.mkdir()
    for name in ("redis-server", "ls"):
        (place / name).write_text("#!/bin/sh\n")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("MQLAYER_DSN", "postgresql://elsewhere")
    return place


def test_a_rows_servers_come_first_and_nothing_else_is_asked(machine: Path, tmp_path: Path) -> None:
    wanted, cache = row("newest"), tmp_path / "cache"
    made = row_environment(wanted, cache, tmp_path / "venv/bin", tmp_path)
    places = made["PATH"].split(os.pathsep)
    servers = [UnpackedSeries(series, cache).path for series in (wanted.redis, wanted.postgres) if series]
    assert places[:3] == [*map(str, servers), str(tmp_path / "venv/bin")]
    assert places[-1] == str(machine)
    assert not {"CI", "MQLAYER_DSN"} & set(made)


def test_a_row_without_a_redis_sees_none_of_the_machines(machine: Path, tmp_path: Path) -> None:
    path = row_environment(row("redis-6.2"), tmp_path / "cache", tmp_path / "venv/bin", tmp_path)["PATH"]
    assert shutil.which("redis-server", path=path) is None
    assert shutil.which("ls", path=path) is not None


def test_a_table_counts_what_a_report_has(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    result = RowResult.of_junit("valkey-9", "Valkey 9.1.2", tmp_path / "junit.xml", seconds=61.4, code=1)
    assert not result.good
    assert result.failed == ("tests.a::bad", "tests.a::broken")
    assert table([result]).splitlines()[-1] == "| valkey-9 | Valkey 9.1.2 | 3 | 1 | 2 | 1 | 61 |"


def test_a_row_that_ran_nothing_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text("<testsuites/>")
    assert not RowResult.of_junit("a", "", tmp_path / "junit.xml", seconds=1, code=5).good
    assert not RowResult.of_junit("a", "", tmp_path / "none.xml", seconds=1, code=2).good
    assert "no mirror" in table([RowResult("a", trouble="no mirror")])
