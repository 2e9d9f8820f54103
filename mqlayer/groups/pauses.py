"""Pause topics and partitions (groups: `admin`); see docs/design/ownership.md, "Pauses".

Receivers of ordered pop get nothing new within a second, and may settle messages that are out.
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
from mqlayer.runtime.runtime import Runtime

POLL_INTERVAL_S: Final = 0.1


def pause_topic(runtime: Runtime, topic: str) -> bool:
    """Pause all groups of a topic, also new ones; publishing continues. False: it was paused."""
    return _change_topic(runtime, topic, query("topic_pause"), "topic pause")


def resume_topic(runtime: Runtime, topic: str) -> bool:
    """Resume a topic's groups, except those paused themselves. False: it was not paused."""
    return _change_topic(runtime, topic, query("topic_resume"), "topic resume")


def pause_partitions(runtime: Runtime, topic: str, name: str, partitions: Sequence[int]) -> list[int]:
    """Pause partitions for a group; return the newly paused. Their successors wait too.

    Raises NotFound for partitions that the topic lacks, InvalidInput for none or a broadcast group.
    """
    return _change_partitions(runtime, topic, name, partitions, query("partition_pause_put"), "partition pause")


def resume_partitions(runtime: Runtime, topic: str, name: str, partitions: Sequence[int]) -> list[int]:
    """Resume partitions for a group; return those that were paused. Raises as `pause_partitions`."""
    return _change_partitions(runtime, topic, name, partitions, query("partition_pause_end"), "partition resume")


def running_partitions(
    database: Database, topic: str, name: str | None = None, partitions: Sequence[int] | None = None
) -> int:
    """Return in how many paused partitions owners still finish messages.

    A dead owner counts until its lease ends. Receivers of ordered pop and members of shared groups never count.
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
    """Wait until `running_partitions` is 0, or the timeout; return it."""
    until = time.monotonic() + timeout_s
    while True:
        left = running_partitions(database, topic, name, partitions)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(POLL_INTERVAL_S)


def _change_topic(runtime: Runtime, topic: str, statement: Any, act: str) -> bool:
    check_name("topic", topic)

    def work(connection: Connection) -> bool:
        topic_id = _topic_id(connection, topic)
        if connection.execute(statement, {"topic": topic, "actor": runtime.actor}).fetchone() is None:
            return False
        write_audit(connection, runtime.actor, act, topic, {})
        # Heartbeats read the pause, so no group row changes and no lock is needed.
        connection.execute(query("topic_groups_notify"), {"topic_id": topic_id})
        failpoint("pause.before_commit")
        return True

    return runtime.control.transaction(work)


def _change_partitions(
    runtime: Runtime, topic: str, name: str, partitions: Sequence[int], statement: Any, act: str
) -> list[int]:
    if not partitions:
        raise InvalidInput("name a partition: mqlayer group show tells which there are")
    group = find_group(runtime.control, topic, name)
    refuse_broadcast(group)
    facts = {
        "group_id": group.group_id,
        "topic_id": group.topic_id,
        "partitions": list(partitions),
        "actor": runtime.actor,
    }

    def work(connection: Connection) -> list[int]:
        known = {row[0] for row in connection.execute(query("partitions_of_topic"), facts).fetchall()}
        unknown = sorted(set(partitions) - known)
        if unknown:
            raise NotFound("partition", f"{topic}/{unknown[0]}", f"those there are: mqlayer group show {topic} {name}")
        changed = sorted(row[0] for row in connection.execute(statement, facts).fetchall())
        if changed:
            write_audit(connection, runtime.actor, act, _target(group), {"partitions": changed})
            rebalance(connection, group.group_id)
            connection.execute(query("allocation_raise"), {"group_id": group.group_id})
            failpoint("pause.before_commit")
        return changed

    return change_group(runtime.control, group.group_id, work)


def _topic_id(connection: Connection, topic: str) -> int:
    row = connection.execute(query("topic_known"), {"topic": topic}).fetchone()
    if row is None:
        raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
    return int(row[0])


def _target(group: Group) -> str:
    return f"{group.topic}/{group.name}"
