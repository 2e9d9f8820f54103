"""Giving a node up: what else is under way, who comes back, and what must not happen to the living."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import redis

from mqlayer import Producer
from mqlayer.domain.assignment import assign
from mqlayer.domain.durability import Durability
from mqlayer.errors import Conflict, NodeNotArmed
from mqlayer.groups import members
from mqlayer.groups.members import join, send_heartbeat
from mqlayer.postgres.database import Database
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import MessageRun, Refused, append_command, append_reply
from mqlayer.routes import change_driver, finish_changes, give_up_node, node_loss, rearm_lost_nodes
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, rearm_node, set_durability, set_node_replicas
from tests.fixtures.dead_nodes import all_handled, bring, consuming, known_group, published
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import move, split
from tests.proof.runtimes import runtime_of
from tests.proof.step_driver import drive
from tests.proof.world import World

IN_ORDER = "everything is handled in order"

pytestmark = pytest.mark.world(nodes=2)


def states(world: World) -> dict[int, tuple[int, str]]:
    rows = world.rows("SELECT partition_id, node_id, state FROM mqlayer.partition")
    return {partition: (node, state) for partition, node, state in rows}


def give_up(world: World, database: Database) -> node_loss.NodeLossReport:
    return give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")


def rearm(world: World, database: Database) -> None:
    rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2")


@pytest.mark.full
def test_a_living_parent_of_a_merge_keeps_what_groups_have_not_drained(
    world: World, database: Database, node: RedisServer
) -> None:
    known_group(world, database)
    bring(world, 200, "before")
    assert drive("merge", "1", "2", environment=world.environment("change.after_plan=kill")) == -9
    node.kill()
    loss = give_up(world, database)
    assert loss.moved == (2,)
    assert loss.resent > 0
    assert states(world)[1] == (1, "sealed")
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


def test_a_node_that_is_back_in_the_middle_keeps_its_partitions(
    world: World, database: Database, node: RedisServer
) -> None:
    known_group(world, database)
    bring(world, 100, "before")
    node.kill()
    assert drive("give_up", "node-2", environment=world.environment("lost.after_disarm=kill")) == -9
    node.start()
    with pytest.raises(Conflict, match="answers"):
        give_up(world, database)
    rearm(world, database)
    assert states(world)[2] == (2, "open")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


@pytest.mark.full
def test_a_node_that_is_back_before_its_partition_is_moved_seals_it_itself(
    world: World, database: Database, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_group(world, database)
    bring(world, 100, "before")
    node.kill()

    def back_again(*arguments: object, **options: object) -> dict[int, str]:
        node.start()
        rearm(world, database)
        return {}

    monkeypatch.setattr(node_loss, "finish_changes", back_again)
    loss = give_up(world, database)
    assert loss.moved == ()
    assert states(world)[2] == (2, "sealed")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


def test_a_successor_on_the_lost_node_is_made_elsewhere(world: World, database: Database, node: RedisServer) -> None:
    world.add_topic("invoices", partitions=4)
    third = load_route(database, "invoices").ranges[2].partition
    with broken_off_at("change.after_open"):
        move(runtime_of(database, world.key_prefix), "invoices", third, to="node-2")
    node.kill()
    loss = give_up(world, database)
    assert len(loss.recreated) == 1
    assert all(node_id == 1 for node_id, state in states(world).values() if state != "deleted")
    with world.relay(), consuming(world) as seen:
        world.publish(50, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


def test_a_topic_that_was_created_half_holds_nobody_up(world: World, database: Database, node: RedisServer) -> None:
    with broken_off_at("topic.after_allocate"):
        create_topic(runtime_of(database, world.key_prefix), "aaa", partitions=2)
    node.kill()
    give_up(world, database)
    assert all(node_id == 1 for node_id, state in states(world).values() if state != "deleted")
    assert create_topic(runtime_of(database, world.key_prefix), "aaa", partitions=2).version == 1


@pytest.mark.full
def test_a_group_that_began_late_gets_what_a_wiped_node_gets_again(world: World, database: Database) -> None:
    bring(world, 300, "old")
    known_group(world, database, start="latest")
    bring(world, 50, "new")
    client = redis.Redis.from_url(world.urls[1])
    client.delete(*client.keys(f"{world.key_prefix}:*"))
    rearm(world, database)
    with world.relay():
        world.wait_until_whole()
        with consuming(world, start="latest") as seen:
            wanted = {f"new-{number}" for number in range(50)}
            wait_until(
                lambda: {body for bodies in [*seen.values()] for body in bodies if body.startswith("new")} == wanted,
                what="all that is new to the group",
                timeout_s=20,
            )


@pytest.mark.full
def test_the_copy_that_a_lost_node_brings_back_takes_nothing(
    world: World, database: Database, node: RedisServer
) -> None:
    known_group(world, database)
    bring(world, 50, "before")
    node.kill()
    move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    assert give_up(world, database).recreated == (2,)
    node.start()
    rearm(world, database)
    back = next(n for n in load_nodes(database) if n.name == "node-2")
    with NodeConnection(back) as connection:
        command = append_command(connection, world.key_prefix, 2, 999, [MessageRun(700, 1, 1, [b"x", b"k", b"b"])])
        assert append_reply(connection.call([command])[0], "node-2") == Refused("deleted", "")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


def test_what_was_given_another_node_is_made_there_also_after_a_kill_in_between(
    world: World, database: Database, node: RedisServer
) -> None:
    """Its first rows are in no outbox any more, so nobody but the operator's command may go on without them."""
    known_group(world, database)
    bring(world, 100, "before")
    move(runtime_of(database, world.key_prefix), "orders", 2, to="node-1")
    world.rows("DELETE FROM mqlayer_app.outbox WHERE lp >= 512 AND seq = 1")
    node.kill()
    assert drive("give_up", "node-2", environment=world.environment("lost.after_one=kill")) == -9
    assert states(world)[2] == (1, "sealed")
    assert give_up(world, database).recreated == (2,)
    with world.relay(), consuming(world) as seen:
        world.publish(50, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


def test_a_rebalance_beside_the_loss_leaves_nobody_with_a_partition_that_is_gone(
    world: World, database: Database, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_group(world, database)
    bring(world, 50, "before")
    node.kill()
    read, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if not read.is_set() and arguments[1]:
            read.set()
            go_on.wait(20)
        return assign(*arguments)

    # The package offers the function of this module's name.
    monkeypatch.setattr(sys.modules["mqlayer.groups.rebalance"], "assign", slow)
    sessions: list[members.MemberSession] = []
    joining = threading.Thread(
        target=lambda: sessions.append(join(database, group_id=1, member_id="m-one", lease_s=30))
    )
    giving_up = threading.Thread(target=lambda: give_up(world, database))
    joining.start()
    assert read.wait(10)
    giving_up.start()
    wait_until(lambda: states(world)[2][1] == "deleted", what="the partition to be gone", timeout_s=20)
    go_on.set()
    joining.join(20)
    giving_up.join(20)
    assert [
        a.partition for a in send_heartbeat(database, sessions[0], lease_s=30).assignments if a.partition == 2
    ] == []
    join(database, group_id=1, member_id="m-two", lease_s=30)
    assert not world.rows("SELECT 1 FROM mqlayer.assignment WHERE partition_id = 2 AND member_id IS NOT NULL")


@pytest.mark.full
def test_a_partition_that_its_node_does_not_have_leaves_the_others_there_alone(
    world: World, database: Database, node: RedisServer
) -> None:
    known_group(world, database)
    split(runtime_of(database, world.key_prefix), "orders", 2, at=[700])
    with world.relay(), consuming(world) as seen:
        bring(world, 50, "before")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)
        client = redis.Redis.from_url(node.url)
        # Nobody repairs this one: Postgres does not say what it has to be any more.
        world.rows("UPDATE mqlayer.partition SET state = 'importing' WHERE lp_from = 700")
        client.delete(f"{world.key_prefix}:{{4}}:meta")
        keys = [key for key, bodies in published(world).items() if bodies]
        before = sum(map(len, seen.values()))
        world.publish(100, tag="after")
        wait_until(lambda: sum(map(len, seen.values())) > before + len(keys), what="the others go on", timeout_s=20)


def test_what_is_sent_again_is_not_rotated_away_before(world: World, database: Database, node: RedisServer) -> None:
    bring(world, 200, "before")
    wait_until(
        lambda: (
            not world.rows(
                "SELECT 1 FROM mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp) "
                "WHERE c.seq > coalesce(r.seq, 0)"
            )
        ),
        what="all to be recorded as relayed",
    )
    node.kill()
    give_up(world, database)
    rows = world.rows("SELECT 1 FROM mqlayer_app.relayed WHERE lp >= 512 AND seq > 0")
    assert rows == [], "the outbox would be emptied of what the successors have not got"


def test_the_next_command_finishes_a_move_away(world: World, database: Database, node: RedisServer) -> None:
    bring(world, 50, "before")
    node.kill()
    with broken_off_at("change.before_sealed_commit"):
        move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    route = split(runtime_of(database, world.key_prefix, application=database), "orders", 1, at=[100])
    assert route.version == 3


def test_away_is_refused_where_direct_producers_may_have_published(
    world: World, database: Database, node: RedisServer
) -> None:
    with Producer(world.settings(), name="direct") as producer:
        producer.send("orders", key="k", body=b"1")
    node.kill()
    with pytest.raises(Conflict, match="--accept-loss"):
        move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    route = move(
        runtime_of(database, world.key_prefix, application=database),
        "orders",
        2,
        to="node-1",
        unreachable=True,
        accept_loss=True,
    )
    assert route.version == 2


@pytest.mark.full
def test_away_waits_for_a_node_that_answers_and_is_not_armed(
    world: World, database: Database, node: RedisServer
) -> None:
    bring(world, 50, "before")
    node.kill()
    node.start()
    with pytest.raises(NodeNotArmed):
        move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    rearm(world, database)
    assert finish_changes(runtime_of(database, world.key_prefix, application=database)) == {1: "done"}
    assert not world.rows("SELECT 1 FROM mqlayer.seal WHERE unreachable")


def move_a_parent_that_holds_more(world: World, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move a partition whose node is away for the driver only, and has more than the outbox proves."""
    known_group(world, database)
    bring(world, 100, "before")
    monkeypatch.setattr(
        change_driver.ChangeDriver, "_is_unreachable", lambda self, work, place: work.mode == "unreachable"
    )
    world.rows("UPDATE mqlayer_app.relayed SET seq = seq - 1 WHERE lp >= 512 AND seq > 1")
    move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    assert rearm_lost_nodes(runtime_of(database, world.key_prefix, application=database)) == {"node-2": "armed"}
    assert world.rows("SELECT unreachable, cut FROM mqlayer.seal") == [(False, True)]


def test_what_a_parent_holds_beyond_its_proven_marks_is_handled_once(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was away for the driver only; relays went on. The successor has the rest too, so no group handles it
    in the parent."""
    move_a_parent_that_holds_more(world, database, monkeypatch)
    with world.relay(), consuming(world) as seen:
        world.publish(50, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)
    assert dict(seen) == published(world), "handled twice"


def test_what_only_a_moved_parent_holds_is_in_its_successor_before_the_outbox_is_numbered_anew(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads it in the parent, and nobody sends by the old numbers any more: it would be held for relayed."""
    move_a_parent_that_holds_more(world, database, monkeypatch)
    world.publish(50, tag="after")
    wanted = published(world)
    world.rows("UPDATE mqlayer_app.identity SET timeline = 77")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: dict(seen) == wanted, what=IN_ORDER, timeout_s=30)


def lose_the_only_holder(world: World, node: RedisServer, durability: Durability) -> Runtime:
    """Give the topic a class that only the second node can hold, and kill that node."""
    runtime = world.runtime()
    for name in ("node-1", "node-2"):
        set_node_replicas(runtime, name, 1)
    set_durability(runtime, "orders", durability)
    # As a node that was declared with one is made anew without.
    world.rows("UPDATE mqlayer.node SET replicas = 0 WHERE name = 'node-1' RETURNING 1")
    node.kill()
    return runtime


def test_a_durability_class_that_no_other_node_holds_refuses_the_loss_before_anything_is_changed(
    world: World, database: Database, node: RedisServer, start_redis: StartRedis
) -> None:
    runtime = lose_the_only_holder(world, node, "replica")
    with pytest.raises(Conflict, match="no other node can hold durability replica of topic 'orders'"):
        give_up(world, database)
    assert world.rows("SELECT lost_at, armed_run_id IS NULL FROM mqlayer.node WHERE name = 'node-2'") == [(None, False)]
    assert states(world)[2] == (2, "open")
    world.add_node(start_redis().url)
    set_node_replicas(runtime, "node-3", 1)
    assert give_up(world, database).moved == (2,)
    route = load_route(database, "orders")
    assert (sorted(one.node for one in route.ranges), route.durability) == ([1, 3], "replica")


def test_a_class_that_is_given_up_lets_a_node_go(world: World, database: Database, node: RedisServer) -> None:
    runtime = lose_the_only_holder(world, node, "quorum")
    with pytest.raises(Conflict, match="mqlayer topic set orders --durability node"):
        give_up(world, database)
    set_durability(runtime, "orders", "node")
    assert give_up(world, database).moved == (2,)
