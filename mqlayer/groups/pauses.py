"""What an operator pauses: all groups of a topic, or some partitions of a group. See `admin` for whole groups.

A pause is one transaction with its audit row. What is paused is not readable: owners are told to release it with their
next heartbeat, or by notice at once, finish what runs and settle it; nobody gets it before it goes on. Nothing in a
member knows of it, and a crash at any line leaves the state before or the state after. Publishing goes on. Receivers of
ordered pop are given nothing new of it once they hear of that, within a second; what they have out they may settle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group, refuse_broadcast
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

POLL_INTERVAL_S: Final = 0.1


def pause_topic(database: Database, topic: str, *, actor: str) -> bool:
    """Pause all groups of a topic, also those that are made meanwhile; publishing goes on. False where they do."""
    return _change_topic(database, topic, query("topic_pause"), "topic pause", actor)


def resume_topic(database: Database, topic: str, *, actor: str) -> bool:
    """Let the groups of a topic go on, but for those that are paused by themselves. False where they do."""
    return _change_topic(database, topic, query("topic_resume"), "topic resume", actor)


def pause_partitions(database: Database, topic: str, name: str, partitions: Sequence[int], *, actor: str) -> list[int]:
    """Pause partitions for a group; return those that did not. Raises NotFound for such as the topic has not.

    Raises InvalidInput for a broadcast group: its instances have partitions. What comes out of one by a split or merge
    waits behind it, as behind any partition that is not drained.
    """
    return _change_partitions(database, topic, name, partitions, query("partition_pause_put"), "partition pause", actor)


def resume_partitions(database: Database, topic: str, name: str, partitions: Sequence[int], *, actor: str) -> list[int]:
    """Let partitions go on for a group; return those that rested."""
    return _change_partitions(
        database, topic, name, partitions, query("partition_pause_end"), "partition resume", actor
    )


def running_partitions(
    database: Database, topic: str, name: str | None = None, partitions: Sequence[int] | None = None
) -> int:
    """Return in how many partitions owners still finish what they have in hand, of what was paused; 0: nothing runs.

    A partition whose owner died counts until its lease is over. Receivers of ordered pop and members of shared groups
    own none: what they have in hand is not known, so not counted.
    """
    with database.connection() as connection:
        facts: dict[str, object] = {"topic_id": _topic_id(connection, topic)}
    facts["group_id"] = None if name is None else find_group(database, topic, name).group_id
    facts["partitions"] = None if partitions is None else list(partitions)
    with database.connection() as connection:
        row = connection.execute(query("pause_under_way"), facts).fetchone()
    return int(row[0]) if row else 0


def wait_paused(
    database: Database,
    topic: str,
    name: str | None = None,
    partitions: Sequence[int] | None = None,
    *,
    timeout_s: float,
) -> int:
    """Wait until nothing runs any more of what was paused; return in how many partitions it does after the time."""
    until = time.monotonic() + timeout_s
    while True:
        left = running_partitions(database, topic, name, partitions)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(POLL_INTERVAL_S)


def _change_topic(database: Database, topic: str, statement: Any, act: str, actor: str) -> bool:
    check_name("topic", topic)

    def work(connection: Connection) -> bool:
        topic_id = _topic_id(connection, topic)
        if connection.execute(statement, {"topic": topic, "actor": actor}).fetchone() is None:
            return False
        write_audit(connection, actor, act, topic, {})
        # Each heartbeat says what is paused, so nothing else of a group changes: no lock of theirs is needed.
        connection.execute(query("topic_groups_notify"), {"topic_id": topic_id})
        failpoint("pause.before_commit")
        return True

    return database.transaction(work)


def _change_partitions(
    database: Database, topic: str, name: str, partitions: Sequence[int], statement: Any, act: str, actor: str
) -> list[int]:
    if not partitions:
        raise InvalidInput("name a partition: mqlayer group show tells which there are")
    group = find_group(database, topic, name)
    refuse_broadcast(group)
    facts = {"group_id": group.group_id, "topic_id": group.topic_id, "partitions": list(partitions), "actor": actor}

    def work(connection: Connection) -> list[int]:
        known = {row[0] for row in connection.execute(query("partitions_of_topic"), facts).fetchall()}
        unknown = sorted(set(partitions) - known)
        if unknown:
            raise NotFound("partition", f"{topic}/{unknown[0]}", f"those there are: mqlayer group show {topic} {name}")
        changed = sorted(row[0] for row in connection.execute(statement, facts).fetchall())
        if changed:
            write_audit(connection, actor, act, _target(group), {"partitions": changed})
            rebalance(connection, group.group_id)
            connection.execute(query("allocation_raise"), {"group_id": group.group_id})
            failpoint("pause.before_commit")
        return changed

    return change_group(database, group.group_id, work)


def _topic_id(connection: Connection, topic: str) -> int:
    row = connection.execute(query("topic_known"), {"topic": topic}).fetchone()
    if row is None:
        raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
    return int(row[0])


def _target(group: Group) -> str:
    return f"{group.topic}/{group.name}"
