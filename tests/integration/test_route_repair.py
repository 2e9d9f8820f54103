"""What was left half-way by a route change, a drop or a drain, and who brings it to its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from mqlayer import failpoints
from mqlayer.errors import Conflict, InvalidInput, NodeNotArmed, NotFound
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.groups.start_positions import Start
from mqlayer.postgres.database import Database
from mqlayer.routes import (
    apply_change,
    drain_progress,
    drop_change,
    finish_changes,
    planned_merge,
    planned_move,
    planned_split,
    retire_partitions,
)
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.topics import rearm_node
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import merge, move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2)


def leave_planned(world: World, database: Database) -> None:
    """Plan a merge of both partitions, and leave it there."""
    with broken_off_at("change.after_plan"):
        merge(runtime_of(database, world.key_prefix), "orders", [1, 2])


def make_group(world: World, database: Database, start: Start = "latest") -> None:
    ensure_group(
        runtime_of(database, world.key_prefix),
        RouteCache(database),
        topic="orders",
        name="ledger",
        settings=GroupSettings(start=start),
    )


def meta(world: World, partition: int) -> str:
    key = f"{world.key_prefix}:{{{partition}}}:meta"
    found = [redis.Redis.from_url(url, decode_responses=True).hget(key, "state") for url in world.urls]
    return next((str(state) for state in found if state), "absent")


def test_who_applies_a_plan_that_somebody_drops_is_told(world: World, database: Database, tmp_path: Path) -> None:
    plan, door = planned_move(database, "orders", 1), tmp_path / "door"
    failpoints.arm("change.after_plan", f"wait:{door}")
    with ThreadPoolExecutor(1) as pool:
        applying = pool.submit(apply_change, runtime_of(database, world.key_prefix), plan)
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer.route_change"), what="the plan to be recorded")
        assert drop_change(runtime_of(database), "orders") == 1
        door.touch()
        with pytest.raises(Conflict, match="was dropped meanwhile"):
            applying.result(30)
    assert load_route(database, "orders").version == 1


@pytest.mark.slow
def test_a_node_that_is_away_leaves_the_change_open_and_says_who_finishes_it(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.routes.change_driver.RETRY_FOR_S", 0.5)
    plan = planned_merge(database, "orders", [1, 2])
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another' WHERE name = 'node-2'")
    with pytest.raises(NodeNotArmed, match=r"change 1 stays open: mqlayer route repair orders"):
        apply_change(runtime_of(database, world.key_prefix), plan)
    (word,) = finish_changes(runtime_of(database, world.key_prefix)).values()
    assert "not the armed one" in word
    with pytest.raises(Conflict, match="change 1 of topic 'orders' is open"):
        planned_split(runtime_of(database, world.key_prefix), "orders", 1, at=[5])
    rearm_node(runtime_of(database, world.key_prefix), "node-2")
    assert finish_changes(runtime_of(database, world.key_prefix)) == {1: "done"}


def test_a_group_whose_version_stayed_behind_is_raised(world: World, database: Database) -> None:
    """A drain and the end of a change that met: neither saw the other's word."""
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
    split(runtime_of(database, world.key_prefix), "orders", 2, at=[600])
    make_group(world, database)
    version = "SELECT version FROM mqlayer.consumer_group"
    assert world.rows(version) == [(3,)]
    world.rows("UPDATE mqlayer.consumer_group SET version = 1")
    assert finish_changes(runtime_of(database, world.key_prefix)) == {}
    assert world.rows(version) == [(3,)]


def test_an_old_copy_of_a_deleted_partition_takes_nothing(world: World, database: Database) -> None:
    """A node put back to an old copy has it open again, and nobody would ever read what it takes."""
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
    make_group(world, database)
    assert retire_partitions(runtime_of(database, world.key_prefix)) == [1]
    assert meta(world, 1) == "deleted"
    redis.Redis.from_url(world.urls[0]).hset(f"{world.key_prefix}:{{1}}:meta", mapping={"state": "open", "lp_from": 0})
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another' WHERE name = 'node-1'")
    rearm_node(runtime_of(database, world.key_prefix), "node-1")
    assert meta(world, 1) == "deleted"


def test_what_a_group_has_yet_to_settle_is_counted_from_what_is_kept(world: World, database: Database) -> None:
    with world.relay():
        world.publish(100, keys=40)
        world.wait_until_whole()
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
    held = redis.Redis.from_url(world.urls[0]).xlen(f"{world.key_prefix}:{{1}}:log") - 1
    make_group(world, database, "earliest")
    (progress,) = drain_progress(runtime_of(database, world.key_prefix), "orders")
    assert (progress.group, progress.group_version, progress.partition, progress.remaining) == ("ledger", 1, 1, held)
    redis.Redis.from_url(world.urls[0]).hset(f"{world.key_prefix}:{{1}}:meta", "first", 11)
    (progress,) = drain_progress(runtime_of(database, world.key_prefix), "orders")
    assert progress.remaining == held - 10
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another'")
    (progress,) = drain_progress(runtime_of(database, world.key_prefix), "orders")
    assert progress.remaining is None


def test_a_plan_starts_from_the_version_that_is_asked_for(world: World, database: Database) -> None:
    plan = planned_split(runtime_of(database, world.key_prefix), "orders", 1, if_version=1)
    assert [(s.lp_from, s.lp_to, s.node) for s in plan.successors] == [(0, 256, 1), (256, 512, 1)]
    with pytest.raises(Conflict, match="is at route version 1, not 4"):
        planned_merge(database, "orders", [1, 2], if_version=4)
    with pytest.raises(InvalidInput, match="not both"):
        planned_split(runtime_of(database, world.key_prefix), "orders", 1, at=[5], measure_s=1)
    with pytest.raises(InvalidInput, match="measured for"):
        planned_split(runtime_of(database, world.key_prefix), "orders", 1, measure_s=float("nan"))
    with pytest.raises(NotFound, match="node 'nobody'"):
        planned_move(database, "orders", 1, to="nobody")


def test_a_move_without_a_target_goes_to_the_emptiest_other_node(world: World, database: Database) -> None:
    assert [s.node for s in planned_move(database, "orders", 1).successors] == [2]
    assert [r.node for r in move(runtime_of(database, world.key_prefix), "orders", 1).ranges] == [2, 2]
