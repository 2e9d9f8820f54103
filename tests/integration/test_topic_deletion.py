"""`topic delete`: nothing of a topic is left but tombstones and its archive, whoever dies, sleeps or comes late."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from os import getpid
from pathlib import Path
from socket import gethostname
from threading import Event
from typing import Any, LiteralString

import psycopg
import pytest

from mqlayer import Context, failpoints
from mqlayer.archive import archive_pass, archive_status, create_snapshot, find_snapshot, set_retention
from mqlayer.archive.snapshots import snapshot_cut
from mqlayer.doctor.control import check_deletions
from mqlayer.doctor.findings import LIMITS
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, NotFound
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.inspect import MessageFilter, find_message, group_facts, history_of_key, search_messages, topic_status
from mqlayer.maintenance.topic_deletion import delete_topic, planned_deletion
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.relay import relay_once
from mqlayer.relay.lp_cursors import LpCursor, Target, chain_of
from mqlayer.relay.outbox_reader import OutboxReader
from mqlayer.routes import finish_changes, plan_split, retire_partitions
from mqlayer.routes.planner import apply_plan
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics import attach_topics, create_topic, list_topics, set_archived, set_limits
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

OF_OUTBOX = ("counter", "outbox", "relayed", "dedup", "delayed", "quarantined", "voided")
PLACES = [
    "topic_delete.after_begin",
    "topic_delete.after_drop",
    "topic_delete.after_rows",
    "topic_delete.after_detach",
    "topic_delete.before_end",
    "topic_delete.after_end",
    "retire.after_delete",
]


def topic_of(world: World, name: str = "orders") -> int:
    return load_route(world.database, name).topic_id


def assert_gone(world: World, topic_id: int) -> None:
    """Nothing of a topic is left, in either schema or on a node, but rows that say so."""
    assert world.rows("SELECT name FROM mqlayer.topic WHERE topic_id = %s", topic_id) == [(f"orders@{topic_id}",)]
    assert world.rows("SELECT name FROM mqlayer_app.topic WHERE topic_id = %s", topic_id) == [(f"orders@{topic_id}",)]
    for table in OF_OUTBOX:
        assert world.rows(f"SELECT count(*) FROM mqlayer_app.{table} WHERE topic_id = %s", topic_id) == [(0,)], table
    partitions = world.rows(
        "SELECT partition_id, state, retired_at FROM mqlayer.partition WHERE topic_id = %s", topic_id
    )
    with world.client() as client:
        for partition, state, retired_at in partitions:
            assert (state, retired_at is not None) == ("deleted", True)
            assert list(client.scan_iter(f"{world.key_prefix}:{{{partition}}}:*")) == [world.keys(partition).meta]
            assert client.hgetall(world.keys(partition).meta) == {b"state": b"deleted"}


def add_group(runtime: Runtime, name: str = "g") -> None:
    with closing(RouteCache(runtime.control)) as routes:
        ensure_group(runtime, routes, topic="orders", name=name, settings=GroupSettings(start="latest"))


@pytest.mark.world(relayed=20)
def test_what_is_left_of_a_topic_is_its_tombstones_and_its_name_is_free(world: World) -> None:
    runtime, old = world.runtime(actor="ann"), topic_of(world)
    add_group(runtime)
    world.rows("SELECT seq FROM mqlayer_app.publish_once_v1('orders', 'k', 'x', 'id')")
    assert relay_once(world.settings(), limits=QUICK) == 1
    with pytest.raises(Conflict, match=r"group g has not settled 1 messages.*--force"):
        delete_topic(runtime, "orders")
    assert [one.deleting for one in list_topics(world.database)] == [False]
    done = delete_topic(runtime, "orders", force=True)
    assert (done.topic, done.deleted_as, done.left) == ("orders", f"orders@{old}", {})
    assert_gone(world, old)
    assert list_topics(world.database) == []
    audited = "SELECT actor, act, object FROM mqlayer.audit WHERE act LIKE 'topic delete%%' ORDER BY audit_id"
    assert world.rows(audited) == [
        ("ann", "topic delete", "orders"), ("ann", "topic deleted", "orders"),
    ]  # fmt: skip
    with pytest.raises(psycopg.Error, match='unknown topic "orders"'):
        world.publish(1)
    with pytest.raises(psycopg.Error, match='unknown topic "orders"'):
        world.rows("SELECT mqlayer_app.publish_at_v1('orders', 'k', 'x', now())")
    # Repeated, it is nothing, and so is a relay that has the topic in an old list.
    assert delete_topic(runtime, "orders").deleted_as == f"orders@{old}"
    assert delete_topic(runtime, f"orders@{old}").deleted_as == f"orders@{old}"
    world.add_topic("orders", partitions=1)
    world.publish(3, tag="new")
    assert relay_once(world.settings(), limits=QUICK) == 3
    assert sorted(value for values in world.by_key().values() for value in values) == ["new-0", "new-1", "new-2"]
    assert_gone(world, old)
    with pytest.raises(NotFound):
        delete_topic(runtime, "mails")


@pytest.mark.world(relayed=20)
@pytest.mark.parametrize("place", some_of(PLACES, 4))
def test_a_deletion_that_is_killed_goes_on_where_it_was(world: World, place: str) -> None:
    """Behind the end the worker's job does the rest; relays that attach topics meanwhile revive nothing."""
    old = topic_of(world)
    done = ask_python("mqlayer", "topic", "delete", "orders", "--yes", env=world.environment(f"{place}=kill"))
    assert done.returncode == -9, done.stderr
    attach_topics(world.runtime())
    if place in ("topic_delete.after_end", "retire.after_delete"):
        assert len(retire_partitions(world.runtime())) == 2
    else:
        assert [(one.name, one.deleting) for one in list_topics(world.database)] == [("orders", True)]
        delete_topic(world.runtime(), "orders")
    assert_gone(world, old)
    assert delete_topic(world.runtime(), "orders").left == {}
    assert world.rows("SELECT count(*) FROM mqlayer.audit WHERE act = 'topic deleted'") == [(1,)]


