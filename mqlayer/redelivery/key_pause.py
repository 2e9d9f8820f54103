"""What an operator pauses of a group: one key. It is parked, without a time, until it is resumed.

States: *in line* or *waiting* -> *paused* (`parked_key.paused_at`) -> *waiting*, or *in line* where nothing of it was
parked. A paused key is due at no time whatever else is said of it; what comes of it is parked behind what waits, in
order, within the group's limits, and what finds no room waits in the stream. Each act is one transaction under the
group's lock, with its audit row; owners hear of it by notice, or with their next heartbeat. What an owner has in hand:

- a message that a handler is at ends as it would; the next one of its key is parked.
- a key that its owner had begun with, out of Postgres: what was handed out is handled, then nothing more is.
- an owner that dies between hearing of the pause and parking: its successor knows of the pause before it reads.
- resumed before its owner parked anything: its row is gone, the owner finds that as it parks, and goes on in line.
"""

from __future__ import annotations

from mqlayer.errors import Conflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, refuse_broadcast
from mqlayer.groups.rebalance import change_group
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import raise_parking_version
from mqlayer.redelivery.operator_actions import audit_target, key_label, parked_place


def pause_key(database: Database, topic: str, group: str, key: str, *, actor: str) -> bool:
    """Pause a key for a group; its messages wait in order, other keys go on. False where it is paused already.

    Raises NotFound, and Conflict for a group that keeps no order by key or is consumed by receivers: nothing of them
    is parked by its key.
    """
    found, place = parked_place(database, topic, group, key=key, message=None)
    refuse_without_keys(found)

    def work(connection: Connection) -> bool:
        if connection.execute(query("key_pause"), place | {"actor": actor}).fetchone() is None:
            return False
        write_audit(connection, actor, "key pause", audit_target(found), {"key": key_label(place)})
        raise_parking_version(connection, found.group_id, [(place["lp"], place["name"])])
        failpoint("key_pause.before_commit")
        return True

    return change_group(database, found.group_id, work)


def resume_key(database: Database, topic: str, group: str, key: str, *, actor: str) -> bool:
    """Let a paused key go on where it stood; False where it was not paused.

    One that had failed before it was paused waits on as it did then: for its time, or for an operator.
    """
    found, place = parked_place(database, topic, group, key=key, message=None)

    def work(connection: Connection) -> bool:
        if connection.execute(query("key_resume"), place).fetchone() is None:
            return False
        connection.execute(query("parked_key_end"), place)
        write_audit(connection, actor, "key resume", audit_target(found), {"key": key_label(place)})
        raise_parking_version(connection, found.group_id, [(place["lp"], place["name"])])
        failpoint("key_resume.before_commit")
        return True

    return change_group(database, found.group_id, work)


def refuse_without_keys(group: Group) -> None:
    """Raise Conflict for a group none of whose keys can be parked as such, InvalidInput for a broadcast group."""
    refuse_broadcast(group)
    if group.mode != "exclusive":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is consumed in mode {group.mode}: its keys can't be parked",
            f"pause all of it, or a partition: mqlayer group pause {group.topic} {group.name} --partition N",
        )
    if not group.ordered or group.strategy != "strict":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} handles each message by itself, whatever its key",
            f"pause all of it, or a partition: mqlayer group pause {group.topic} {group.name} --partition N",
        )
