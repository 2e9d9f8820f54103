"""Partitions whose node is away, comes back, or never does."""

from __future__ import annotations

import pytest
import redis

from mqlayer.changes import apply_change, finish_changes, give_up_node, move, plan_move
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.routes.cache import load_route
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.dead_nodes import all_handled, consuming, first_times, published
from tests.fixtures.waiting import wait_until
from tests.proof.driving import drive
from tests.proof.failpoint_names import failpoint_names
from tests.proof.outbox_world import OutboxWorld


def test_publishing_goes_on_without_a_dead_node_and_consuming_in_order_when_it_is_back(
    world: OutboxWorld, database: Database, node: RedisServer
) -> None:
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    node.kill()
    world.publish(100, tag="while")
    with pytest.raises(StoreUnavailable):
        apply_change(database, plan_move(load_route(database, "orders"), 2, NodeId(1)), prefix=world.key_prefix)
    assert "refused" in finish_changes(database, prefix=world.key_prefix, application=database)[1]
    assert finish_changes(database, prefix=world.key_prefix, application=database, away=True) == {1: "done"}
    assert load_route(database, "orders").version == 2
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wait_until(lambda: len(seen) > 5, what="the living node's keys are handled")
        node.start()
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)


def test_a_node_that_is_lost_for_good_is_given_up_and_what_the_outbox_holds_is_sent_again(
    world: OutboxWorld, database: Database, node: RedisServer
) -> None:
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    with pytest.raises(Conflict, match="answers"):
        give_up_node(database, "node-2", prefix=world.key_prefix, application=database)
    node.kill()
    loss = give_up_node(database, "node-2", prefix=world.key_prefix, application=database)
    assert (loss.moved, loss.remade, loss.only_there) == ((2,), (), 0)
    assert loss.again > 0
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)
    assert world.rows("SELECT act FROM mqlayer.audit WHERE act = 'node lost'")


@pytest.mark.parametrize("name", sorted(name for name in failpoint_names() if name.startswith("lost.")))
def test_giving_a_node_up_that_was_killed_half_way_is_done_again(
    world: OutboxWorld, database: Database, node: RedisServer, name: str
) -> None:
    world.add_topic("invoices", partitions=4)
    with world.relay():
        world.publish(100, tag="before")
        world.wait_until_whole()
    node.kill()
    assert drive("give_up", "node-2", environment=world.environment(f"{name}=kill")) == -9
    give_up_node(database, "node-2", prefix=world.key_prefix, application=database)
    assert not world.rows("SELECT 1 FROM mqlayer.partition WHERE node_id = 2 AND state <> 'deleted'")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)


def test_members_that_held_a_lost_partition_go_on_with_its_successor(
    world: OutboxWorld, database: Database, node: RedisServer
) -> None:
    """Also a sealed one that the group had not drained: it is made anew elsewhere, from the outbox."""
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="before")
        wait_until(lambda: all_handled(world, seen), what="the members hold both partitions")
    world.publish(100, tag="waiting")
    with world.relay():
        world.wait_until_whole()
        move(database, "orders", 2, prefix=world.key_prefix, to="node-1")
        world.publish(50, tag="moved")
        world.wait_until_whole()
    with consuming(world) as seen_later, world.relay():
        node.kill()
        loss = give_up_node(database, "node-2", prefix=world.key_prefix, application=database)
        assert (loss.moved, loss.remade) == ((), (2,))
        wait_until(
            lambda: all(
                first_times(seen_later.get(key, []))[-len(wanted[5:]) :] == wanted[5:]
                for key, wanted in published(world).items()
            ),
            what="everything that was not handled is handled in order",
            timeout_s=30,
        )


def test_a_node_that_lost_everything_goes_on_behind_what_the_outbox_forgot(
    world: OutboxWorld, database: Database
) -> None:
    """Rows that were relayed and rotated away are gone with the node; an operator says so, and the loss is written."""
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    world.rows("DELETE FROM mqlayer_app.outbox")
    client = redis.Redis.from_url(world.urls[1])
    client.delete(*client.keys(f"{world.key_prefix}:*"))
    world.publish(100, tag="after")
    with world.relay():
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer_app.set_aside"), what="LPs are held")
        rearm_node(database, "node-2", prefix=world.key_prefix, application=database, accept_loss=True)
        wait_until(
            lambda: (
                sum(map(len, world.relayed().values())) >= 100 + 0
                and not world.rows("SELECT 1 FROM mqlayer_app.set_aside")
            ),
            what="LPs go on",
        )
        with consuming(world) as seen:
            wait_until(
                lambda: all(
                    bodies[-len(wanted) :] == wanted
                    for key, wanted in published(world).items()
                    for bodies in [seen.get(key, [])]
                ),
                what="what came after is handled",
                timeout_s=20,
            )
    ((facts,),) = world.rows("SELECT facts FROM mqlayer.audit WHERE act = 'node rearm' ORDER BY audit_id DESC LIMIT 1")
    assert sum(facts["lost"].values()) > 0
