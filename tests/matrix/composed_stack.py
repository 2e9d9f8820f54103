"""docker-compose.yml for real: built, started, killed service by service, audited by its Spark; run by the matrix."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest

from tests.fixtures.wait import wait_until
from tests.matrix.composed import ledger
from tests.matrix.composed.stack import (
    BACK_WITHIN_S,
    SUPERUSER_DSN,
    ComposedStack,
    await_bookings,
    change_all,
    check_the_ledger,
    writing,
)

pytestmark = [pytest.mark.xdist_group("compose"), pytest.mark.timeout(1200)]

SERVICES = ("consume", "relay", "worker", "beat", "node-1", "node-2", "broker", "postgres")
WRITING_S = 10.0
PORTS = (5432, 6379, 6380, 6381)
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Started:
    """A stack that is up, and how long that took."""

    stack: ComposedStack
    built_in_s: float
    up_in_s: float


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """The stack with its consumers, healthy, with an archived topic; nothing of it is left afterwards."""
    for port in PORTS:
        with socket.socket() as here:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            here.bind(("127.0.0.1", port))
    stack = ComposedStack()
    begun = time.monotonic()
    stack.compose("build", "users", "spark-master", profiles=("consumers", "spark"))
    built = time.monotonic()
    try:
        # The application needs its tables before its first message, and the archive its topic.
        stack.up()
        up = time.monotonic()
        with psycopg.connect(SUPERUSER_DSN) as connection:
            connection.execute(ledger.TABLES)
        stack.operate("topic", "set", "orders", "--archived")
        yield Started(stack, built - begun, up - built)
    finally:
        stack.compose("down", "--volumes", "--timeout", "20", profiles=("consumers", "spark"))
        assert stack.left() == []


def test_changes_of_the_host_are_booked_in_order_by_healthy_services(started: Started, record_property: Record) -> None:
    for service in SERVICES:
        assert started.stack.state(service)["Health"]["Status"] == "healthy"
    begun = time.monotonic()
    with writing():
        wait_until(lambda: time.monotonic() > begun + WRITING_S, timeout_s=2 * WRITING_S, what="changes are made")
    count = check_the_ledger()
    record_property("build_s", round(started.built_in_s))
    record_property("up_s", round(started.up_in_s))
    record_property("booked_in_order", count)
    found = started.stack.operate("verify", "orders", "--deep", "--json")
    assert {json.loads(line)["verdict"] for line in found.splitlines()} == {"ok"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_whose_process_is_killed_comes_back_by_itself(
    started: Started, service: str, record_property: Record
) -> None:
    before = started.stack.state(service)
    with writing():
        killed = time.monotonic()
        os.kill(before["Pid"], signal.SIGKILL)
        wait_until(
            lambda: started.stack.state(service)["RestartCount"] > before["RestartCount"],
            timeout_s=BACK_WITHIN_S,
            what=f"the engine starts {service} again",
        )
        await_bookings(change_all())
        record_property(f"crash of {service}, s", round(time.monotonic() - killed, 1))
        started.stack.await_health(service)
    record_property("booked", check_the_ledger())


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_that_is_killed_comes_back_with_the_next_up(
    started: Started, service: str, record_property: Record
) -> None:
    with writing():
        killed = time.monotonic()
        started.stack.docker("kill", started.stack.state(service)["Id"])
        started.stack.up()
        await_bookings(change_all())
        record_property(f"kill of {service} and up, s", round(time.monotonic() - killed, 1))
        started.stack.await_health(service)
    record_property("booked", check_the_ledger())


def test_sparks_workers_audit_the_archive(started: Started, record_property: Record) -> None:
    with writing():
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() > begun + WRITING_S, timeout_s=2 * WRITING_S, what="changes are made")
    check_the_ledger()
    begun = time.monotonic()
    started.stack.up("spark")
    up = time.monotonic()
    started.stack.operate("archive", "run", "--once")
    started.stack.operate("snapshot", "create", "monday")
    run = ("run", "--rm", "--no-deps", "-T", "analytics", "audit", "--snapshot", "monday", "--json")
    answer = started.stack.compose(*run, profiles=("consumers", "spark"))
    audit = json.loads(answer.splitlines()[-1])
    record_property("spark_up_s", round(up - begun))
    record_property("audit_s", round(time.monotonic() - up))
    record_property("audited", {name: audit[name] for name in ("verdict", "records") if name in audit})
    assert audit["good"] is True
    assert audit["verdict"] == "clean"
