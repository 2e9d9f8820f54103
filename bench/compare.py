"""`python -m bench.compare [FILE [EARLIER]]`: what a run's lines are beside the record; exits with 1 if one is slower.

Of a line with a baseline, ratios are compared, else values; each with the last earlier run that has the line, had the
same options, and is no later. The figure of a run is the median of its repetitions. A line is slower or faster where
the two medians differ by more than 5 %, and by more than the noise: the larger interquartile range of the two runs,
twice where both have five repetitions or more, else three times, as the range of few is often too small. Between equal
runs of normal noise, 2 % of the lines pass that bound with five repetitions, 1.4 % with three; half of these are
slower. Fewer than three repetitions have no spread that is worth the name: 25 % stand in for it then.

Values without a baseline are judged between equal machines only, with loads before the run that differ by no more than
one process by core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import recording
from bench.recording import Recording, Samples, all_of, read
from bench.registry import BETTER

Verdict = Literal["slower", "faster", "same", "new", "gone", "not compared"]

LEAST_CHANGE: Final = 0.05
NOISE_WITHOUT_SPREAD: Final = 0.25
LEAST_REPETITIONS: Final = 3
MANY_REPETITIONS: Final = 5
FEW_FACTOR: Final = 3.0
MANY_FACTOR: Final = 2.0
WIDTH: Final = 200
"""Of a table in a pipe or a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line beside its last figures; `since` is the earlier run."""

    verdict: Verdict
    name: str
    unit: str
    now: Samples | None = None
    before: Samples | None = None
    since: Recording | None = None


def compare(run: Recording, earlier: Sequence[Recording]) -> list[Row]:
    """Return a row for each line of a run, and for each that its benches no longer have; `earlier` is in order."""
    alike = [one for one in reversed(earlier) if one.options == run.options]
    rows = []
    for now in run.lines:
        found = ((line, one) for one in alike for line in one.lines if line.key == now.key)
        before, since = next(found, (None, None))
        if before is None or since is None:
            rows.append(Row("new", now.name, now.unit, now))
        else:
            verdict = judged(now, before) if comparable(now, before, run, since) else "not compared"
            rows.append(Row(verdict, now.name, now.unit, now, before, since))
    return rows + [row for bench in {now.bench: None for now in run.lines} for row in gone(bench, run, alike)]


def gone(bench: str, run: Recording, alike: Sequence[Recording]) -> list[Row]:
    """Return a row for each line that a bench had in its last run, and has no more."""
    last = next((one for one in alike if any(line.bench == bench for line in one.lines)), None)
    here = {line.key for line in run.lines}
    lines = [line for line in last.lines if line.bench == bench and line.key not in here] if last else []
    return [Row("gone", line.name, line.unit, before=line, since=last) for line in lines]


def comparable(now: Samples, before: Samples, run: Recording, since: Recording) -> bool:
    """Whether figures of two runs can be judged: ratios always, values of equal machines under like loads."""
    if bool(now.ratios) != bool(before.ratios) or BETTER.get(now.unit, "neither") == "neither":
        return False
    return bool(now.ratios) or (run.machine == since.machine and like_loads(run, since))


def like_loads(run: Recording, since: Recording) -> bool:
    """Whether the loads before two runs differ by no more than one process by core."""
    return abs(run.loads[0] - since.loads[0]) <= run.machine.cores


def judged(now: Samples, before: Samples) -> Verdict:
    """Return what became of a line, by the unit's direction."""
    was, difference = middle(before), middle(now) - middle(before)
    if abs(difference) <= max(LEAST_CHANGE * abs(was), noise(now, before)):
        return "same"
    return "faster" if (difference > 0) == (BETTER[now.unit] == "higher") else "slower"


def middle(samples: Samples) -> float:
    """Return the median of the figures that are compared."""
    return statistics.median(samples.compared)


def noise(now: Samples, before: Samples) -> float:
    """Return how much two medians may differ by chance."""
    counts = [len(one.compared) for one in (now, before)]
    spread = max(spread_of(one.compared) for one in (now, before))
    bound = spread * (MANY_FACTOR if min(counts) >= MANY_REPETITIONS else FEW_FACTOR)
    return bound if min(counts) >= LEAST_REPETITIONS else max(bound, NOISE_WITHOUT_SPREAD * abs(middle(before)))


def spread_of(figures: Sequence[float]) -> float:
    """Return the interquartile range; of three figures, half of the distance of the outer two."""
    if len(figures) < LEAST_REPETITIONS:
        return 0.0
    lower, _, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return upper - lower


def report(run: Recording, earlier: Sequence[Recording]) -> bool:
    """Show a run beside the record, slower lines first; return whether none is slower."""
    rows = compare(run, earlier)
    table = Table(box=None)
    for title in ("line", "unit", "compared", "before", "now", "change", "noise", "", "since"):
        table.add_column(title, no_wrap=True)
    order: list[Verdict] = ["slower", "faster", "gone", "new", "not compared", "same"]
    for row in sorted(rows, key=lambda one: order.index(one.verdict)):
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    for one in {row.since.file_name: row.since for row in rows if row.since}.values():
        console.print(escape(described(one)), highlight=False)
        if one.machine != run.machine:
            console.print("  another machine, or other versions: values are not compared, ratios say less")
    console.print(escape(f"this run: {described(run)}"), highlight=False)
    return all(row.verdict != "slower" for row in rows)


def cells(row: Row) -> list[str]:
    """Return a row's texts."""
    before, now = (middle(one) if one else None for one in (row.before, row.now))
    kind = "ratio" if any(one and one.ratios for one in (row.now, row.before)) else "value"
    facts = ["" if one is None else f"{one:,.2f}" for one in (before, now)]
    change = bound = ""
    if row.before and row.now and before and now is not None:
        change = f"{(now - before) / abs(before):+.0%}"
        bound = f"{max(LEAST_CHANGE, noise(row.now, row.before) / abs(before)):.0%}"
    since = row.since.commit[:8] if row.since else ""
    return [escape(row.name), row.unit, kind, *facts, change, bound, row.verdict, since]


def described(run: Recording) -> str:
    """Return a run's facts in one line."""
    counts = sorted({len(line.values) for line in run.lines})
    times = " to ".join(str(one) for one in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    loads = ", ".join(f"{one:g}" for one in run.loads)
    changed = " with changes" if run.changed else ""
    return f"{run.commit[:8]}{changed}, {run.began_at:%Y-%m-%d %H:%M}Z, {times} repetitions, loads {loads}"


def main(
    file: Annotated[Path | None, typer.Argument(help="The run; the last saved one without it.")] = None,
    earlier: Annotated[Path | None, typer.Argument(help="The run to compare it with; the record without it.")] = None,
) -> None:
    """Compare a saved run with the record; exit with 1 if a line is slower."""
    saved = all_of(recording.RESULTS)
    if file is None and not saved:
        raise typer.BadParameter("no run is saved yet: python -m bench NAME… --repeat 3 --save")
    run = read(file) if file else saved[-1]
    before = [read(earlier)] if earlier else [one for one in saved if one.began_at < run.began_at]
    if earlier and before[0].options != run.options:
        raise typer.BadParameter(f"the runs had other options: {dict(run.options)}, {dict(before[0].options)}")
    raise typer.Exit(0 if report(run, before) else 1)


if __name__ == "__main__":
    typer.run(main)
