"""An outbox is numbered anew while another relay is at work on it, or it is a copy (TRAPS 2h)."""

from __future__ import annotations

import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from mqlayer.errors import ConfigurationRefused
from mqlayer.logs import event_of
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import ended_sources_key, partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import MessageRun, Refused, append_command, append_reply
from mqlayer.relay import RelayLimits, recover_now, relay_once
from mqlayer.relay.backoff import FIRST_S
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, Target, chain_of
from mqlayer.relay.outbox_reader import OutboxReader
from mqlayer.relay.outbox_source import term_of
from mqlayer.relay.progress_writer import ProgressWriter
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node, register_node
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.lost_commits import expected, recovered, values
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

SETS = list(range(16))
ENDED = "SELECT count(*)::int FROM mqlayer.source WHERE closed_at IS NOT NULL"

pytestmark = pytest.mark.world(own_node=True, partitions=1, relayed=20, keys=4)


@pytest.mark.world(own_node=True)
def test_a_relay_at_work_notices_that_another_one_numbered_the_outbox_anew(world: World, database_dsn: str) -> None:
    """It has lost nothing itself and knows old numbers: by these it would pass the new ones over."""
    with world.relay() as relay, Database(database_dsn) as database:
        world.publish(40, keys=10)
        world.wait_until_whole()
        wait_until(
            lambda: world.rows("SELECT sum(seq) FROM mqlayer_app.relayed") == [(40,)], what="its progress recorded"
        )
        before = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
        # Another relay saw that commits are missing in an LP of its own; as a rule that one is first to see to it.
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        recover_now(runtime_of(database, settings=world.settings(), application=database))
        assert world.rows("SELECT outbox_uuid FROM mqlayer_app.identity") != before
        world.publish(60, keys=10, tag="new")
        wait_until(lambda: len(list(world.records())) == 100, timeout_s=30, what="the new messages to arrive")
        wait_until(lambda: relay.health().ready, what="the relay to be ready")
    assert values(world) == expected(10, ("m", 40), ("new", 60))


@pytest.mark.world(own_node=True)
@pytest.mark.parametrize("beside", some_of(["", "armed", "emptied"], 3))
def test_what_a_relay_has_read_of_the_old_numbers_is_not_there_twice(
    world: World, database_dsn: str, node: RedisServer, key_prefix: str, beside: str
) -> None:
    """It is stuck between its look at the outbox and its append, while another one numbers that anew.

    By its chain the node would take the messages once more, under their old numbers and behind newer ones; where it is
    emptied meanwhile, those that begin a chain.
    """
    before = [] if beside == "emptied" else [("m", 20)]
    for tag, count in before:
        world.publish(count, keys=4, tag=tag)
        relay_once(world.settings(), limits=QUICK)
    world.publish(20, keys=4, tag="read")
    with world.relay_process(failpoints="relay.before_append=stop") as process, Database(database_dsn) as database:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the relay at its append")
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        if beside == "emptied":
            # What is ended is a node's own knowledge: whoever arms it says it again.
            with world.relay():
                wait_until(lambda: world.rows(ENDED) == [(1,)], timeout_s=30, what="the source ended")
            with redis.Redis.from_url(node.url) as client:
                client.flushall()
            rearm_node(runtime_of(database, key_prefix, application=database), "node-1")
        else:
            assert recover_now(runtime_of(database, settings=world.settings(), application=database)) is not None
        if beside == "armed":
            # Before anybody says in Postgres that the source is ended.
            world.rows("UPDATE mqlayer.node SET armed_run_id = NULL")
            rearm_node(runtime_of(database, key_prefix, application=database), "node-1")
        world.publish(20, keys=4, tag="new")
        with world.relay():
            wait_until(lambda: counted(world, "new") == 20, timeout_s=30, what="the new messages to arrive")
            process.send_signal(signal.SIGCONT)
            world.publish(20, keys=4, tag="after")
            wait_until(lambda: counted(world, "after") == 20, timeout_s=30, what="what comes after it")
        process.terminate()
        assert process.wait(30) == 0
    assert values(world) == expected(4, *before, ("read", 20), ("new", 20), ("after", 20))


