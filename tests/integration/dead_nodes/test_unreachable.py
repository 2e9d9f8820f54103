"""Partitions whose node is away, comes back, or never does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from mqlayer import App, Context, failpoints
from mqlayer.domain.routing import NodeId
from mqlayer.errors import ConfigurationRefused, Conflict, Reject, StoreUnavailable
from mqlayer.failpoints import FailpointHit
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.routes import apply_change, finish_changes, give_up_node, plan_move, rearm_lost_nodes
from mqlayer.runtime.route_cache import load_route
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.dead_nodes import all_handled, bring, consuming, first_times, known_group, published
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.failpoint_names import failpoint_names
from tests.proof.fall_back import FallBack
from tests.proof.route_steps import move
from tests.proof.runtimes import runtime_of
from tests.proof.step_driver import drive
from tests.proof.world import World

IN_ORDER = "everything is handled in order"
NOT_RECORDED = (
    "SELECT 1 FROM mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp) "
    "WHERE c.seq > coalesce(r.seq, 0)"
)

pytestmark = pytest.mark.world(nodes=2)


def test_publishing_goes_on_without_a_dead_node_and_consuming_in_order_when_it_is_back(
    world: World, database: Database, node: RedisServer
) -> None:
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    node.kill()
    world.publish(100, tag="while")
    with pytest.raises(StoreUnavailable):
        apply_change(runtime_of(database, world.key_prefix), plan_move(load_route(database, "orders"), 2, NodeId(1)))
    assert "refused" in finish_changes(runtime_of(database, world.key_prefix, application=database))[1]
    assert finish_changes(runtime_of(database, world.key_prefix, application=database), unreachable=True) == {1: "done"}
    assert load_route(database, "orders").version == 2
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wait_until(lambda: len(seen) > 5, what="the living node's keys are handled", timeout_s=30)
        node.start()
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)


def test_a_node_that_is_lost_for_good_is_given_up_and_what_the_outbox_holds_is_sent_again(
    world: World, database: Database, node: RedisServer
) -> None:
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    with pytest.raises(Conflict, match="answers"):
        give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    node.kill()
    loss = give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    assert (loss.moved, loss.recreated, loss.only_on_node) == ((2,), (), 0)
    assert loss.resent > 0
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)
    assert world.rows("SELECT act FROM mqlayer.audit WHERE act = 'node lost'")


@pytest.mark.full
def test_what_died_in_a_lost_partition_stays_dead_in_its_successor(
    world: World, database: Database, node: RedisServer
) -> None:
    """Case 67: it is sent again there, under its number and at another offset."""
    with world.relay():
        world.publish(100, tag="before")
        world.wait_until_whole()
    app = App(world.settings(lease_s=10.0))

    @app.consumer("orders", group="ledger", start="earliest", policy="dead_letter")
    def refuse(_body: bytes, ctx: Context) -> None:
        if ctx.partition == 2:
            raise Reject("no")

    died = "SELECT convert_from(body, 'UTF8') FROM mqlayer.dead_message"
    of_node = "SELECT count(*) FROM mqlayer_app.outbox WHERE lp >= 512"
    app.start()
    try:
        [(expected,)] = world.rows(of_node)
        wait_until(lambda: len(world.rows(died)) == expected > 0, what="all of the partition is dead", timeout_s=30)
    finally:
        app.stop()
    node.kill()
    assert give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2").resent > 0
    dead = {body for (body,) in world.rows(died)}
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="after")
        wanted = {key: [body for body in bodies if body not in dead] for key, bodies in published(world).items()}
        later = {key: [body for body in bodies if body.startswith("after")] for key, bodies in wanted.items()}
        wait_until(
            lambda: all(
                [body for body in seen[key] if body.startswith("after")] == bodies for key, bodies in later.items()
            ),
            what="what came after is handled", timeout_s=30,
        )  # fmt: skip
        assert not dead & {body for bodies in seen.values() for body in bodies}


@pytest.mark.parametrize("name", some_of(sorted(name for name in failpoint_names() if name.startswith("lost.")), 9))
def test_giving_a_node_up_that_was_killed_half_way_is_done_again(
    world: World, database: Database, node: RedisServer, name: str
) -> None:
    world.add_topic("invoices", partitions=4)
    with world.relay():
        world.publish(100, tag="before")
        world.wait_until_whole()
    node.kill()
    assert drive("give_up", "node-2", environment=world.environment(f"{name}=kill")) == -9
    give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    assert not world.rows("SELECT 1 FROM mqlayer.partition WHERE node_id = 2 AND state <> 'deleted'")
    with world.relay(), consuming(world) as seen:
        wait_until(lambda: all_handled(world, seen), what="everything is handled in order", timeout_s=30)


@pytest.mark.full
def test_members_that_held_a_lost_partition_go_on_with_its_successor(
    world: World, database: Database, node: RedisServer
) -> None:
    """Also a sealed one that the group had not drained: it is made anew elsewhere, from the outbox."""
    with world.relay(), consuming(world) as seen:
        world.publish(100, tag="before")
        wait_until(lambda: all_handled(world, seen), what="the members hold both partitions", timeout_s=30)
    world.publish(100, tag="waiting")
    with world.relay():
        world.wait_until_whole()
        move(runtime_of(database, world.key_prefix), "orders", 2, to="node-1")
        world.publish(50, tag="moved")
        world.wait_until_whole()
    # The node is stopped at first: else its members may drain the partition before the loss.
    node.send(signal.SIGSTOP)
    with consuming(world) as seen_later, world.relay():
        held = "SELECT 1 FROM mqlayer.assignment WHERE partition_id = 2 AND member_id IS NOT NULL"
        wait_until(lambda: world.rows(held), timeout_s=30, what="the members hold it")
        node.kill()
        loss = give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")
        assert (loss.moved, loss.recreated) == ((), (2,))
        wait_until(
            lambda: all(
                first_times(seen_later.get(key, []))[-len(wanted[5:]) :] == wanted[5:]
                for key, wanted in published(world).items()
            ),
            what="everything that was not handled is handled in order",
            timeout_s=30,
        )


@pytest.mark.full
def test_a_node_that_lost_everything_goes_on_behind_what_the_outbox_forgot(world: World, database: Database) -> None:
    """Rows that were relayed and rotated away are gone with the node; an operator says so, and the loss is written."""
    with world.relay():
        world.publish(200, tag="before")
        world.wait_until_whole()
    world.rows("DELETE FROM mqlayer_app.outbox")
    client = redis.Redis.from_url(world.urls[1])
    client.delete(*client.keys(f"{world.key_prefix}:*"))
    world.publish(100, tag="after")
    with world.relay():
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer_app.quarantined"), what="LPs are held")
        rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2", accept_loss=True)
        wait_until(
            lambda: (
                sum(map(len, world.relayed().values())) >= 100 + 0
                and not world.rows("SELECT 1 FROM mqlayer_app.quarantined")
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


def moved_off_after_it_was_sealed_short(world: World, database: Database, node: RedisServer, place: Path) -> None:
    """Have partition 2 fall back and sealed before the relay notices, its driver die, and its node moved off."""
    known_group(world, database)
    bring(world, 100, "before")
    then = FallBack(node, place)
    bring(world, 100, "fallen")
    wait_until(lambda: not world.rows(NOT_RECORDED), what="all to be recorded as relayed")
    then.happen()
    rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    with broken_off_at("change.after_seal"):
        move(runtime_of(database, world.key_prefix), "orders", 2, to="node-1")
    node.kill()
    assert finish_changes(runtime_of(database, world.key_prefix, application=database), unreachable=True) == {1: "done"}
    node.start()


def last_arming(world: World) -> dict[str, Any]:
    rows = world.rows("SELECT facts FROM mqlayer.audit WHERE act = 'node rearm' ORDER BY audit_id DESC LIMIT 1")
    return dict(rows[0][0])


@pytest.mark.full
@pytest.mark.parametrize("broken", some_of(["", "repair.after_resend", "repair.after_seal"], 3))
def test_a_parent_that_was_sealed_short_of_what_its_outbox_proves_is_filled_up_when_its_node_is_back(
    world: World, database: Database, node: RedisServer, tmp_path: Path, broken: str
) -> None:
    moved_off_after_it_was_sealed_short(world, database, node, tmp_path / "then")
    if broken:
        failpoints.arm(broken, "raise")
        with pytest.raises(FailpointHit):
            rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    assert rearm_lost_nodes(runtime_of(database, world.key_prefix, application=database)) == {"node-2": "armed"}
    assert last_arming(world)["lost"] == {}
    log: Any = redis.Redis.from_url(node.url).xrange(partition_keys(world.key_prefix, 2).log)
    commands = [fields[b"b"].decode() for _, fields in log if fields[b"m"] == b"command"]
    assert commands == [str(world.rows("SELECT seal_id FROM mqlayer.seal")[0][0])], "one, and the recorded one"
    assert log[-1][1][b"m"] == b"command"
    with world.relay(), consuming(world) as seen:
        world.publish(50, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)
    assert dict(seen) == published(world), "handled twice"


@pytest.mark.parametrize("gone", some_of(["some", "all"], 2))
def test_what_the_outbox_does_not_hold_any_more_of_it_is_given_up_only_by_an_operators_word(
    world: World, database: Database, node: RedisServer, tmp_path: Path, gone: str
) -> None:
    moved_off_after_it_was_sealed_short(world, database, node, tmp_path / "then")
    fallen = world.rows(
        "SELECT lp, seq FROM mqlayer_app.outbox WHERE lp >= 512 AND starts_with(convert_from(body, 'UTF8'), 'fallen') "
        "ORDER BY lp, seq"
    )
    for lp, seq in fallen[:3] if gone == "some" else fallen:
        world.rows("DELETE FROM mqlayer_app.outbox WHERE lp = %s AND seq = %s", lp, seq)
    waits = rearm_lost_nodes(runtime_of(database, world.key_prefix, application=database))
    assert "--accept-loss goes on without them" in waits["node-2"]
    rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2", accept_loss=True)
    assert last_arming(world)["lost"] == {"2": 3 if gone == "some" else len(fallen)}
    with world.relay(), consuming(world) as seen:
        world.publish(50, tag="after")
        wait_until(lambda: all_handled(world, seen), what=IN_ORDER, timeout_s=30)


@pytest.mark.full
def test_another_outbox_proves_nothing(world: World, database: Database, node: RedisServer) -> None:
    bring(world, 50, "before")
    node.kill()
    world.rows("UPDATE mqlayer_app.identity SET outbox_uuid = gen_random_uuid()")
    with pytest.raises(ConfigurationRefused, match="MQLAYER_APP_DSN"):
        move(runtime_of(database, world.key_prefix, application=database), "orders", 2, to="node-1", unreachable=True)
    assert load_route(database, "orders").version == 1
