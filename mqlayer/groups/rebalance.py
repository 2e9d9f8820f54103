"""Assign a group's partitions to members (docs/design/ownership.md).

An assignment is *free*, *held* (target = owner) or *releasing* (another target).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from mqlayer.domain.assignment import Zones, assign, assign_by_rate
from mqlayer.domain.deployments import Deployments, assign_each
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.groups.wakeups import wakeups
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)

Result = TypeVar("Result")
SCAN_LOCK_WAIT_S: Final = 0.1
IDLE_S: Final = 2.0
"""How long an idle process may hold a group's lock, which blocks joins, leaves and arming."""
ALONE_S: Final = 30.0
"""A scan ignores a group this long after all leases ran out: Postgres may have been unavailable."""


def change_group(
    database: Database,
    group_id: int,
    work: Callable[[Connection], Result],
    *,
    lock_wait_s: float = 2.0,
    timeout_s: float = 10.0,
    idle_s: float = IDLE_S,
) -> Result:
    """Run `work` in one transaction under the group's lock; `idle_s` without a statement ends it.

    `work` may run again. Raises TransactionConflict after `lock_wait_s` for the lock, retried for `timeout_s`.
    """
    timeouts = {"lock_wait": f"{max(1, int(lock_wait_s * 1000))}ms", "idle": f"{int(idle_s * 1000)}ms"}

    def patiently(connection: Connection) -> Result:
        connection.execute(query("transaction_patience"), timeouts)
        connection.execute(query("group_lock"), {"group_id": group_id})
        return work(connection)

    return database.transaction(patiently, timeout_s=timeout_s)


def rebalance(connection: Connection, group_id: int) -> bool:
    """Assign partitions to living members, in the caller's transaction; say whether any changed."""
    group: dict[str, object] = {"group_id": group_id}
    locked = connection.execute(query("group_lock"), group).fetchone()
    if locked is not None and locked[4] == "pop":
        # No members: its partitions stay free, each under an epoch.
        return False
    connection.execute(query("member_expire"), group)
    if locked is not None and locked[4] == "shared":
        # Members read all partitions: these stay free, each under an epoch.
        connection.execute(query("members_forget"), group)
        return False
    connection.execute(query("assignment_free_unreadable_of_gone"), group)
    members = connection.execute(query("member_live"), group).fetchall()
    live = {member for member, *_ in members}
    staying = {member: deployment for member, leaving, deployment, _ in members if not leaving}
    if locked is not None and locked[6]:
        connection.execute(query("instance_presence"), group | {"here": bool(live)})
    if locked is not None:
        _fall_back(connection, group_id, Deployments(*locked[7:]), staying.values())
    rows = connection.execute(query("assignment_list"), group).fetchall()
    zones = {member: zone for member, _, _, zone in members}
    desired = _desired(rows, staying, zones, by_rate=locked is not None and locked[3] == "rate")
    steps: dict[str, dict[PartitionId, str | None]] = {}
    concerned: set[str] = set()
    for partition, owner, _, target, *_ in rows:
        wanted = desired.get(PartitionId(partition))
        name = _step(owner if owner in live else None, wanted, target, owned=owner is not None)
        if name is not None:
            steps.setdefault(name, {})[PartitionId(partition)] = wanted
            # Whose partition is wanted by another releases it; the other hears when that is done.
            concerned.update(filter(None, [owner if owner in live else wanted]))
    # One statement per step, not a round trip per partition.
    for name, given in steps.items():
        connection.execute(query(name), group | {"partitions": list(given), "members": list(given.values())})
    if steps:
        connection.execute(query("allocation_raise_for"), group | {"payloads": wakeups(group_id, concerned)})
    connection.execute(query("members_forget"), group)
    return bool(steps)


def _desired(
    rows: Sequence[Any], members: Mapping[str, str], zones: Mapping[str, str], *, by_rate: bool
) -> dict[PartitionId, str]:
    rates = {PartitionId(row[0]): row[4] for row in rows}
    places = {PartitionId(row[0]): row[6] for row in rows}

    def spread(
        partitions: Collection[PartitionId], able: Collection[str], current: Mapping[PartitionId, str]
    ) -> dict[PartitionId, str]:
        if by_rate:
            return assign_by_rate(partitions, able, current, rates)
        # Of these members only: a zone with members of another deployment is nobody's home.
        return assign(partitions, able, current, Zones(places, {member: zones[member] for member in able}))

    return assign_each(
        {PartitionId(row[0]): row[5] for row in rows},
        members,
        owners={PartitionId(row[0]): row[1] for row in rows if row[1]},
        targets={PartitionId(row[0]): row[3] for row in rows if row[3]},
        assign=spread,
    )


def _fall_back(connection: Connection, group_id: int, now: Deployments, living: Collection[str]) -> None:
    older = now.fallen_back(living)
    if older is None:
        return
    put_deployments(connection, group_id, older)
    facts = {"from": now.canary or now.in_force, "to": older.in_force}
    for topic, name, _, _ in connection.execute(query("group_admits"), {"group_id": group_id}).fetchall():
        write_audit(connection, "fallback", "group deploy", f"{topic}/{name}", facts)
    log.warning("group_fell_back", extra={"group_id": group_id, **facts})


def put_deployments(connection: Connection, group_id: int, deployments: Deployments) -> bool:
    """Store a group's deployments; say whether it is live. Call under the group's lock."""
    facts = {
        "group_id": group_id,
        "deployment": deployments.in_force,
        "canary": deployments.canary,
        "canary_lps": deployments.canary_lps,
        "previous_deployment": deployments.previous,
        "fallback": deployments.fallback,
    }
    return connection.execute(query("group_deploy"), facts).fetchone() is not None


def _step(live_owner: str | None, wanted: str | None, target: str | None, *, owned: bool) -> str | None:
    if live_owner is None:
        if wanted is not None:
            return "assignments_put"
        return "assignments_free" if owned else None
    return "assignments_target" if target != wanted else None


def rebalance_groups(database: Database) -> int:
    """Rebalance groups with silent members; return how many changed. Safe to call concurrently.

    Skips locked groups. A group without living members waits `ALONE_S`.
    """
    with database.connection() as connection:
        found = [row[0] for row in connection.execute(query("groups_unbalanced"), {"alone_s": ALONE_S}).fetchall()]
    return rebalance_each(database, found, lock_wait_s=SCAN_LOCK_WAIT_S)


def rebalance_each(database: Database, group_ids: Iterable[int], *, lock_wait_s: float = 2.0) -> int:
    """Rebalance groups, one transaction each, except locked ones; return how many changed."""
    changed = 0
    for group_id in group_ids:
        work = partial(rebalance, group_id=group_id)
        try:
            changed += change_group(database, group_id, work, lock_wait_s=lock_wait_s, timeout_s=0)
        except MqlayerError as error:
            log.warning("group_rebalance_delayed", extra={"group_id": group_id, "reason": str(error)})
    return changed