@pytest.mark.full
@pytest.mark.world(own_node=True, partitions=1)
def test_a_relay_that_was_stopped_while_it_was_numbered_anew_records_nothing_by_the_old_numbers(world: World) -> None:
    """Else what is published next would count as relayed, and be rotated away."""
    world.publish(50, keys=1)
    moved = "SELECT c.seq, r.seq FROM mqlayer_app.counter c JOIN mqlayer_app.relayed r USING (topic_id, lp)"
    with world.relay_process(failpoints="relay.before_progress=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the relay to come to its progress")
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        with world.relay():
            numbers = "SELECT sum(seq) FROM mqlayer_app.counter"
            wait_until(lambda: world.rows(numbers) == [(0,)], timeout_s=30, what="new numbers")
            world.publish(3, keys=1, tag="new")
            wait_until(lambda: world.rows(moved) == [(3, 3)], timeout_s=30, what="the new messages recorded")
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert world.rows(moved) == [(3, 3)]


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=1)
def test_progress_that_waits_for_the_renumbering_is_none_by_then(world: World, database_dsn: str) -> None:
    """It was asked for by the old numbers, and neither makes the other give up."""
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.relayed")
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    ((outbox_uuid,),) = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
    with connect(database_dsn) as one, connect(database_dsn) as other, ThreadPoolExecutor() as pool:
        reader = OutboxReader(one, RelayLimits())
        reader.outbox_uuid, reader.term = outbox_uuid, term_of(one)
        with other.transaction():
            facts = {"outbox_uuid": outbox_uuid, "topic_ids": [], "lps": [], "seqs": [], "fallen": []}
            assert other.execute(query("outbox_recover"), facts).fetchone() == (0,)
            put = pool.submit(reader.put_relayed, {LpCursor(topic_id * 1024 + lp, Target(1, 1, 0)): 7})
            waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'mqlayer_app.relayed'::regclass AND NOT granted"
            wait_until(lambda: world.rows(waiting) == [(1,)], what="the progress to wait")
        put.result(timeout=10)
    assert world.rows("SELECT * FROM mqlayer_app.relayed") == []


@pytest.mark.full
@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=1)
@pytest.mark.parametrize("whose", some_of(["its own", "a former one's"], 2))
def test_what_a_relay_writes_counts_for_the_outbox_whose_numbers_it_knows(
    world: World, database_dsn: str, whose: str
) -> None:
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.relayed")
    cursor = LpCursor(topic_id * 1024 + lp, Target(1, 1, 0), seq=7)
    with connect(database_dsn) as connection:
        reader = OutboxReader(connection, RelayLimits())
        ((outbox_uuid,),) = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
        reader.outbox_uuid = outbox_uuid if whose == "its own" else uuid.uuid4()
        reader.term = term_of(connection)
        before = noted(world)
        reader.put_relayed({cursor: cursor.acked})
        after_progress = noted(world)
        cursor.acked = 3
        reader.lower_relayed([cursor])
        reader.quarantine(cursor, 4, "a test")
        reader.put_voided(cursor, 5, "a test")
        connection.execute(query("outbox_suspect"), {"outbox_uuid": reader.outbox_uuid})
    if whose == "its own":
        assert after_progress == (7, 0, 0, before[3])
        assert noted(world) == (3, 1, 1, -1)
    else:
        assert after_progress == noted(world) == before


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=1)
def test_progress_counts_in_the_term_only_in_which_its_rows_were_read(world: World, database_dsn: str) -> None:
    """A pooler may run the statement on a server that lost the rows in a crash since."""
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.relayed")
    before = noted(world)
    with connect(database_dsn) as connection:
        reader = OutboxReader(connection, RelayLimits())
        ((reader.outbox_uuid,),) = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
        reader.term = "another"
        reader.put_relayed({LpCursor(topic_id * 1024 + lp, Target(1, 1, 0)): 7})
    assert noted(world) == before


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=1)
def test_rows_are_read_under_known_numbers_and_in_the_known_term_only(world: World, database_dsn: str) -> None:
    ((outbox_uuid, term),) = world.rows("SELECT outbox_uuid, mqlayer_app.term_v1() FROM mqlayer_app.identity")
    ids = [row[0] for row in world.rows("SELECT id FROM mqlayer_app.outbox")]

    def read(outbox_uuid: uuid.UUID, term: str) -> tuple[int, int]:
        with connect(database_dsn) as connection:
            reader = OutboxReader(connection, RelayLimits())
            reader.outbox_uuid, reader.term = outbox_uuid, term
            return len(reader.scan(SETS)), len(reader.late(ids, SETS))

    assert read(outbox_uuid, term) == (5, 5)
    assert read(outbox_uuid, "another") == read(uuid.uuid4(), term) == (0, 0)
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    assert read(outbox_uuid, term) == (0, 0)


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=1)
def test_progress_under_way_does_not_raise_what_is_lowered_meanwhile(world: World, database_dsn: str) -> None:
    """A node fell behind what the relay is about to record: rotation must keep the rows."""
    ((topic_id, lp),) = world.rows("SELECT topic_id, lp FROM mqlayer_app.relayed")
    cursor = LpCursor(chain_of(topic_id, lp), Target(1, 1, 0), seq=5)
    sender: Any = SimpleNamespace(moved={cursor.chain: cursor}, fallen={}, missing=[])
    confirmations: Any = SimpleNamespace(take=dict)
    gate = threading.Event()
    with connect(database_dsn) as connection, ThreadPoolExecutor() as pool:
        reader = OutboxReader(connection, RelayLimits())
        ((reader.outbox_uuid, reader.term),) = world.rows(
            "SELECT outbox_uuid, mqlayer_app.term_v1() FROM mqlayer_app.identity"
        )
        writer = ProgressWriter(
            reader, sender, LpCursors(lambda _: cursor.target), confirmations, world.runtime().outbox,
            lambda asked: None if asked is connection else expect(gate.wait(10)),
        )  # fmt: skip
        cursor.acked = 7
        writer.record()
        assert cursor.recorded == 7
        cursor.acked = 3
        sender.fallen = {cursor.chain: cursor}
        lowering = pool.submit(writer.lower_fallen)
        wait([lowering], timeout=0.2)
        gate.set()
        lowering.result(timeout=10)
        writer.close()
    assert world.rows("SELECT seq FROM mqlayer_app.relayed") == [(3,)]
    assert cursor.recorded == 3


