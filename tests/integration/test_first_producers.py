"""Case 4: programs that all publish to a topic for the first time, each in a process of its own, at once.

Each makes the topic, as a program does that finds none: one of them by the outbox, the others as direct producers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mqlayer.domain.routing import check_tiling
from mqlayer.relay import relay_once
from tests.proof.world import World

ROOT: Final = Path(__file__).parents[2]
PARTITIONS: Final = 3
ROUNDS: Final = 12
LEAD_S: Final = 0.05
"""So long beforehand a topic's name is told, so that all begin with it at once."""
COUNT: Final = 20
"""How many messages each process publishes to each topic."""

PROGRAM: Final = """
import json, os, sys, time
import mqlayer
from mqlayer import outbox
from mqlayer.runtime import open_runtime
from mqlayer.topics import create_topic
import psycopg

way, count, settings = sys.argv[1], int(sys.argv[2]), mqlayer.Settings()
print("ready", flush=True)
for line in sys.stdin:
    topic, at = line.split()
    while time.time() < float(at):
        pass
    with open_runtime(settings) as runtime:
        route = create_topic(runtime, topic, partitions=3)
        keys = [f"key-{number}" for number in range(count)]
        if way == "outbox":
            with psycopg.connect(settings.control_dsn()) as connection, outbox.transaction(connection) as transaction:
                for key in keys:
                    transaction.publish(topic, key=key, body=way)
            source = None
        else:
            with mqlayer.Producer(settings, name=way) as producer:
                (source,) = {producer.send(topic, key=key, body=way.encode()).identity.source for key in keys}
    print(json.dumps({"route": repr(route), "source": source}), flush=True)
"""

pytestmark = pytest.mark.world(partitions=0)


class Programs:
    """One process for each way, which all begin with a topic when they are told to."""

    def __init__(self, world: World, ways: list[str]) -> None:
        environment = os.environ | {"MQLAYER_DSN": world.dsn, "MQLAYER_KEY_PREFIX": world.key_prefix}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, way, str(COUNT)], env=environment, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for way in ways
        ]  # fmt: skip
        for process in self._processes:
            assert _line(process) == "ready"

    def begin(self, topic: str, at: float) -> list[dict[str, Any]]:
        """Have all publish to a topic from a time on; return what each says of it."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{topic} {at}\n")
            process.stdin.flush()
        return [json.loads(_line(process)) for process in self._processes]

    def end(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def programs(world: World) -> Iterator[Programs]:
    """Two direct producers and an outbox."""
    programs = Programs(world, ["first", "second", "outbox"])
    yield programs
    programs.end()


@pytest.mark.slow
def test_processes_that_register_a_topic_at_once_make_one_version_and_all_publish_to_it(
    world: World, programs: Programs
) -> None:
    """Case 4: one default route version, the same to all, and each message is stored once, in its source's chain."""
    for number in range(ROUNDS):
        topic = f"orders-{number}"
        first, second, outbox = programs.begin(topic, time.time() + LEAD_S)
        assert first["route"] == second["route"] == outbox["route"]
        routes = world.rows(
            "SELECT lp_from, lp_to, route.version FROM mqlayer.route JOIN mqlayer.topic USING (topic_id)"
            " WHERE name = %s ORDER BY 1", topic,
        )  # fmt: skip
        assert {version for _, _, version in routes} == {1}
        check_tiling((lp_from, lp_to) for lp_from, lp_to, _ in routes)
        assert len(routes) == len(world.partitions(topic)) == PARTITIONS
        assert first["source"] != second["source"]
        assert relay_once(world.settings()) == COUNT
        stored = sorted(value for chain in world.chains(topic).values() for value in chain)
        assert stored == sorted(["first", "second", "outbox"] * COUNT)
