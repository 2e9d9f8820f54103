"""What commands print for people: lines that fit, whole words, sizes and spans; JSON has numbers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from mqlayer.cli.output import (
    Size,
    cells,
    echo,
    fold,
    format_age,
    format_size,
    output_width,
    show_facts,
    show_rows,
)

ROW = {"topic": "orders", "group": "ledger", "stored_bytes": 12_345_678, "lease_left_s": 7_500.0, "per_s": 3.0}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119, "119 s"), (119.7, "2 min"), (185, "3 min"),
        (3_599, "60 min"), (7_500, "2 h 5 min"), (7_200, "2 h"), (86_399, "24 h"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_a_span_has_the_unit_that_people_would_take(seconds: float, said: str) -> None:
    assert format_age(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (12_345_678, "12.3 MB"), (4 * 10**12, "4 TB")]
)
def test_a_size_has_three_digits(count: int, said: str) -> None:
    assert format_size(count) == said


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the width of the terminal."""
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


def test_rows_are_a_table_where_it_fits_and_cards_where_not(capsys: pytest.CaptureFixture[str], columns: Any) -> None:
    columns(60)
    show_rows([ROW, ROW], as_json=False, nothing="", by=2)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["topic", "group", "stored", "size", "lease", "left", "per", "second"]
    assert table[1] == table[2] == "orders  ledger      12.3 MB   2 h 5 min           3"
    columns(30)
    show_rows([ROW, ROW | {"group": "mail"}], as_json=False, nothing="", by=2)
    assert capsys.readouterr().out.splitlines() == [
        "topic orders, group ledger",
        "  stored size  12.3 MB",
        "  lease left   2 h 5 min",
        "  per second   3",
        "",
        "topic orders, group mail",
        "  stored size  12.3 MB",
        "  lease left   2 h 5 min",
        "  per second   3",
    ]


def test_json_has_numbers_and_times_in_iso_form(capsys: pytest.CaptureFixture[str], columns: Any) -> None:
    columns(20)
    at = datetime(2026, 11, 21, 9, 30, tzinfo=timezone(timedelta(hours=1)))
    show_rows([ROW | {"died_at": at, "body_limit": Size(7)}], as_json=True, nothing="")
    shown = json.loads(capsys.readouterr().out)
    assert shown == ROW | {"died_at": "2026-11-21T09:30:00+01:00", "body_limit": 7}


def test_times_are_relative_and_exact_where_there_is_room(capsys: pytest.CaptureFixture[str], columns: Any) -> None:
    columns(80)
    at = datetime.now(UTC) - timedelta(minutes=3)
    show_rows([{"key": "k", "died_at": at, "due_at": at + timedelta(hours=3)}], as_json=False, nothing="")
    show_facts({"died_at": at, "unknown": None, "nothing": [], "sure": True, "counts": {"sent": 2}})
    show_facts({"records": 12_345, "offset": 12_345})
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["key  died       due", "k    3 min ago  in 2 h 57 min"]
    assert shown[2:] == [f"died    {at.isoformat(timespec='seconds')} (3 min ago)", "sure    yes", "counts  sent 2",
                         "records  12,345", "offset   12345"]  # fmt: skip


@pytest.mark.parametrize("width", [12, 20, 33, 80])
def test_lines_fit_and_words_stay_whole(width: int) -> None:
    text = "  partition 7 waits: its node does not answer, ask it again in a moment"
    lines = list(fold(text, width))
    assert all(cells(line) <= width for line in lines)
    assert " ".join(lines).split() == text.split()
    assert [line[:4].isspace() for line in lines[1:]] == [True] * (len(lines) - 1)


def test_a_value_that_fits_no_line_is_cut_at_its_own_marks_or_not_at_all() -> None:
    assert list(fold("at redis://node-1.example.com:6379/0 now", 24)) == [
        "at redis://node-",
        "  1.example.com:6379/0",
        "  now",
    ]
    assert list(fold("key " + "x" * 40, 20)) == ["key", "  " + "x" * 40]


@pytest.mark.parametrize("width", range(9, 40))
def test_a_number_stays_with_its_unit(width: int) -> None:
    text = "it waits 2 h 5 min (3.4 MB, 12 %), or 7 days; 5 s"
    lines = list(fold(text, width))
    assert " ".join(lines).split() == text.split()
    assert all(any(part in line for line in lines) for part in ("2 h", "5 min", "(3.4 MB,", "12 %),", "5 s"))


def test_letters_that_take_two_columns_are_counted_so(columns: Any, capsys: pytest.CaptureFixture[str]) -> None:
    columns(20)
    show_rows([{"key": "注文", "n": 1}, {"key": "a", "n": 22}], as_json=False, nothing="")
    assert capsys.readouterr().out.splitlines() == ["key    n", "注文   1", "a     22"]


def test_files_and_pipes_get_whole_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with Path("/dev/null").open("w") as file:
        assert output_width(file) is None
    echo("word " * 100)
    assert len(capfd.readouterr().out.splitlines()) == 1
