"""Groups, partitions and members in Postgres."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from mqlayer.domain.deployments import Deployments
from mqlayer.domain.names import check_any_topic, check_group
from mqlayer.domain.retry_rules import RULES_COUNT, RetryRules
from mqlayer.domain.routing import NodeId
from mqlayer.errors import NotFound
from mqlayer.groups.breaker import BreakerFacts
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import load_route

OF_BREAKER: Final = 8
BEHIND_RULES: Final = 5 + OF_BREAKER
OF_DEPLOYMENTS: Final = 7
Visibility = Literal["hidden", "readable", "drained"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group with its settings. `alive`: living members, `living`: by deployment; `seek`: number of seeks.

    Broadcast: `absent_s`: since its last consumer, None with one; `instance_expiry_s`: then kept for.
    """

    group_id: int
    topic: str
    name: str
    state: str
    version: int
    topic_version: int | None
    start: str
    start_at: datetime | None
    seek: int
    created_at: datetime
    ordered: bool
    balance: str
    settings_version: int
    paused_at: datetime | None
    mode: Literal["exclusive", "pop", "shared", "broadcast"]
    scope: Literal["partition", "key"] | None
    alive: int
    tag_filter: str
    instance: str | None
    instance_expiry_s: float | None
    absent_s: float | None
    rules: RetryRules
    paused_by: str | None = None
    topic_paused_at: datetime | None = None
    topic_paused_by: str | None = None
    rate_limit: float | None = None
    rate_burst: float | None = None
    breaker: BreakerFacts | None = None
    living: Mapping[str, int] = field(default_factory=dict)
    copied_from: str | None = None
    deployments: Deployments = field(default_factory=Deployments)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A group in a partition. `made_in`: route version; `behind`: undrained parents.

    `target`: next owner ('': none), None unless to be released; `changed_at`: of owner, target, epoch; `alive`: valid
    lease.
    """

    group_id: int
    partition: int
    node: NodeId
    lp_from: int
    lp_to: int
    made_in: int
    made_at: datetime
    drained: bool
    behind: Sequence[int]
    start: int
    seek: int
    owner: str | None
    epoch: int | None
    target: str | None
    changed_at: datetime | None
    alive: bool | None
    lease_over_at: datetime | None
    paused_at: datetime | None = None
    paused_by: str | None = None

    @property
    def visibility(self) -> Visibility:
        """The partition's state for the group."""
        if self.drained:
            return "drained"
        return "hidden" if self.behind else "readable"


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member. `lease_left_s`: None once its end is recorded."""

    member_id: str
    host: str
    pid: int
    joined_at: datetime
    lease_left_s: float | None
    state: Literal["running", "leaving", "gone"]
    partitions: int
    deployment: str


def members_wanted(database: Database, topic: str, group: str, *, lag_target_s: float) -> int | None:
    """Return how many members a group needs to work its lag off within a time, by samples; None: not known."""
    facts = {"topic": topic, "group": group, "lag_target_s": lag_target_s}
    with database.connection() as connection:
        row = connection.execute(query("members_wanted"), facts).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def group_facts(database: Database, topic: str | None = None, name: str | None = None) -> list[GroupFacts]:
    """Return all groups, a topic's, or one. Raises NotFound."""
    facts = {
        "topic": None if topic is None else check_any_topic(topic),
        "name": None if name is None else check_group(name),
    }
    with database.connection() as connection:
        rows = connection.execute(query("inspected_groups"), facts).fetchall()
    if not rows and topic is not None:
        load_route(database, topic)
        if name is not None:
            hint = f"it is created when its first member starts; those there are: mqlayer group list {topic}"
            raise NotFound("group", f"{topic}/{name}", hint)
    return [_group_facts(row) for row in rows]


def _group_facts(row: Sequence[Any]) -> GroupFacts:
    row, (*living, in_force, canary, lps, previous, fallback) = row[:-OF_DEPLOYMENTS], row[-OF_DEPLOYMENTS:]
    deployments = Deployments(in_force, canary, lps, previous, fallback)
    first, later = row[:-BEHIND_RULES], row[-BEHIND_RULES:]
    state, *of_breaker = later[-OF_BREAKER:]
    breaker = None if state is None else BreakerFacts(state, *of_breaker)
    rules = RetryRules.of(first[-RULES_COUNT:])
    values: list[Any] = [*first[:-RULES_COUNT], rules, *later[:-OF_BREAKER], breaker, *living, deployments]
    return GroupFacts(*values)


def partition_facts(database: Database, groups: Iterable[GroupFacts]) -> list[PartitionFacts]:
    """Return the partitions of groups, oldest first."""
    wanted = {"group_ids": [group.group_id for group in groups]}
    with database.connection() as connection:
        rows = connection.execute(query("inspected_partitions"), wanted).fetchall()
    return [PartitionFacts(*row) for row in rows]


def group_members(database: Database, topic: str, name: str) -> list[MemberFacts]:
    """Return members, also recently ended ones. Raises NotFound."""
    (group,) = group_facts(database, topic, name)
    with database.connection() as connection:
        rows = connection.execute(query("inspected_members"), {"group_id": group.group_id}).fetchall()
    return [
        MemberFacts(member, host, pid, joined_at, left, _state(left, leaving=leaving), partitions, deployment)
        for member, host, pid, joined_at, leaving, left, partitions, deployment in rows
    ]


def _state(lease_left_s: float | None, *, leaving: bool) -> Literal["running", "leaving", "gone"]:
    if lease_left_s is None or lease_left_s < 0:
        return "gone"
    return "leaving" if leaving else "running"
