"""Each place between two writes of a route change, and of what follows from one, hit by a kill.

Cases 16 and 17: afterwards there is exactly one outcome, whoever repairs it and however often; everything that was
published, before, meanwhile and after, is in the partitions once and in order along the lineage, and every key was
handled in order.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from mqlayer.domain.routing import lp_of
from mqlayer.errors import NotFound
from mqlayer.groups import find_group
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.routes import drop_change, finish_change, finish_changes, retire_partitions
from mqlayer.runtime.route_cache import load_route
from mqlayer.stack import RedisServer
from tests.chaos.actors import SINK
from tests.chaos.harness.stores import note_sink, note_streams
from tests.fixtures.kill_scenes import KillScene
from tests.fixtures.steady_load import AT_A_TIME, KEYS, SteadyLoad
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.checker import check
from tests.proof.failpoint_names import failpoint_names
from tests.proof.history import History, read_histories
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.step_driver import drive
from tests.proof.world import World

KILLED = -signal.SIGKILL
"""Messages come all the time, so that some are under way at each step of a change, by few transactions."""
KINDS = {"split": ("split", "1", "100", "node-1", "node-2"), "merge": ("merge", "1", "2"), "move": ("move", "1")}
SUCCESSORS = {"split": 2, "merge": 1, "move": 1}
PARENTS = {"split": 1, "merge": 2, "move": 1}


CHANGE = sorted(name for name in failpoint_names() if name.startswith("change."))
TIMES = {"change.after_make": SUCCESSORS, "change.after_seal": PARENTS, "change.after_open": SUCCESSORS}
"""Places that a change comes by once for each partition."""
PLACES = [
    (kind, name, nth) for kind in KINDS for name in CHANGE for nth in range(1, TIMES.get(name, {kind: 1})[kind] + 1)
]

pytestmark = pytest.mark.world(nodes=2)


class Load(SteadyLoad):
    """The same; at the end every chain is whole, and the group has drained what came before the change."""

    def wait_handled(self) -> None:
        """Wait for all of that."""
        self.world.wait_until_whole(timeout_s=30)
        super().wait_handled()
        in_force = load_route(self.world.database, "orders").version
        wait_until(
            lambda: find_group(self.world.database, "orders", "ledger").version == in_force,
            timeout_s=30, what="the group to have drained what came before",
        )  # fmt: skip

    def more(self) -> None:
        """Wait until every key got more, handled or not."""
        wanted = self.count + KEYS + AT_A_TIME
        wait_until(lambda: self.count >= wanted, timeout_s=20, what="more to be published")


def facts(world: World) -> list[Any]:
    """Return all that a repair could change, in both stores."""
    found: list[Any] = [
        world.rows("SELECT partition_id, state, created_by_change, ended_by_change FROM mqlayer.partition ORDER BY 1"),
        world.rows("SELECT topic_id, version, lp_from, lp_to, partition_id FROM mqlayer.route ORDER BY 1, 2, 3"),
        world.rows("SELECT change_id, version, state, sealed_at, ended_at FROM mqlayer.route_change ORDER BY 1"),
        world.rows("SELECT partition_id, seal_id, next_offset FROM mqlayer.seal ORDER BY 1"),
        world.rows("SELECT name, version FROM mqlayer.topic ORDER BY 1"),
    ]
    for url in world.urls:
        with redis.Redis.from_url(url) as client:
            for pattern in ("meta", "marks", "log"):
                keys = sorted(client.scan_iter(f"{world.key_prefix}:*:{pattern}", count=10_000))
                found += [(key, client.dump(key)) for key in keys]
    return found


def assert_one_outcome(world: World, database: Database, *, done: bool) -> None:
    """The route in force is served by exactly its partitions; what is not in force refuses."""
    assert world.rows("SELECT count(*)::int FROM mqlayer.route_change WHERE state IN ('planned', 'sealed')") == [(0,)]
    route = load_route(database, "orders")
    assert route.version == (2 if done else 1)
    edges = [(r.lp_from, r.lp_to) for r in route.ranges]
    assert [lo for lo, _ in edges] == [0, *(hi for _, hi in edges[:-1])]
    assert edges[-1][1] == 1024
    in_force = {int(r.partition): r.node for r in route.ranges}
    for number, url in enumerate(world.urls, start=1):
        with redis.Redis.from_url(url, decode_responses=True) as client:
            for key in client.scan_iter(f"{world.key_prefix}:*:meta", count=10_000):
                partition = int(key.split("{")[1].split("}")[0])
                serving = client.hget(key, "state") == "open"
                assert serving == (in_force.get(partition) == number), (partition, client.hgetall(key))


def assert_route_is_there(world: World, database: Database) -> None:
    """Case 17: no route in force names a partition that does not exist, since successors are open before its rows."""
    for r in load_route(database, "orders").ranges:
        with redis.Redis.from_url(world.urls[r.node - 1]) as client:
            assert client.exists(partition_keys(world.key_prefix, r.partition).meta)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "nth"), some_of(PLACES, 9))
def test_a_driver_killed_anywhere_leaves_a_change_that_anybody_completes(
    world: World, database: Database, kind: str, name: str, nth: int
) -> None:
    with Load(world).running() as load:
        code = drive(*KINDS[kind], environment=world.environment(f"{name}=kill@{nth}"))
        assert code == KILLED, "the place was not reached"
        assert_route_is_there(world, database)
        load.more()
        planned = world.rows("SELECT state FROM mqlayer.route_change")
        assert planned == ([] if name == "change.before_plan_commit" else [(_state_at(name),)])
        came_to = finish_changes(runtime_of(database, world.key_prefix))
        assert list(came_to.values()) == ["done"] * len(planned)
    assert_one_outcome(world, database, done=bool(planned))
    before = facts(world)
    assert finish_changes(runtime_of(database, world.key_prefix)) == {}
    for change_id in came_to:
        assert finish_change(runtime_of(database, world.key_prefix), change_id) == "done"
    assert facts(world) == before, "a repeated repair changed something"


def _state_at(name: str) -> str:
    if name in ("change.after_seal", "change.before_sealed_commit"):
        return "sealing"
    return "sealed" if name in ("change.after_ids", "change.after_open", "change.before_done_commit") else "planned"


@pytest.mark.parametrize("name", some_of(["change.after_seal", "change.after_open"], 2))
def test_the_next_command_finishes_what_a_killed_driver_left(world: World, database: Database, name: str) -> None:
    with Load(world).running():
        assert drive(*KINDS["merge"], environment=world.environment(f"{name}=kill")) == KILLED
        route = split(runtime_of(database, world.key_prefix), "orders", 3, at=[700])
        assert [(r.lp_from, r.lp_to, int(r.partition)) for r in route.ranges] == [(0, 700, 4), (700, 1024, 5)]
        assert route.version == 3


def test_two_that_repair_at_once_come_to_one_outcome(world: World, database: Database) -> None:
    with Load(world).running():
        assert drive(*KINDS["merge"], environment=world.environment("change.after_seal=kill")) == KILLED
        drivers = [
            threading.Thread(target=finish_changes, args=(runtime_of(database, world.key_prefix),)) for _ in range(3)
        ]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join(20)
    assert_one_outcome(world, database, done=True)


# Drops


@pytest.mark.parametrize("name", sorted(name for name in failpoint_names() if name.startswith("drop.")))
@pytest.mark.parametrize("repair", some_of(["finish", "drop"], 2))
def test_a_drop_that_was_killed_never_was(world: World, database: Database, name: str, repair: str) -> None:
    """A drop is one transaction: the change may go on, or be dropped again."""
    with Load(world).running() as load:
        assert drive(*KINDS["merge"], environment=world.environment("change.after_make=kill")) == KILLED
        assert drive("drop", environment=world.environment(f"{name}=kill")) == KILLED
        load.more()
        if repair == "finish":
            assert finish_changes(runtime_of(database, world.key_prefix)) == {1: "done"}
        else:
            assert drop_change(runtime_of(database), "orders") == 1
        with pytest.raises(NotFound):
            drop_change(runtime_of(database), "orders")
    came_to = "done" if repair == "finish" else "dropped"
    assert world.rows("SELECT state FROM mqlayer.route_change WHERE change_id = 1") == [(came_to,)]
    retire_partitions(runtime_of(database, world.key_prefix))
    assert_one_outcome(world, database, done=repair == "finish")


# Consumers


@pytest.mark.parametrize("name", sorted(name for name in failpoint_names() if name.startswith("drained.")))
@pytest.mark.parametrize("kind", some_of(KINDS, 3))
def test_a_consumer_killed_as_it_opens_a_gate_leaves_that_to_the_next(
    world: World, database: Database, tmp_path: Path, name: str, kind: str
) -> None:
    world.rows(SINK)
    scene = KillScene(world.settings(lease_s=1.0), tmp_path)
    try:
        scene.publish()
        assert drive(*KINDS[kind], environment=world.environment()) == 0
        first = scene.start("first", f"{name}=kill")
        assert first.wait(40) == KILLED, "the place was not reached"
        assert world.rows("SELECT count(*)::int FROM mqlayer.drained") == [(0,)]
        scene.start("second")
        scene.wait_until_drained()
        wait_until(
            lambda: find_group(database, "orders", "ledger").version == 2, timeout_s=40, what="the version to be raised"
        )
    finally:
        scene.end()
    partitions = [row[0] for row in world.rows("SELECT partition_id FROM mqlayer.partition ORDER BY 1")]
    with History(tmp_path, "witness") as history:
        note_streams(history, world.dsn, world.key_prefix, partitions)
        note_sink(history, world.dsn)
    verdict = check(read_histories(tmp_path), flows=[("ledger", "orders")])
    assert verdict.clean, verdict


# Retiring


@pytest.mark.parametrize("name", some_of(sorted(name for name in failpoint_names() if name.startswith("retire.")), 2))
def test_retiring_that_was_killed_is_completed_by_the_next(world: World, database: Database, name: str) -> None:
    with Load(world).running():
        assert drive(*KINDS["merge"], environment=world.environment()) == 0
        wait_until(
            lambda: world.rows("SELECT count(*)::int FROM mqlayer.drained") == [(2,)], what="the parents to be drained"
        )
    assert drive("retire", environment=world.environment(f"{name}=kill")) == KILLED
    assert retire_partitions(runtime_of(database, world.key_prefix)) == [1, 2]
    assert retire_partitions(runtime_of(database, world.key_prefix)) == []
    for partition, url in zip((1, 2), world.urls, strict=True):
        with redis.Redis.from_url(url) as client:
            left = client.keys(f"{world.key_prefix}:{{{partition}}}:*")
            assert left == [partition_keys(world.key_prefix, partition).meta]
            assert client.hgetall(left[0]) == {b"state": b"deleted"}
    member = ManualMember(database, world.key_prefix, "orders", member="later")
    assert set(member.assigned()) == {3}


# Re-arming


@pytest.mark.world(own_node=True)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nth"),
    some_of(
        [(name, 1) for name in sorted(n for n in failpoint_names() if n.startswith("rearm."))]
        + [(name, nth) for name in sorted(n for n in failpoint_names() if n.startswith("repair.")) for nth in (1, 2)],
        9,
    ),
)
def test_mending_that_was_killed_is_completed_by_the_next(
    world: World, node: RedisServer, key_prefix: str, name: str, nth: int
) -> None:
    """The node holds two sealed partitions that a group has half drained, and their open successors."""
    with Database(world.dsn) as database:
        member = ManualMember(database, key_prefix, "orders")
        with world.relay():
            world.publish(120, keys=KEYS, tag="m")
            world.wait_until_whole()
            assert drive("split", "1", "100", environment=world.environment()) == 0
            assert drive("split", "2", "700", environment=world.environment()) == 0
            world.publish(120, keys=KEYS, tag="n")
            world.wait_until_whole()
        member.consume(1, 10)
        member.consume(2, 10)
        node.stop()
        for path in node.directory.iterdir():
            if path.name.startswith("appendonly"):
                _remove(path)
        node.start()
        assert drive("rearm", "node-1", environment=world.environment(f"{name}=kill@{nth}")) == KILLED
        assert drive("rearm", "node-1", environment=world.environment()) == 0
        with world.relay():
            world.wait_until_whole()
            world.publish(60, keys=KEYS, tag="o")
            world.wait_until_whole()
        member.consume_all()
        assert member.version == 3
    for key, bodies in member.bodies().items():
        first = list(dict.fromkeys(bodies))
        assert first == [b.decode() for _, b in _published(world, key)], key


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink()


def _published(world: World, key: str) -> list[tuple[int, bytes]]:
    rows = world.rows("SELECT seq, body FROM mqlayer_app.outbox WHERE key = %s AND lp = %s ORDER BY seq", key,
                      lp_of(key.encode()))  # fmt: skip
    return [(seq, bytes(body)) for seq, body in rows]
