"""Nodes and the outbox's Postgres lose data at once, as in a power cut: nothing is forgotten, or taken for another."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis

from mqlayer.domain.routing import lp_of
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import AS_BEFORE_UNLESS_CLOSED, MessageRun, Refused, append_command, append_reply
from mqlayer.relay import recover_now, relay_once
from mqlayer.routes import finish_changes
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, rearm_node, register_node
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.fall_back import FallBack, lose_all
from tests.proof.lost_commits import EarlierState, expected, recovered, values
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

LOST_COMMITS = "UPDATE mqlayer_app.identity SET timeline = 77"

pytestmark = pytest.mark.world(own_node=True)


def bring(world: World, count: int, tag: str) -> None:
    """Publish messages of ten keys, and relay them."""
    world.publish(count, keys=10, tag=tag)
    relay_once(world.settings(), limits=QUICK)


def sources(world: World) -> dict[str, set[int]]:
    """Return under which sources the messages of each tag are in Redis."""
    found: dict[str, set[int]] = {}
    for record in world.records():
        found.setdefault(record.value.partition("-")[0], set()).add(record.source)
    return found


@pytest.mark.parametrize("lost", some_of(["all", "some"], 2))
def test_what_a_node_lost_of_an_outbox_that_may_lack_commits_comes_again_under_its_own_numbers(
    world: World, node: RedisServer, tmp_path: Path, lost: str
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


def test_who_dies_in_the_middle_of_that_leaves_it_to_the_next_one(world: World, node: RedisServer) -> None:
    bring(world, 60, "a")
    lose_all(node)
    world.rows(LOST_COMMITS)
    with world.relay_process(failpoints="recover.after_refill=kill") as process:
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert 0 < len(list(world.records())) < 60
    bring(world, 20, "new")
    assert values(world) == expected(10, ("a", 60), ("new", 20))


@pytest.mark.full
def test_what_neither_node_nor_outbox_holds_any_more_keeps_its_lps_waiting(world: World, node: RedisServer) -> None:
    bring(world, 30, "a")
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.outbox LIMIT 1")
    world.rows("DELETE FROM mqlayer_app.outbox WHERE lp = %s AND seq <= 2", lp)
    bodies = "SELECT convert_from(body, 'UTF8') FROM mqlayer_app.outbox WHERE lp"
    waiting = {body for (body,) in world.rows(f"{bodies} = %s", lp)}
    others = {body for (body,) in world.rows(f"{bodies} <> %s", lp)}
    lose_all(node)
    world.rows(LOST_COMMITS)
    found = recover_now(world.runtime())
    assert found is not None
    assert waiting
    assert found.missing_count == 2 + len(waiting)
    with world.relay():
        held = "SELECT topic_id, lp FROM mqlayer_app.quarantined"
        wait_until(lambda: world.rows(held) == [(topic_id, lp)], timeout_s=20, what="the LP to be held")
    assert {record.value for record in world.records()} == others
    rearm_node(world.runtime(), "node-1", accept_loss=True)
    relay_once(world.settings(), limits=QUICK)
    assert {record.value for record in world.records()} == others | waiting


def test_while_a_route_changes_nothing_is_lost_either(world: World, node: RedisServer) -> None:
    """The parent is sealed for good, and no successor serves as yet."""
    bring(world, 30, "a")
    with broken_off_at("change.after_open"):
        split(world.runtime(), "orders", 1)
    lose_all(node)
    world.rows(LOST_COMMITS)
    assert recover_now(world.runtime()) is not None
    member = ManualMember(world.database, world.key_prefix, "orders")
    finish_changes(world.runtime())
    bring(world, 20, "new")
    member.consume_all()
    assert member.bodies() == expected(10, ("a", 30), ("new", 20))


@pytest.mark.full
def test_what_has_other_numbers_now_does_not_take_the_place_of_what_a_sealed_partition_lost(
    database_dsn: str, node: RedisServer, start_postgres: StartPostgres, key_prefix: str
) -> None:
    """Only the outbox's server lost commits: a seal of before tells of numbers that are given out again."""
    own = start_postgres().create_database("app")
    migrate(own)
    world = World(own, key_prefix, [node.url], control_dsn=database_dsn)
    with Database(database_dsn) as control, Database(own) as application:
        register_node(runtime_of(control), name="node-1", url=node.url)
        create_topic(runtime_of(control, key_prefix, application=application), "orders")
        bring(world, 20, "a")
        then = EarlierState(world)
        bring(world, 20, "lost")
        split(runtime_of(control, key_prefix, application=application), "orders", 1)
        then.come_back()
        world.rows(LOST_COMMITS)
        world.publish(20, keys=10, tag="new")
        lose_all(node)
        with pytest.raises(StoreUnavailable, match="may have others under these numbers"):
            recover_now(runtime_of(control, settings=world.settings(), application=application))
        rearm_node(runtime_of(control, key_prefix, application=application), "node-1", accept_loss=True)
        assert recover_now(runtime_of(control, settings=world.settings(), application=application)) is not None
        assert relay_once(world.settings(), limits=QUICK) == 20
        member = ManualMember(control, key_prefix, "orders")
        member.consume_all()
    assert member.bodies() == expected(10, ("a", 20), ("new", 20))


