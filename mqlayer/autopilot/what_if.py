"""The same arrivals on other routes, with other members, with automatic routes: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Final

from mqlayer.autopilot.loads import TIMES, Times
from mqlayer.autopilot.policy import RoutePolicy
from mqlayer.autopilot.simulated_passes import PASS_S, SimulatedChange, SimulatedPilot
from mqlayer.autopilot.simulated_queues import Arrivals, SimulatedMembers
from mqlayer.autopilot.simulated_topic import SimulatedRun, SimulatedTopic
from mqlayer.errors import InvalidInput

SCENARIOS: Final = 64
"""Most of one call."""

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AutoThresholds:
    """Values to combine; none: the default."""

    capacities: Sequence[float] = ()
    cool_downs_s: Sequence[float] = ()
    changes_per_hour: Sequence[int] = ()
    max_partitions: Sequence[int] = ()
    min_partitions: int = 1

    def policies(self) -> Iterator[RoutePolicy]:
        """Yield one per combination."""
        each = RoutePolicy()
        for capacity, cool, budget, most in product(
            self.capacities or (each.capacity_per_s,),
            self.cool_downs_s or (each.cool_down_s,),
            self.changes_per_hour or (each.changes_per_hour,),
            self.max_partitions or (each.max_partitions,),
        ):
            yield RoutePolicy("on", self.min_partitions, most, capacity, budget, cool, each.rest_s)


@dataclass(frozen=True, slots=True)
class WhatIfParams:
    """What to try. None: as the snapshot shows."""

    partitions: Sequence[int] = ()
    split_report: Path | None = None
    version: int | None = None
    group: str | None = None
    members: Sequence[int] = ()
    member_per_s: float | None = None
    handling_ms: float | None = None
    concurrency: int = 8
    by_rate: bool = False
    slot_s: float | None = None
    since: datetime | None = None
    until: datetime | None = None
    thresholds: AutoThresholds | None = None
    times: Times = TIMES
    pass_s: float = PASS_S


@dataclass(frozen=True, slots=True)
class Scenario:
    """Without a policy, the route stays."""

    route: str
    ranges: Ranges
    members: SimulatedMembers
    policy: RoutePolicy | None = None

    @property
    def name(self) -> str:
        """For legends."""
        found = f"{self.route}, {self.members.size} members"
        if self.policy is None:
            return found
        capacity = "" if self.policy.capacity_per_s is None else f" {self.policy.capacity_per_s:g}/s"
        return f"{found}, automatic{capacity}"


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """`stopped`: why the autopilot did."""

    scenario: Scenario
    run: SimulatedRun
    changes: Sequence[SimulatedChange] = field(default_factory=tuple)
    stopped: str = ""

    def row(self) -> dict[str, Any]:
        """Return figures."""
        policy, run = self.scenario.policy, self.run
        return {
            "route": self.scenario.route,
            "members": self.scenario.members.size,
            "automatic": policy is not None,
            "capacity": None if policy is None else policy.capacity_per_s,
            "cool_down": None if policy is None else policy.cool_down_s,
            "per_hour": None if policy is None else policy.changes_per_hour,
            "at_most": None if policy is None else policy.max_partitions,
            "splits": sum(one.kind == "split" for one in self.changes),
            "merges": sum(one.kind == "merge" for one in self.changes),
            "partitions": run.partitions[-1] if run.partitions else len(self.scenario.ranges),
            "hottest_share": round(run.hottest_share, 3),
            "lag_p99": run.lag_p99,
            "lag_most": max(run.lags, default=0),
            "wait_p50": run.wait_s(0.5),
            "wait_p99": run.wait_s(0.99),
            "behind_most": run.behind_s,
            "left": run.left,
            "stopped": self.stopped,
        }


def scenarios(
    routes: Mapping[str, Ranges], members: Sequence[SimulatedMembers], thresholds: AutoThresholds | None = None
) -> list[Scenario]:
    """Return all combinations. Raises InvalidInput for too many."""
    policies = [None, *([] if thresholds is None else thresholds.policies())]
    found = [
        Scenario(name, ranges, crew, policy)
        for (name, ranges), crew, policy in product(routes.items(), members, policies)
    ]
    if len(found) > SCENARIOS:
        raise InvalidInput(f"these are {len(found)} scenarios, {SCENARIOS} are the most: name fewer values")
    return found


def run_scenario(
    arrivals: Arrivals, scenario: Scenario, *, times: Times = TIMES, pass_s: float = PASS_S
) -> ScenarioResult:
    """Simulate a scenario. Raises InvalidInput as SimulatedPilot."""
    topic = SimulatedTopic(arrivals, scenario.ranges, scenario.members)
    if scenario.policy is None:
        return ScenarioResult(scenario, SimulatedRun(topic))
    pilot = SimulatedPilot(scenario.policy, times, pass_s=pass_s)
    run = SimulatedRun(topic, pilot)
    return ScenarioResult(scenario, run, pilot.changes, pilot.state.stopped_because or "")