@pytest.mark.world(relayed=2)
@pytest.mark.parametrize(
    ("publish", "waits"), [("publish_v1('orders', 'k', 'late')", "no relay has sent"),
                           ("publish_at_v1('orders', 'k', 'late', now())", "are delayed")],
    ids=["at once", "delayed"],
)  # fmt: skip
def test_a_message_that_is_published_meanwhile_is_waited_for_and_stops_the_deletion(
    world: World, publish: LiteralString, waits: str
) -> None:
    runtime, old = world.runtime(), topic_of(world)
    with kept_session(world.dsn) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.execute(f"SELECT mqlayer_app.{publish}")
        deleting = pool.submit(delete_topic, runtime, "orders")
        wait_until(lambda: world.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), what="the deletion waits")
        publisher.commit()
        with pytest.raises(Conflict, match=f"1 messages of the outbox {waits}.*repeat the command"):
            deleting.result(20)
    # All goes on but what would need the topic's future.
    for change in (lambda: create_topic(runtime, "orders"), lambda: set_limits(runtime, "orders", body_limit=9)):
        with pytest.raises(Conflict, match=r"topic 'orders' is being deleted.*topic delete orders --yes"):
            change()
    world.rows("UPDATE mqlayer.topic SET deleting_at = now() - interval '2 hours'")
    with world.database.connection() as connection:
        (finding,) = check_deletions(CheckedDatabase(connection, "control", "there"), LIMITS)
    assert finding.seen == "the deletion of topic orders began 2 h ago and is unfinished"
    assert relay_once(world.settings(), limits=QUICK) == 1
    delete_topic(runtime, "orders")
    assert_gone(world, old)


@pytest.fixture
def reader(world: World) -> Iterator[OutboxReader]:
    """The outbox, as a relay reads it that slept over what a test does."""
    connection: Connection
    with kept_session(world.dsn, autocommit=True) as connection:
        reader = OutboxReader(connection, QUICK)
        reader.outbox_uuid = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")[0][0]
        reader.term = world.rows("SELECT mqlayer_app.term_v1()")[0][0]
        yield reader


@pytest.mark.world(relayed=2)
def test_a_late_relay_writes_nothing_of_a_deleted_topic(world: World, reader: OutboxReader) -> None:
    """What it read before, it may come to quarantine, record or attach afterwards."""
    old = topic_of(world)
    cursor = LpCursor(chain_of(old, 5), Target(1, 1, 0), seq=7)
    assert reader.quarantine(cursor, 8, "as long as the topic lives")
    delete_topic(world.runtime(), "orders", force=True)
    assert not reader.quarantine(cursor, 8, "too late")
    reader.put_relayed({cursor: cursor.acked})
    facts = {"topic_id": old, "name": "orders", "body_limit": 9}
    for name in ("outbox_topic_put", "outbox_topic_limit", "outbox_counters_put"):
        assert reader.connection.execute(query(name), facts).rowcount == 0
    assert_gone(world, old)


