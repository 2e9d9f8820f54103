"""A real run on the even route and with automatic routes, beside the simulation of the same arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from statistics import mean
from typing import Final

from bench.auto_route import CONCURRENCY, MEMBERS, PASS_S, TIMES, WAIT_MS, RunTimes, prepared, run_members
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from bench.takeover import alone
from mqlayer.autopilot import set_policy
from mqlayer.autopilot.simulated_queues import OTHER_KEYS, ArrivalCell, Arrivals, SimulatedMembers
from mqlayer.autopilot.simulated_topic import quantile
from mqlayer.autopilot.what_if import AutoThresholds, Scenario, ScenarioResult, run_scenario
from mqlayer.domain.routing import lp_of
from mqlayer.routes import route_history

SLOT_S: Final = 0.5
BEGAN: Final = datetime(2026, 1, 1, tzinfo=UTC)
THRESHOLDS: Final = AutoThresholds(cool_downs_s=[5.0], changes_per_hour=[720], max_partitions=[16])
"""As bench.auto_route sets."""


@bench("what_if")
def what_if(stage: Stage) -> Iterator[Line]:
    """How far the simulated lag is from the lag of a real run of `auto_route`, in messages: the mean distance per half
    second, beside the real mean and most; and how many more or fewer changes automatic routes make in it."""
    for name, automatic in (("even route", False), ("automatic", True)):
        system = prepared(stage)
        if automatic:
            set_policy(system.runtime, "bench", mode="on", cool_down_s=5.0, changes_per_hour=720, max_partitions=16)
        times = run_members(system, automatic=automatic)
        changes = [one.kind for one in route_history(system.database, "bench") if one.state == "done"]
        arrived = arrivals_of(times)
        found = simulated(arrived, system, automatic=automatic)
        real, tried = lags(times, arrived.slots), list(found.run.lags)
        apart = mean(abs(a - b) for a, b in zip(real, tried, strict=True))
        kinds = Counter(one.kind for one in found.changes)
        note(f"  {name}: lag real {told(real)}, simulated {told(tried)}; changes {Counter(changes)} and {kinds}")
        yield alone(f"what_if[{name}]", apart, "messages apart", None)
        yield alone(f"what_if[{name}, real mean]", mean(real), "messages apart", None)
        if automatic:
            yield alone("what_if[changes]", abs(len(changes) - len(found.changes)), "changes apart", None)


def arrivals_of(times: RunTimes) -> Arrivals:
    """Return what was sent, by slots."""
    counts = Counter((int((at - times.began) / 1e9 / SLOT_S), lp_of(key.encode())) for at, key in times.sent)
    cells = (ArrivalCell(slot, lp, OTHER_KEYS, messages) for (slot, lp), messages in sorted(counts.items()))
    return Arrivals.of(BEGAN, SLOT_S, [], cells)


def simulated(arrived: Arrivals, system: System, *, automatic: bool) -> ScenarioResult:
    """Simulate the run."""
    crew = SimulatedMembers(MEMBERS, CONCURRENCY * 1_000 / WAIT_MS, CONCURRENCY, by_rate=True)
    ranges = [(one.lp_from, one.lp_to) for one in system.route.ranges]
    policy = next(THRESHOLDS.policies()) if automatic else None
    return run_scenario(arrived, Scenario("even", ranges, crew, policy), times=TIMES, pass_s=PASS_S)


def lags(times: RunTimes, slots: int) -> list[int]:
    """Return the messages that were left at the end of each slot."""
    grown = Counter(int((at - times.began) / 1e9 / SLOT_S) for at, _ in times.sent)
    grown.subtract(Counter(int((at - times.began) / 1e9 / SLOT_S) for at in times.handled))
    found, lag = [], 0
    for slot in range(slots):
        lag += grown[slot]
        found.append(lag)
    return found


def told(values: Sequence[int]) -> str:
    """Return mean, p99, most and last of lags."""
    return (
        f"mean {mean(values):,.0f}, p99 {quantile(Counter(values), 0.99):,}, most {max(values):,}, end {values[-1]:,}"
    )
