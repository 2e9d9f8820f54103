"""How far a group is in the lineage of a topic's partitions.

A successor is handed out only when the group has drained all its parents: that is a fact in Postgres, said by the
owner of each parent under its epoch, of the very command record that Postgres has recorded (invariant 8). The group's
route version follows, one by one.
"""

from __future__ import annotations

import logging
from functools import partial

from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import raise_group_version
from mqlayer.groups.members import Assignment, MemberSession
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)


def seal_marks(database: Database, partition: int) -> dict[str, int]:
    """Return the marks that a sealed partition is recorded with: "<source>:<lp>" -> highest seq."""
    with database.connection() as connection:
        row = connection.execute(query("seal_marks"), {"partition_id": partition}).fetchone()
    return dict(row[0]) if row else {}


def drained(
    database: Database, session: MemberSession, assigned: Assignment, seal_id: str, *, lock_wait_s: float = 2.0
) -> bool:
    """Say that everything before a command record is settled; return whether Postgres took it.

    In one transaction: the fact, the partition taken off its owner, the group's version raised, the successors given
    out. Refused unless this epoch is in force and this very seal is the recorded one; then nothing was changed. Raises
    TransactionConflict where the group's lock could not be had in time.
    """
    facts = {
        "group_id": session.group_id,
        "member_id": session.member_id,
        "session": session.session,
        "partition_id": assigned.partition,
        "epoch": assigned.epoch,
        "seal_id": seal_id,
    }

    def work(connection: Connection) -> bool:
        if connection.execute(query("drained_put"), facts).fetchone() is None:
            return False
        connection.execute(query("assignments_free"), facts | {"partitions": [assigned.partition]})
        raise_group_version(connection, session.group_id)
        rebalance(connection, session.group_id)
        failpoint("drained.before_commit")
        return True

    taken = change_group(database, session.group_id, work, lock_wait_s=lock_wait_s, timeout_s=0)
    if taken:
        # The end of a change that was not committed above may be by now; whoever commits second sees both.
        change_group(database, session.group_id, partial(raise_group_version, group_id=session.group_id))
    return taken


def drained_popped(
    database: Database, group_id: int, partition: int, epoch: int, seal_id: str, *, lock_wait_s: float = 2.0
) -> bool:
    """Say for a group with ordered pop that everything before a command record is settled; return whether it was taken.

    Any receiver may say so, more than once: what counts is the epoch in force and the very seal that is recorded. In
    one transaction: the fact, the group's version raised, and its receivers told to look for the successors. Raises
    TransactionConflict where the group's lock could not be had in time.
    """
    facts = {"group_id": group_id, "partition_id": partition, "epoch": epoch, "seal_id": seal_id}

    def work(connection: Connection) -> bool:
        if connection.execute(query("drained_put_popped"), facts).fetchone() is None:
            return False
        raise_group_version(connection, group_id)
        connection.execute(query("allocation_raise"), facts)
        failpoint("pop.before_drained")
        return True

    taken = change_group(database, group_id, work, lock_wait_s=lock_wait_s, timeout_s=0)
    if taken:
        change_group(database, group_id, partial(raise_group_version, group_id=group_id))
    return taken


def raise_group_versions(database: Database) -> int:
    """Raise the route version of every group that has drained what came before the next one; return how many moved.

    Whoever drains does it itself, and whoever ends a change for those that had drained before. Where the two meet
    neither may see the other; the next call makes up for it, and so it does for a group whose lock is held.
    """
    with database.connection() as connection:
        behind = [row[0] for row in connection.execute(query("groups_behind")).fetchall()]
    moved = 0
    for group_id in behind:
        try:
            change_group(database, group_id, partial(raise_group_version, group_id=group_id))
        except MqlayerError as error:
            log.warning("group_version_delayed", extra={"group_id": group_id, "reason": str(error)})
        else:
            moved += 1
    return moved
