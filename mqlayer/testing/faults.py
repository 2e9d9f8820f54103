"""Faults on demand, on a test's real servers.

A process that is killed or stopped is a member without heartbeats whose partitions pass on: to its group and to the
nodes it is the same, and the test's process lives on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mqlayer.consuming.api.app import App
from mqlayer.domain.codecs import TypedBodies
from mqlayer.errors import RetryLater
from mqlayer.routes import apply_change, planned_split
from mqlayer.runtime.route_cache import load_route
from mqlayer.testing.app_run import Kill, Life, StopPastLease, Strike

if TYPE_CHECKING:
    from mqlayer.testing.stack import TestStack


class DeliverAgain(Strike):
    """The message comes once more, after its effect."""

    def after(self, _: Life, /) -> None:
        """Ask for it again."""
        raise RetryLater(0.0, "delivered again by a test")


class SplitPartition(Strike):
    """The topic's widest partition splits while a message of it is handled."""

    def __init__(self, name: str, faults: Faults) -> None:
        super().__init__(name)
        self._faults = faults

    def before(self, life: Life, /) -> None:
        """Split it."""
        self._faults.split(life.run.groups[0][0])


class LoseNodes(Strike):
    """All nodes end and come back, one after the other, while a message is handled."""

    def __init__(self, name: str, faults: Faults, nodes: list[str]) -> None:
        super().__init__(name)
        self._faults, self._nodes = faults, nodes

    def before(self, _: Life, /) -> None:
        """Kill and start them."""
        for node in self._nodes:
            with self._faults.node_lost(node):
                pass


class Faults:
    """A stack's faults. Those with `at` strike once, at the n-th run of the application's handlers from now on.

    Their result's `struck` tells whether they did.
    """

    def __init__(self, stack: TestStack) -> None:
        self._stack = stack

    def kill(self, app: App, *, at: int = 1) -> Strike:
        """Kill the process when a handler has returned, before that is settled; another one takes over."""
        return self.arm(app, Kill("kill"), at)

    def stop_past_lease(self, app: App, *, at: int = 1) -> Strike:
        """Stop the process before a handler runs; it wakes up when another one has handled everything."""
        return self.arm(app, StopPastLease("stop_past_lease"), at)

    def deliver_again(self, app: App, *, at: int = 1) -> Strike:
        """Deliver a message again, at once, after its handler returned."""
        return self.arm(app, DeliverAgain("deliver_again"), at)

    def arm(self, app: App, strike: Strike, at: int) -> Strike:
        """Have a fault strike. Raises InvalidInput where it can't."""
        self._stack.run_of(app).arm(strike, at)
        return strike

    def split(self, topic: str | TypedBodies[Any], partition: int | None = None) -> tuple[int, int]:
        """Split a partition now, by default the widest, in two halves of its LPs; return the new partitions."""
        name = topic if isinstance(topic, str) else topic.name
        ranges = load_route(self._stack.runtime.control, name).ranges
        wide = max((r for r in ranges if partition in (None, r.partition)), key=lambda r: r.lp_to - r.lp_from)
        plan = planned_split(self._stack.runtime, name, wide.partition, at=[(wide.lp_from + wide.lp_to) // 2])
        former = {r.partition for r in ranges}
        made = [r.partition for r in apply_change(self._stack.runtime, plan).ranges if r.partition not in former]
        return made[0], made[1]

    def stop_node(self, name: str) -> None:
        """Kill a node; all that it answered is on its disk. Raises InvalidInput for a node of MQLAYER_REDIS_URL."""
        self._stack.servers.node(name).kill()

    def start_node(self, name: str) -> None:
        """Start it again; the relay arms it."""
        self._stack.servers.node(name).start()

    @contextlib.contextmanager
    def node_lost(self, name: str = "node-1") -> Iterator[None]:
        """Kill a node, and start it again after the block."""
        self.stop_node(name)
        try:
            yield
        finally:
            self.start_node(name)
