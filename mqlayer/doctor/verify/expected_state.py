"""A topic in Postgres, read before and after the nodes as lower and upper bounds.

See docs/design/decisions/0053-verify-asks-postgres-twice.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, LiteralString, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

Marks = Mapping[str, int]
"""`<source>:<lp>` -> seq."""


class ExpectedPartition(NamedTuple):
    """A partition as recorded. `changing`: in an open change; `came_with`: parents' marks."""

    partition: int
    node: NodeId
    armed_run: str | None
    given_up: bool
    lp_from: int
    lp_to: int
    state: str
    changing: bool
    seal_id: str
    seal_next: int
    seal_marks: Marks
    seal_unreachable: bool
    seal_cut: bool
    came_with: Marks


class ExpectedGroup(NamedTuple):
    """A group in a partition; `armed_since`: armed after the drain."""

    group_id: int
    name: str
    start: int
    seek: int
    drained: bool
    armed_since: bool


class OutboxCounter(NamedTuple):
    """An LP of the outbox; `waiting`: rows above `relayed`."""

    lp: int
    seq: int
    relayed: int
    waiting: int


@dataclass(slots=True)
class ExpectedBefore:
    """Lower bounds. `source`: None if the outbox has sent nothing."""

    topic_id: int
    topic: str
    partitions: Sequence[ExpectedPartition]
    groups: Mapping[int, Sequence[ExpectedGroup]]
    relayed: Mapping[int, int]
    source: int | None
    archive_marks: Marks
    archive_progress: Mapping[int, int]


@dataclass(slots=True)
class ExpectedAfter:
    """Upper bounds. `partitions`: unchanged ones; `archive_floor`: first unarchived offsets."""

    partitions: frozenset[int]
    epoch: int
    counters: Sequence[OutboxCounter]
    archive_floor: Mapping[int, int] = field(default_factory=dict)
    archive_breaks: Sequence[tuple[str, int, int, int]] = field(default_factory=list)


def topics_to_verify(database: Database, topic: str | None) -> list[tuple[int, str]]:
    """Return id and name of one topic, or of all."""
    with database.connection() as connection:
        return [(row[0], row[1]) for row in connection.execute(query("verify_topics"), {"topic": topic})]


def ask_before(database: Database, outbox: Database, topic_id: int, topic: str) -> ExpectedBefore:
    """Read the lower bounds."""
    facts = {"topic_id": topic_id}
    with outbox.connection() as connection:
        relayed = _pairs(connection, query("verify_relayed"), facts)
        identity = connection.execute(query("outbox_identity")).fetchone()
    with database.connection() as connection:
        groups: dict[int, list[ExpectedGroup]] = {}
        for partition, *group in connection.execute(query("verify_groups"), facts):
            groups.setdefault(partition, []).append(ExpectedGroup(*group))
        return ExpectedBefore(
            topic_id,
            topic,
            _partitions(connection, facts),
            groups,
            relayed,
            _source(connection, identity),
            _pairs(connection, query("verify_archive_marks"), facts),
            _pairs(connection, query("verify_archive_progress"), facts),
        )


def ask_after(database: Database, outbox: Database, before: ExpectedBefore, *, deep: bool) -> ExpectedAfter:
    """Read the upper bounds."""
    facts = {"topic_id": before.topic_id}
    with outbox.connection() as connection, connection.transaction():
        counters = [OutboxCounter(*row) for row in connection.execute(query("verify_counters"), facts)]
    with database.connection() as connection:
        now = {one.partition: one for one in _partitions(connection, facts)}
        same = frozenset(one.partition for one in before.partitions if now.get(one.partition) == one)
        (epoch,) = connection.execute(query("verify_epoch")).fetchall()[0]
        breaks = connection.execute(query("verify_archive_chains"), facts).fetchall() if deep else []
        floor = _pairs(connection, query("verify_archive_floor"), facts)
    return ExpectedAfter(same, epoch, counters, floor, [(row[0], row[1], row[2], row[3]) for row in breaks])


def rows_kept(outbox: Database, topic_id: int, lp: int, after: int, upto: int) -> int:
    """Count an LP's outbox rows in (`after`, `upto`]."""
    facts = {"topic_id": topic_id, "lp": lp, "after": after, "upto": upto}
    with outbox.connection() as connection:
        return int(connection.execute(query("verify_kept"), facts).fetchall()[0][0])


def _partitions(connection: Connection, facts: Mapping[str, Any]) -> list[ExpectedPartition]:
    return [ExpectedPartition(*row) for row in connection.execute(query("verify_partitions"), facts)]


def _pairs(connection: Connection, statement: LiteralString, facts: Mapping[str, Any]) -> dict[Any, int]:
    return {row[0]: row[1] for row in connection.execute(statement, facts)}


def _source(connection: Connection, identity: tuple[Any, ...] | None) -> int | None:
    if identity is None:
        return None
    row = connection.execute(query("source_of_outbox"), {"outbox_uuid": identity[0]}).fetchone()
    return None if row is None else int(row[0])
