"""Each place between two writes of a node's draining and removal, hit by a kill, under load.

The same command goes on; each message is handled, and each key's in order, over all of it.
"""

from __future__ import annotations

import signal

import pytest
import redis

from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.routes import finish_changes
from mqlayer.runtime.route_cache import load_nodes, load_route
from tests.fixtures.steady_load import SteadyLoad
from tests.fixtures.variants import some_of
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.step_driver import drive
from tests.proof.world import World

KILLED = -signal.SIGKILL
PLACES = [
    ("drain.after_move", 1), ("drain.before_mark_commit", 1), ("drain.after_mark", 1), ("drain.after_move", 2),
    ("drain.after_retire", 1), ("change.after_seal", 1), ("change.after_open", 2), ("retire.after_mark", 1),
]  # fmt: skip

pytestmark = pytest.mark.world(nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nth"), some_of(PLACES, len(PLACES)))
def test_a_drain_that_was_killed_goes_on_by_the_same_command(
    world: World, database: Database, name: str, nth: int
) -> None:
    with SteadyLoad(world).running() as load:
        split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
        assert drive("drain", "node-1", environment=world.environment(f"{name}=kill@{nth}")) == KILLED
        load.more()
        assert drive("drain", "node-1", environment=world.environment()) == 0
        assert world.rows("SELECT count(*)::int FROM mqlayer.partition WHERE node_id = 1 AND state <> 'deleted'") == [
            (0,)
        ]
        load.more()
        assert drive("remove", "node-1", environment=world.environment("drain.before_remove_commit=kill")) == KILLED
        assert [node.name for node in load_nodes(database)] == ["node-1", "node-2"]
        assert drive("remove", "node-1", environment=world.environment()) == 0
        assert [node.name for node in load_nodes(database)] == ["node-2"]
    assert {r.node for r in load_route(database, "orders").ranges} == {2}
    with redis.Redis.from_url(world.urls[0]) as client:
        left = client.keys(f"{world.key_prefix}:{{*}}:*")
        tombstones = [row[0] for row in world.rows("SELECT partition_id FROM mqlayer.partition WHERE node_id = 1")]
        assert sorted(left) == sorted(partition_keys(world.key_prefix, one).meta for one in tombstones)


@pytest.mark.slow
@pytest.mark.world(nodes=2, partitions=8)
@pytest.mark.parametrize(
    "place", [pytest.param("moves.after_one", marks=pytest.mark.full), pytest.param("change.after_seal")]
)
def test_a_balance_that_was_killed_is_planned_anew(world: World, database: Database, place: str) -> None:
    """Between two moves, and in one."""
    loaded = [one.partition for one in load_route(database, "orders").ranges if one.node == 1]
    world.rows(
        "INSERT INTO mqlayer.partition_rate SELECT partition_id, 1, CASE WHEN partition_id = ANY(%s) THEN 200 ELSE 10 "
        "END, now() FROM mqlayer.partition RETURNING 1",
        loaded,
    )
    with SteadyLoad(world).running() as load:
        assert drive("balance", environment=world.environment(f"{place}=kill")) == KILLED
        load.more()
        finish_changes(world.runtime())
        assert on_node(database, 1) == 3, "one move was made, the others were not"
        assert drive("balance", environment=world.environment()) == 0
        assert on_node(database, 1) < 3
        load.more()


def on_node(database: Database, node: int) -> int:
    """Return how many partitions a node has in force."""
    return sum(one.node == node for one in load_route(database, "orders").ranges)
