"""Cases 5, 12 to 24, 34, 35, 72, 77: routes change under load while every process that has to do with it is killed.

Publishers, two relays, three consumers of two groups each and two drivers of route changes run as real processes on
two nodes. A nemesis kills and stops them wherever they stand, and restarts nodes. Then everything is let go, the
backlog drains through all generations of partitions until both groups are at the topic's route version and nothing
sealed is left to drain; and the histories, the streams and the sink are judged: nothing lost or twice, no key reversed,
every chain whole along the lineage, no two owners, no effect of a stale one, and no record of a successor handled
before its parents were.

The short form runs with the suite; `--long` (or MQLAYER_CHAOS_SECONDS) makes it last: 10^5 messages of 500 keys.
MQLAYER_CHAOS_SEED repeats a choice of faults, MQLAYER_CHAOS_REPORT names a file for the verdict as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer.changes import (
    drain_progress,
    finish_changes,
    merge,
    move,
    retire_partitions,
    route_history,
)
from mqlayer.membership.groups import find_group
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.routes.cache import load_route
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, register_node
from tests.chaos.actors import GROUP, MIRROR, SINK, TOPIC
from tests.chaos.test_consumer_zombie import is_stopped
from tests.chaos.test_whole_path import LEASE_S, Nemesis, Play, note_sink, note_streams
from tests.fixtures.servers import StartRedis
from tests.fixtures.waiting import wait_until
from tests.proof.checker import Breach, Verdict, check
from tests.proof.failpoint_names import failpoint_names
from tests.proof.history import History, Lineage, read_histories
from tests.proof.planted import read_successors_at_once

CAST: Final = {"publisher": 2, "relay": 2, "pair": 3, "driver": 2}
GROUPS: Final = (GROUP, MIRROR)
KEYS: Final = 500
SETTLING_S: Final = 300.0
PLACES: Final = {
    "driver": ("change.", "drop.", "retire."),
    "pair": ("drained.", "take.", "rearm.", "mend.", "ack.", "release.", "member.", "read."),
    "relay": ("relay.", "rearm.", "mend."),
}
"""Where processes of a role are broken: the rooms that a change of routes leads them through."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run lasts at the least, and what it must have seen before the faults end."""

    seconds: float
    changes: int
    messages: int

    @classmethod
    def of(cls, config: pytest.Config) -> Length:
        """Return the short form, the long one, or as many seconds as are asked for."""
        long = bool(config.getoption("--long", default=False))
        seconds = float(os.environ.get("MQLAYER_CHAOS_SECONDS", "240" if long else "16"))
        return cls(seconds, changes=20, messages=100_000) if long else cls(seconds, changes=6, messages=8_000)


class RouteNemesis(Nemesis):
    """Strikes at whoever has to do with a change: consumers, relays, its drivers, and nodes.

    Half of the processes that it starts again are to be killed or stopped at a place between two writes, too: a change
    takes a twentieth of a second, so blows at random moments seldom hit one.
    """

    mortal = ("pair", "relay", "driver", "driver", "publisher")
    stoppable = ("pair", "relay", "driver")

    def __init__(self, play: Play, nodes: list[RedisServer], dsn: str, seed: int) -> None:
        super().__init__(play, nodes, dsn, seed)
        self.places: Counter[str] = Counter()
        self._armed: dict[str, str] = {}
        self._stopped_since: dict[str, float] = {}

    def strike(self) -> None:
        """Break something; processes more often than nodes."""
        faults = [self.kill] * 5 + [self.pause] * 3 + [self.kill_node, self.cut_backends, self.flush_scripts]
        fault = self._rng.choice(faults)
        fault()
        self.faults[fault.__name__] += 1
        self.revive()

    def kill(self) -> None:
        """Kill a process; perhaps what is started in its place will meet its end at a place."""
        role = self._rng.choice(self.mortal)
        name = self._rng.choice(self._play.names(role))
        self.killed[role] += 1
        self._armed.pop(name, None)
        if role in PLACES and self._rng.random() < 0.5:
            place = self._rng.choice(sorted(n for n in failpoint_names() if n.startswith(PLACES[role])))
            self._armed[name] = f"{place}={self._rng.choice(['kill', 'kill', 'stop'])}@{self._rng.randint(1, 2)}"
        self._play.kill(name, self._armed.get(name, ""))

    def revive(self) -> None:
        """Start again what died at its place; wake up what has stood there for longer than a lease."""
        for name, failpoint in list(self._armed.items()):
            process = self._play.processes[name]
            if process.poll() is not None:
                self.places[failpoint] += 1
                del self._armed[name]
                self._play.start(name)
            elif not is_stopped(process):
                self._stopped_since.pop(name, None)
            elif time.monotonic() - self._stopped_since.setdefault(name, time.monotonic()) > 1.5 * LEASE_S:
                self.places[failpoint] += 1
                del self._stopped_since[name]
                process.send_signal(signal.SIGCONT)

    def rest(self) -> None:
        """Let go: from here on nothing breaks; who may still be broken at a place is replaced."""
        self.revive()
        for name in self._armed:
            self._play.kill(name)
        self._armed.clear()


