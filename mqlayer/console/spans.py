"""The time that curves are shown for, and pages of lists that a page has in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from mqlayer.console.page import ROWS, Visit
from mqlayer.console.render import link

Row = TypeVar("Row")

SPANS: Final[Mapping[str, timedelta]] = {
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(days=7),
}


def span_of(visit: Visit) -> tuple[str, timedelta]:
    """Return the chosen time, an hour unless day or week."""
    name = visit.text("last", "hour")
    return (name, SPANS[name]) if name in SPANS else ("hour", SPANS["hour"])


def page_of(rows: Sequence[Row], visit: Visit, path: str, **query: Any) -> tuple[Sequence[Row], str, str]:
    """Return the rows of the chosen page, and the paths of the next and the former one."""
    page = min(visit.number("page", 1), 1 + (len(rows) - 1) // ROWS if rows else 1) or 1
    shown = rows[(page - 1) * ROWS : page * ROWS]
    later = link(path, **query, page=page + 1) if page * ROWS < len(rows) else ""
    return shown, later, link(path, **query, page=page - 1) if page > 1 else ""
