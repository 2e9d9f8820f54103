"""Members of a process arm a node one after another: one connection to Postgres, however many they are."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from mqlayer.consuming.engine import nodes
from mqlayer.topics.nodes import arm_if_allowed
from tests.fixtures.consumers import StartStage
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until

MEMBERS = 6


class Counted:
    """Arms nodes; counts how often, and how many threads do at a time."""

    def __init__(self) -> None:
        self.calls, self.most, self._running = 0, 0, 0
        self._lock, self._arm = threading.Lock(), arm_if_allowed

    def __call__(self, runtime: Any, name: str) -> Any:
        """Arm a node."""
        with self._lock:
            self.calls += 1
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            return self._arm(runtime, name)
        finally:
            with self._lock:
                self._running -= 1


def noting(handled: dict[int, set[bytes]], number: int) -> Callable[[bytes], None]:
    """Return a handler that notes its messages: one in flight at a restart comes twice."""

    def handle(body: bytes) -> None:
        handled[number].add(body)

    return handle


def test_one_member_of_a_process_arms_a_node_for_all(
    start_redis: StartRedis, start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, handled, arming = start_redis(), defaultdict[int, set[bytes]](set), Counted()
    monkeypatch.setattr(nodes, "arm_if_allowed", arming)
    stage = start_stage(server.url, partitions=2)
    app = stage.app()
    for number in range(MEMBERS):
        app.consumer(stage.topic, group=f"g{number}", start="earliest")(noting(handled, number))
    app.start()
    stage.send([("k", b"1")])
    wait_until(lambda: len(handled) == MEMBERS, timeout_s=20, what="all groups to have the first message")
    assert arming.calls == 0
    server.restart()
    wait_until(lambda: arming.calls > 0, timeout_s=20, what="a member to arm the node")
    wait_until(lambda: not app.health().waits, timeout_s=20, what="all members to go on")
    stage.send([("k", b"2")])
    wait_until(
        lambda: all(b"2" in bodies for bodies in list(handled.values())),
        timeout_s=20,
        what="all groups to have the second message",
    )
    assert arming.most == 1
    assert arming.calls < MEMBERS