class Scene:
    """Two nodes, a topic of four partitions, two groups; what the stores say of them."""

    groups: tuple[str, ...] = GROUPS

    def __init__(self, database: Database, nodes: list[RedisServer], settings: Settings, directory: Path) -> None:
        self.database, self.nodes, self.settings, self.directory = database, nodes, settings, directory
        self.prefix = settings.key_prefix
        for number, node in enumerate(nodes):
            register_node(database, name=f"n{number}", url=node.url)
        create_topic(database, TOPIC, prefix=self.prefix, partitions=4, application=database)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return what Postgres answers."""
        with psycopg.connect(self.settings.control_dsn()) as connection:
            return connection.execute(statement.encode()).fetchall()

    def changes(self) -> Counter[str]:
        """Return how many changes of each kind came into force."""
        return Counter(change.kind for change in route_history(self.database, TOPIC) if change.state == "done")

    def committed(self) -> int:
        """Return how many messages were committed to the outbox."""
        return int(self.rows("SELECT coalesce(sum(seq), 0)::bigint FROM mqlayer_app.counter")[0][0])

    def partitions(self, *states: str) -> list[int]:
        """Return the partitions in some states."""
        found = self.rows("SELECT partition_id, state FROM mqlayer.partition ORDER BY partition_id")
        return [partition for partition, state in found if state in states]

    def parents(self) -> dict[int, tuple[int, ...]]:
        """Return whose place each partition took, of all that ever served."""
        return {
            partition: tuple(parents)
            for partition, parents in self.rows(
                "SELECT p.partition_id, array_agg(q.partition_id) FROM mqlayer.partition p JOIN mqlayer.partition q"
                " ON q.ended_in = p.born_in AND q.lp_from < p.lp_to AND p.lp_from < q.lp_to GROUP BY p.partition_id"
            )
        }

    def unsettled(self) -> Iterator[str]:
        """Say what the groups have yet to do."""
        for progress in drain_progress(self.database, TOPIC, prefix=self.prefix):
            yield f"{progress}"
        version = load_route(self.database, TOPIC).version
        for name in self.groups:
            group = find_group(self.database, TOPIC, name)
            if group.version != version:
                yield f"group {name} is at version {group.version} of {version}"
            for partition in self.partitions("open"):
                keys = group_keys(self.prefix, partition, group.group_id)
                committed, following = (
                    self._hget(keys.lock, "committed"),
                    self._hget(partition_keys(self.prefix, partition).meta, "next"),
                )
                if following > 1 and committed != following:
                    yield f"group {name} is at {committed} of {following} in partition {partition}"

    def is_settled(self) -> bool:
        """Say whether both groups have settled all that was committed, along the whole lineage."""
        ends = self.rows("SELECT coalesce(max(place), 0)::bigint FROM sink")[0][0]
        if ends < self.committed():
            return False
        # What the periodic job does: where a drain and the end of its change meet, neither raises the group's version.
        finish_changes(self.database, prefix=self.prefix, topic=TOPIC, application=self.database)
        waiting = list(self.unsettled())
        assert not waiting, waiting
        return bool(self.rows("SELECT count(*) FROM sink")[0][0] == self.committed())

    def left_of(self, partition: int) -> dict[str, Any]:
        """Return all that the nodes hold of a partition: the last part of each key's name, and what is in it."""
        left: dict[str, Any] = {}
        for node in self.nodes:
            client = redis.Redis.from_url(node.url, decode_responses=True)
            for key in client.scan_iter(f"{self.prefix}:{{{partition}}}:*", count=10_000):
                kind = client.type(key)
                left[key.split("}:")[1]] = client.hgetall(key) if kind == "hash" else kind
        return left

    def witness(self) -> None:
        """Write down what the stores hold."""
        with History(self.directory, "witness") as history:
            # Of those that are deleted some may not be buried yet.
            everything = self.partitions("open", "sealed", "deleted")
            note_streams(history, self.settings.control_dsn(), self.prefix, everything)
            note_sink(history, self.settings.control_dsn())
            for partition, parents in self.parents().items():
                history.note(Lineage(topic=TOPIC, partition=partition, parents=parents))

    def judge(self) -> Verdict:
        """Have the histories judged for both groups."""
        return check(read_histories(self.directory), flows=[(group, TOPIC) for group in self.groups])

    def _hget(self, key: bytes, name: str) -> int:
        for node in self.nodes:
            value: Any = redis.Redis.from_url(node.url).hget(key.decode(), name)
            if value is not None:
                return int(value)
        return 0


