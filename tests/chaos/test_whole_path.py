"""Cases 34, 35, 72, 73, 75, 77, 81: the whole path while every process of it is killed, stopped and restarted.

Writers, two relays, three consumers and two nodes run as real processes; a nemesis with a seed breaks one after the
other. Then everything is let go, the backlog drains, and the histories, the streams and the sink are judged.
The short form runs with the suite; `--long` (or MQLAYER_CHAOS_SECONDS) makes it last; MQLAYER_CHAOS_SEED repeats a
choice of faults, MQLAYER_CHAOS_REPORT names a file for the verdict as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer.postgres.database import Connection, Database
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, list_nodes, register_node
from tests.chaos.actors import GROUP, SINK, TOPIC
from tests.fixtures.forking import Process, start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.waiting import wait_until
from tests.proof.checker import check
from tests.proof.history import Effect, History, read_histories
from tests.proof.streams import read_records

ROOT: Final = Path(__file__).parents[2]
LEASE_S: Final = 1.5
CAST: Final = {"writer": 3, "relay": 2, "consumer": 3}


class Play:
    """The processes of a run, by name; one that was killed is started again under its name."""

    def __init__(self, settings: Settings, directory: Path, **environment: str) -> None:
        self._directory = directory
        self._environment = (
            os.environ
            | {
                "MQLAYER_DSN": settings.control_dsn(),
                "MQLAYER_KEY_PREFIX": settings.key_prefix,
                "MQLAYER_LEASE_S": str(LEASE_S),
            }
            | environment
        )
        self.processes: dict[str, Process] = {}

    def start(self, name: str, failpoints: str = "") -> None:
        """Start a process, its output to a file, perhaps to be broken at a place."""
        with (self._directory / f"{name}.log").open("ab") as log:
            role = name.partition("-")[0]
            self.processes[name] = start_python(
                "tests.chaos.actors", role, name, str(self._directory),
                cwd=ROOT, env=self._environment | {"MQLAYER_FAILPOINTS": failpoints}, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, name: str, failpoints: str = "") -> None:
        """End a process without warning, and start it again."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name, failpoints)

    def pause(self, name: str, seconds: float) -> None:
        """Stop a process for a while, in the background."""
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        threading.Timer(seconds, process.send_signal, (signal.SIGCONT,)).start()

    def names(self, role: str) -> list[str]:
        """Return the names of a role's processes."""
        return [name for name in self.processes if name.startswith(role)]

    def ended(self) -> list[str]:
        """Return the names of those that do not run any more."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def end(self, role: str, timeout_s: float = 30) -> None:
        """End a role in order; a process that does not is killed, and the test fails."""
        names = self.names(role)
        for name in names:
            self.processes[name].send_signal(signal.SIGCONT)
            self.processes[name].terminate()
        late = []
        for name in names:
            try:
                self.processes.pop(name).wait(timeout_s)
            except subprocess.TimeoutExpired:
                late.append(name)
        assert not late, f"{late} did not end at SIGTERM"

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            process.kill()
            process.wait()


class Nemesis:
    """Breaks one thing after the other; the seed decides what and when."""

    mortal: tuple[str, ...] = tuple(CAST)
    """Roles that are killed."""
    stoppable: tuple[str, ...] = ("consumer", "relay")
    """Roles that are stopped past their lease."""

    def __init__(self, play: Play, nodes: list[RedisServer], dsn: str, seed: int) -> None:
        self._play, self._nodes, self._dsn = play, nodes, dsn
        self._rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.stopped: Counter[str] = Counter()

    def strike(self) -> None:
        """Break something."""
        fault = self._rng.choice(
            [self.kill, self.kill, self.pause, self.pause, self.kill_node, self.flush_scripts, self.cut_backends]
        )
        fault()
        self.faults[fault.__name__] += 1

    def kill(self) -> None:
        """Kill a process."""
        name = self._rng.choice([name for role in self.mortal for name in self._play.names(role)])
        self.killed[name.partition("-")[0]] += 1
        self._play.kill(name)

    def pause(self) -> None:
        """Stop a process past its lease."""
        name = self._rng.choice([name for role in self.stoppable for name in self._play.names(role)])
        self.stopped[name.partition("-")[0]] += 1
        self._play.pause(name, LEASE_S * self._rng.uniform(1.2, 2.0))

    def kill_node(self) -> None:
        """Kill a Redis and start it again."""
        node = self._rng.choice(self._nodes)
        node.kill()
        node.start()

    def flush_scripts(self) -> None:
        """Have a Redis forget its scripts."""
        redis.Redis.from_url(self._rng.choice(self._nodes).url).script_flush()

    def cut_backends(self) -> None:
        """End all connections to the database."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


