"""Print rows and facts: tables where they fit, else cards; or JSON lines.

Lines fit the terminal, or COLUMNS; files and pipes get whole lines. People get sizes and spans, JSON gets numbers.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from mqlayer.escaping import escape, is_printable, json_line

# Most commands print lines only; rich is a tenth of a second of their start.
if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line and nothing else.")]

GAP: Final = "  "
_UNIT: Final = re.compile(r"(?<!^per)_(at|s|ms)$")
# Offsets, ids and versions are typed again, so they get no separators.
_COUNTED: Final = re.compile(r"(^|_)(limit|messages|records|lag|published|kept|retained|waiting|keys)$")
# A number stays with its unit.
_WORDS: Final = re.compile(r"( *)([^ ]*\d (?:ms|s|min|h|d|[kMGT]?B|%)(?!\w)[^ ]*|[^ ]+)")
_PARTS: Final = re.compile(r"[^/:,=&?-]*[/:,=&?-]*")
_SIZES: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_SPANS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"))


class Size(int):
    """Bytes, where a column's name does not say so."""


def show_rows(rows: Iterable[Mapping[str, Any]], *, as_json: bool, nothing: str, by: int = 1) -> None:
    """Print rows, or the text `nothing`. The first `by` columns say what a row is about.

    Columns end in their units: `_at` (a datetime), `_s`, `_ms`, `bytes`.
    """
    found = list(rows)
    if as_json:
        for row in found:
            typer.echo(json_line(row))
    elif not found:
        echo(nothing)
    else:
        width = output_width(sys.stdout)
        for line in _table(found, width) or _cards(found, by, width):
            typer.echo(line)


def show_facts(facts: Mapping[str, Any], *, indent: str = "") -> None:
    """Print the facts of one thing, one per line; nothing of unknown ones."""
    for line in _fact_lines(facts, output_width(sys.stdout), indent):
        typer.echo(line)


