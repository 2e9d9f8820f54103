"""Named queries from ``sql/queries/<area>.sql``.

``-- name: <name>`` begins a statement with its purpose; ``-- part: <name>`` replaces ``{<name>}`` below it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, LiteralString

from mqlayer.resources import sql_names, sql_source

_ENTRY: Final = re.compile(r"^-- (name|part): ([a-z_]+)\n", re.MULTILINE)
_PART: Final = re.compile(r"\{([a-z_]+)\}")


@cache
def queries() -> Mapping[str, str]:
    """Return all named queries."""
    found: dict[str, str] = {}
    for file in sql_names("queries"):
        pieces = _ENTRY.split(sql_source(f"queries/{file}"))
        entries = list(zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True))
        parts: dict[str, str] = {}
        for kind, name, text in entries:
            if name in found:
                raise RuntimeError(f"query {name} stands twice in sql/queries")
            whole = _PART.sub(partial(_part, parts), text.strip().rstrip(";"))
            (found if kind == "name" else parts)[name] = whole
    return found


def _part(parts: Mapping[str, str], found: re.Match[str]) -> str:
    return parts[found[1]]


def query(name: str) -> LiteralString:
    """Return a named query."""
    # From a file of this package, never from data.
    return queries()[name]


def columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return rows as arrays by column."""
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
