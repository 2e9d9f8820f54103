"""Nodes and the outbox's Postgres lose data at once, as in a power cut: nothing is forgotten, or taken for another."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqlayer.changes import finish_changes, split
from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.failpoints import FailpointHit, arm, disarm_all
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.migrations import migrate
from mqlayer.relay import recover_now, relay_once
from mqlayer.relay.refilling import refill
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, rearm_node, register_node
from mqlayer.topics.resending import Lent
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.waiting import wait_until
from tests.integration.failover.test_lost_commits import EarlierState, expected, recovered, values
from tests.proof.fall_back import FallBack, lose_all
from tests.proof.hand import Hand
from tests.proof.outbox_world import QUICK, OutboxWorld

LOST_COMMITS = "UPDATE mqlayer_app.identity SET timeline = 77"


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    disarm_all()


@pytest.fixture
def node(start_redis: StartRedis) -> RedisServer:
    """A Redis of the test's own."""
    return start_redis()


@pytest.fixture
def world(database_dsn: str, node: RedisServer, key_prefix: str) -> OutboxWorld:
    """A node, and the topic orders of two partitions."""
    world = OutboxWorld(database_dsn, key_prefix, [node.url])
    world.add_topic("orders", partitions=2)
    return world


def bring(world: OutboxWorld, count: int, tag: str) -> None:
    """Publish messages of ten keys, and relay them."""
    world.publish(count, keys=10, tag=tag)
    relay_once(world.settings(), limits=QUICK)


def sources(world: OutboxWorld) -> dict[str, set[int]]:
    """Return under which sources the messages of each tag are in Redis."""
    found: dict[str, set[int]] = {}
    for record in world.records():
        found.setdefault(record.value.partition("-")[0], set()).add(record.source)
    return found


@pytest.mark.parametrize("lost", ["all", "some"])
def test_what_a_node_lost_of_an_outbox_that_may_lack_commits_comes_again_under_its_own_numbers(
    world: OutboxWorld, node: RedisServer, tmp_path: Path, lost: str
) -> None:
    """Handlers that were given it know it by these. It is recorded as relayed: nobody else would send it again."""
    bring(world, 30, "a")
    then = FallBack(node, tmp_path / "then")
    bring(world, 30, "b")
    if lost == "all":
        lose_all(node)
    else:
        then.happen()
    world.rows(LOST_COMMITS)
    world.publish(20, keys=10, tag="new")
    relay_once(world.settings(), limits=QUICK)
    assert recovered(world)
    assert values(world) == expected(10, ("a", 30), ("b", 30), ("new", 20))
    found = sources(world)
    assert found["a"] == found["b"] == {1}
    assert found["new"].isdisjoint({1})


def test_who_dies_in_the_middle_of_that_leaves_it_to_the_next_one(world: OutboxWorld, node: RedisServer) -> None:
    bring(world, 60, "a")
    lose_all(node)
    world.rows(LOST_COMMITS)
    with world.relay_process(failpoints="recover.after_refill=kill") as process:
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert 0 < len(list(world.records())) < 60
    bring(world, 20, "new")
    assert values(world) == expected(10, ("a", 60), ("new", 20))


def test_what_neither_node_nor_outbox_holds_any_more_keeps_its_lps_waiting(
    world: OutboxWorld, node: RedisServer
) -> None:
    bring(world, 30, "a")
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.outbox LIMIT 1")
    world.rows("DELETE FROM mqlayer_app.outbox WHERE lp = %s AND seq <= 2", lp)
    bodies = "SELECT convert_from(body, 'UTF8') FROM mqlayer_app.outbox WHERE lp"
    waiting = {body for (body,) in world.rows(f"{bodies} = %s", lp)}
    others = {body for (body,) in world.rows(f"{bodies} <> %s", lp)}
    lose_all(node)
    world.rows(LOST_COMMITS)
    with Database(world.dsn) as database:
        found = recover_now(database, database, world.settings())
    assert found is not None
    assert waiting
    assert found.gone_count == 2 + len(waiting)
    with world.relay():
        held = "SELECT topic_id, lp FROM mqlayer_app.set_aside"
        wait_until(lambda: world.rows(held) == [(topic_id, lp)], timeout_s=20, what="the LP to be held")
    assert {record.value for record in world.records()} == others
    with Database(world.dsn) as database:
        rearm_node(database, "node-1", prefix=world.key_prefix, application=database, accept_loss=True)
    relay_once(world.settings(), limits=QUICK)
    assert {record.value for record in world.records()} == others | waiting


def test_while_a_route_changes_nothing_is_lost_either(world: OutboxWorld, node: RedisServer) -> None:
    """The parent is sealed for good, and no successor serves as yet."""
    bring(world, 30, "a")
    arm("change.after_open", "raise")
    with Database(world.dsn) as database:
        with pytest.raises(FailpointHit):
            split(database, "orders", 1, prefix=world.key_prefix, application=database)
        disarm_all()
        lose_all(node)
        world.rows(LOST_COMMITS)
        assert recover_now(database, database, world.settings()) is not None
        hand = Hand(database, world.key_prefix, "orders")
        finish_changes(database, prefix=world.key_prefix, application=database)
        bring(world, 20, "new")
        hand.consume_all()
    assert hand.bodies() == expected(10, ("a", 30), ("new", 20))


def test_what_has_other_numbers_now_does_not_take_the_place_of_what_a_sealed_partition_lost(
    database_dsn: str, node: RedisServer, start_postgres: StartPostgres, key_prefix: str
) -> None:
    """Only the outbox's server lost commits: a seal of before tells of numbers that are given out again."""
    own = start_postgres().create_database("app")
    migrate(own)
    world = OutboxWorld(own, key_prefix, [node.url], control_dsn=database_dsn)
    with Database(database_dsn) as control, Database(own) as application:
        register_node(control, name="node-1", url=node.url)
        create_topic(control, "orders", prefix=key_prefix, application=application)
        bring(world, 20, "a")
        then = EarlierState(world)
        bring(world, 20, "lost")
        split(control, "orders", 1, prefix=key_prefix, application=application)
        then.come_back()
        world.rows(LOST_COMMITS)
        world.publish(20, keys=10, tag="new")
        lose_all(node)
        with pytest.raises(Conflict, match="may have others under these numbers"):
            recover_now(application, control, world.settings())
        rearm_node(control, "node-1", prefix=key_prefix, application=application, accept_loss=True)
        assert recover_now(application, control, world.settings()) is not None
        assert relay_once(world.settings(), limits=QUICK) == 20
        hand = Hand(control, key_prefix, "orders")
        hand.consume_all()
    assert hand.bodies() == expected(10, ("a", 20), ("new", 20))


def test_what_no_open_partition_serves_is_not_forgotten(database_dsn: str) -> None:
    sealed = (1, 1, 0, 512, "sealed")
    with connect(database_dsn) as outbox:
        lent = Lent(1, uuid.uuid4(), outbox)
        with pytest.raises(StoreUnavailable, match="LP 7 changes"):
            refill(lent, lambda _: pytest.fail("nobody is to be asked"), "p", 1, [sealed], {7: (1, 2)})
