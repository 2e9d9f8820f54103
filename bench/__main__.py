"""`python -m bench [NAME …] [--json] [--repeat N] [--save] [--compare]`: run benches, show their lines, keep them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import recording
from bench.compare import report
from bench.recording import all_of, load, new_recording
from bench.registry import BENCHES, Line, note
from bench.stage import Stage

FRAMEWORK = {
    "__init__",
    "__main__",
    "actors",
    "archive_rows",
    "compare",
    "consumer_process",
    "consumer_notes",
    "fill",
    "member_process",
    "memory_process",
    "memory_table",
    "process_trees",
    "processes",
    "quick_restarts",
    "recording",
    "registry",
    "spark_scale_driver",
    "stage",
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Benches to run; all without a name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Run all of them so many times, each on new servers.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Keep the lines as a file of bench/results.")] = False,
    against_record: Annotated[
        bool, typer.Option("--compare", help="Compare with the record; exit with 1 if a line is slower.")
    ] = False,
) -> None:
    """Measure mqlayer against a raw baseline in the same run; progress goes to standard error."""
    load_benches()
    wanted = names or sorted(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        raise typer.BadParameter(f"no bench {', '.join(unknown)}; there are: {', '.join(sorted(BENCHES))}")
    if as_json and against_record:
        raise typer.BadParameter("--compare prints a table: save the run, then python -m bench.compare")
    earlier = all_of(recording.RESULTS) if against_record else []
    run = new_recording(datetime.now(UTC))
    for number in range(1, repeat + 1):
        if repeat > 1:
            note(f"repetition {number} of {repeat}")
        taken = list(measured(wanted, as_json=as_json))
        run = run.with_repetition(taken, load())
        if save:
            note(f"saved: bench/results/{run.write(recording.RESULTS).name}")
    if not as_json:
        show([samples.median() for samples in run.lines])
    if against_record and not report(run, earlier):
        raise typer.Exit(1)


def measured(names: list[str], *, as_json: bool) -> Iterator[tuple[str, Line]]:
    """Run benches on new servers; yield their lines with their names."""
    with Stage() as stage:
        for name in names:
            note(name)
            for line in BENCHES[name](stage):
                if as_json:
                    typer.echo(msgspec.json.encode(line))
                yield name, line


def load_benches() -> None:
    """Import all modules of this folder, which register their benches."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in FRAMEWORK:
            import_module(f"bench.{path.stem}")


def show(lines: list[Line]) -> None:
    """Show results as a table."""
    table = Table("name", "value", "unit", "baseline", "ratio", "target", box=None, header_style="bold")
    for line in lines:
        facts = [escape(line.name), f"{line.value:,.2f}", line.unit]
        facts += ["" if fact is None else f"{fact:,.2f}" for fact in (line.baseline, line.ratio, line.target)]
        table.add_row(*facts)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
