"""What is done to the topic's route while pgbench runs: partitions are split, moved and merged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from examples.bank.effects import TOPIC
from mqlayer.domain.routing import LpRange, Route
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.routes import ChangePlan, apply_change, planned_merge, planned_move, planned_split
from mqlayer.runtime.route_cache import load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

PREFIX: Final = "mq"


class Rerouting:
    """The changes, one after the other, in a thread of their own; each begins at its share of the run."""

    def __init__(self, control_dsn: str, *, note: Callable[[str], None]) -> None:
        self._dsn, self._note = control_dsn, note
        self._share = threading.Condition()
        self._come_to = 0.0
        self._thread = threading.Thread(target=self._run, name="rerouting", daemon=True)
        self.done = False
        self.error = ""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def follow(self, share: float) -> None:
        """Say what share of the run is over."""
        with self._share:
            self._come_to = share
            self._share.notify_all()

    def finish(self) -> None:
        """Let what is left be done now, and wait for it."""
        self.follow(1.0)
        self._thread.join()

    def _run(self) -> None:
        try:
            with Database(self._dsn, application="bank rerouting") as database:
                runtime = Runtime(database, Settings(key_prefix=PREFIX), actor="bank")
                for share, change in STEPS:
                    with self._share:
                        self._share.wait_for(lambda due=share: self._come_to >= due)  # type: ignore[misc]
                    before = load_route(database, TOPIC)
                    after = apply_change(runtime, change(runtime, before))
                    self._note(f"route version {after.version}: {_difference(before, after)}")
            self.done = True
        except MqlayerError as error:
            self.error = f"the route could not be changed: {error}"


def _split_the_first(runtime: Runtime, route: Route) -> ChangePlan:
    return planned_split(runtime, TOPIC, route.ranges[0].partition)


def _move_the_last(runtime: Runtime, route: Route) -> ChangePlan:
    return planned_move(runtime.control, TOPIC, route.ranges[-1].partition)


def _merge_the_middle(runtime: Runtime, route: Route) -> ChangePlan:
    middle = len(route.ranges) // 2
    pair = [r.partition for r in route.ranges[middle - 1 : middle + 1]]
    return planned_merge(runtime.control, TOPIC, pair)


def _merge_the_first(runtime: Runtime, route: Route) -> ChangePlan:
    return planned_merge(runtime.control, TOPIC, [r.partition for r in route.ranges[:2]])


STEPS: Final[tuple[tuple[float, Callable[[Runtime, Route], ChangePlan]], ...]] = (
    (0.15, _split_the_first),
    (0.3, _move_the_last),
    (0.45, _merge_the_middle),
    # In the midst of the faults.
    (0.55, _split_the_first),
    (0.7, _move_the_last),
    (0.85, _merge_the_first),
)


def _difference(before: Route, after: Route) -> str:
    ended = [r for r in before.ranges if r not in after.ranges]
    made = [r for r in after.ranges if r not in before.ranges]
    if len(made) > 1:
        return f"partition {_named(ended)} is split into {_named(made)}"
    if len(ended) > 1:
        return f"partitions {_named(ended)} are merged into {_named(made)}"
    return f"partition {_named(ended)} is moved to node {made[0].node} as {_named(made)}"


def _named(ranges: Sequence[LpRange]) -> str:
    return " and ".join(str(r.partition) for r in ranges)
