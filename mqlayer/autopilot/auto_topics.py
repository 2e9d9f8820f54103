"""What rules see: topics with their partitions, past changes, and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from mqlayer.autopilot.loads import LoadFigures
from mqlayer.autopilot.policy import PolicyState, RoutePolicy, capacity_of
from mqlayer.domain.routing import NodeId


class HotKey(NamedTuple):
    """The busiest key of a partition, with its LP and its share of the newest messages."""

    key: str
    lp: int
    share: float


class LpLoads(NamedTuple):
    """A partition's messages per LP in the sample, and its busiest key where one LP has most of them."""

    per_lp: Mapping[int, int]
    hot_key: HotKey | None = None

    @property
    def total(self) -> int:
        """All its messages in the sample."""
        return sum(self.per_lp.values())


@dataclass(frozen=True, slots=True)
class AutoPartition:
    """An open partition. `age_s`: since its creation; `draining`: a group has not drained its parents;
    `sampled_ago_s`: since its LPs were sampled."""

    partition: int
    node: NodeId
    lp_from: int
    lp_to: int
    age_s: float = 0.0
    draining: bool = False
    sampled_ago_s: float | None = None
    figures: LoadFigures = field(default_factory=LoadFigures)
    loads: LpLoads | None = None
    """Measured for candidates only."""

    @property
    def per_s(self) -> float:
        """Messages per second, 0 where not known."""
        return self.figures.per_s or 0.0


@dataclass(frozen=True, slots=True)
class PastChange:
    """A change of the last hours, of any actor. `ago_s`: since it was planned."""

    change_id: int
    kind: str
    state: str
    actor: str
    ago_s: float
    successors: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("planned", "sealing", "sealed")


@dataclass(frozen=True, slots=True)
class AutoTopic:
    """A topic with automatic routes, at one moment. `partitions`: in the order of their LPs; `minute`: of the day."""

    topic_id: int
    topic: str
    version: int
    policy: RoutePolicy
    state: PolicyState
    partitions: tuple[AutoPartition, ...]
    changes: tuple[PastChange, ...] = ()
    at: datetime | None = None
    minute: int = 0
    paused: bool = False
    home_zone: str = ""
    unfit: frozenset[NodeId] = frozenset()
    """Nodes that can't hold its durability class."""

    @property
    def capacity_per_s(self) -> float:
        """Messages per second that a partition can take."""
        return capacity_of(self.policy, self.state)[0]

    @property
    def limit_per_s(self) -> float | None:
        """The most that a group with a backlog settled of one partition, None: no group had one."""
        limits = [one.figures.limit_per_s for one in self.partitions if one.figures.limit_per_s is not None]
        return min(1e9, max(1.0, *limits)) if limits else None

    @property
    def lag(self) -> int:
        """Messages left to the slowest groups in open partitions."""
        return sum(one.figures.lag for one in self.partitions)

    @property
    def served_per_s(self) -> float:
        """Messages per second that the slowest groups settled in open partitions."""
        return sum(one.figures.served_per_s for one in self.partitions)

    def at_partition(self, partition: int) -> AutoPartition | None:
        """Return an open partition."""
        return next((one for one in self.partitions if one.partition == partition), None)


@dataclass(frozen=True, slots=True)
class AutoNode:
    """A node. `per_s`: of all partitions there. CPU (of one core) and memory (of maxmemory): None where not known."""

    node: NodeId
    name: str
    serving: bool = True
    per_s: float = 0.0
    partitions: int = 0
    cpu: float | None = None
    memory: float | None = None
    zone: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class AutoCluster:
    """The nodes that rules may use. `last_move_ago_s`: since the autopilot moved a partition of any topic."""

    nodes: Sequence[AutoNode] = ()
    last_move_ago_s: float = float("inf")
