"""Partitions and epochs for receivers of ordered pop (docs/design/ordered-pop.md).

Rows of `assignment` without owner hold the epochs; arming, node loss and seeks raise them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mqlayer.domain.deployments import MAIN
from mqlayer.domain.key_classes import NO_CLASSES
from mqlayer.domain.rates import RateLimit
from mqlayer.domain.retry_rules import Policy
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.domain.tags import NO_FILTER
from mqlayer.domain.time_to_live import ExpiredRule
from mqlayer.errors import GroupRetired
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class PopPartition:
    """A partition of a group with ordered pop. `epoch`: None if it was never readable.

    `start`, `seek`, `replay`, `cut`, `archived`: see `Assignment`, `HeartbeatReply`. `readable`: not gated, not paused,
    given to this deployment. `parked`: a key is; `parked_due_in_s`: until the next one is due. `message_ttl_s`,
    `expired`: see `TimeToLive`; `now_ms`: Postgres's time, at the latest.
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
    policy: Policy = "block"
    attempt_limit: int = 1
    tag_filter: str = NO_FILTER
    key_class: str = NO_CLASSES
    class_concurrency: int | None = None
    class_rate: float | None = None
    lp_from: int = 0
    lp_to: int = 0
    parked: bool = field(default=False, compare=False)
    parked_due_in_s: float | None = field(default=None, compare=False)
    message_ttl_s: int = 0
    expired: ExpiredRule = "settle"
    now_ms: int = field(default=0, compare=False)

    @property
    def rate(self) -> RateLimit | None:
        """The group's limit of messages received."""
        return RateLimit.of(self.rate_limit, self.rate_burst, self.share_count or 0)

    @property
    def rate_of_class(self) -> RateLimit | None:
        """The limit of messages received of a key class."""
        return RateLimit.of(self.class_rate, None, self.share_count or 0)


def pop_partitions(database: Database, group_id: int, *, deployment: str = MAIN) -> list[PopPartition]:
    """Return a group's partitions, with epochs for readable ones. Raises GroupRetired."""
    facts = {"group_id": group_id, "deployment": deployment}
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
    """Replace an epoch that its node refuses, because Postgres lost commits; no effect if another is in force."""
    facts = {"group_id": group_id, "partition_id": partition, "epoch": epoch}
    with database.connection() as connection:
        connection.execute(query("pop_epoch_renew"), facts)