def expect(happened: bool) -> None:
    """Fail unless it did."""
    assert happened


def noted(world: World) -> tuple[Any, ...]:
    """Return what relays noted: progress, rows quarantined and passed over, the timeline."""
    (row,) = world.rows(
        "SELECT (SELECT seq FROM mqlayer_app.relayed), (SELECT count(*) FROM mqlayer_app.quarantined), "
        "(SELECT count(*) FROM mqlayer_app.voided), (SELECT timeline FROM mqlayer_app.identity)"
    )
    return row


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=5)
def test_a_copy_on_another_server_does_not_take_the_place_of_its_original(world: World, database_dsn: str) -> None:
    """It is on another timeline too, as a rule: that must not hide that it is a copy, nor end the original's source."""
    world.rows("UPDATE mqlayer.source SET cluster = '1/elsewhere'")
    world.rows("UPDATE mqlayer_app.identity SET timeline = 77")
    with pytest.raises(ConfigurationRefused, match="outbox adopt"):
        relay_once(world.settings(), limits=QUICK)
    with Database(database_dsn) as database, pytest.raises(ConfigurationRefused, match="outbox adopt"):
        recover_now(runtime_of(database, settings=world.settings(), application=database))
    assert world.rows("SELECT count(*) FROM mqlayer.source WHERE closed_at IS NULL") == [(1,)]


