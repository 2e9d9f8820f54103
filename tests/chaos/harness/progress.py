"""Looks at a run that goes on: what can be told of it already, and whether it still gets anywhere."""

from __future__ import annotations

import math
import time

import psycopg
import redis

from mqlayer.errors import MqlayerError
from tests.chaos.actors import TOPIC
from tests.chaos.harness.scene import Scene
from tests.chaos.harness.stores import effects_in
from tests.proof.checker import Verdict, check
from tests.proof.history import Append, Effect, Lineage, Record, Seal, read_histories

WRITING_S = 0.2
"""How long a line may take from its time to its file."""


def judge_so_far(scene: Scene) -> Verdict:
    """Judge what the histories and the sink of a run tell by now; what can be told at its end only is left out.

    The sink is read first: whatever has its effect there was published before. Lines that are written while the files
    are read, one after the other, are left out, so that none shows what another lacks. Streams are left out as a whole,
    also what was noted of them at burials: while a node is brought back, or a route changes, they may rightly lack
    something for a moment.
    """
    seen = [*_sink(scene), *_lineage(scene)]
    until_ns = time.monotonic_ns()
    # Not for anything to happen: a line is given its time before it is written.
    time.sleep(WRITING_S)
    told = [
        record
        for record in read_histories(scene.directory)
        if record.at_ns <= until_ns and not isinstance(record.event, Append | Seal)
    ]
    return check([*told, *seen], drained=False)


def _sink(scene: Scene) -> list[Record]:
    effects = effects_in(scene.settings.control_dsn())
    return [_noted(number, effect) for number, effect in enumerate(effects, start=1)]


def _lineage(scene: Scene) -> list[Record]:
    return [
        _noted(-number, Lineage(topic=TOPIC, partition=partition, parents=parents))
        for number, (partition, parents) in enumerate(scene.parents().items(), start=1)
    ]


def _noted(operation: int, event: Effect | Lineage) -> Record:
    return Record(process="look", pid=0, operation=operation, phase="ok", at_ns=time.monotonic_ns(), event=event)


class Progress:
    """Says when nothing has changed for `stall_s`: neither the sink, nor what any group has yet to do."""

    def __init__(self, scene: Scene, stall_s: float) -> None:
        self._scene, self._stall_s = scene, stall_s
        self._last, self._changed_at, self._looked_at = "", time.monotonic(), -math.inf

    def has_ended(self) -> bool:
        """Say whether it goes on no more; looks once a second."""
        now = time.monotonic()
        if self._stall_s < math.inf and now - self._looked_at > 1:
            self._looked_at = now
            left = self._left()
            if left != self._last:
                self._last, self._changed_at = left, now
        return now - self._changed_at > self._stall_s

    def _left(self) -> str:
        try:
            return f"{self._scene.rows('SELECT count(*) FROM sink')} {list(self._scene.unsettled())}"
        except (psycopg.Error, redis.RedisError, MqlayerError) as error:
            return str(error)
