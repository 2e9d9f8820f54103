"""The record of figures in `bench/results`: what a run keeps, and what a comparison says of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import typer

from bench import __main__ as program
from bench import compare as comparison
from bench import recording
from bench.compare import compare, like_loads, noise, report, spread_of
from bench.recording import Machine, Recording, Samples, all_of, encode, new_recording, read
from bench.registry import BENCHES, BETTER, Line, compared
from bench.stage import Stage

BEGAN = datetime(2026, 11, 27, 5, 18, tzinfo=UTC)
MACHINE = Machine(
    processor="x", cores=2, system="Linux x86_64", python="3.11.2", redis="redis-8.0.2", postgres="postgres-15.18"
)
BENCH = Path(comparison.__file__).parent
RATES = [unit for unit, better in BETTER.items() if better == "higher"]
COSTS = [unit for unit, better in BETTER.items() if better == "lower"]


def ratios(*figures: float, name: str = "a", unit: str = "msg/s", bench: str = "a") -> Samples:
    """Return a line with a baseline of 100."""
    values, baselines = tuple(100 * one for one in figures), (100.0,) * len(figures)
    return Samples(bench=bench, name=name, unit=unit, target=None, values=values, baselines=baselines, ratios=figures)


def values(*figures: float, name: str = "a", unit: str = "ms", bench: str = "a") -> Samples:
    """Return a line without a baseline."""
    return Samples(bench=bench, name=name, unit=unit, target=None, values=figures, baselines=(), ratios=())


def run(
    *lines: Samples,
    hours: int = 1,
    machine: Machine = MACHINE,
    load: float = 1.0,
    options: dict[str, str] | None = None,
) -> Recording:
    """Return a recording, some hours after the first."""
    return Recording(
        version="0.1.0",
        commit=f"{hours:040x}",
        changed=False,
        began_at=BEGAN + timedelta(hours=hours),
        machine=machine,
        options=options or {},
        loads=(load, 4.0),
        lines=lines,
    )


def verdicts(now: Recording, *earlier: Recording) -> dict[str, str]:
    return {row.name: row.verdict for row in compare(now, earlier)}


def verdict(before: Samples, now: Samples) -> str:
    """Return what becomes of one line."""
    return verdicts(run(now, hours=2), run(before))[now.name]


@pytest.mark.parametrize("unit", RATES)
def test_of_a_rate_more_is_faster(unit: str) -> None:
    low, high = (ratios(one, one, one, unit=unit) for one in (1.0, 1.2))
    assert (verdict(low, high), verdict(high, low)) == ("faster", "slower")


@pytest.mark.parametrize("unit", COSTS)
@pytest.mark.parametrize("line", [ratios, values])
def test_of_a_time_or_a_size_less_is_faster(unit: str, line: Callable[..., Samples]) -> None:
    low, high = (line(one, one, one, unit=unit) for one in (1.0, 1.2))
    assert (verdict(low, high), verdict(high, low)) == ("slower", "faster")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # Below 5 %, without any noise.
        ((1.0, 1.0, 1.0), (0.96, 0.96, 0.96), "same"),
        ((1.0, 1.0, 1.0), (0.94, 0.94, 0.94), "slower"),
        # Three repetitions, a range of 0.1: an interquartile range of 0.05, three times.
        ((0.95, 1.0, 1.05), (0.86, 0.86, 0.86), "same"),
        ((0.95, 1.0, 1.05), (0.84, 0.84, 0.84), "slower"),
        # The noise of the later run counts as much.
        ((1.0, 1.0, 1.0), (0.81, 0.86, 0.91), "same"),
        # Five repetitions, an interquartile range of 0.04, twice.
        ((0.96, 0.98, 1.0, 1.02, 1.04), (0.91,) * 5, "slower"),
        ((0.96, 0.98, 1.0, 1.02, 1.04), (0.93,) * 5, "same"),
        # Five beside three: three times again.
        ((0.96, 0.98, 1.0, 1.02, 1.04), (0.91,) * 3, "same"),
        # One outlier of five moves neither the median nor the spread.
        ((1.0, 1.0, 1.0, 1.0, 0.2), (0.9,) * 5, "slower"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 0.2), "same"),
    ],
)
def test_a_line_is_slower_beyond_the_noise_of_both_runs_and_five_percent(
    before: Sequence[float], now: Sequence[float], expected: str
) -> None:
    assert verdict(ratios(*before), ratios(*now)) == expected


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 3), (3, 1), (2, 2), (1, 9)])
def test_of_fewer_than_three_repetitions_a_quarter_is_noise(before: int, now: int) -> None:
    found = [verdict(ratios(*[1.0] * before), ratios(*[figure] * now)) for figure in (0.74, 0.76, 1.24, 1.26)]
    assert found == ["slower", "same", "same", "faster"]


def test_a_spread_that_is_larger_than_a_quarter_stays_the_noise() -> None:
    assert noise(ratios(1.0), ratios(0.8, 1.0, 1.2)) == pytest.approx(0.6)


def test_the_spread_of_three_is_half_of_their_range_and_of_two_none() -> None:
    assert spread_of([3.0, 1.0, 2.0]) == 1.0
    assert spread_of([1.0, 9.0]) == 0.0


def test_a_figure_that_was_zero_is_compared() -> None:
    zero, some = values(0, 0, 0, unit="in 1,000 stop"), values(3, 3, 3, unit="in 1,000 stop")
    assert (verdict(zero, some), verdict(some, zero), verdict(zero, zero)) == ("slower", "faster", "same")
    assert report(run(zero, hours=2), [run(some)])


def test_ratios_are_compared_on_another_machine_and_values_are_not() -> None:
    other = msgspec.structs.replace(MACHINE, cores=8)
    before = run(ratios(1.0, 1.0, 1.0, name="ratio"), values(1.0, 1.0, 1.0, name="value"))
    now = run(ratios(0.5, 0.5, 0.5, name="ratio"), values(2.0, 2.0, 2.0, name="value"), hours=2, machine=other)
    assert verdicts(now, before) == {"ratio": "slower", "value": "not compared"}


def test_values_are_not_compared_where_one_machine_was_busy() -> None:
    assert like_loads(run(load=1.0), run(load=3.0))
    assert not like_loads(run(load=1.0), run(load=3.1))
    line = values(1.0, 1.0, 1.0)
    assert verdicts(run(line, hours=2, load=9.0), run(line)) == {"a": "not compared"}


def test_a_line_that_lost_its_baseline_is_not_compared() -> None:
    assert verdict(ratios(1.0, 1.0, 1.0, unit="ms"), values(100.0, 100.0, 100.0)) == "not compared"


@pytest.mark.parametrize("unit", ["changes", "1/s", "a unit without a direction"])
def test_a_unit_without_a_direction_is_not_compared(unit: str) -> None:
    assert verdict(values(1.0, 1.0, 1.0, unit=unit), values(9.0, 9.0, 9.0, unit=unit)) == "not compared"


def test_lines_come_and_go_with_the_benches_that_ran() -> None:
    before = run(ratios(1, 1, 1, name="old"), ratios(1, 1, 1, name="kept"), ratios(1, 1, 1, name="b", bench="b"))
    now = run(ratios(1, 1, 1, name="kept"), ratios(1, 1, 1, name="added"), hours=2)
    assert verdicts(now, before) == {"kept": "same", "added": "new", "old": "gone"}


def test_a_line_in_another_unit_is_another_line() -> None:
    rows = compare(run(values(1, 1, 1, unit="s"), hours=2), [run(values(1, 1, 1, unit="ms"))])
    assert [(row.verdict, row.unit) for row in rows] == [("new", "s"), ("gone", "ms")]


def test_each_line_is_compared_with_the_last_run_that_has_it() -> None:
    first = run(ratios(1.0, 1.0, 1.0), ratios(1.0, 1.0, 1.0, name="b", bench="b"), hours=1)
    second = run(ratios(2.0, 2.0, 2.0), hours=2)
    now = run(ratios(2.0, 2.0, 2.0), ratios(1.0, 1.0, 1.0, name="b", bench="b"), hours=3)
    rows = compare(now, [first, second])
    assert [(row.name, row.verdict, row.since) for row in rows] == [("a", "same", second), ("b", "same", first)]


def test_runs_of_other_sizes_are_other_runs() -> None:
    sized = run(ratios(9.0, 9.0, 9.0), hours=2, options={"BENCH_MESSAGES": "10"})
    assert verdicts(run(ratios(1.0, 1.0, 1.0), hours=3), run(ratios(1.0, 1.0, 1.0)), sized) == {"a": "same"}
    assert verdicts(sized, run(ratios(1.0, 1.0, 1.0))) == {"a": "new"}


def test_a_report_shows_each_line_with_its_change_and_both_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = run(ratios(1.0, 1.0, 1.0, name="a[x]"), ratios(1.0, 1.0, 1.0, name="b"), load=3.5)
    now = run(ratios(0.8, 0.8, 0.8, name="a[x]"), ratios(1.2, 1.2, 1.2, name="c"), hours=2)
    assert not report(now, [before])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == ["a[x]", "msg/s", "ratio", "1.00", "0.80", "-20%", "5%", "slower", "00000000"]
    assert [line[-2] if "00000000" in line else line[-1] for line in shown[2:4]] == ["gone", "new"]
    assert "loads 3.5, 4" in " ".join(shown[4])
    assert shown[5][:2] == ["this", "run:"]


def test_a_report_in_a_pipe_shows_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a line of a bench[with more than forty letters in its name]"
    report(run(ratios(1.0, name=name, unit="transactions/s")), [])
    assert name in capsys.readouterr().out


def test_a_file_gives_back_its_run(tmp_path: Path) -> None:
    one = run(ratios(1.0, 1.25), values(3.0, name="b"))
    path = one.write(tmp_path / "results")
    assert path.name == "2026-11-27T061800Z-00000000.json"
    assert read(path) == one
    assert one.write(tmp_path / "results") == path
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert json.loads(encode(one))["lines"][0]["ratios"] == [1.0, 1.25]
    assert len(encode(run()).splitlines()) < len(encode(one).splitlines())
    assert json.loads(encode(run()))["lines"] == []


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 2}'])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json"):
        all_of(tmp_path)


def test_the_record_is_read_and_names_neither_a_path_nor_a_host() -> None:
    for one in all_of(recording.RESULTS):
        assert one.loads
        assert one.lines
        assert one.file_name in {path.name for path in recording.RESULTS.iterdir()}
        assert "/" not in encode(msgspec.structs.replace(one, lines=()))


def test_a_run_knows_its_commit_and_machine_and_the_sizes_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_MESSAGES", "7")
    one = new_recording(BEGAN)
    assert one.options["BENCH_MESSAGES"] == "7"
    assert one.machine.cores >= 1
    assert len(one.commit) == 40 or one.commit == "unknown"


def test_a_run_outside_of_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recording, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert recording.tree() == ("unknown", True)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The ratios that the bench `steady` has next; its record is empty."""
    coming: list[float] = []

    def measure(_stage: Stage) -> Iterator[Line]:
        yield compared("steady", 100 * coming.pop(0), 100.0, unit="msg/s", target=None)

    monkeypatch.setitem(BENCHES, "steady", measure)
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    return coming


