"""Instances of a broadcast group: each is a group `group@instance` with one member at a time.

An instance is created at its first join, with its group's settings and start. A retired one returns as *creating*, with
one seek more and higher epochs; see docs/design/ownership.md, "Broadcast, retirement".
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mqlayer.domain.names import check_instance, instance_name
from mqlayer.errors import GroupRetired
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, bring_to_life, find_group
from mqlayer.groups.retirement import drop_parked, retire_absent_instance
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


def ensure_instance(runtime: Runtime, routes: RouteCache, group: Group, instance: str) -> tuple[Group, bool]:
    """Return an instance, created if missing, and whether it begins anew.

    It begins anew after an absence beyond `instance_expiry_s`. Raises GroupRetired if the group is retired,
    InvalidName, StoreUnavailable.
    """
    check_instance(instance)
    facts = {"group_id": group.group_id, "instance": instance}
    name = instance_name(group.name, instance)
    made = runtime.control.transaction(
        lambda connection: connection.execute(query("instance_insert"), facts).fetchone()
    )
    failpoint("instance.after_insert")
    found = _find(runtime.control, group, name)
    if made is None:
        retire_absent_instance(replace(runtime, actor="instance"), found.group_id, group.topic, name)
    while (found := _find(runtime.control, group, name)).state == "retired":
        _revive(runtime.control, found.group_id, facts)
    # Also if another process revived it and died before any member consumed.
    anew = found.state == "creating" and found.seek > 0
    bring_to_life(runtime, routes, found)
    if anew:
        log.warning("instance_reset", extra={"topic": group.topic, "group": name, "start": str(group.start)})
    return find_group(runtime.control, group.topic, name), anew


def _find(database: Database, group: Group, name: str) -> Group:
    if find_group(database, group.topic, group.name).state == "retired":
        raise GroupRetired(group.topic, group.name)
    return find_group(database, group.topic, name)


def _revive(database: Database, group_id: int, facts: Mapping[str, Any]) -> None:
    drop_parked(database, group_id)
    database.transaction(lambda connection: connection.execute(query("instance_revive"), facts))
    failpoint("instance.after_revive")


def host_instance() -> str:
    """Return this host's name as an instance name."""
    host = re.sub(r"[^a-z0-9_.-]+", "-", socket.gethostname().lower()).strip("-_.")
    return host[:63] or "host"
