"""Count, notice and event of operators' acts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mqlayer.events import Event, EventKind, emit
from mqlayer.groups.group import Group
from mqlayer.parking import MAX_CHANGES
from mqlayer.postgres.database import Connection
from mqlayer.postgres.event_counts import BY_OPERATORS, add_counts
from mqlayer.postgres.queries import query

ANY_KEY: Final = ((-1, b""),)


def raise_parking_version(connection: Connection, group_id: int, keys: Iterable[tuple[int, bytes]]) -> None:
    """Notify a group's members of changed parked keys, at the caller's commit."""
    changed = list(keys)
    facts = {"lps": [lp for lp, _ in changed], "names": [name for _, name in changed], "kept": MAX_CHANGES}
    connection.execute(query("parking_raise"), {"group_id": group_id} | facts)


def count_action(connection: Connection, group_id: int, kind: EventKind, count: int = 1) -> None:
    """Count an act, in its transaction under the group's lock."""
    add_counts(connection, {"group_id": group_id}, {BY_OPERATORS: {kind: count}})


def emit_action(kind: EventKind, group: Group, **facts: Any) -> None:
    """Emit a committed act's event to this process's hooks."""
    emit(Event(kind, group.topic, group.name, **facts))
