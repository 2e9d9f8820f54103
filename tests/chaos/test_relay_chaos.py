"""Cases 72, 73 and 75 together: relays die and stop, stores restart, lines are cut, and every chain is whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from mqlayer.stack import RedisServer
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.proof.world import World

SECONDS = float(os.environ.get("MQLAYER_CHAOS_S", "9"))
WRITERS = 4
RELAYS = 2


class Nemesis:
    """Does one bad thing after the other to relays, a node, and connections to Postgres; the seed decides which."""

    def __init__(self, world: World, node: RedisServer, seed: int) -> None:
        self._world, self._node, self._rng = world, node, random.Random(seed)
        self._relays = [self._start() for _ in range(RELAYS)]
        self.acts: list[str] = []

    def act(self) -> None:
        """Do one thing, and bring back what is dead."""
        act = self._rng.choice([self.kill, self.kill, self.stop, self.restart_node, self.cut_postgres])
        self.acts.append(act.__name__)
        act()
        self._relays = [relay if relay.poll() is None else self._start() for relay in self._relays]

    def kill(self) -> None:
        """Kill a relay, wherever it stands; it is known to be dead, and replaced, before the next thing happens."""
        relay = self._rng.choice(self._relays)
        relay.kill()
        relay.wait()

    def stop(self) -> None:
        """Stop a relay for longer than its lease, and wake it."""
        relay = self._rng.choice(self._relays)
        relay.send_signal(signal.SIGSTOP)
        time.sleep(0.8)
        relay.send_signal(signal.SIGCONT)

    def restart_node(self) -> None:
        """Kill the node and start it again with its data."""
        self._node.kill()
        self._node.start()

    def cut_postgres(self) -> None:
        """End every connection of relays to Postgres."""
        self._world.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'mqlayer relay' AND datname = current_database()"
        )

    def end(self) -> None:
        """Kill all relays."""
        for relay in self._relays:
            relay.kill()
            relay.wait()

    def _start(self) -> Process:
        environment = self._world.environment(MQLAYER_RELAY_CHUNK_ROWS=str(self._rng.choice([20, 200, 2_000])))
        return start_python("mqlayer", "--log-level", "ERROR", "relay", env=environment, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def writers(world: World, seed: int) -> Iterator[list[int]]:
    """Publish from several connections, a tenth of it rolled back; the list gets each writer's committed messages."""
    done, counts = threading.Event(), [0] * WRITERS

    def write(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        with psycopg.connect(world.dsn) as connection:
            while not done.is_set():
                batch = rng.randrange(1, 6)
                for turn in range(batch):
                    key, body = f"key-{rng.randrange(40)}", f"{number}-{counts[number] + turn}".encode()
                    connection.execute("SELECT mqlayer_app.publish_v1('orders', %s, %s)", (key, body))
                    time.sleep(rng.uniform(0, 0.016))
                if rng.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()
                    counts[number] += batch

    def write_on(number: int) -> None:
        # Keys are taken in any order, so writers may deadlock; as an application would, they go on.
        while not done.is_set():
            with contextlib.suppress(psycopg.errors.DeadlockDetected):
                write(number)

    threads = [threading.Thread(target=write_on, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of([1, 2], 2))
def test_whatever_happens_to_relays_and_stores_every_chain_is_whole(
    database_dsn: str, key_prefix: str, start_redis: StartRedis, seed: int
) -> None:
    node = start_redis()
    world = World(database_dsn, key_prefix, [node.url])
    world.add_topic("orders", partitions=4)
    nemesis = Nemesis(world, node, seed)
    try:
        with writers(world, seed) as counts:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                nemesis.act()
                time.sleep(0.3)
        world.wait_until_whole()
    finally:
        nemesis.end()
    assert sum(map(len, world.relayed().values())) == sum(counts), nemesis.acts
    assert world.rows("SELECT count(*)::int FROM mqlayer_app.quarantined") == [(0,)]