def test_what_a_node_lost_comes_again_although_its_parents_node_is_away_for_good(
    world: World, node: RedisServer, start_redis: StartRedis, tmp_path: Path
) -> None:
    """An operator goes on without that one, which says nothing of what the successor had."""
    second = start_redis()
    register_node(runtime_of(world.database), name="node-2", url=second.url)
    member = ManualMember(world.database, world.key_prefix, "orders")
    bring(world, 30, "a")
    move(world.runtime(), "orders", 1, to="node-2")
    then = FallBack(second, tmp_path / "then")
    bring(world, 30, "b")
    then.happen()
    node.kill()
    relayed = world.rows("SELECT count(*) FROM mqlayer_app.relayed WHERE lp >= 512")
    world.rows(LOST_COMMITS)
    with pytest.raises(StoreUnavailable, match="--unproven"):
        recover_now(world.runtime())
    found = recover_now(world.runtime(), unproven=True)
    assert found is not None
    assert [(found.unasked,)] == relayed
    node.start()
    bring(world, 20, "new")
    member.consume_all()
    assert member.bodies() == expected(10, ("a", 30), ("b", 30), ("new", 20))


def test_a_node_without_memory_for_what_it_lost_is_waited_for(world: World, node: RedisServer) -> None:
    """Relays stay up, and say so: what is settled and trimmed there makes room."""
    bring(world, 60, "a")
    lose_all(node)
    with redis.Redis.from_url(node.url) as client:
        rearm_node(world.runtime(), "node-1")
        client.config_set("maxmemory", 1)
        world.rows(LOST_COMMITS)
        with world.relay() as relay:
            wait_until(lambda: "no memory" in str(relay.health()), timeout_s=20, what="the relay to say so")
            client.config_set("maxmemory", 0)
            wait_until(lambda: recovered(world), timeout_s=20, what="the outbox to be recovered")
    assert values(world) == expected(10, ("a", 60))


def test_who_stood_still_before_it_sent_something_again_does_not_send_it_behind_what_is_newer(
    world: World, node: RedisServer
) -> None:
    """Another one recovered the outbox meanwhile, without that node as it had to."""
    bring(world, 10, "a")
    world.rows(LOST_COMMITS)
    bring(world, 10, "new")
    with NodeConnection(load_nodes(world.database)[0]) as connection:
        late = append_command(
            connection,
            world.key_prefix,
            1,
            1,
            [MessageRun(0, 1, 1, [b"1", b"k", b"late"])],
            backlog=AS_BEFORE_UNLESS_CLOSED,
        )
        assert append_reply(connection.call([late])[0], node.url) == Refused("ended", "1")


