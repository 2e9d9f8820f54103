"""The endpoint of a process: what it answers, and that nothing it meets does harm."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from mqlayer.errors import Conflict, InvalidInput
from mqlayer.health import Health, HealthEndpoint, Liveness, health_endpoint, stuck_after_s
from mqlayer.settings import Settings
from tests.fixtures.health_probes import Answer, ask, free_ports


class Process:
    """Something that can be asked, on a port."""

    def __init__(self) -> None:
        self.health, self.port = Health(), free_ports()

    def ask(self) -> Health:
        return self.health


@pytest.fixture
def process() -> Iterator[Process]:
    """A process that answers."""
    process = Process()
    with health_endpoint(Settings(health_port=process.port), process.ask):
        yield process


def test_a_process_that_is_well_answers_both(process: Process) -> None:
    for path in ("/live", "/ready", "/ready?verbose"):
        assert ask(process.port, path) == Answer(200, {"live": True, "ready": True, "reasons": []})
    assert ask(process.port, "/ready", method="HEAD").status == 200


def test_what_waits_is_live_and_not_ready(process: Process) -> None:
    process.health = Health(waits=("redis://:s3cret@h is away",)).named("group g")
    assert ask(process.port, "/live") == Answer(200, {"live": True, "ready": False, "reasons": []})
    answer = ask(process.port, "/ready")
    assert answer == Answer(503, {"live": True, "ready": False, "reasons": ["group g: redis://***@h is away"]})


def test_what_is_stuck_is_neither(process: Process) -> None:
    process.health = Health(stuck=("the heartbeat has been stuck for 60 s",), waits=("no lease",))
    assert ask(process.port, "/live").status == 503
    assert ask(process.port, "/ready").facts["reasons"] == ["the heartbeat has been stuck for 60 s", "no lease"]


def test_another_path_is_not_found(process: Process) -> None:
    assert ask(process.port, "/metrics").status == 404


def test_a_fault_of_whoever_is_asked_is_an_answer_and_names_no_detail() -> None:
    port = free_ports()

    def fails() -> Health:
        raise KeyError("s3cret")

    with health_endpoint(Settings(health_port=port), fails):
        answer = ask(port, "/live")
    assert (answer.status, answer.reasons) == (503, "it can't say: KeyError")


def test_without_a_port_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    with health_endpoint(Settings(), Health):
        assert set(threading.enumerate()) == before


def test_a_port_that_is_in_use_is_refused_by_the_name_of_the_setting(process: Process) -> None:
    with pytest.raises(Conflict, match=rf"port {process.port} of 127.0.0.1 is in use: set MQLAYER_HEALTH_PORT"):
        HealthEndpoint(Health, host="127.0.0.1", port=process.port)
    with pytest.raises(InvalidInput, match="MQLAYER_HEALTH_HOST"):
        HealthEndpoint(Health, host="203.0.113.1", port=process.port)
    with pytest.raises(InvalidInput, match="MQLAYER_HEALTH_PORT"):
        HealthEndpoint(Health, host="127.0.0.1", port=65_536)


def test_the_port_is_free_again_at_once() -> None:
    port = free_ports()
    for _ in range(2):
        with health_endpoint(Settings(health_port=port), Health):
            assert ask(port, "/live").status == 200


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port() -> None:
    """As those that Celery forks later on."""
    port = free_ports()
    parent, inherited = socket.socketpair()
    with parent, inherited:
        with health_endpoint(Settings(health_port=port), Health):
            if (child := os.fork()) == 0:
                parent.close()
                inherited.sendall(b"up")
                inherited.recv(1)
                os._exit(0)
        # The child lets go of the port before `fork` returns in it, and that may be later than here.
        assert parent.recv(2) == b"up"
        try:
            with health_endpoint(Settings(health_port=port), Health):
                assert ask(port, "/ready").status == 200
        finally:
            parent.sendall(b"!")
            os.waitpid(child, 0)


def test_a_loop_is_stuck_when_it_has_not_turned_for_longer_than_its_stores_may_keep_it() -> None:
    turns = Liveness()
    assert turns.stuck("the heartbeat", 60) == ()
    assert turns.stuck("the heartbeat", -1) == ("the heartbeat has been stuck for 0 s",)
    assert stuck_after_s(Settings(lease_s=2, socket_timeout_s=10)) == 40
    assert stuck_after_s(Settings(lease_s=20, socket_timeout_s=10)) == 110
