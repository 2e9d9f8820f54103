"""What receivers of ordered pop ask of Postgres: which partitions there are, and under which epochs.

A group with ordered pop has no members and nothing is assigned. Its partitions have rows of `assignment` all the same,
without an owner: so arming a node, giving one up and a seek raise their epochs as those of any group, and tokens that
were given out before are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqlayer.domain.rates import RateLimit
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import GroupRetired
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class PopPartition:
    """A partition of a group with ordered pop. `epoch`: None while it was never readable.

    `start`, `seek`, `replay` and `cut` as of an assignment, see `Assignment`. `readable`: whether it is given out now;
    `archived`: whether what becomes of messages is told to an archiver.
    """

    partition: PartitionId
    node: NodeId
    epoch: int | None
    start: int
    seek: int
    replay: int
    cut: bool
    readable: bool
    archived: bool = False
    rate_limit: float | None = None
    rate_burst: float | None = None
    share_count: int | None = None

    @property
    def rate(self) -> RateLimit | None:
        """How fast its group gives messages out."""
        return RateLimit.of(self.rate_limit, self.rate_burst, self.share_count or 0)


def pop_partitions(database: Database, group_id: int) -> list[PopPartition]:
    """Return the partitions of a group with ordered pop; what is readable has an epoch. Raises GroupRetired."""
    facts = {"group_id": group_id}
    with database.connection() as connection:
        found = [PopPartition(*row) for row in connection.execute(query("pop_partitions"), facts).fetchall()]
        if any(one.readable and one.epoch is None for one in found):
            connection.execute(query("pop_epochs_put"), facts)
            found = [PopPartition(*row) for row in connection.execute(query("pop_partitions"), facts).fetchall()]
        if not any(one.readable for one in found):
            row = connection.execute(query("group_admits"), facts).fetchone()
            if row is not None and row[2] == "retired":
                raise GroupRetired(row[0], row[1])
    return found


def renew_pop_epoch(database: Database, group_id: int, partition: int, epoch: int) -> None:
    """Give out a higher epoch for a partition whose node refuses the one in force, unless somebody did.

    Happens where a node has seen a higher epoch than Postgres gave out: a database that lost commits.
    """
    facts = {"group_id": group_id, "partition_id": partition, "epoch": epoch}
    with database.connection() as connection:
        connection.execute(query("pop_epoch_renew"), facts)
