"""Reads that several pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mqlayer.console.page import Visit
from mqlayer.errors import PermissionDenied
from mqlayer.inspect import hidden_from
from mqlayer.postgres.queries import query

NAMES: Final = 200
"""Of a field's suggestions."""


def topic_names(visit: Visit) -> Sequence[str]:
    """Return the first topics by name."""
    with visit.runtime.control.connection() as connection:
        rows = connection.execute(query("topic_names"), {"begins": ""}).fetchmany(NAMES)
    return [name for (name,) in rows]


def check_bodies(visit: Visit) -> None:
    """Raise PermissionDenied unless this user may see bodies."""
    reason, _, fix = why_hidden(visit).partition(": ")
    if reason:
        raise PermissionDenied("the console", reason, fix)


def why_hidden(visit: Visit) -> str:
    """Return why this user may see no bodies and headers; empty if it may."""
    if not visit.user.bodies:
        return f"{visit.user.name} may not see bodies and headers of messages: a body reader may"
    role = hidden_from(visit.runtime.control)
    return "" if role is None else f"role {role} of Postgres may not see them: mqlayer grant operate {role}, or analyze"
