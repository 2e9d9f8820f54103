"""`python -m bench [NAME …] [--json]`: run benches and show their lines."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.registry import BENCHES, Line, note
from bench.stage import Stage

FRAMEWORK = {
    "__init__",
    "__main__",
    "actors",
    "consumer_process",
    "consumer_notes",
    "fill",
    "member_process",
    "processes",
    "quick_restarts",
    "registry",
    "stage",
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Benches to run; all without a name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")] = False,
) -> None:
    """Measure mqlayer against a raw baseline in the same run; progress goes to standard error."""
    load()
    wanted = names or sorted(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        raise typer.BadParameter(f"no bench {', '.join(unknown)}; there are: {', '.join(sorted(BENCHES))}")
    lines: list[Line] = []
    with Stage() as stage:
        for name in wanted:
            note(name)
            for line in BENCHES[name](stage):
                lines.append(line)
                if as_json:
                    typer.echo(msgspec.json.encode(line))
    if not as_json:
        show(lines)


def load() -> None:
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