@pytest.mark.full
def test_what_a_node_loses_while_the_rest_is_filled_up_is_not_forgotten(
    world: World, node: RedisServer, start_redis: StartRedis
) -> None:
    """All that was to be there is looked at once more before the numbers change."""
    second = start_redis()
    register_node(runtime_of(world.database), name="node-2", url=second.url)
    create_topic(world.runtime(), "other", partitions=2)
    bring(world, 30, "a")
    world.publish(30, topic="other", keys=10)
    relay_once(world.settings(), limits=QUICK)
    world.rows(LOST_COMMITS)
    lose_all(second)
    with world.relay_process(failpoints="recover.after_refill=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the second topic to be filled up")
        lose_all(node)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: recovered(world), timeout_s=30, what="the outbox to be recovered")
        world.publish(20, keys=10, tag="new")
        world.urls = [*world.urls, second.url]
        wait_until(lambda: len(list(world.records())) >= 80, timeout_s=30, what="the new messages to arrive")
    bodies = sorted(record.value for record in world.records())
    wanted = {"a": 30, "m": 30, "new": 20}
    assert bodies == sorted(f"{tag}-{number}" for tag, count in wanted.items() for number in range(count))


def test_what_an_emptied_node_lost_of_a_sealed_partition_is_there_before_the_numbers_change(
    world: World, node: RedisServer, start_redis: StartRedis
) -> None:
    """It keeps its run, and its successor on another node has the marks: nothing seems to be missing."""
    second = start_redis()
    register_node(runtime_of(world.database), name="node-2", url=second.url)
    member = ManualMember(world.database, world.key_prefix, "orders")
    bring(world, 30, "a")
    move(world.runtime(), "orders", 1, to="node-2")
    with redis.Redis.from_url(node.url) as client:
        client.flushall()
    world.rows(LOST_COMMITS)
    assert recover_now(world.runtime()) is not None
    bring(world, 20, "new")
    member.consume_all()
    assert member.bodies() == expected(10, ("a", 30), ("new", 20))


def test_an_operator_can_go_on_without_a_partition_that_takes_nothing(world: World, node: RedisServer) -> None:
    """As where the control database lost a whole route change: it is sealed on its node, and Postgres knows nothing."""
    bring(world, 30, "a")
    lose_all(node)
    rearm_node(world.runtime(), "node-1")
    with redis.Redis.from_url(node.url) as client:
        client.hset(partition_keys(world.key_prefix, 1).meta, mapping={"state": "sealed", "sealed_for": "9"})
    world.rows(LOST_COMMITS)
    with pytest.raises(StoreUnavailable, match="was refused: sealed 9; mqlayer outbox recover --unproven"):
        recover_now(world.runtime())
    found = recover_now(world.runtime(), unproven=True)
    assert found is not None
    assert found.unasked > 0
    assert set(values(world)) == {f"key-{key}" for key in range(10) if lp_of(f"key-{key}".encode()) >= 512}


@pytest.mark.parametrize("timeline", [-1, 77])
def test_nothing_is_recorded_as_relayed_before_the_outbox_is_recovered(world: World, timeline: int) -> None:
    """On another timeline what was acknowledged may be in no commit, and its number be another message's by now."""
    bring(world, 10, "a")
    before = world.rows("SELECT sum(seq) FROM mqlayer_app.relayed")
    ((outbox_uuid,),) = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
    ((term,),) = world.rows("SELECT mqlayer_app.term_v1()")
    facts = {"outbox_uuid": outbox_uuid, "term": term, "topic_ids": [1], "lps": [0], "seqs": [500]}
    with connect(world.dsn) as outbox:
        world.rows("UPDATE mqlayer_app.identity SET timeline = %s", timeline)
        outbox.execute(query("relayed_put"), facts)
        assert world.rows("SELECT sum(seq) FROM mqlayer_app.relayed") == before
        world.rows("UPDATE mqlayer_app.identity SET timeline = 0")
        outbox.execute(query("relayed_put"), facts)
        assert world.rows("SELECT sum(seq) FROM mqlayer_app.relayed") != before
