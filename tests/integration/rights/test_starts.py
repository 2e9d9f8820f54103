"""A process whose role lacks its right ends at its start, and says which one is missing and how to give it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping

import pytest
from pydantic import SecretStr

from mqlayer import App, Producer, Receiver, Settings
from mqlayer.errors import PermissionDenied
from mqlayer.postgres.rights import Right
from mqlayer.relay import Relay, relay_once
from tests.fixtures.consumers import Stage
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.roles import Roles
from tests.fixtures.variants import some_of

START_S = 60


def start_consumer(settings: Settings) -> None:
    app = App(settings)
    app.consumer("orders", group="g", start="earliest")(lambda body: None)
    try:
        app.start()
    finally:
        app.stop(1.0)


def start_receiver(settings: Settings) -> None:
    Receiver("orders", group="g", settings=settings, start="earliest").open().close()


def start_producer(settings: Settings) -> None:
    Producer(settings).close()


def start_relay(settings: Settings) -> None:
    relay = Relay(settings)
    timer = threading.Timer(2.0, relay.stop)
    timer.start()
    try:
        relay.run()
    finally:
        timer.cancel()
        relay.stop()


STARTS: Mapping[str, tuple[Callable[[Settings], object], Right, str]] = {
    "App.start": (start_consumer, Right.CONSUME, "--group orders/g"),
    "Receiver.open": (start_receiver, Right.CONSUME, "--group orders/g"),
    "Producer": (start_producer, Right.PUBLISH, ""),
    "Relay.run": (start_relay, Right.RELAY, ""),
    "relay_once": (relay_once, Right.RELAY, ""),
}


@pytest.mark.parametrize("process", some_of(STARTS, 3))
def test_a_process_without_its_right_ends_with_the_command_that_gives_it(
    stage: Stage, roles: Roles, process: str
) -> None:
    start, right, limit = STARTS[process]
    without = [other for other in (Right.PUBLISH, Right.CONSUME, Right.VIEW, Right.ANALYZE) if other is not right]
    for rights in ([], without):
        dsn = roles.login(*rights)
        with pytest.raises(PermissionDenied) as refused:
            start(stage.settings(dsn=SecretStr(dsn)))
        command = f"mqlayer grant {right} {Roles.name_of(dsn)} {limit}".strip()
        assert refused.value.fix == command
        assert f"lacks the right to {right}" in str(refused.value)


@pytest.mark.parametrize("process", some_of(STARTS, 3))
def test_it_starts_with_its_right_alone(stage: Stage, roles: Roles, process: str) -> None:
    start, right, _ = STARTS[process]
    start(stage.settings(dsn=SecretStr(roles.login(right))))


def test_a_consumer_of_another_group_does_not_start(stage: Stage, roles: Roles) -> None:
    dsn = roles.login(Right.CONSUME, scopes=["orders/other"])
    for start in (start_consumer, start_receiver):
        with pytest.raises(PermissionDenied, match="lacks the right to consume orders/g"):
            start(stage.settings(dsn=SecretStr(dsn)))


def test_a_publisher_to_single_topics_sends_nothing_directly(stage: Stage, roles: Roles) -> None:
    """A Redis user knows no topics, so such a role has the outbox only."""
    dsn = roles.login(Right.PUBLISH, scopes=["orders"])
    with pytest.raises(PermissionDenied) as refused:
        start_producer(stage.settings(dsn=SecretStr(dsn)))
    assert refused.value.fix == f"mqlayer grant publish {Roles.name_of(dsn)}"


def run_program(stage: Stage, dsn: str, *words: str) -> subprocess.CompletedProcess[str]:
    names = {"MQLAYER_DSN": dsn, "MQLAYER_KEY_PREFIX": stage.prefix, "MQLAYER_BROKER_URL": stage.url}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQLAYER_")} | names
    return ask_python(*words, env=environment, timeout=START_S)


def test_the_relay_command_without_its_right_says_so_in_one_line(stage: Stage, roles: Roles) -> None:
    dsn = roles.login(Right.VIEW)
    for words in (["relay"], ["relay", "--once"]):
        ended = run_program(stage, dsn, "mqlayer", *words)
        assert ended.returncode == 1
        assert "Traceback" not in ended.stderr
        assert f"mqlayer grant relay {Roles.name_of(dsn)}" in ended.stderr.splitlines()[-1]


def test_the_worker_without_its_right_ends_with_the_command_that_gives_it(stage: Stage, roles: Roles) -> None:
    dsn = roles.login(Right.VIEW)
    ended = run_program(
        stage, dsn, "celery", "-A", "mqlayer.workers.app", "worker", "--pool", "solo", "--without-mingle"
    )
    assert ended.returncode not in (0, None)
    said = ended.stdout + ended.stderr
    assert f"mqlayer grant work {Roles.name_of(dsn)}" in said, said[-2000:]
