"""Partitions that take much more than their share, by the rates of the last minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mqlayer.doctor.health import HOT_PER_S
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


class HotPartition(NamedTuple):
    """A topic's busiest partition. `fair`: the share of the topic's messages that would be fair."""

    partition: int
    per_s: float
    all_per_s: float
    fair: float

    @property
    def share(self) -> float:
        """Its share of the topic's messages."""
        return self.per_s / self.all_per_s


def hot_partitions(database: Database) -> Mapping[str, HotPartition]:
    """Return the hot partition of each topic with one, by the overview's condition without its lag."""
    with database.connection() as connection:
        rows = connection.execute(query("health_hot"), {"least_per_s": HOT_PER_S}).fetchall()
    return {name: HotPartition(*facts) for name, *facts in rows}


def is_hot(share: float, fair: float) -> bool:
    """Whether a share of the messages is far above a fair one, as the query `health_hot` says."""
    return share > min(2 * fair, (1 + fair) / 2)
