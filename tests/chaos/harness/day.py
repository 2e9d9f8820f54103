"""A day in some minutes: a load that grows twenty times, moves its hot spot and falls, under all faults of a run.

Once with automatic routes, and once with the best fixed route: as many even partitions as the automatic ones came to.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

from mqlayer.autopilot import decisions_of, set_policy
from mqlayer.errors import MqlayerError
from mqlayer.routes import route_history
from mqlayer.testing.servers import best_place
from tests.chaos.actors import TOPIC
from tests.chaos.day_actors import BEGAN_VARIABLE, POLICY, SECONDS_VARIABLE
from tests.chaos.harness.run import Audit, Length, Run
from tests.chaos.harness.scene import Scene
from tests.proof.checker import Verdict
from tests.proof.history import read_histories
from tests.proof.pace import pace
from tests.proof.runtimes import runtime_of

EVERY_S: Final = 2.5
"""Seconds between two faults."""
LOOK_S: Final = 1.0
START_S: Final = 15.0
"""What servers and processes take to start, before the day begins."""


@dataclass(slots=True)
class Lags:
    """Messages committed and without an effect yet, second by second, and how many partitions there were."""

    lags: list[int] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)

    def look(self, scene: Scene) -> None:
        """Take a sample, where Postgres answers."""
        with suppress(psycopg.Error, MqlayerError):
            effects = int(scene.rows("SELECT count(*) FROM sink")[0][0])
            self.lags.append(max(0, scene.committed() - effects))
            self.partitions.append(len(scene.partitions("open")))


class Day(Run):
    """A run whose load is that of a day. `automatic`: routes change by themselves."""

    writers = ("shopper", "pilot")
    automatic = True

    def play(self, length: Length) -> dict[str, Any]:
        """Play it, and report its lags and changes too."""
        if self.automatic:
            set_policy(runtime_of(self._database, actor="operator"), TOPIC, **POLICY)
        self._lags, self._paces = Lags(), dict[str, Any]()
        return super().play(length)

    def _strike(self, length: Length) -> Verdict | None:
        done = threading.Event()
        looks = threading.Thread(target=self._look, args=(done,))
        began_ns = time.monotonic_ns()
        looks.start()
        try:
            return super()._strike(length)
        finally:
            done.set()
            looks.join()
            self._span = (began_ns, time.monotonic_ns())

    def _look(self, done: threading.Event) -> None:
        while not done.wait(LOOK_S):
            self._lags.look(self._scene)

    def _facts(self, verdict: Verdict, struck_s: float) -> dict[str, Any]:
        told = pace(read_histories(self._histories), *self._span, without=())
        return super()._facts(verdict, struck_s) | {
            "automatic": self.automatic,
            "lag_mean": round(statistics.fmean(self._lags.lags or [0]), 1),
            "lag_longest": max(self._lags.lags, default=0),
            "partitions_most": max(self._lags.partitions, default=0),
            "partitions_last": (self._lags.partitions or [0])[-1],
            "wait_median_s": round(told.median_wait_s, 3),
            "wait_p99_s": round(told.p99_wait_s, 3),
            **self._changes(),
        }

    def _changes(self) -> dict[str, Any]:
        done = [one for one in route_history(self._database, TOPIC) if one.state == "done" and one.ended_at]
        took = sorted((one.ended_at - one.planned_at).total_seconds() for one in done if one.ended_at)
        journal = decisions_of(self._database, TOPIC, limit=500)
        return {
            "changes": len(done),
            "pause_median_s": round(statistics.median(took or [0.0]), 3),
            "pause_longest_s": round(max(took, default=0.0), 3),
            "helped": sum(one.helped is True for one in journal),
            "did_not_help": sum(one.helped is False for one in journal),
            "stopped": sum(one.verdict == "stopped" for one in journal),
        }


def play_day(
    seed: int, day_s: float, *, automatic: bool, partitions: int = 4, audits: Iterable[Audit] = ()
) -> dict[str, Any]:
    """Play a day, and return its report."""
    began = time.monotonic() + START_S
    kind = type("Day", (Day,), {
        "cast": {"shopper": 3, "relay": 2, "pair": 4, "worker": 2, "beat": 2} | ({"pilot": 2} if automatic else {}),
        "partitions": partitions,
        "automatic": automatic,
        "environment": {BEGAN_VARIABLE: str(began), SECONDS_VARIABLE: str(day_s)},
    })  # fmt: skip
    with ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mqday-", dir=best_place())))
        directory.chmod(0o755)
        found: dict[str, Any] = kind(directory, seed, cleanup, "", audits, 0.1).play(Length(day_s, 0, EVERY_S))
        return found


def compared(automatic: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return automatic routes beside the best fixed one."""
    names = ("messages", "lag_mean", "lag_longest", "wait_median_s", "wait_p99_s", "partitions_most", "clean")
    return {name: [automatic[name], fixed[name]] for name in names} | {
        "clean": automatic["clean"] and fixed["clean"],
        "changes": automatic["changes"],
        "pause_longest_s": automatic["pause_longest_s"],
        "lag_ratio": round(automatic["lag_mean"] / max(1.0, fixed["lag_mean"]), 2),
    }
