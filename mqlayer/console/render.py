"""Templates and their filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from mqlayer.console.glossary import GLOSSARY, anchor
from mqlayer.escaping import is_printable

UNKNOWN: Final = "unknown"
UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Return a time's distance in one unit, as in "5 min ago"."""
    if moment is None:
        return "never"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if seconds < -1:
        return f"in {duration(-seconds)}"
    return "just now" if seconds < 1 else f"{duration(seconds)} ago"


def lasting(moment: datetime) -> str:
    """Return the time since a moment in one unit, as in "5 min"."""
    return duration((datetime.now(UTC) - moment).total_seconds())


def duration(seconds: float | None) -> str:
    """Return a duration in its largest unit."""
    if seconds is None:
        return "unknown"
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0) * 1000:.0f} ms" if seconds > 0 else "0 s"


def lasted(seconds: float) -> str:
    """Return a problem's duration, below ten minutes to the second."""
    if not 60 <= seconds < 600:
        return duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def number(value: float | None) -> str:
    """Return a number with its thousands apart."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 or value == int(value) else f"{value:,.2g}"


def counted(count: int | float | None, what: str) -> str:
    """Return a number with its noun: 1 message, 2,000 messages."""
    return f"{number(count)} {what}" if count == 1 else f"{number(count)} {what}s"


def size(value: float | None) -> str:
    """Return bytes in a fitting unit."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def when(moment: datetime | None) -> str:
    """Return a time in UTC to the second."""
    return UNKNOWN if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def minute(moment: datetime) -> str:
    """Return a time of day in UTC to the minute, as samples have it."""
    return f"{moment.astimezone(UTC):%H:%M} UTC"


def clock(moment: datetime) -> str:
    """Return a time of day in UTC."""
    return f"{moment.astimezone(UTC):%H:%M:%S} UTC"


def link(path: str, **query: Any) -> str:
    """Return a path within the console with its query, quoted."""
    given = {name: value for name, value in query.items() if value not in {None, ""}}
    return path + (f"?{urlencode(given)}" if given else "")


def segment(value: Any) -> str:
    """Return a part of a path, quoted."""
    return quote(str(value), safe="")


_BACKSLASHES: Final = re.compile(r"\\+")
_ESCAPE: Final = re.compile(r"u([0-9a-fA-F]{4})")


class _Exact(str):
    __slots__ = ()


def exact(value: str) -> str:
    """Return the text of a field that comes back as it is: its markup alone is escaped."""
    return _Exact(value)


def unambiguous(text: str) -> str:
    r"""Return text with unprintable characters as \uXXXX, lines kept; backslashes before such are doubled."""
    if "\\" in text:
        text = _BACKSLASHES.sub(_doubled, text)
    return text if is_printable(text) else "".join(one if _is_shown(one) else _escaped(one) for one in text)


def _is_shown(one: str) -> bool:
    return one == "\n" or is_printable(one)


def _doubled(found: re.Match[str]) -> str:
    behind = found.string[found.end() : found.end() + 5]
    if alike := _ESCAPE.fullmatch(behind):
        shown = is_printable(chr(int(alike[1], 16)))
    else:
        shown = all(map(_is_shown, behind[:1]))
    return found[0] if shown else found[0] * 2


def _escaped(one: str) -> str:
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _shown(value: Any) -> Any:
    # Marks of direction and characters without width would fake what a page says; markup is the templates' own.
    return unambiguous(value) if type(value) is str else value


@cache
def templates() -> Environment:
    """Return the environment; names that a page does not give are errors."""
    made = Environment(
        loader=PackageLoader("mqlayer.console"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.filters |= {
        "ago": ago,
        "anchor": anchor,
        "clock": clock,
        "counted": counted,
        "duration": duration,
        "exact": exact,
        "lasted": lasted,
        "lasting": lasting,
        "minute": minute,
        "number": number,
        "segment": segment,
        "size": size,
        "when": when,
    }
    made.globals |= {"glossary": GLOSSARY, "link": link}
    return made


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template's text."""
    return templates().get_template(template).render(variables)