def test_a_relay_that_slept_brings_nothing_of_the_old_topic_to_the_new_one(world: World, tmp_path: Path) -> None:
    """It has read a message, and wakes up when another topic has the name."""
    old, awake = topic_of(world), tmp_path / "awake"
    failpoints.arm("relay.before_append", f"mark:{tmp_path / 'asleep'}")
    failpoints.arm("relay.before_append", f"wait:{awake}")
    with world.relay(lease_s=30):
        world.publish(1, tag="old")
        wait_until((tmp_path / "asleep").exists, what="the relay to have read it")
        delete_topic(world.runtime(), "orders", force=True)
        world.add_topic("orders", partitions=1)
        world.publish(3, tag="new")
        awake.touch()
        wait_until(lambda: len(world.records("orders")) == 3, what="the new messages")
        wait_until(
            lambda: world.rows("SELECT sum(seq)::int FROM mqlayer_app.relayed") == [(3,)], what="all to be recorded"
        )
    assert {record.value for record in world.records("orders")} == {"new-0", "new-1", "new-2"}
    assert_gone(world, old)


def test_a_producer_is_told_and_goes_on_with_the_topic_that_has_the_name(world: World) -> None:
    old = topic_of(world)
    with world.producer() as producer:
        producer.send("orders", body=b"old", key="k")
        with pytest.raises(
            Conflict, match=rf"direct producer test on {gethostname()} \(pid {getpid()}\) lives: stop it"
        ):
            delete_topic(world.runtime(), "orders")
        delete_topic(world.runtime(), "orders", force=True)
        with pytest.raises(MqlayerError, match="unknown topic 'orders': it was deleted"):
            producer.send("orders", body=b"late", key="k")
        with pytest.raises(NotFound):
            producer.send("orders", body=b"later", key="k")
        world.add_topic("orders", partitions=1)
        producer.send("orders", body=b"new", key="k")
        # It does not take the new topic for a newer route of the one that it knows.
        newer = topic_of(world)
        delete_topic(world.runtime(), "orders", force=True)
        world.add_topic("orders", partitions=2)
        with pytest.raises(MqlayerError, match="it was deleted"):
            producer.send("orders", body=b"late", key="k")
        producer.send("orders", body=b"newest", key="k")
        assert not producer.stats.lost
    assert [record.value for record in world.records("orders")] == ["newest"]
    for topic_id in (old, newer):
        assert_gone(world, topic_id)


def test_a_producer_is_asked_for_its_topics_once_all_code_says_them(world: World) -> None:
    """Cases: another topic, a killed producer, code that acts on the former version, the former version in force."""
    world.add_topic("bills", partitions=1)
    with world.producer() as producer:
        producer.send("bills", body=b"1", key="k")
        assert planned_deletion(world.runtime(), "orders").obstacles == ()
        producer.send("orders", body=b"1", key="k")
        (told,) = planned_deletion(world.runtime(), "orders").obstacles
        assert "lives: stop it, or wait 30 s if it was killed" in told
        world.rows("UPDATE mqlayer.process SET lease_until = now() - interval '1 ms'")
        assert planned_deletion(world.runtime(), "orders").obstacles == ()
        world.rows("UPDATE mqlayer.process SET lease_until = now() + interval '1 minute', acts_on = 1, topics = '{}'")
        (told,) = planned_deletion(world.runtime(), "orders").obstacles
        assert "does not say its topics yet: wait" in told
        world.rows("UPDATE mqlayer.process SET acts_on = 2, topics = '{0}'")
        assert planned_deletion(world.runtime(), "orders").obstacles != (), "more topics than a row has room for"
        world.rows("UPDATE mqlayer.protocol SET serves_from = 1, in_force = 1")
        assert planned_deletion(world.runtime(), "orders").obstacles == (), "older code says nothing, and may live"


