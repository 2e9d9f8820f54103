"""Circuit breakers of groups: what opens them, what counts meanwhile, and how they close."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.consuming.engine.circuit_breaker import RAMP_STEP_S
from mqlayer.errors import InvalidInput
from mqlayer.groups import find_group
from mqlayer.groups.breaker import LONGEST_PROBE_S, RAMP_S, reset_breaker, trip_breaker
from mqlayer.inspect import group_statuses
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


class Downstream:
    """A TCP server that answers a line with its length, and refuses connections while it is away."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self.port = 0
        self.come_back()

    def come_back(self) -> None:
        """Accept connections, at the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def go_away(self) -> None:
        """Refuse connections."""
        if self._listener is not None:
            # Ends the accepting thread's call, and with it the last reference to the port.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"%d\n" % len(connection.recv(1000)))


@pytest.fixture
def downstream() -> Iterator[Downstream]:
    server = Downstream()
    yield server
    server.go_away()


def call(port: int, body: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=5)) as connection:
        connection.sendall(body)
        assert connection.recv(100)


def breaker_rows(stage: Stage) -> list[Any]:
    with stage.database.connection() as connection:
        return connection.execute("SELECT state, cause, probes, failing_keys FROM mqlayer.breaker").fetchall()


def state(stage: Stage) -> str:
    rows = breaker_rows(stage)
    return rows[0][0] if rows else "closed"


def test_an_outage_counts_nothing_parks_nothing_and_ends_by_itself(stage: Stage, downstream: Downstream) -> None:
    recorder = Recorder(act=lambda body, ctx: call(downstream.port, body))
    events: list[Any] = []
    app = stage.consume(recorder, breaker_share=0.5, breaker_keys=6, backoff_s=None, attempt_limit=2)
    app.on_event(events.append)
    stage.send_numbers(keys=20, each=2)
    stage.wait_settled()
    downstream.go_away()
    stage.send_numbers(keys=20, each=5, first=3)
    wait_until(lambda: state(stage) == "open", what="the breaker to open")
    begun = len(recorder.begun)
    wait_until(lambda: breaker_rows(stage)[0][2] >= 2, what="two probes that fail")
    assert len(recorder.begun) - begun <= 4 + member_of(app)._core.options.concurrency
    (status,) = group_statuses(stage.runtime, stage.topic, "g")
    assert {one.stall.reason for one in status.undrained if one.stall is not None} == {"breaker"}
    downstream.come_back()
    back = time.monotonic()
    stage.wait_settled(timeout_s=30)
    took = time.monotonic() - back
    print("took", took, breaker_rows(stage), app.members[0].stats)
    recorder.assert_in_order()
    assert {run.attempt for run in recorder.begun} <= {1, 2}
    assert member_of(app).stats.parked == member_of(app).stats.dead == 0
    wait_until(lambda: state(stage) == "closed", what="closed again")
    assert [event.kind for event in events if event.kind.startswith("breaker")] == ["breaker_opened", "breaker_closed"]