@pytest.mark.full
@pytest.mark.world(own_node=True, partitions=1, relayed=40, keys=10)
def test_what_a_sealed_partition_lost_comes_again_under_a_source_that_is_about_to_end(
    world: World, database_dsn: str, node: RedisServer, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who began to recover the outbox died, and the node lost some: nobody could arm it if it refused that source."""
    with Database(database_dsn) as database:
        member = ManualMember(database, key_prefix, "orders")
        split(runtime_of(database, key_prefix, application=database), "orders", 1)
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        with world.relay_process(failpoints="recover.after_end=kill") as process:
            assert process.wait(timeout=30) == -signal.SIGKILL
        with redis.Redis.from_url(node.url) as client:
            assert client.smembers(ended_sources_key(key_prefix).decode())
            client.delete(*partition_keys(key_prefix, 1))
        node.kill()
        node.start()
        with world.relay():
            wait_until(lambda: recovered(world), timeout_s=30, what="the outbox to be recovered")
            world.publish(20, keys=10, tag="new")
            wait_until(lambda: counted(world, "new") == 20, timeout_s=30, what="the new messages to arrive")
        member.consume_all()
    assert member.bodies() == expected(10, ("m", 40), ("new", 20))
    assert "messages_lost" not in caplog.text


def test_who_recovers_an_outbox_that_another_one_recovers_meanwhile_takes_it_for_no_former_one(world: World) -> None:
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    with world.relay_process(failpoints="recover.before_source=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="a relay that recovers")
        assert recover_now(world.runtime()) is not None
        relay_once(world.settings(), limits=QUICK)
        process.send_signal(signal.SIGCONT)
        world.publish(10, keys=4, tag="new")
        wait_until(lambda: counted(world, "new") == 10, timeout_s=30, what="what is new, by that relay")


def ended(world: World, url: str) -> set[bytes]:
    """Return the sources that a node takes nothing of any more."""
    with redis.Redis.from_url(url) as client:
        found: Any = client.smembers(ended_sources_key(world.key_prefix).decode())
        return {word for word in found if b":" not in word}


def test_a_node_without_memory_is_told_and_armed_all_the_same(world: World, node: RedisServer) -> None:
    """Else nobody would settle and trim there, and it would stay full."""
    with redis.Redis.from_url(node.url) as client:
        client.config_set("maxmemory", 1)
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        assert recover_now(world.runtime()) is not None
        assert ended(world, node.url) == {b"1"}
        assert relay_once(world.settings(), limits=QUICK) == 0
        client.delete(ended_sources_key(world.key_prefix).decode())
        world.rows("UPDATE mqlayer.node SET armed_run_id = NULL")
        rearm_node(world.runtime(), "node-1")
        assert ended(world, node.url) == {b"1"}


def test_a_node_that_is_new_is_told_before_it_is_sent_anything(world: World, start_redis: StartRedis) -> None:
    new = start_redis()
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    assert recover_now(world.runtime()) is not None
    register_node(runtime_of(world.database), name="node-2", url=new.url)
    relay_once(world.settings(), limits=QUICK)
    assert ended(world, new.url) == {b"1"}


@pytest.mark.full
def test_a_node_that_is_emptied_in_the_middle_of_a_recovery_is_told_again_by_the_relay_that_goes_on(
    world: World, node: RedisServer
) -> None:
    """Who arms it says what Postgres knows as ended, and that is not so far before the outbox is numbered anew."""
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    with world.relay_process(failpoints="recover.after_end=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the source ended")
        assert ended(world, node.url) == {b"1"}
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
        rearm_node(world.runtime(), "node-1")
        assert ended(world, node.url) == set()
        process.send_signal(signal.SIGCONT)
        world.publish(10, keys=4, tag="new")
        wait_until(lambda: counted(world, "new") == 10, timeout_s=30, what="what is new, under the next source")
        (found,) = load_nodes(world.database)
        with NodeConnection(found) as connection:
            late = append_command(connection, world.key_prefix, 1, 1, [MessageRun(0, 1, 1, [b"1", b"k", b"late"])])
            assert append_reply(connection.call([late])[0], node.url) == Refused("ended", "1")
    assert counted(world, "late") == 0


@pytest.mark.full
def test_a_promotion_that_was_given_up_is_got_over_by_an_operators_word(
    world: World, node: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes were told that the source ends, and the server that it was to go on with is gone: the old one stays."""
    with redis.Redis.from_url(node.url) as client:
        client.sadd(ended_sources_key(world.key_prefix).decode(), 1)
        world.publish(10, keys=4, tag="kept")
        with world.relay() as relay:
            wait_until(lambda: "outbox recover --anew" in str(relay.health()), timeout_s=20, what="the way out told")
            wait_until(lambda: len(session_ends(caplog)) >= 6, timeout_s=30, what="six sessions that end at once")
            *_, fifth, sixth = session_ends(caplog)[:6]
            assert sixth - fifth >= FIRST_S * 2**4 / 2, "it begins session after session"
            assert recover_now(world.runtime()) is None
            assert recover_now(world.runtime(), anew=True) is not None
            wait_until(lambda: counted(world, "kept") == 10, timeout_s=30, what="what waited")
    assert values(world) == expected(4, ("m", 20), ("kept", 10))


def session_ends(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Return when a relay's sessions ended (s)."""
    return [record.created for record in caplog.records if event_of(record) == "relay_postgres_lost"]


def test_a_relay_that_starts_while_the_outbox_is_numbered_anew_is_no_former_one(world: World) -> None:
    """It has read the identity of before, whose source is ended by the time it asks for that."""
    with world.relay_process(failpoints="relay.before_source=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the relay at its source")
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        assert recover_now(world.runtime()) is not None
        relay_once(world.settings(), limits=QUICK)
        process.send_signal(signal.SIGCONT)
        world.publish(10, keys=4, tag="new")
        wait_until(lambda: counted(world, "new") == 10, timeout_s=30, what="what is new, by that relay")


def counted(world: World, tag: str) -> int:
    """Return how many messages with a tag are in the partitions."""
    return sum(value.startswith(f"{tag}-") for of_key in values(world).values() for value in of_key)
