"""Named queries: SQL lives in ``sql/queries/<area>.sql``; Python knows names only.

A file holds entries of the form ``-- name: <name>``, a line of purpose, and one statement with named parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final, LiteralString

from mqlayer.resources import sql_names, sql_source

_ENTRY: Final = re.compile(r"^-- name: ([a-z_]+)\n", re.MULTILINE)


@cache
def queries() -> Mapping[str, str]:
    """Return every named query of every area."""
    found: dict[str, str] = {}
    for file in sql_names("queries"):
        parts = _ENTRY.split(sql_source(f"queries/{file}"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise RuntimeError(f"query {name} stands twice in sql/queries")
            found[name] = text.strip().rstrip(";")
    return found


def query(name: str) -> LiteralString:
    """Return the statement of this name."""
    # The text comes from a file of this package, never from data.
    return queries()[name]