def chaos_seconds(config: pytest.Config) -> float:
    """Return how long the faults go on."""
    long = config.getoption("--long", default=False)
    return float(os.environ.get("MQLAYER_CHAOS_SECONDS", "600" if long else "15"))


@pytest.mark.timeout(0)
def test_whatever_dies_every_key_is_handled_in_commit_order_and_once(
    request: pytest.FixtureRequest,
    database_dsn: str,
    key_prefix: str,
    start_redis: StartRedis,
    tmp_path: Path,
) -> None:
    """No message is lost, reversed, or has its effect twice or by a stale owner, whatever is broken."""
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", "0")) or random.randrange(1, 10**6)
    nodes = [start_redis() for _ in range(2)]
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database, psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
        for number, node in enumerate(nodes):
            register_node(database, name=f"n{number}", url=node.url)
        route = create_topic(database, TOPIC, prefix=key_prefix, partitions=6, application=database)
    play = Play(settings, tmp_path)
    nemesis = Nemesis(play, nodes, database_dsn, seed)
    try:
        for role, count in CAST.items():
            for number in range(count):
                play.start(f"{role}-{number}")
        until = time.monotonic() + chaos_seconds(request.config)
        rng = random.Random(seed)
        while time.monotonic() < until:
            # The pace of faults is part of the experiment, not a wait for anything.
            time.sleep(rng.uniform(0.3, 1.5))
            nemesis.strike()
        play.end("writer")
        with psycopg.connect(database_dsn, autocommit=True) as reader:
            wait_until(lambda: drained(reader), timeout_s=90, what=f"the sink holds all that was committed, {seed=}")
        play.end("consumer")
        play.end("relay")
    finally:
        play.kill_all()
    with History(tmp_path, "witness") as history:
        note_streams(history, database_dsn, key_prefix, [part.partition for part in route.ranges])
        note_sink(history, database_dsn)
    verdict = check(read_histories(tmp_path), flows=[(GROUP, TOPIC)])
    report = {"seed": seed, "faults": nemesis.faults, "verdict": json.loads(verdict.as_json())}
    if path := os.environ.get("MQLAYER_CHAOS_REPORT"):
        Path(path).write_text(json.dumps(report), "utf-8")
    assert verdict.clean, f"{seed=} {verdict}"
    assert verdict.messages > 200, "too little was published to prove anything"


def drained(connection: Connection) -> bool:
    """Say whether the sink holds as many messages as were committed to the outbox."""
    row = connection.execute(
        "SELECT (SELECT count(*) FROM sink), (SELECT sum(seq) FROM mqlayer_app.counter)"
    ).fetchone()
    return row is not None and row[0] == row[1]


def note_streams(history: History, dsn: str, prefix: str, partitions: list[int]) -> None:
    """Write down what the partitions hold."""
    with Database(dsn) as database:
        clients = [redis.Redis.from_url(node.url) for node in list_nodes(database)]
    for partition in partitions:
        for client in clients:
            for event in read_records(client, prefix, partition, TOPIC):
                history.note(event)


def note_sink(history: History, dsn: str) -> None:
    """Write down the effects, in the order in which the sink got them."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT place, key, source, lp, seq, epoch, partition, value FROM sink ORDER BY place"
        ).fetchall()
    for place, key, source, lp, seq, epoch, partition, value in rows:
        history.note(
            Effect(
                topic=TOPIC, key=key, source=source, lp=lp, seq=seq, value=value,
                group=GROUP, partition=partition, epoch=epoch, place=place,
            )
        )  # fmt: skip
