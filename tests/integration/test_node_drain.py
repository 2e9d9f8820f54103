"""Draining and removing nodes: the plan, the order of things, refusals and races. Kills: chaos/test_drain_kills.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mqlayer import Producer
from mqlayer.archive import archive_pass
from mqlayer.doctor import diagnose
from mqlayer.errors import Conflict
from mqlayer.postgres.database import Database
from mqlayer.routes import (
    DrainStep,
    apply_plan,
    drain_node,
    finish_changes,
    plan_drain,
    planned_move,
    planned_split,
    route_ranges,
)
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.stack import RedisServer
from mqlayer.topics import begin_drain, create_topic, register_node, remove_node, set_archived, stop_drain
from tests.fixtures.commands import Commands
from tests.fixtures.dead_nodes import all_handled, bring, consuming, known_group
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.node_locks import lock_of_nodes
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import move, split
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2)


def left_on(world: World, node: int) -> int:
    (count,) = world.rows(
        "SELECT count(*)::int FROM mqlayer.partition WHERE node_id = %s AND state <> 'deleted'", node
    )[0]
    return int(count)


def test_a_node_is_drained_and_removed_while_groups_consume(world: World, database: Database) -> None:
    world.add_topic("quiet", partitions=4)
    known_group(world, database)
    bring(world, 200, "before")
    runtime = world.runtime()
    plan = plan_drain(runtime, "node-1")
    assert {(one.topic, one.target_name) for one in plan.moves} == {("orders", "node-2"), ("quiet", "node-2")}
    (of_ledger,) = plan.groups
    assert (of_ledger.group, of_ledger.drain_s) == ("ledger", None)
    assert 0 < (of_ledger.left or 0) <= 200
    assert set(plan.held.values()) == {
        "topic quiet has no group, and keeps all its messages: create one, or delete the topic"
    }
    known_group_of_quiet(world)
    with consuming(world) as seen, world.relay():
        told: list[DrainStep] = []
        report = drain_node(runtime, "node-1", timeout_s=60, tell=told.append)
        assert report.is_empty
        assert {one.partition for one in told if one.state == "moved"} == {one.partition for one in plan.moves}
        assert left_on(world, 1) == 0
        remove_node(runtime, "node-1")
        world.publish(100, tag="after")
        wait_until(lambda: all_handled(world, seen), timeout_s=20, what="all to be handled, in order")
    assert [one.name for one in load_nodes(database)] == ["node-2"]
    # Old routes still name it, and its name is free.
    assert {one.node for one in route_ranges(database, "orders", 1)} == {"node-1@1", "node-2"}
    assert register_node(runtime, name="node-1", url=world.urls[0]).node_id == 3


def known_group_of_quiet(world: World) -> None:
    world.rows(
        "INSERT INTO mqlayer.consumer_group (topic_id, name, state, start, backoff_s) "
        "SELECT topic_id, 'none', 'live', 'latest', '{1}' FROM mqlayer.topic WHERE name = 'quiet' RETURNING group_id"
    )
    world.rows(
        "INSERT INTO mqlayer.drained (group_id, partition_id) SELECT group_id, partition_id FROM mqlayer.partition p "
        "JOIN mqlayer.consumer_group g USING (topic_id) WHERE g.name = 'none' RETURNING group_id"
    )


def test_a_draining_node_gets_no_partition_in_any_way(world: World, database: Database) -> None:
    runtime = world.runtime()
    assert begin_drain(runtime, "node-2")
    assert not begin_drain(runtime, "node-2")
    with pytest.raises(Conflict, match="node 'node-2' is being drained"):
        planned_move(database, "orders", 1, to="node-2")
    with pytest.raises(Conflict, match="no other node takes partitions: register one"):
        planned_move(database, "orders", 1)
    with pytest.raises(Conflict, match="node 'node-2' is being drained"):
        # Its successors stay on its node.
        split(runtime, "orders", 2, at=[700])
    assert {r.node for r in create_topic(runtime, "mails").ranges} == {1}
    with pytest.raises(Conflict, match="node-2 is being drained, end that: mqlayer node drain node-2 --stop; or"):
        begin_drain(runtime, "node-1")
    with pytest.raises(Conflict, match="holds partitions: 1 open"):
        remove_node(runtime, "node-2")
    assert stop_drain(runtime, "node-2")
    assert not stop_drain(runtime, "node-2")
    assert move(runtime, "orders", 1, to="node-2").version == 2


def test_a_plan_recorded_before_the_mark_is_moved_away_too(world: World, database: Database) -> None:
    runtime = world.runtime()
    known_group(world, database)
    with broken_off_at("change.after_plan"):
        move(runtime, "orders", 1, to="node-2")
    assert not drain_node(runtime, "node-2", timeout_s=0).failed
    assert {r.node for r in load_route(database, "orders").ranges} == {1}


def test_a_plan_waits_for_the_mark_and_is_refused(world: World, database: Database) -> None:
    """Who planned before the mark commits finds it there, whatever was read before."""
    plan = planned_move(database, "orders", 1, to="node-2")
    refused: list[str] = []

    def apply() -> None:
        try:
            apply_plan(world.runtime(), plan)
        except Conflict as error:
            refused.append(str(error))

    with database.connection() as connection, connection.transaction():
        connection.execute("UPDATE mqlayer.node SET draining_at = now() WHERE name = 'node-2'")
        other = threading.Thread(target=apply)
        other.start()
        blocked = (
            "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        wait_until(lambda: world.rows(blocked) == [(1,)], what="the plan to wait for the mark")
    other.join(10)
    (said,) = refused
    assert "node 'node-2' is being drained: it gets no partitions" in said
    assert "mqlayer node drain node-2 --stop" in said


def test_of_two_drains_of_the_last_nodes_one_begins(world: World, database: Database) -> None:
    """Both marked their node before either looked for another one."""
    runtime, refused = world.runtime(), list[str]()

    def drain(name: str) -> None:
        try:
            begin_drain(runtime, name)
        except Conflict as error:
            refused.append(str(error))

    with ThreadPoolExecutor(2) as pool, lock_of_nodes(world.dsn, waiting=2):
        drains = [pool.submit(drain, name) for name in ("node-1", "node-2")]
    for one in drains:
        one.result()
    (said,) = refused
    assert "no other node can take the partitions" in said
    assert sum(node.takes_partitions for node in load_nodes(database)) == 1


@pytest.mark.world(nodes=2, partitions=1)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_only_target_of_a_drain_is_not_removed(world: World, database: Database, at_once: bool) -> None:
    """At once, one of both is refused; behind the drain, the removal."""
    runtime, refused = world.runtime(), list[str]()

    def attempt(act: Callable[[Runtime, str], object], name: str) -> None:
        try:
            act(runtime, name)
        except Conflict as error:
            refused.append(str(error))

    if at_once:
        with ThreadPoolExecutor(2) as pool, lock_of_nodes(world.dsn, waiting=2):
            acts = [pool.submit(attempt, *one) for one in ((begin_drain, "node-1"), (remove_node, "node-2"))]
        for one in acts:
            one.result()
    else:
        begin_drain(runtime, "node-1")
        attempt(remove_node, "node-2")
        assert "'node-1' is being drained, and only node 'node-2' can take its partitions" in refused[0]
        assert "mqlayer node drain node-1 --stop" in refused[0]
    assert len(refused) == 1
    assert any(node.takes_partitions for node in load_nodes(database))
    if load_nodes(database)[0].draining_at is not None:
        stop_drain(runtime, "node-1")
        remove_node(runtime, "node-2")


def test_a_silent_node_is_no_target_and_a_dead_one_can_not_drain(
    world: World, database: Database, node: RedisServer
) -> None:
    runtime = world.runtime()
    node.kill()
    with pytest.raises(Conflict, match="node-2 does not answer: start its Redis again; or register another Redis"):
        plan_drain(runtime, "node-1")
    quick = replace(runtime, settings=world.settings(connect_timeout_s=0.2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mqlayer.routes.node_drain.RETRY_AFTER_S", 0.01)
        report = drain_node(quick, "node-2")
    assert list(report.failed) == [2]
    finish_changes(quick)


@pytest.mark.world(nodes=2, by_commands=True)
def test_the_commands_show_plan_progress_and_what_is_left(world: World, database: Database, run: Commands) -> None:
    known_group(world, database)
    bring(world, 20, "m")
    shown = run.text("node", "drain", "node-1")
    assert "1 partitions to move" in shown
    assert "no change was measured yet" in shown
    assert "nothing was changed: --yes does this" in shown
    ended = run("node", "drain", "node-1", "--yes", "--timeout", "0")
    assert ended.exit_code == 1
    assert "topic orders, partition 1 moved: to node-2 in" in ended.output
    assert "partition 1 waits: group ledger:" in ended.output
    assert "node node-1 is not empty: partitions 1 wait; go on with mqlayer node drain node-1 --yes" in ended.output
    assert '"draining_at": "20' in run.text("node", "list", "--json")
    assert "holds partitions: 1 sealed" in run.failure("node", "remove", "node-1", "--yes")
    found = {one.check: one for one in diagnose(world.settings()) if one.check == "draining"}
    assert "node node-1 drains since" in found["draining"].seen
    assert "gets partitions again" in run.text("node", "drain", "node-1", "--stop")


def test_a_producer_finds_the_partitions_of_a_removed_node(world: World, database: Database) -> None:
    """It knows the old route, and its node no more."""
    known_group(world, database)
    with Producer(world.settings(), name="direct") as producer:
        for number in range(20):
            producer.send("orders", key=f"key-{number}", body=b"0")
        with consuming(world) as seen:
            assert drain_node(world.runtime(), "node-1", timeout_s=60).is_empty
            remove_node(world.runtime(), "node-1")
            receipts = [producer.send("orders", key=f"key-{number}", body=b"1") for number in range(20)]
            wait_until(lambda: sum(map(len, seen.values())) >= 40, what="all to be handled")
    nodes = {int(r.partition): r.node for r in load_route(database, "orders").ranges}
    assert {nodes[receipt.partition] for receipt in receipts} == {2}


def test_a_split_is_planned_onto_other_nodes_than_a_draining_one(world: World, database: Database) -> None:
    runtime = world.runtime()
    begin_drain(runtime, "node-1")
    assert [s.node for s in planned_split(runtime, "orders", 1, at=[100], to=["node-2"]).successors] == [2, 2]


def test_a_drain_waits_for_the_archive_and_says_so(world: World, database: Database) -> None:
    known_group(world, database)
    set_archived(world.runtime(), "orders", archived=True)
    drained = "INSERT INTO mqlayer.drained (group_id, partition_id) SELECT group_id, 1 FROM mqlayer.consumer_group"
    world.rows(f"{drained} RETURNING 1")
    report = drain_node(world.runtime(), "node-1", timeout_s=0)
    assert report.waiting == {1: "the archive goes first"}

    def is_empty() -> bool:
        archive_pass(world.runtime())
        return drain_node(world.runtime(), "node-1", timeout_s=0).is_empty

    wait_until(is_empty, what="the partition to be archived and retired")
