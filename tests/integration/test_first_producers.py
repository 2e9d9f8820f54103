"""Case 4: programs that all publish to a topic for the first time, each in a process of its own, at once.

Each makes the topic, as a program does that finds none: one of them by the outbox, the others as direct producers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import pytest

from mqlayer.domain.routing import check_tiling
from mqlayer.relay import relay_once
from tests.fixtures.forked_programs import start_python
from tests.proof.world import World

ROOT: Final = Path(__file__).parents[2]
PARTITIONS: Final = 3
ROUNDS: Final = 4
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
for line in open(sys.argv[3]):
    topic, at = line.split()
    time.sleep(max(0.0, float(at) - time.time()))
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

    def __init__(self, world: World, ways: list[str], directory: Path) -> None:
        environment = os.environ | {"MQLAYER_DSN": world.dsn, "MQLAYER_KEY_PREFIX": world.key_prefix}
        self._programs = [Program(way, environment, directory / way) for way in ways]
        for program in self._programs:
            assert program.line() == "ready"

    def begin(self, topic: str, at: float) -> list[dict[str, Any]]:
        """Have all publish to a topic from a time on; return what each says of it."""
        for program in self._programs:
            program.tell(f"{topic} {at}")
        return [json.loads(program.line()) for program in self._programs]

    def end(self) -> None:
        """End all."""
        for program in self._programs:
            program.end()


class Program:
    """One of them; it is told by a named pipe."""

    def __init__(self, way: str, environment: Mapping[str, str], orders: Path) -> None:
        os.mkfifo(orders)
        said, says = os.pipe()
        words = (PROGRAM, way, str(COUNT), str(orders))
        try:
            self._process = start_python("-c", *words, env=environment, cwd=ROOT, stdout=says)
        finally:
            os.close(says)
        self._said, self._orders = os.fdopen(said), orders
        self._tells: IO[str] | None = None

    def line(self) -> str:
        """Return the next line that it says."""
        return self._said.readline().strip()

    def tell(self, text: str) -> None:
        """Tell it a line; the first time, it comes for it."""
        self._tells = self._tells or self._orders.open("w")
        self._tells.write(f"{text}\n")
        self._tells.flush()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for file in filter(None, (self._said, self._tells)):
            file.close()


@pytest.fixture
def programs(world: World, tmp_path: Path) -> Iterator[Programs]:
    """Two direct producers and an outbox."""
    programs = Programs(world, ["first", "second", "outbox"], tmp_path)
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
