"""Instances of a broadcast group: each gets every message, so each is a group of its own, with one member at a time.

The broadcast group itself is settings only. An instance is made when it first joins, with the settings and the start of
its group, and goes on where it stood when it comes back. States: those of any group, and *retired* -> *creating*
again: whoever comes back after its position was dropped begins anew. That is what a seek is: one seek more, so what was
committed before is void, and epochs above all that were given out. A crash between leaves it *creating*, which counts
as away: it is retired again like any other.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from typing import Any

from mqlayer.domain.names import check_instance, instance_name
from mqlayer.errors import GroupRetired
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, bring_to_life, find_group
from mqlayer.groups.retirement import drop_parked, retire_absent_instance
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import RouteCache

log = logging.getLogger(__name__)


def ensure_instance(
    database: Database, routes: RouteCache, group: Group, instance: str, *, prefix: str, unsafe: bool = False
) -> tuple[Group, bool]:
    """Return an instance of a broadcast group, made where it is not there; and whether it begins anew.

    It does where it was away for longer than its group keeps positions, whether a job has noticed that or not. Raises
    GroupRetired where the group itself is retired, InvalidName, StoreUnavailable where a node can't be asked.
    """
    check_instance(instance)
    facts = {"group_id": group.group_id, "instance": instance}
    name = instance_name(group.name, instance)
    made = database.transaction(lambda connection: connection.execute(query("instance_insert"), facts).fetchone())
    failpoint("instance.after_insert")
    found = _find(database, group, name)
    if made is None:
        retire_absent_instance(database, found.group_id, group.topic, name, actor=name)
    while (found := _find(database, group, name)).state == "retired":
        _revive(database, found.group_id, facts)
    # Also where somebody else brought it back, or who did could not go on: nobody was told who could consume.
    anew = found.state == "creating" and found.seek > 0
    bring_to_life(database, routes, found, prefix=prefix, unsafe=unsafe)
    if anew:
        log.warning("instance_reset", extra={"topic": group.topic, "group": name, "start": str(group.start)})
    return find_group(database, group.topic, name), anew


def _find(database: Database, group: Group, name: str) -> Group:
    """Return an instance. Raises GroupRetired for one of a group that is retired: none is made, or brought back."""
    if find_group(database, group.topic, group.name).state == "retired":
        raise GroupRetired(group.topic, group.name)
    return find_group(database, group.topic, name)


def _revive(database: Database, group_id: int, facts: Mapping[str, Any]) -> None:
    """Let a retired instance be created again, without what was parked for it; nothing where that did not work."""
    drop_parked(database, group_id)
    database.transaction(lambda connection: connection.execute(query("instance_revive"), facts))
    failpoint("instance.after_revive")


def host_instance() -> str:
    """Return the name of this host in the form of an instance's name."""
    host = re.sub(r"[^a-z0-9_.-]+", "-", socket.gethostname().lower()).strip("-_.")
    return host[:63] or "host"
