"""The outbox for people: what waits for which node, relays, rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class WaitingPart:
    """Outbox messages of a topic for a node. `held`: of them, behind a quarantined row; no `node`: none has the LPs."""

    topic: str
    node: str | None
    waiting: int
    held: int
    lps: int
    oldest_at: datetime


@dataclass(frozen=True, slots=True)
class WaitingSum:
    """Outbox messages under one name."""

    name: str
    waiting: int
    held: int
    lps: int
    oldest_at: datetime


def outbox_waiting(runtime: Runtime) -> list[WaitingPart]:
    """Return what waits in the outbox by topic and node, most first. Costs a look per LP with messages, not per row."""
    with runtime.control.connection() as connection:
        places = connection.execute(query("outbox_places")).fetchall()
    facts = {name: [row[at] for row in places] for name, at in (("topic_ids", 0), ("nodes", 2), ("lps", 3))}
    with runtime.outbox.connection() as connection:
        return [WaitingPart(*row) for row in connection.execute(query("outbox_waiting"), facts).fetchall()]


def sums_by_node(parts: Iterable[WaitingPart]) -> list[WaitingSum]:
    """Return the sums by node, most first; the name of no node is empty."""
    return _sums((one.node or "", one) for one in parts)


def sums_by_topic(parts: Iterable[WaitingPart]) -> list[WaitingSum]:
    """Return the sums by topic, most first."""
    return _sums((one.topic, one) for one in parts)


def _sums(named: Iterable[tuple[str, WaitingPart]]) -> list[WaitingSum]:
    groups: dict[str, list[WaitingPart]] = {}
    for name, one in named:
        groups.setdefault(name, []).append(one)
    found = [
        WaitingSum(
            name,
            sum(one.waiting for one in ones),
            sum(one.held for one in ones),
            sum(one.lps for one in ones),
            min(one.oldest_at for one in ones),
        )
        for name, ones in groups.items()
    ]
    return sorted(found, key=lambda one: (-one.waiting, one.name))
