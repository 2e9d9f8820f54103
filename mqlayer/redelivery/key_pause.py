"""Pause one key of a group: it stays parked until it is resumed (`parked_key.paused_at`).

Its new messages are parked behind, in order and within the group's limits. Messages already delivered finish first.
Crashes: docs/design/crash-matrix.md.
"""

from __future__ import annotations

from mqlayer.errors import Conflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, refuse_broadcast
from mqlayer.groups.rebalance import change_group
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import raise_parking_version
from mqlayer.redelivery.operator_actions import audit_target, key_label, parked_place
from mqlayer.runtime.runtime import Runtime


def pause_key(runtime: Runtime, topic: str, group: str, key: str) -> bool:
    """Pause a key for a group; other keys continue. False: it was paused.

    Raises NotFound, InvalidInput for a broadcast group, Conflict for a group without parked keys: no order by key, pop,
    shared.
    """
    found, place = parked_place(runtime.control, topic, group, key=key, message=None)
    refuse_without_keys(found)

    def work(connection: Connection) -> bool:
        if connection.execute(query("key_pause"), place | {"actor": runtime.actor}).fetchone() is None:
            return False
        write_audit(connection, runtime.actor, "key pause", audit_target(found), {"key": key_label(place)})
        raise_parking_version(connection, found.group_id, [(place["lp"], place["name"])])
        failpoint("key_pause.before_commit")
        return True

    return change_group(runtime.control, found.group_id, work)


def resume_key(runtime: Runtime, topic: str, group: str, key: str) -> bool:
    """Resume a paused key; False: it was not paused. Raises NotFound.

    A key parked before the pause waits for its old time, or for an operator.
    """
    found, place = parked_place(runtime.control, topic, group, key=key, message=None)

    def work(connection: Connection) -> bool:
        if connection.execute(query("key_resume"), place).fetchone() is None:
            return False
        connection.execute(query("parked_key_end"), place)
        write_audit(connection, runtime.actor, "key resume", audit_target(found), {"key": key_label(place)})
        raise_parking_version(connection, found.group_id, [(place["lp"], place["name"])])
        failpoint("key_resume.before_commit")
        return True

    return change_group(runtime.control, found.group_id, work)


def refuse_without_keys(group: Group) -> None:
    """Raise Conflict or InvalidInput for a group whose keys can't be paused."""
    refuse_broadcast(group)
    if group.mode != "exclusive":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is consumed in mode {group.mode}: its keys can't be paused",
            f"pause all of it, or a partition: mqlayer group pause {group.topic} {group.name} --partition N",
        )
    if not group.ordered or group.strategy != "strict":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} handles each message by itself, whatever its key",
            f"pause all of it, or a partition: mqlayer group pause {group.topic} {group.name} --partition N",
        )
