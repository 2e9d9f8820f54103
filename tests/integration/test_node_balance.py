"""Nodes are balanced by hand: the plan is that of automatic routes, and each move a route change under load."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mqlayer.autopilot.node_balance import plan_balance
from mqlayer.domain.routing import PartitionId
from mqlayer.postgres.database import Database
from mqlayer.routes import carry_out_moves, plan_drain
from mqlayer.runtime.route_cache import load_route
from mqlayer.topics import set_durability, set_node_replicas
from tests.fixtures.commands import Commands
from tests.fixtures.servers import StartRedis
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2, partitions=4)


def load(world: World, rates: Mapping[PartitionId, float]) -> None:
    """Say how much is published to partitions."""
    for partition, per_s in rates.items():
        world.rows(
            "INSERT INTO mqlayer.partition_rate VALUES (%s, 1, %s, now()) ON CONFLICT (partition_id) "
            "DO UPDATE SET per_s = excluded.per_s, measured_at = now() RETURNING 1",
            partition, per_s,
        )  # fmt: skip


def test_partitions_leave_a_loaded_node_until_it_is_none(world: World, database: Database) -> None:
    runtime = world.runtime()
    here = [one.partition for one in load_route(database, "orders").ranges if one.node == 1]
    there = [one.partition for one in load_route(database, "orders").ranges if one.node == 2]
    load(world, dict.fromkeys(there, 10.0) | {here[0]: 300.0, here[1]: 200.0})
    (planned,) = plan_balance(runtime).moves
    assert (planned.source, planned.move.partition, planned.move.target_name) == ("node-1", here[1], "node-2")
    assert "times the mean" in planned.reason
    told: list[str] = []
    assert carry_out_moves(runtime, [planned.move], tell=lambda step: told.append(step.state)) == {}
    assert told == ["moved"]
    moved = [one for one in load_route(database, "orders").ranges if one.partition not in (*here, *there)]
    assert [one.node for one in moved] == [2]
    # Again by the same plan: another command moved it.
    assert carry_out_moves(runtime, [planned.move]) == {}
    load(world, {moved[0].partition: 200.0})
    assert plan_balance(runtime).moves == []


def test_an_idle_system_and_a_draining_node_stay_as_they_are(world: World, database: Database) -> None:
    load(world, {one.partition: 5.0 for one in load_route(database, "orders").ranges if one.node == 1})
    assert plan_balance(world.runtime()).moves == []
    load(world, {one.partition: 500.0 for one in load_route(database, "orders").ranges if one.node == 1})
    assert plan_balance(world.runtime()).moves
    world.rows("UPDATE mqlayer.node SET draining_at = now() WHERE name = 'node-2' RETURNING 1")
    assert plan_balance(world.runtime()).moves == []


def test_no_move_and_no_drain_goes_to_a_node_that_can_not_hold_the_topic_s_class(
    world: World, database: Database, start_redis: StartRedis
) -> None:
    runtime = world.runtime()
    for name in ("node-1", "node-2"):
        set_node_replicas(runtime, name, 1)
    set_durability(runtime, "orders", "replica")
    load(world, {one.partition: 500.0 for one in load_route(database, "orders").ranges if one.node == 1})
    assert plan_balance(runtime).moves
    world.rows("UPDATE mqlayer.node SET replicas = 0 WHERE name = 'node-2' RETURNING 1")
    assert plan_balance(runtime).moves == []
    world.add_node(start_redis().url)
    set_node_replicas(runtime, "node-3", 1)
    assert {one.target_name for one in plan_drain(runtime, "node-1").moves} == {"node-3"}


@pytest.mark.world(nodes=2, partitions=4, by_commands=True)
def test_the_command_shows_its_plan_and_makes_the_moves(world: World, database: Database, run: Commands) -> None:
    ours = [one.partition for one in load_route(database, "orders").ranges if one.node == 1]
    load(world, {ours[0]: 300.0, ours[1]: 200.0})
    shown = run.text("node", "balance")
    assert "times the mean" in shown
    assert "publishers of a partition wait while it moves" in shown
    assert "nothing was changed: --yes does this" in shown
    assert f"topic orders, partition {ours[0]} moved: to node-2 in" in run.text("node", "balance", "--yes")