@pytest.fixture
def scene(database_dsn: str, key_prefix: str, start_redis: StartRedis, tmp_path: Path) -> Iterator[Scene]:
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
    with Database(database_dsn) as database:
        yield Scene(database, [start_redis() for _ in range(2)], settings, tmp_path)


@pytest.mark.timeout(0)
def test_whatever_dies_while_routes_change_every_key_is_handled_in_commit_order(
    request: pytest.FixtureRequest, scene: Scene
) -> None:
    """The checker's verdict over all generations of partitions is clean; what is retired leaves a tombstone."""
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", "0")) or random.randrange(1, 10**6)
    print(f"MQLAYER_CHAOS_SEED={seed}")  # noqa: T201
    length = Length.of(request.config)
    play = Play(
        scene.settings, scene.directory,
        MQLAYER_TEST_KEYS=str(KEYS), MQLAYER_CHAOS_SEED=str(seed), MQLAYER_TEST_PAUSE_S="0.004",
    )  # fmt: skip
    nemesis = RouteNemesis(play, scene.nodes, scene.settings.control_dsn(), seed)
    began = time.monotonic()
    try:
        for role, count in CAST.items():
            for number in range(count):
                play.start(f"{role}-{number}")
        strike_for(scene, nemesis, length, random.Random(seed))
        nemesis.rest()
        assert play.ended() == [], f"nobody ended these, see their logs in {scene.directory}"
        struck_s = time.monotonic() - began
        for role in ("publisher", "driver"):
            play.end(role)
        finish_changes(scene.database, prefix=scene.prefix, topic=TOPIC, application=scene.database)
        wait_until(scene.is_settled, timeout_s=SETTLING_S, what=f"both groups settle all that was committed, {seed=}")
        settled_s = time.monotonic() - began
        for role in ("pair", "relay"):
            play.end(role)
    finally:
        play.kill_all()
    scene.witness()
    verdict = scene.judge()
    report(scene, nemesis, verdict, seed=seed, struck_s=struck_s, settled_s=settled_s)
    assert verdict.clean, f"{seed=} {verdict}"
    assert scene.changes().total() >= length.changes, "too few changes came into force to prove anything"
    assert verdict.messages >= length.messages / 2, "too little was published to prove anything"
    only_tombstones_are_left(scene)