def test_a_run_keeps_each_repetition_when_it_ends(steady: list[float], tmp_path: Path) -> None:
    steady.extend([1.0, 1.1])
    with pytest.raises(IndexError):
        program.main(["steady"], repeat=3, save=True)
    (kept,) = all_of(tmp_path)
    assert kept.lines[0].ratios == (1.0, 1.1)
    assert kept.lines[0].bench == "steady"
    assert len(kept.loads) == 3


def test_a_run_is_compared_with_the_record_before_it_and_ends_with_1_where_a_line_is_slower(
    steady: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    steady.extend([1.0, 1.0, 1.0])
    program.main(["steady"], repeat=3, save=True, against_record=True)
    assert " new " in capsys.readouterr().out
    steady.extend([0.8, 0.8, 0.8])
    with pytest.raises(typer.Exit) as ended:
        program.main(["steady"], repeat=3, against_record=True)
    assert ended.value.exit_code == 1
    assert " slower " in capsys.readouterr().out
    steady.extend([1.2, 1.2, 1.2])
    program.main(["steady"], repeat=3, against_record=True)
    assert " faster " in capsys.readouterr().out


def test_saved_runs_are_compared_by_themselves(steady: list[float], tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no run is saved"):
        comparison.main()
    first, second, third = (run(ratios(*[one] * 3), hours=hours) for hours, one in enumerate((1.0, 1.2, 0.8), 1))
    paths = [one.write(tmp_path) for one in (first, second, third)]
    for arguments, code in {
        (): 1,
        (paths[1],): 0,
        (paths[0],): 0,
        (paths[2], paths[0]): 1,
        (paths[1], paths[2]): 0,
    }.items():
        with pytest.raises(typer.Exit) as ended:
            comparison.main(*arguments)
        assert ended.value.exit_code == code, arguments
    sized = run(ratios(1.0), hours=4, options={"BENCH_MESSAGES": "10"}).write(tmp_path)
    with pytest.raises(typer.BadParameter, match="other options"):
        comparison.main(sized, paths[0])


def test_every_unit_of_a_bench_says_which_figures_are_better() -> None:
    """Where this fails, put the unit into BETTER of `bench/registry.py`."""
    units = {unit for path in BENCH.glob("*.py") for unit in units_of(ast.parse(path.read_text("utf-8")))}
    assert len(units) > 15
    assert units <= set(BETTER)
    assert set(BETTER) <= units


def units_of(tree: ast.Module) -> Iterator[str]:
    """Yield the units of a module's lines: arguments `unit=`, and the third of `alone`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            given = [one.value for one in call.keywords if one.arg == "unit"]
            if isinstance(call.func, ast.Name) and call.func.id == "alone":
                given += call.args[2:3]
            yield from (one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str))
