"""A group's progress over route changes: a drained parent makes its successors readable (invariant 8).

See docs/design/route-changes.md, "Consumers: the gate".
"""

from __future__ import annotations

from functools import partial
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import raise_group_version
from mqlayer.groups.members import Assignment, MemberSession
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)

LOCK_WAIT_S: Final = 2.0
"""Short: members that read a command record try again."""


def seal_marks(database: Database, partition: int) -> dict[str, int]:
    """Return a sealed partition's recorded marks: "<source>:<lp>" -> highest seq."""
    with database.connection() as connection:
        row = connection.execute(query("seal_marks"), {"partition_id": partition}).fetchone()
    return dict(row[0]) if row else {}


def drained(
    database: Database, session: MemberSession, assigned: Assignment, seal_id: str, *, lock_wait_s: float = LOCK_WAIT_S
) -> bool:
    """Record that a member settled everything before a command record; return False if Postgres refuses.

    The same transaction frees the partition and assigns its successors. Refused, with nothing changed, unless epoch and
    seal id are in force. Raises TransactionConflict.
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
        # A change may have committed meanwhile; the later transaction sees both.
        change_group(database, session.group_id, partial(raise_group_version, group_id=session.group_id))
    return taken


def drained_popped(database: Database, group_id: int, partition: int, epoch: int, seal_id: str) -> bool:
    """Like `drained`, for a receiver of ordered pop; any receiver may repeat it."""
    facts = {"group_id": group_id, "partition_id": partition, "epoch": epoch, "seal_id": seal_id}

    def work(connection: Connection) -> bool:
        if connection.execute(query("drained_put_popped"), facts).fetchone() is None:
            return False
        raise_group_version(connection, group_id)
        connection.execute(query("allocation_raise"), facts)
        failpoint("pop.before_drained")
        return True

    taken = change_group(database, group_id, work, lock_wait_s=LOCK_WAIT_S, timeout_s=0)
    if taken:
        change_group(database, group_id, partial(raise_group_version, group_id=group_id))
    return taken


def drained_dropped(database: Database, group_id: int, partition: int, next_offset: int, seek: int) -> bool:
    """Like `drained`, for a group without living members whose topic's limits moved its position to the command."""
    facts = {"group_id": group_id, "partition_id": partition, "next_offset": next_offset, "seek": seek}

    def work(connection: Connection) -> bool:
        if connection.execute(query("drained_put_dropped"), facts).fetchone() is None:
            return False
        connection.execute(query("assignment_free_unreadable"), facts)
        raise_group_version(connection, group_id)
        rebalance(connection, group_id)
        failpoint("retention.before_drained")
        connection.execute(query("allocation_raise"), facts)
        return True

    taken = change_group(database, group_id, work, lock_wait_s=LOCK_WAIT_S, timeout_s=0)
    if taken:
        change_group(database, group_id, partial(raise_group_version, group_id=group_id))
    return taken


def raise_group_versions(database: Database) -> int:
    """Raise the route version of groups that have drained it; return how many moved.

    Skips groups whose lock is held: a later call raises them.
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
