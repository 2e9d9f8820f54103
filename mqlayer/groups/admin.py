"""What an operator says to a living group: other settings, pause, resume, and the end of one member.

Each is one transaction under the group's lock, with its audit row; members hear of it by notice, or with their next
heartbeat. A group is paused without its partitions: their owners finish what runs, settle it and release, as in any
hand-over, and nobody gets them before the group goes on. So nothing in a member knows of it, a member that joins
meanwhile gets nothing, and a crash at any line leaves the state before or the state after.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack

from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import (
    RULES,
    Balance,
    Group,
    GroupSettings,
    RetrySettings,
    as_columns,
    check_settings,
    check_times,
    find_group,
    no_end,
    refuse_ineffective,
    settings_of,
)
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


def set_group(
    database: Database,
    topic: str,
    name: str,
    *,
    actor: str,
    balance: Balance | None = None,
    tag_filter: str | None = None,
    instance_expiry_s: float | None = None,
    rate_limit: float | None = None,
    rate_burst: float | None = None,
    if_version: int | None = None,
    **rules: Unpack[RetrySettings],
) -> Group:
    """Change settings of a group for all of its members, at once; return it as it is then. See GroupSettings and Rules.

    Those of a broadcast group are changed for all of its instances. Raises InvalidInput, NotFound, and Conflict where
    its settings are not of the version named any more, and for a single instance.
    """
    settings = settings_of(
        balance=balance, tag_filter=tag_filter, instance_expiry_s=instance_expiry_s, rate_limit=rate_limit,
        rate_burst=rate_burst,
        **rules,
    )  # fmt: skip
    if settings == GroupSettings():
        raise InvalidInput("nothing to set: name a setting")
    facts = {
        **as_columns({name: getattr(settings, name) for name in RULES}),
        "balance": balance,
        "tag_filter": settings.tag_filter,
        "instance_expiry_s": instance_expiry_s,
        "rate_limit": rate_limit,
        "rate_burst": rate_burst,
        "if_version": if_version,
    }

    def work(connection: Connection, group: Group) -> None:
        if group.instance is not None:
            raise Conflict(f"{_called(group)} is an instance", "change what all have: mqlayer group set of its group")
        check_settings(replace(settings, mode=group.mode))
        refuse_ineffective(settings, _with(group, settings))
        times = connection.execute(query("group_settings_put"), facts | {"group_id": group.group_id}).fetchone()
        if times is None:
            raise Conflict(f"the settings of {_called(group)} are at version {group.settings_version}", "look at them")
        check_times(*times)
        # JSON has no number without end.
        said = {key: "none" if value == math.inf else value for key, value in facts.items() if value is not None}
        write_audit(connection, actor, "group set", _target(group), said)
        connection.execute(query("instances_follow"), {"group_id": group.group_id})

    _change_group(database, topic, name, work)
    return find_group(database, topic, name)


def _with(group: Group, settings: GroupSettings) -> Group:
    """Return a group as it is with other settings."""
    said = {name: value for name in RULES if (value := getattr(settings, name)) is not None}
    rules = replace(group.rules, **said)
    rate_limit = group.rate_limit if settings.rate_limit is None else no_end(settings.rate_limit)
    return replace(group, rules=rules, rate_limit=rate_limit)


def pause_group(database: Database, topic: str, name: str, *, actor: str) -> bool:
    """Pause a group: what runs is finished and settled, nothing more is started. False where it is paused already.

    With a broadcast group all of its instances are paused.
    """

    def work(connection: Connection, group: Group) -> bool:
        facts = {"group_id": group.group_id, "actor": actor}
        if connection.execute(query("group_pause"), facts).fetchone() is None:
            return False
        connection.execute(query("instances_pause"), {"group_id": group.group_id})
        for group_id in (group.group_id, *_instances(connection, group)):
            connection.execute(query("assignments_of_group_release"), {"group_id": group_id})
        write_audit(connection, actor, "group pause", _target(group), {})
        return True

    return bool(_change_group(database, topic, name, work))


def resume_group(database: Database, topic: str, name: str, *, actor: str) -> bool:
    """Let a group go on where it was paused. False where it does already."""

    def work(connection: Connection, group: Group) -> bool:
        if connection.execute(query("group_resume"), {"group_id": group.group_id}).fetchone() is None:
            return False
        connection.execute(query("instances_pause"), {"group_id": group.group_id})
        write_audit(connection, actor, "group resume", _target(group), {})
        return True

    return bool(_change_group(database, topic, name, work))


def evict_member(database: Database, topic: str, name: str, member_id: str, *, actor: str) -> None:
    """End a member: others get its partitions at once, under higher epochs; its process stops consuming.

    What it has in hand may be handled again. A supervisor may start the process again, which joins as a new one. Raises
    NotFound where no such member lives.
    """

    def work(connection: Connection, group: Group) -> None:
        facts = {"group_id": group.group_id, "member_id": member_id}
        if connection.execute(query("member_evict"), facts).fetchone() is None:
            raise NotFound("living member", f"{topic}/{name}/{member_id}", f"mqlayer group members {topic} {name}")
        write_audit(connection, actor, "group evict", _target(group), {"member": member_id})

    _change_group(database, topic, name, work)


def _change_group(database: Database, topic: str, name: str, work: Any) -> Any:
    """Do something to a group under its lock, bring its assignments up to it, and let its members know."""
    group = find_group(database, topic, name)

    def steered(connection: Connection) -> Any:
        done = work(connection, group)
        for group_id in (group.group_id, *_instances(connection, group)):
            rebalance(connection, group_id)
            connection.execute(query("allocation_raise"), {"group_id": group_id})
        failpoint("group_admin.before_commit")
        return done

    return change_group(database, group.group_id, steered)


def _instances(connection: Connection, group: Group) -> list[int]:
    """Return the instances of a broadcast group, whose lock is held: none is made meanwhile."""
    if group.mode != "broadcast":
        return []
    return [row[0] for row in connection.execute(query("instances_of"), {"group_id": group.group_id}).fetchall()]


def _target(group: Group) -> str:
    return f"{group.topic}/{group.name}"


def _called(group: Group) -> str:
    return f"group {group.name!r} of topic {group.topic!r}"
