"""Topics and groups in pages, by Postgres alone: figures come from the samples of the last ten minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.domain.durability import Durability
from mqlayer.domain.names import check_any_topic
from mqlayer.domain.time_to_live import ExpiredRule
from mqlayer.errors import NotFound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

LATE_S: Final = 300.0
"""A message that waits for longer is trouble."""


@dataclass(frozen=True, slots=True)
class TopicOverview:
    """A topic. Figures: None without samples. `sealed`: partitions that a change ended and a group has not drained.

    `lag`, `oldest_s`: the largest of its groups; `settled_per_min`: by the slowest; `unrelayed`: waiting in the outbox.
    """

    name: str
    strategy: str
    version: int | None
    archived: bool
    schema_mode: str
    schema_version: int | None
    paused_at: datetime | None
    paused_by: str | None
    deleting_at: datetime | None
    partitions: int
    sealed: int
    groups: int
    lag: int | None
    oldest_s: float | None
    committed_per_min: float | None
    stored_per_min: float | None
    settled_per_min: float | None
    unrelayed: int | None
    sampled_at: datetime | None


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A group. Figures: None without samples. `owned`: partitions with a living owner, of `partitions` in force."""

    topic: str
    name: str
    mode: str
    state: str
    paused_at: datetime | None
    paused_by: str | None
    topic_paused_at: datetime | None
    topic_paused_by: str | None
    members: int
    owned: int
    partitions: int
    paused_partitions: int
    lag: int | None
    oldest_s: float | None
    parked: int | None
    dead: int | None
    settled_per_min: float | None
    sampled_at: datetime | None
    silent: int
    """Open partitions on nodes that were given as silent: the last sample's lag may lack theirs."""

    @property
    def least_lag(self) -> int | None:
        """The lag, where it is all or surely more than nothing."""
        return None if self.silent and not self.lag else self.lag

    @property
    def unowned(self) -> int:
        """Partitions without a living owner, where members own any."""
        return max(0, self.partitions - self.owned) if self.mode == "exclusive" and self.members else 0


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """A topic's settings and state."""

    topic_id: int
    name: str
    strategy: str
    version: int | None
    body_limit: int
    backlog_limit: int
    archived: bool
    retention_days: int | None
    schema_mode: str
    schema_version: int | None
    paused_at: datetime | None
    paused_by: str | None
    deleting_at: datetime | None
    created_at: datetime
    message_ttl_s: int
    expired: ExpiredRule
    durability: Durability


def topic_overviews(
    database: Database, *, after: str = "", contains: str = "", limit: int = 50
) -> Sequence[TopicOverview]:
    """Return topics behind the name `after`, by name."""
    facts = {"after": after, "contains": contains, "limit": limit}
    with database.connection() as connection:
        return [TopicOverview(*row) for row in connection.execute(query("topic_overviews"), facts).fetchall()]


def topic_settings(database: Database, name: str) -> TopicSettings:
    """Return a topic. Raises NotFound."""
    with database.connection() as connection:
        row = connection.execute(query("topic_settings"), {"topic": check_any_topic(name)}).fetchone()
    if row is None:
        raise NotFound("topic", name, "see those that there are: mqlayer topic list")
    return TopicSettings(*row)


def group_overviews(
    database: Database,
    *,
    topic: str | None = None,
    after: tuple[str, str] = ("", ""),
    contains: str = "",
    limit: int = 50,
    silent: Sequence[int] = (),
) -> Sequence[GroupOverview]:
    """Return groups that are not retired, behind a topic and name. `silent`: ids of nodes that do not answer."""
    facts = {
        "topic": topic, "after_topic": after[0], "after": after[1], "contains": contains, "limit": limit,
        "silent": list(silent),
    }  # fmt: skip
    with database.connection() as connection:
        return [GroupOverview(*row) for row in connection.execute(query("group_overviews"), facts).fetchall()]


def groups_in_trouble(
    database: Database, *, limit: int = 50, silent: Sequence[int] = ()
) -> tuple[int, Sequence[GroupOverview]]:
    """Return how many groups are paused, late, without a needed member or on a silent node, and the latest of them."""
    facts = {"late_s": LATE_S, "limit": limit, "silent": list(silent)}
    with database.connection() as connection:
        rows = connection.execute(query("groups_in_trouble"), facts).fetchall()
    return (rows[0][0] if rows else 0), [GroupOverview(*row[1:]) for row in rows]