def report(scene: Scene, nemesis: RouteNemesis, verdict: Verdict, **facts: float) -> None:
    """Write down what was done and what was found, where that is asked for."""
    if path := os.environ.get("MQLAYER_CHAOS_REPORT"):
        facts_of_run = facts | {
            "changes": scene.changes(),
            "dropped": sum(change.state == "dropped" for change in route_history(scene.database, TOPIC)),
            "retired_meanwhile": len(scene.partitions("deleted")),
            "faults": nemesis.faults,
            "places": nemesis.places,
            "killed": nemesis.killed,
            "stopped": nemesis.stopped,
            "verdict": json.loads(verdict.as_json()),
        }
        Path(path).write_text(json.dumps(facts_of_run), "utf-8")


def strike_for(scene: Scene, nemesis: Nemesis, length: Length, rng: random.Random) -> None:
    """Break one thing after the other until it has lasted and enough has happened."""
    began = time.monotonic()
    while True:
        # The pace of faults is part of the experiment, not a wait for anything.
        time.sleep(rng.uniform(0.2, 0.8))
        nemesis.strike()
        lasted_s = time.monotonic() - began
        if lasted_s < length.seconds:
            continue
        # On a machine that others keep busy it takes longer, but not for ever.
        if lasted_s > 8 * length.seconds:
            return
        if scene.changes().total() >= length.changes and scene.committed() >= length.messages:
            return


def only_tombstones_are_left(scene: Scene) -> None:
    """Retire what is drained: of every partition but those in force nothing is left but the word that it is deleted."""
    retire_partitions(scene.database, prefix=scene.prefix)
    assert scene.partitions("sealed", "importing") == []
    in_force = [r.partition for r in load_route(scene.database, TOPIC).ranges]
    assert sorted(scene.partitions("open")) == sorted(in_force)
    retired = scene.partitions("deleted")
    assert {partition: scene.left_of(partition) for partition in retired} == {
        partition: {"meta": {"state": "deleted"}} for partition in retired
    }


def change_under_backlog(scene: Scene, play: Play) -> Verdict:
    """Let a backlog grow, move and merge what holds it, let consumers in, and judge what they do."""
    play.start("relay-0")
    play.start("publisher-0")
    wait_until(lambda: scene.committed() > 600, timeout_s=30, what="a backlog")
    first, second, third, _ = (r.partition for r in load_route(scene.database, TOPIC).ranges)
    merge(scene.database, TOPIC, [first, second], prefix=scene.prefix)
    move(scene.database, TOPIC, third, prefix=scene.prefix)
    behind = scene.committed() + 600
    wait_until(lambda: scene.committed() > behind, timeout_s=30, what="more behind the change")
    play.start("pair-0")
    wait_until(lambda: scene.rows("SELECT 1 FROM sink LIMIT 1"), timeout_s=30, what="a consumer at work")
    play.end("publisher")
    wait_until(lambda: scene.rows("SELECT count(*) FROM sink")[0][0] >= 600, timeout_s=60, what="it goes on")
    for role in ("pair", "relay"):
        play.end(role)
    scene.witness()
    return check(read_histories(scene.directory), drained=False)


@pytest.mark.parametrize("planted", [False, True])
def test_the_judge_sees_a_group_that_reads_successors_before_it_has_drained_their_parents(
    scene: Scene, planted: bool
) -> None:
    """The gates taken away, and nothing else: the judge names it. With the gates it has nothing to say."""
    play = Play(scene.settings, scene.directory, MQLAYER_TEST_PAUSE_S="0.002")
    if planted:
        with psycopg.connect(scene.settings.control_dsn(), autocommit=True) as connection:
            read_successors_at_once(connection)
    try:
        verdict = change_under_backlog(scene, play)
    finally:
        play.kill_all()
    if not planted:
        assert verdict.clean, verdict
        return
    assert {Breach.BEFORE_GATE, Breach.INVERSION} <= verdict.broken, verdict
