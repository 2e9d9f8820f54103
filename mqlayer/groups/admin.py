"""Operators' acts on a group. Each is one transaction under the group's lock with an audit row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import (
    RULES,
    SET_OPTIONS,
    Group,
    GroupChanges,
    GroupSettings,
    as_columns,
    check_settings,
    check_times,
    find_group,
    no_end,
    read_group,
    refuse_before_finalization,
    refuse_ineffective,
    settings_of,
)
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


def set_group(
    runtime: Runtime,
    topic: str,
    name: str,
    *,
    if_version: int | None = None,
    **changes: Unpack[GroupChanges],
) -> Group:
    """Change a group's settings for all members at once; return the group. See GroupSettings, RetryRules.

    A broadcast group's instances follow. Raises InvalidInput, NotFound, Conflict for an instance or if the settings'
    version is not `if_version`.
    """
    settings = settings_of(**changes)
    if settings == GroupSettings():
        raise InvalidInput("nothing to set: name a setting")

    def work(connection: Connection, group: Group) -> None:
        put_settings(connection, runtime.actor, group, settings, if_version=if_version)
        connection.execute(query("instances_follow"), {"group_id": group.group_id})

    _change_group(runtime.control, topic, name, work)
    return find_group(runtime.control, topic, name)


def put_settings(
    connection: Connection, actor: str, group: Group, settings: GroupSettings, *, if_version: int | None = None
) -> None:
    """Change a group's settings, with an audit row, in the caller's transaction under its lock. Raises as set_group."""
    if group.instance is not None:
        raise Conflict(f"{_called(group)} is an instance", "change what all have: mqlayer group set of its group")
    facts = {
        **as_columns({name: getattr(settings, name) for name in RULES}),
        "balance": settings.balance,
        "tag_filter": settings.tag_filter,
        "instance_expiry_s": settings.instance_expiry_s,
        "rate_limit": settings.rate_limit,
        "rate_burst": settings.rate_burst,
        "if_version": if_version,
    }
    in_mode = replace(settings, mode=group.mode, scope=group.scope)
    check_settings(in_mode)
    refuse_before_finalization(connection, in_mode)
    was = read_group(connection, group.topic, group.name)
    refuse_ineffective(settings, _with(group, settings))
    times = connection.execute(query("group_settings_put"), facts | {"group_id": group.group_id}).fetchone()
    if times is None:
        raise Conflict(f"the settings of {_called(group)} are at version {group.settings_version}", "look at them")
    check_times(*times)
    # JSON has no infinity.
    said = {key: "none" if value == math.inf else value for key, value in facts.items() if value is not None}
    said["before"] = _settings_before(was, said)
    write_audit(connection, actor, "group set", _target(group), said)


def _with(group: Group, settings: GroupSettings) -> Group:
    said = {name: value for name in RULES if (value := getattr(settings, name)) is not None}
    rules = replace(group.rules, **said)
    rate_limit = group.rate_limit if settings.rate_limit is None else no_end(settings.rate_limit)
    return replace(group, rules=rules, rate_limit=rate_limit)


def pause_group(runtime: Runtime, topic: str, name: str) -> bool:
    """Pause a group and its instances: running messages finish, no more start. False: it was paused."""

    def work(connection: Connection, group: Group) -> bool:
        facts = {"group_id": group.group_id, "actor": runtime.actor}
        if connection.execute(query("group_pause"), facts).fetchone() is None:
            return False
        connection.execute(query("instances_pause"), {"group_id": group.group_id})
        for group_id in (group.group_id, *_instances(connection, group)):
            connection.execute(query("assignments_of_group_release"), {"group_id": group_id})
        write_audit(connection, runtime.actor, "group pause", _target(group), {})
        return True

    return bool(_change_group(runtime.control, topic, name, work))


def resume_group(runtime: Runtime, topic: str, name: str) -> bool:
    """Resume a group and its instances. False: it was not paused."""

    def work(connection: Connection, group: Group) -> bool:
        if connection.execute(query("group_resume"), {"group_id": group.group_id}).fetchone() is None:
            return False
        connection.execute(query("instances_pause"), {"group_id": group.group_id})
        write_audit(connection, runtime.actor, "group resume", _target(group), {})
        return True

    return bool(_change_group(runtime.control, topic, name, work))


def evict_member(runtime: Runtime, topic: str, name: str, member_id: str) -> None:
    """End a member: others get its partitions at once, under higher epochs; its process stops consuming.

    Its unsettled messages may be handled again. Raises NotFound if no such member lives.
    """

    def work(connection: Connection, group: Group) -> None:
        facts = {"group_id": group.group_id, "member_id": member_id}
        if connection.execute(query("member_evict"), facts).fetchone() is None:
            raise NotFound("living member", f"{topic}/{name}/{member_id}", f"mqlayer group members {topic} {name}")
        write_audit(connection, runtime.actor, "group evict", _target(group), {"member": member_id})

    _change_group(runtime.control, topic, name, work)


def _change_group(database: Database, topic: str, name: str, work: Any) -> Any:
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
    if group.mode != "broadcast":
        return []
    return [row[0] for row in connection.execute(query("instances_of"), {"group_id": group.group_id}).fetchall()]


def _settings_before(was: Group, changed: Iterable[str]) -> dict[str, Any]:
    found = {name: getattr(was.rules if name in RULES else was, name) for name in changed if name in SET_OPTIONS}
    return {name: "none" if value is None else value for name, value in as_columns(found).items()}


def _target(group: Group) -> str:
    return f"{group.topic}/{group.name}"


def _called(group: Group) -> str:
    return f"group {group.name!r} of topic {group.topic!r}"