def test_force_ends_members_and_nothing_of_the_old_topic_comes_to_the_new_one(stage: Stage) -> None:
    runtime = runtime_of(stage.database, settings=stage.settings(), application=stage.database)
    go_on = Event()

    def hold(body: bytes, _: Context) -> None:
        if body == b"1":
            go_on.wait(20)

    late = Recorder(hold)
    app = stage.consume(late, settings=stage.settings(lease_s=10.0))
    stage.send([("k", b"1"), ("k", b"2")])
    wait_until(lambda: late.begun, what="the first message")
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')")
        connection.execute("SELECT mqlayer_app.publish_at_v1('orders', 'k', 'x', now() + interval '1 hour')")
    plan = planned_deletion(runtime, "orders")
    assert (plan.partitions, plan.records, plan.groups) == (2, 2, ("g",))
    assert plan.obstacles == (
        "group g has 1 living members", "group g has not settled 2 messages",
        "1 messages of the outbox no relay has sent", "1 messages of the outbox are delayed",
    )  # fmt: skip
    with pytest.raises(Conflict, match=r"group g has 1 living members; .*--force"):
        delete_topic(runtime, "orders")
    old = delete_topic(runtime, "orders", force=True)
    wait_until(lambda: "is retired" in str(app.health()), what="the member to notice")
    go_on.set()
    wait_until(lambda: not app.running, what="the member to end")
    wait_until(lambda: late.bodies() == [b"1"], what="the message in hand")
    world_route = create_topic(runtime, "orders", partitions=2)
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'new')")
    assert relay_once(stage.settings()) == 1
    fresh = Recorder()
    stage.consume(fresh)
    wait_until(lambda: fresh.bodies() == [b"new"], what="the new message")
    assert {handled.partition for handled in fresh.begun} <= {line.partition for line in world_route.ranges}
    keys = [key for part in stage.partitions for key in stage.redis.scan_iter(f"{stage.prefix}:{{{part}}}:*")]
    assert keys == [stage.keys(part).meta for part in stage.partitions]
    assert old.left == {}


def test_an_open_route_change_goes_with_the_topic(world: World) -> None:
    old, runtime = topic_of(world), world.runtime()
    parent = load_route(world.database, "orders").ranges[0].partition
    plan = plan_split(load_route(world.database, "orders"), parent, [100])
    with broken_off_at("change.before_sealed_commit"):
        apply_plan(runtime, plan)
    delete_topic(runtime, "orders")
    assert finish_changes(runtime) == {}
    assert world.rows("SELECT state FROM mqlayer.route_change") == [("dropped",)]
    assert_gone(world, old)


@pytest.mark.world(relayed=2)
def test_a_node_that_is_away_gets_its_tombstones_later(world: World) -> None:
    old, runtime = topic_of(world), world.runtime()
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another'")
    with pytest.raises(Conflict, match="node node-1 does not tell what it holds"):
        delete_topic(runtime, "orders")
    assert delete_topic(runtime, "orders", force=True).left == {"node-1": 2}
    world.arm_node()
    assert len(retire_partitions(runtime)) == 2
    assert_gone(world, old)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("SELECT FROM mqlayer.route_change FOR UPDATE", "SELECT FROM mqlayer.topic FOR UPDATE"),
        ("SELECT FROM mqlayer.consumer_group FOR SHARE", "SELECT FROM mqlayer.topic FOR KEY SHARE"),
        ("SELECT FROM mqlayer_app.topic FOR NO KEY UPDATE", "SELECT FROM mqlayer_app.counter FOR NO KEY UPDATE"),
    ],
    ids=["a driver", "a new instance", "attaching"],
)
def test_it_waits_for_others_before_it_holds_what_they_want_next(world: World, first: str, then: str) -> None:
    """Two that lock in one order can't wait for each other."""
    old, runtime = topic_of(world), world.runtime()
    add_group(runtime)
    route = load_route(world.database, "orders")
    with broken_off_at("change.after_plan"):
        apply_plan(runtime, plan_split(route, route.ranges[0].partition, [100]))
    with psycopg.connect(world.dsn, options="-c lock_timeout=200") as other, ThreadPoolExecutor(1) as pool:
        other.execute(first)
        deleting = pool.submit(delete_topic, runtime, "orders")
        wait_until(lambda: world.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), what="the deletion waits")
        other.execute(then)
        other.commit()
        deleting.result(20)
    assert_gone(world, old)


@pytest.mark.world(relayed=2)
def test_each_outbox_lets_the_topic_go_before_it_ends(world: World) -> None:
    """Another one would go on to take messages for a topic that no relay knows."""
    world.rows(
        "INSERT INTO mqlayer.source (kind, name, outbox_uuid, cluster) VALUES ('outbox', 'crm', gen_random_uuid(), 'c')"
    )
    for _ in range(2):
        with pytest.raises(Conflict, match=r"outbox of database 'crm' \(source \d+\) publishes to it.*MQLAYER_APP_DSN"):
            delete_topic(world.runtime(), "orders")
    assert [one.deleting for one in list_topics(world.database)] == [True]
    assert planned_deletion(world.runtime(), "orders").obstacles[0].startswith("the outbox of database 'crm'")
    world.rows("UPDATE mqlayer.topic SET detached = detached || (SELECT max(source_id) FROM mqlayer.source)")
    delete_topic(world.runtime(), "orders")


