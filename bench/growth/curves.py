"""The curves: which field of a configuration grows, and by which steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bench.growth.points import LATE, Setup

LONG: Final = os.environ.get("BENCH_LONG", "")
"""Steps of ten million keys and messages, three minutes and 4 GB of memory each: none, `1` those too, `only` those."""
BYTES: Final = 200_000_000
"""Of all bodies of a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One curve. `steps` are values of the field `axis`; `fit` makes the rest of a configuration fit its step."""

    name: str
    title: str
    axis: str
    steps: Sequence[int]
    long_steps: Sequence[int] = ()
    series: dict[str, Setup] = field(default_factory=lambda: {"messages": Setup()})
    fit: Callable[[Setup], dict[str, Any]] = lambda _: {}

    def wanted(self, long: str) -> Sequence[int]:
        """Return the steps to take."""
        usual = () if long == "only" else self.steps
        return (*usual, *(self.long_steps if long else ()))

    def setups(self) -> Iterator[tuple[str, Setup]]:
        """Yield the configurations with the names of their series."""
        for name, first in self.series.items():
            for step in self.wanted(LONG):
                setup = msgspec.structs.replace(first, **{self.axis: step})
                yield name, msgspec.structs.replace(setup, **self.fit(setup))


PLANS: Final = {
    plan.name: plan
    for plan in (
        Plan(
            "processes",
            "Consumer processes",
            "processes",
            (1, 2, 4, 8),
            series={
                "handlers that wait 2 ms": Setup(wait_ms=2.0),
                "handlers that do nothing": Setup(),
            },
            fit=lambda setup: {"messages": setup.processes * 8_000 if setup.wait_ms else 100_000},
        ),
        Plan("nodes", "Redis nodes", "nodes", (1, 2, 4, 8), series={"two processes": Setup(processes=2)}),
        Plan("partitions", "Partitions", "partitions", (1, 4, 16, 64, 256, 1_000)),
        Plan(
            "groups",
            "Groups in one process",
            "groups",
            (1, 2, 5, 10, 25, 50),
            series={"deliveries": Setup(rate=200.0)},
            fit=lambda setup: {"messages": max(2_000, 100_000 // setup.groups)},
        ),
        Plan(
            "keys",
            "Keys",
            "keys",
            (100, 1_000, 10_000, 100_000, 1_000_000),
            (10_000_000,),
            fit=lambda setup: {"messages": max(100_000, setup.keys), "late_group": setup.keys > LATE},
        ),
        Plan(
            "bodies",
            "Bytes of a body",
            "body_bytes",
            (16, 256, 4_096, 65_536, 1_000_000),
            fit=lambda setup: {
                "messages": min(100_000, BYTES // setup.body_bytes),
                "rate": min(500.0, 20_000_000 / setup.body_bytes),
            },
        ),
        Plan(
            "backlog",
            "Messages that wait",
            "messages",
            (1_000, 10_000, 100_000, 1_000_000),
            (10_000_000,),
            series={"messages": Setup(late_group=True)},
        ),
    )
}
