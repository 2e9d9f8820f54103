"""Drain nodes: move all partitions away, wait until groups are through and the parents retired.

Any process may go on after a crash: docs/design/draining-nodes.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from mqlayer.domain.route_changes import plan_move
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.routes.drain_plan import DrainMove, held_by, plan_drain
from mqlayer.routes.node_loads import PlacedPartition, placed_partitions
from mqlayer.routes.partition_retirement import retire_partitions
from mqlayer.routes.planner import apply_plan, finish_earlier
from mqlayer.routes.status import drain_progress
from mqlayer.runtime.route_cache import load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.node_draining import begin_drain
from mqlayer.topics.nodes import find_node

log = event_logger(__name__)

TOPICS_AT_ONCE: Final = 3
"""Each change takes a connection of a pool of four."""
ROUNDS: Final = 5
RETRY_AFTER_S: Final = 1.0
POLL_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class DrainStep:
    """Progress with one partition; 0: with deleted ones."""

    topic: str
    partition: int
    state: Literal["moved", "failed", "waits"]
    detail: str


Tell = Callable[[DrainStep], None]


@dataclass(frozen=True, slots=True)
class DrainReport:
    """`failed`: partitions that could not move; `waiting`: sealed ones that are kept; by reason."""

    moved: Sequence[int]
    failed: Mapping[int, str]
    waiting: Mapping[int, str]

    @property
    def is_empty(self) -> bool:
        """Whether the node holds nothing any more."""
        return not self.failed and not self.waiting


def drain_node(
    runtime: Runtime, name: str, *, timeout_s: float | None = None, tell: Tell = lambda _: None
) -> DrainReport:
    """Move everything off a node under load, a partition of each topic at a time; wait until the parents are retired.

    Ends early where only people can help, after `timeout_s`, or where moves fail again and again. After a crash or
    delay, repeat it. Raises Conflict without another node, and for a given-up node.
    """
    node = find_node(runtime.control, name)
    begin_drain(runtime, name)
    failpoint("drain.after_mark")
    return _NodeDrain(runtime, node, tell, None if timeout_s is None else time.monotonic() + timeout_s).run()


class _NodeDrain:
    def __init__(self, runtime: Runtime, node: Node, tell: Tell, until: float | None) -> None:
        self._runtime, self._node, self._until = runtime, node, until
        self._tell, self._told = tell, dict[int, str]()
        self._moved: list[int] = []
        self._failed: dict[int, str] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()

    def run(self) -> DrainReport:
        """Move, then wait."""
        for _ in range(ROUNDS):
            if not self._move_all():
                break
            self._pause.wait(RETRY_AFTER_S)
        waiting = {} if self._failed else self._wait()
        if not self._failed and not waiting:
            log.info("node_drained", extra={"node": self._node.name, "moved": len(self._moved)})
        return DrainReport(self._moved, self._failed, waiting)

    def _move_all(self) -> bool:
        """Move the partitions; say whether some are left."""
        self._failed = {}
        of_topic: dict[str, list[DrainMove]] = {}
        for move in plan_drain(self._runtime, self._node.name).moves:
            of_topic.setdefault(move.topic, []).append(move)
        importing = {one.topic: one.partition for one in self._here() if one.state == "importing" and not held_by(one)}
        with ThreadPoolExecutor(TOPICS_AT_ONCE, thread_name_prefix="drains") as topics:
            list(topics.map(self._move_topic, of_topic.values()))
        for topic in importing.keys() - of_topic.keys():
            self._tried(topic, importing[topic], partial(finish_earlier, self._runtime, topic))
        return bool(self._failed or importing)

    def _move_topic(self, moves: Sequence[DrainMove]) -> None:
        for move in moves:
            if not self._tried(move.topic, move.partition, partial(self._move, move)):
                # Its change may be open, and holds the topic's others up.
                return

    def _tried(self, topic: str, partition: int, work: Callable[[], None]) -> bool:
        try:
            work()
        except MqlayerError as error:
            log.warning("drain_move_failed", extra={"topic": topic, "partition": partition, "reason": str(error)})
            with self._lock:
                self._failed[partition] = str(error)
            self._say(DrainStep(topic, partition, "failed", str(error)))
            return False
        return True

    def _move(self, move: DrainMove) -> None:
        step = _moved(self._runtime, move)
        if step is None:
            return
        failpoint("drain.after_move")
        with self._lock:
            self._moved.append(move.partition)
        self._say(step)

    def _wait(self) -> dict[int, str]:
        """Wait until nothing is left; return the reasons by partition where that ends early."""
        while True:
            retire_partitions(self._runtime)
            failpoint("drain.after_retire")
            here = self._here()
            if not here and not self._is_undeleted():
                return {}
            waiting = self._reasons()
            if self._is_late() or (here and all(held_by(one) for one in here)):
                return waiting
            self._pause.wait(POLL_INTERVAL_S)

    def _reasons(self) -> dict[int, str]:
        here, found = self._here(), dict[int, str]()
        for topic in sorted({one.topic for one in here}):
            ones = [one for one in here if one.topic == topic]
            left: dict[int, list[str]] = {}
            for progress in drain_progress(self._runtime, topic, [one.partition for one in ones]):
                remaining = "its node is away" if progress.remaining is None else f"{progress.remaining} left"
                left.setdefault(progress.partition, []).append(f"group {progress.group}: {remaining}")
            for one in ones:
                groups = "; ".join(left.get(one.partition, ()))
                kept = "the archive goes first" if one.archived else "its records are removed next"
                found[one.partition] = held_by(one) or groups or kept
                self._say(DrainStep(topic, one.partition, "waits", found[one.partition]))
        if not found:
            found[0] = "deleted partitions wait for their last outcomes to be archived"
            self._say(DrainStep("", 0, "waits", found[0]))
        return found

    def _here(self) -> list[PlacedPartition]:
        return [one for one in placed_partitions(self._runtime) if one.node == self._node.node_id]

    def _is_undeleted(self) -> bool:
        facts = {"node_id": self._node.node_id, "lost": False}
        with self._runtime.control.connection() as connection:
            return bool(connection.execute(query("node_left"), facts).fetchall())

    def _is_late(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def _say(self, step: DrainStep) -> None:
        with self._lock:
            if self._told.get(step.partition) != step.detail:
                self._told[step.partition] = step.detail
                self._tell(step)


def carry_out_moves(runtime: Runtime, moves: Sequence[DrainMove], *, tell: Tell = lambda _: None) -> dict[int, str]:
    """Move partitions under load, one after the other; return those that failed, with reasons. Repeatable."""
    failed: dict[int, str] = {}
    for move in moves:
        try:
            step = _moved(runtime, move)
        except MqlayerError as error:
            failed[move.partition] = str(error)
            step = DrainStep(move.topic, move.partition, "failed", str(error))
        if step is not None:
            tell(step)
        failpoint("moves.after_one")
    return failed


def _moved(runtime: Runtime, move: DrainMove) -> DrainStep | None:
    """Move a partition; None where another command moved, split or merged it."""
    finish_earlier(runtime, move.topic)
    route = load_route(runtime.control, move.topic)
    if all(r.partition != move.partition for r in route.ranges):
        return None
    began = time.monotonic()
    apply_plan(runtime, plan_move(route, move.partition, move.target))
    took_ms = 1000 * (time.monotonic() - began)
    return DrainStep(move.topic, move.partition, "moved", f"to {move.target_name} in {took_ms:.0f} ms")