def test_a_snapshot_reads_as_before_and_the_archive_of_the_name_goes_on(world: World) -> None:
    runtime, old = world.runtime(), topic_of(world)
    set_archived(runtime, "orders", archived=True)
    world.publish(5, tag="old")
    assert relay_once(world.settings(), limits=QUICK) == 5
    with pytest.raises(Conflict, match="5 messages are not archived yet"):
        delete_topic(runtime, "orders")
    archive_pass(runtime)
    create_snapshot(runtime, "before")

    def read() -> list[Any]:
        found = find_snapshot(world.database, "before")
        facts = {"snapshot_id": found.snapshot_id, "lp_from": 0, "lp_to": 1024}
        with world.database.connection() as connection:
            records = connection.execute(query("snapshot_records"), facts).fetchall()
        return [found, snapshot_cut(world.database, found.snapshot_id), sorted(map(str, records))]

    before = read()
    assert len(before[2]) == 5
    delete_topic(runtime, "orders")
    assert read() == before
    assert_gone(world, old)
    world.add_topic("orders", partitions=1, archived=True)
    world.publish(2, tag="new")
    assert relay_once(world.settings(), limits=QUICK) == 2
    archive_pass(runtime)
    assert read() == before
    assert [(one.topic, one.records) for one in create_snapshot(runtime, "after").topics] == [("orders", 2)]
    found = {one.topic: one for one in archive_status(runtime)}
    assert {name: one.records for name, one in found.items()} == {"orders": 2, f"orders@{old}": 5}
    # Readers of a stream go by name and batch: they must not take the new topic's first batches for known ones.
    assert found["orders"].batch > found[f"orders@{old}"].batch
    assert set_retention(runtime, f"orders@{old}", days=30)


@pytest.mark.world(by_commands=True)
def test_the_command_plans_unless_it_is_told(world: World, run: Commands) -> None:
    said = run.text("topic", "delete", "orders")
    assert "topic orders would be deleted with 2 partitions, 0 messages, 0 groups; its archive stays" in said
    assert "nothing was changed: --yes does this" in said
    (plan,) = run.lines("topic", "delete", "orders")
    assert (plan["topic"], plan["deleted_as"], plan["obstacles"]) == ("orders", None, [])
    (done,) = run.lines("topic", "delete", "orders", "--yes")
    assert (done["topic"], done["left"]) == ("orders", {})
    assert f"topic orders is deleted, as {done['deleted_as']}" in run.text("topic", "delete", "orders")
    assert f"under {done['deleted_as']}" in run.text("topic", "delete", "orders", "--yes")
    assert "--force goes with --yes" in run.failure("topic", "delete", "orders", "--force")


# -- names and numbers that come again -------------------------------------------------------------------------------


def test_an_id_that_the_outbox_knows_as_another_topics_leaves_that_topic_alone(world: World) -> None:
    """As after a restore of the control database, which gives ids out again."""
    runtime, topic_id = world.runtime(), topic_of(world)
    for statement in (
        "UPDATE mqlayer_app.topic SET name = 'mails' WHERE topic_id = %s RETURNING 1",
        "UPDATE mqlayer_app.counter SET topic = 'mails' WHERE topic_id = %s RETURNING 1",
    ):
        world.rows(statement, topic_id)
    world.publish(5, topic="mails")
    delete_topic(runtime, "orders", force=True)
    assert world.rows("SELECT name, deleted_at FROM mqlayer_app.topic") == [("mails", None)]
    assert world.rows("SELECT count(*) FROM mqlayer_app.outbox") == [(5,)]
    world.publish(1, topic="mails")


def test_what_is_kept_of_a_deleted_topic_is_found_under_its_name_of_now(world: World) -> None:
    runtime = world.runtime()
    set_archived(runtime, "orders", archived=True)
    world.publish(3)
    relay_once(world.settings(), limits=QUICK)
    archive_pass(runtime)
    (old, *_) = world.records("orders")
    identity = f"{old.source}:{old.lp}:{old.seq}"
    name = delete_topic(runtime, "orders").deleted_as
    assert find_message(runtime, identity).topic == name
    assert len(search_messages(runtime, name, MessageFilter(key="key-1")).messages) == 1
    assert history_of_key(runtime, name, "key-1").topic == name
    assert group_facts(world.database, name) == []
    assert topic_status(runtime, name).version is not None

    world.add_topic("orders", partitions=1, archived=True)
    with pytest.raises(InvalidInput, match="take topics of one name into snapshots of their own"):
        create_snapshot(runtime, "both", topics=["orders", name])


def test_a_topic_whose_creation_was_cut_off_is_deleted(world: World) -> None:
    with broken_off_at("topic.after_allocate"):
        create_topic(world.runtime(), "half", partitions=1)
    assert delete_topic(world.runtime(), "half", force=True).deleted_as.startswith("half@")