def output_width(stream: TextIO) -> int | None:
    """Return how many columns lines may have; None: any number."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return None


def format_key(key: str | None) -> str:
    """Return a key, quoted and escaped where unprintable."""
    if key is None:
        return "(none)"
    return key if is_printable(key) else json_line(key)


def pluralize(count: int, what: str) -> str:
    """Return a count: 1 message, 2 messages."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_age(seconds: float | None) -> str:
    """Return a time span: 0.4 s, 12 s, 3 min, 2 h 5 min, 4 d."""
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{f'{seconds:.1f}'.removesuffix('.0')} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    for size, unit, small, small_unit in _SPANS:
        if seconds >= size:
            whole, rest = divmod(round(seconds / small), size // small)
            return f"{whole} {unit} {rest} {small_unit}" if rest else f"{whole} {unit}"
    return f"{seconds / 60:.0f} min"


def format_size(count: int) -> str:
    """Return a number of bytes: 87 B, 12.3 MB."""
    for size, unit in _SIZES:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def format_time(at: datetime, *, exact: bool = False) -> str:
    """Return how long ago, or in how long, a time is; `exact`: the time before it."""
    left = (at - datetime.now(UTC)).total_seconds()
    relative = f"in {format_age(left)}" if left > 0 else f"{format_age(-left)} ago"
    return f"{at.isoformat(timespec='seconds')} ({relative})" if exact else relative


def format_value(name: str, value: Any, *, exact: bool = False) -> str:
    """Return a value for people, by its column's unit and its type."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return format_time(value, exact=exact)
    if isinstance(value, int | float):
        return _format_number(name, value)
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {format_value('', one)}" for part, one in value.items())
    if type(value) in {list, tuple}:
        return ", ".join(format_value(name, one) for one in value)
    return escape(str(value))


def echo(text: object = "", *, err: bool = False, lines: bool = False) -> None:
    """Print a sentence, control characters escaped, between words where it does not fit.

    `lines`: keep its newlines, and lines of any length.
    """
    if lines:
        typer.echo(escape(str(text), lines=True), err=err)
        return
    for line in fold(escape(str(text)), output_width(sys.stderr if err else sys.stdout)):
        typer.echo(line, err=err)


def show_beside(head: str, text: str) -> None:
    """Print a text, escaped, beside its head, and folded there."""
    width = output_width(sys.stdout)
    room = None if width is None else max(20, width - cells(head))
    for number, line in enumerate(fold(escape(text), room, hang="")):
        typer.echo(f"{' ' * cells(head) if number else head}{line}")


def fold(text: str, width: int | None, hang: str = "  ") -> Iterator[str]:
    """Yield lines no wider than `width`, cut between words; `hang` begins all but the first."""
    begin = " " * (len(text) - len(text.lstrip(" ")))
    if width is None or cells(text) <= width:
        yield text
        return
    line, empty = begin, True
    for space, word in _words(text[len(begin) :], width - len(begin) - len(hang)):
        if not empty and cells(line) + len(space) + cells(word) > width:
            yield line
            line = begin + hang + word
        else:
            line += space + word
        empty = False
    yield line


def cells(text: str) -> int:
    """Return how many columns a terminal needs for a text."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in text)


def console(*, width: int | None = None, stderr: bool = False) -> Console:
    """Return a console without markup and emoji names."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=width, stderr=stderr)


def _format_number(name: str, value: float) -> str:
    if isinstance(value, Size) or name == "size" or "bytes" in name:
        return format_size(int(value))
    unit = _UNIT.search(name)
    if unit is not None and unit[1] == "s":
        return format_age(value)
    if unit is not None and unit[1] == "ms":
        return f"{value:g} ms" if value < 1_000 else format_age(value / 1_000)
    if isinstance(value, int):
        return f"{value:,}" if _COUNTED.search(name) else str(value)
    return f"{value:g}"


def _label(name: str) -> str:
    if name == "per_s":
        return "per second"
    return _UNIT.sub("", name).replace("bytes", "size").replace("_", " ")


def _table(rows: Sequence[Mapping[str, Any]], width: int | None) -> list[str] | None:
    """None where it does not fit."""
    # A column without any value says nothing.
    names = [name for name in rows[0] if any(format_value(name, row[name]) for row in rows)] or list(rows[0])
    texts = [[_label(name) for name in names]]
    texts += ([format_value(name, row[name]) for name in names] for row in rows)
    widths = [max(map(cells, column)) for column in zip(*texts, strict=True)]
    if width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return None
    right = [all(_is_number(row[name]) for row in rows) for name in names]
    return [GAP.join(map(_padded, line, widths, right)).rstrip() for line in texts]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - cells(text))
    return space + text if right else text + space


def _cards(rows: Sequence[Mapping[str, Any]], by: int, width: int | None) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        names = list(row)
        yield from fold(", ".join(_titled(name, row[name]) for name in names[:by]), width)
        yield from _fact_lines({name: row[name] for name in names[by:]}, width, GAP)


def _titled(name: str, value: Any) -> str:
    text = format_value(name, value)
    return text if name == "name" else f"{_label(name)} {text}"


def _fact_lines(facts: Mapping[str, Any], width: int | None, indent: str) -> Iterator[str]:
    texts = [(_label(name), format_value(name, value, exact=True)) for name, value in facts.items()]
    known = [(label, text) for label, text in texts if text]
    column = max((cells(label) for label, _ in known), default=0)
    hang = " " * (column + len(GAP))
    for label, text in known:
        begin = f"{indent}{_padded(label, column, right=False)}{GAP}"
        for number, line in enumerate(fold(text, None if width is None else width - len(begin), hang="")):
            yield f"{indent}{hang}{line}" if number else f"{begin}{line}"


def _words(text: str, longest: int) -> Iterator[tuple[str, str]]:
    """Yield words, each with the space before it; a word too long for any line in parts."""
    for space, word in _WORDS.findall(text):
        if cells(word) <= longest:
            yield space, word
            continue
        first, *others = filter(None, _PARTS.findall(word))
        yield space, first
        yield from (("", part) for part in others)
