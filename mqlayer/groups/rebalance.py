"""Who owns what in a group: one transaction under the group's row lock.

States of an assignment: *free* (no member), *held* (member, target the same), *releasing* (target differs: the owner
drains and releases). A partition is handed over when its owner released it or the owner's lease ran out; every new
owner gets a new epoch. A crash at any line rolls back; the next heartbeat of any member, or the scan, does it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

from mqlayer.domain.assignment import assign, assign_by_rate
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

Result = TypeVar("Result")
SCAN_LOCK_WAIT_S: Final = 0.1
"""How long a scan waits for a group that somebody else is changing: long enough for whoever is at work on it."""
IDLE_S: Final = 2.0
"""How long a process that does nothing may hold a group: nobody joins or leaves, and no node is armed, meanwhile."""
ALONE_S: Final = 30.0
"""How long a scan leaves a group alone whose leases all ran out: the database may have been away, not its members."""


def change_group(
    database: Database,
    group_id: int,
    work: Callable[[Connection], Result],
    *,
    lock_wait_s: float = 2.0,
    timeout_s: float = 10.0,
    idle_s: float = IDLE_S,
) -> Result:
    """Run a change of a group's members or assignments in one transaction that holds the group's lock.

    A process that does nothing in the middle for `idle_s` loses its transaction, so it holds nobody up for long.
    Raises TransactionConflict where the lock could not be had in time.
    """
    timeouts = {"lock_wait": f"{max(1, int(lock_wait_s * 1000))}ms", "idle": f"{int(idle_s * 1000)}ms"}

    def patiently(connection: Connection) -> Result:
        connection.execute(query("transaction_patience"), timeouts)
        connection.execute(query("group_lock"), {"group_id": group_id})
        return work(connection)

    return database.transaction(patiently, timeout_s=timeout_s)


def rebalance(connection: Connection, group_id: int) -> bool:
    """Bring the group's assignments up to its live members, in the caller's transaction; say whether any changed."""
    group: dict[str, object] = {"group_id": group_id}
    locked = connection.execute(query("group_lock"), group).fetchone()
    if locked is not None and locked[4] == "pop":
        # It has no members: its partitions are free, each under an epoch.
        return False
    connection.execute(query("member_expire"), group)
    if locked is not None and locked[4] == "shared":
        # Its members read all partitions: these are free, each under an epoch.
        connection.execute(query("members_forget"), group)
        return False
    connection.execute(query("assignment_free_unreadable_of_gone"), group)
    live: dict[str, bool] = dict(connection.execute(query("member_live"), group).fetchall())
    if locked is not None and locked[6]:
        connection.execute(query("instance_presence"), group | {"here": bool(live)})
    rows = connection.execute(query("assignment_list"), group).fetchall()
    partitions = [PartitionId(row[0]) for row in rows]
    staying = [member for member, leaving in live.items() if not leaving]
    current = {PartitionId(p): target or owner for p, owner, _, target, _ in rows if target or owner}
    if locked is not None and locked[3] == "rate":
        desired = assign_by_rate(partitions, staying, current, {PartitionId(row[0]): row[4] for row in rows})
    else:
        desired = assign(partitions, staying, current)
    steps: dict[str, dict[PartitionId, str | None]] = {}
    for partition, owner, _, target, _ in rows:
        wanted = desired.get(PartitionId(partition))
        name = _step(owner if owner in live else None, wanted, target, owned=owner is not None)
        if name is not None:
            steps.setdefault(name, {})[PartitionId(partition)] = wanted
    # One statement for all that take the same step: a round trip for each of a thousand is what a rebalance would cost.
    for name, given in steps.items():
        connection.execute(query(name), group | {"partitions": list(given), "members": list(given.values())})
    if steps:
        connection.execute(query("allocation_raise"), group)
    connection.execute(query("members_forget"), group)
    return bool(steps)


def _step(live_owner: str | None, wanted: str | None, target: str | None, *, owned: bool) -> str | None:
    """Return the statement that moves an assignment on, or None where it is as it should be."""
    if live_owner is None:
        if wanted is not None:
            return "assignments_put"
        return "assignments_free" if owned else None
    return "assignments_target" if target != wanted else None


def rebalance_groups(database: Database) -> int:
    """Rebalance every live group that a member left behind without a word; return how many changed.

    So a silent death is noticed within the lease and the interval of this scan, although no member of the group beats;
    that of all members, when nobody could take over anyway, `ALONE_S` later.
    A group whose lock is held is passed by: whoever holds it rebalances, or dies and leaves it to the next scan. Safe
    to run twice at once: the second finds what the first has committed, and changes nothing.
    """
    with database.connection() as connection:
        found = [row[0] for row in connection.execute(query("groups_unbalanced"), {"alone_s": ALONE_S}).fetchall()]
    return rebalance_each(database, found, lock_wait_s=SCAN_LOCK_WAIT_S)


def rebalance_each(database: Database, group_ids: Iterable[int], *, lock_wait_s: float = 2.0) -> int:
    """Rebalance groups, each in a transaction of its own, but for those whose lock is held; return how many changed."""
    changed = 0
    for group_id in group_ids:
        work = partial(rebalance, group_id=group_id)
        try:
            changed += change_group(database, group_id, work, lock_wait_s=lock_wait_s, timeout_s=0)
        except MqlayerError as error:
            log.warning("group_rebalance_delayed", extra={"group_id": group_id, "reason": str(error)})
    return changed
