"""Print rows: table or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mqlayer.escaping import escape, is_printable, json_line

# Most commands print lines only; rich is a tenth of a second of their start.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line and nothing else.")]

NOT_A_TERMINAL_WIDTH: Final = 1000


def show_rows(rows: Iterable[Mapping[str, Any]], *, as_json: bool, nothing: str) -> None:
    """Print rows, or the text `nothing`."""
    found = list(rows)
    if as_json:
        for row in found:
            typer.echo(json_line(row))
    elif not found:
        echo(nothing)
    else:
        _table(found)


def format_key(key: str | None) -> str:
    """Return a key, quoted and escaped where unprintable."""
    if key is None:
        return "(none)"
    return key if is_printable(key) else json_line(key)


def pluralize(count: int, what: str) -> str:
    """Return a count: 1 message, 2 messages."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_age(seconds: float | None) -> str:
    """Return a time span: 0.4 s, 12 s, 3 min, 2.5 h."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def _table(rows: list[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row.values()))
    show_table(table)


def show_table(table: Table) -> None:
    """Print a table; its texts must be escaped."""
    # Terminals fold wide lines; files and pipes get whole ones.
    console(width=None if sys.stdout.isatty() else NOT_A_TERMINAL_WIDTH).print(table)


def console(*, width: int | None = None, stderr: bool = False) -> Console:
    """Return a console without markup and emoji names."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=width, stderr=stderr)


def echo(text: object = "", *, err: bool = False, lines: bool = False) -> None:
    """Print a line, control characters escaped; newlines only with `lines`."""
    typer.echo(escape(str(text), lines=lines), err=err)
