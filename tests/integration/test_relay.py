"""The relay on healthy stores: order, sharing, late rows, rows that can't be sent, bounds."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import redis

from mqlayer.domain.message import NO_KEY
from mqlayer.domain.names import BODY_LIMIT, KEY_LIMIT
from mqlayer.domain.routing import lp_of
from mqlayer.errors import ConfigurationRefused, InvalidInput, SchemaMismatch
from mqlayer.outbox import adopt, list_quarantined, renew, retry_quarantined
from mqlayer.postgres.rights import Right
from mqlayer.relay import RelayLimits, relay_once, relay_session
from mqlayer.relay.lp_cursors import plan
from mqlayer.relay.lp_leases import LpSets
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(partitions=4, right=Right.RELAY)


def test_everything_published_arrives_once_and_in_order(world: World) -> None:
    world.publish(500, keys=50)
    with world.relay():
        world.publish(500, keys=50, tag="later")
        world.wait_until_whole()
    assert sum(len(chain) for chain in world.relayed().values()) == 1_000


def test_headers_and_messages_without_a_key_arrive_as_they_are(world: World) -> None:
    world.rows("SELECT mqlayer_app.publish_v1('orders', NULL, '\\x00ff', '{\"trace\": \"ä\"}')")
    world.rows("SELECT mqlayer_app.publish_v1('orders', '', 'empty key')")
    with world.relay() as relay:
        wait_until(lambda: relay.appended_count == 2, what="both messages")
    with redis.Redis.from_url(world.urls[0]) as client:
        found: list[Any] = [client.xrange(key) for key in client.scan_iter(f"{world.key_prefix}:*:log")]
    by_key = {fields[b"k"]: fields for entries in found for _, fields in entries}
    assert by_key[NO_KEY][b"b"] == b"\x00\xff"
    assert by_key[NO_KEY][b"m"].split(b":", 4)[4].decode() == '{"trace": "ä"}'
    assert by_key[b""][b"b"] == b"empty key"


def test_a_backlog_larger_than_a_chunk_is_read_in_bounded_chunks(world: World) -> None:
    world.publish(700, keys=100)
    with world.relay(limits=replace(QUICK, chunk_rows=64, chunk_bytes=500, lps_at_once=8)):
        world.publish(300, keys=100, tag="later")
        world.wait_until_whole()


@pytest.mark.full
def test_a_thin_backlog_is_read_by_lp(world: World) -> None:
    world.publish(400, keys=100)
    with world.relay():
        world.wait_until_whole()
    # Most of the range of ids is relayed; a few LPs are not, as after an outage of their node.
    world.publish(10, keys=5, tag="waiting")
    world.rows("SELECT setval('mqlayer_app.outbox_number', 100000)")
    with world.relay(limits=replace(QUICK, chunk_rows=4)):
        world.wait_until_whole()


def test_two_relays_share_the_lps_and_send_each_message_once(world: World) -> None:
    with world.relay() as first, world.relay() as second:
        wait_until(lambda: _shares(world) == {first.relay_id: 8, second.relay_id: 8}, what="eight LP sets each")
        world.publish(1_000, keys=200)
        world.wait_until_whole()
        # A relay counts when it has the answer, a moment after the node has the messages.
        wait_until(lambda: first.appended_count + second.appended_count == 1_000, what="all counted, each once")
        assert first.appended_count > 0
        assert second.appended_count > 0
    assert _shares(world) == {None: 16}, "a relay that stops gives its LPs back"


def test_a_relay_takes_over_what_a_dead_one_held(world: World) -> None:
    world.rows("UPDATE mqlayer_app.lp_set SET relay_id = 'dead', lease_until = now() + interval '0.3 seconds'")
    world.publish(100)
    with world.relay():
        world.wait_until_whole()


def test_a_relay_that_was_silent_for_half_of_its_lease_gets_no_share(world: World) -> None:
    """One that dies again and again leaves such rows: nobody would relay the LP sets that were theirs by right."""
    beat = (
        "INSERT INTO mqlayer_app.relay (relay_id, lease_until, most) VALUES (%s, now() + make_interval(secs => %s), 99)"
    )
    with kept_session(world.dsn, autocommit=True) as connection:
        connection.execute(beat, ("well", 60.0))
        connection.execute(beat, ("dead", 29.0))
        me = LpSets("me", lease_s=60.0)
        me.heartbeat(connection)
        assert len(me.owned) == 8
        connection.execute("UPDATE mqlayer_app.relay SET lease_until = now() + interval '29 s' WHERE relay_id = 'well'")
        me.heartbeat(connection)
        assert len(me.owned) == 16


def test_two_relays_on_the_same_lps_are_harmless(world: World) -> None:
    stop = threading.Event()

    def steal() -> None:
        while not stop.wait(0.01):
            world.rows("UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity'")

    thief = threading.Thread(target=steal)
    with world.relay(), world.relay(), world.relay():
        thief.start()
        try:
            for turn in range(10):
                world.publish(100, keys=30, tag=f"turn-{turn}")
            world.wait_until_whole()
        finally:
            stop.set()
            thief.join()


def test_a_row_that_becomes_visible_late_is_not_passed_by(world: World) -> None:
    with world.relay(), kept_session(world.dsn) as slow:
        slow.execute("SELECT mqlayer_app.publish_v1('orders', 'slow', 'first')")
        world.publish(50, keys=10)
        wait_until(lambda: sum(map(len, world.relayed().values())) == 50, what="the others to pass")
        slow.commit()
        world.wait_until_whole()


def test_a_row_that_becomes_visible_after_its_id_was_given_up_is_found_by_its_counter(world: World) -> None:
    with world.relay(limits=replace(QUICK, late_ids=1, late_s=0.0)), kept_session(world.dsn) as slow:
        slow.execute("SELECT mqlayer_app.publish_v1('orders', 'slow', 'first')")
        world.publish(50, keys=10)
        wait_until(lambda: sum(map(len, world.relayed().values())) == 50, what="the others to pass")
        slow.commit()
        world.wait_until_whole()


def test_a_rolled_back_transaction_sends_nothing_and_holds_nobody(world: World) -> None:
    with world.relay():
        with kept_session(world.dsn) as connection:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'key-1', 'never')")
            connection.rollback()
        world.publish(20)
        world.wait_until_whole()
    assert "never" not in {value for chain in world.relayed().values() for _, _, value in chain}


def test_a_row_that_can_never_be_sent_holds_its_lp_visibly_and_no_other(world: World) -> None:
    """Case 76."""
    lp = lp_of(b"key-1")
    key = "x" * (KEY_LIMIT + 1)
    with world.relay():
        world.publish(20)
        world.wait_until_whole()
        _insert_row(world, lp=lp, key=key, body=b"too long a key")
        world.publish(20, tag="behind")
        (row,) = wait_until(lambda: list_quarantined(world.database), what="the row to be quarantined")
        assert (row.topic, row.lp, row.seq) == ("orders", lp, 2)
        assert str(KEY_LIMIT) in row.reason
        wait_until(lambda: sum(map(len, world.relayed().values())) == 39, what="all other LPs to go on")
        assert [value for _, _, value in world.relayed()["orders", lp]] == ["m-1"]

        world.rows("UPDATE mqlayer_app.outbox SET key = 'repaired' WHERE key = %s", key)
        assert retry_quarantined(world.database, topic="orders", lp=lp) == [row]
        world.wait_until_whole()


def test_a_body_over_the_hard_limit_is_quarantined_without_being_read(world: World) -> None:
    with world.relay():
        _insert_row(world, lp=7, key="big", body=bytes(BODY_LIMIT + 1))
        (row,) = wait_until(lambda: list_quarantined(world.database), what="the row to be quarantined")
        assert str(BODY_LIMIT) in row.reason


def test_rows_of_a_topic_that_control_does_not_know_are_quarantined(world: World) -> None:
    world.rows("INSERT INTO mqlayer_app.topic (topic_id, name, body_limit) VALUES (77, 'ghosts', 1000)")
    world.rows("INSERT INTO mqlayer_app.counter SELECT 77, lp, 'ghosts', 1000 FROM generate_series(0, 1023) AS lp")
    world.publish(3, topic="ghosts", keys=1)
    world.publish(20)
    with world.relay():
        (row,) = wait_until(lambda: list_quarantined(world.database), what="the row to be quarantined")
        assert "mqlayer topic create ghosts" in row.reason
        wait_until(lambda: sum(map(len, world.relayed().values())) == 20, what="the other topic to go on")


def test_rows_that_are_nowhere_any_more_are_reported_and_hold_their_lp(world: World) -> None:
    world.publish(20, keys=2)
    lp = lp_of(b"key-0")
    world.rows("DELETE FROM mqlayer_app.outbox WHERE lp = %s AND seq = 3", lp)
    with world.relay():
        (row,) = wait_until(lambda: list_quarantined(world.database), what="the row to be quarantined")
        assert (row.lp, row.seq) == (lp, 3)
        assert "gone" in row.reason
    assert [seq for seq, _, _ in world.relayed()["orders", lp]] == [1, 2]


def test_a_topic_made_while_the_relay_runs_is_served(world: World) -> None:
    with world.relay():
        world.add_topic("invoices", partitions=2)
        world.publish(20, topic="invoices")
        world.wait_until_whole()


def test_a_full_partition_waits_and_the_others_go_on(world: World) -> None:
    world.add_topic("narrow", partitions=2, backlog_limit=5)
    world.publish(40, topic="narrow", keys=40)
    world.publish(40)
    with world.relay():
        wait_until(lambda: sum(len(c) for (t, _), c in world.relayed().items() if t == "orders") == 40, what="orders")
        wait_until(lambda: sum(len(c) for (t, _), c in world.relayed().items() if t == "narrow") >= 10, what="narrow")
        world.rows("UPDATE mqlayer.topic SET backlog_limit = 1000 WHERE name = 'narrow'")
        world.wait_until_whole()


def test_a_node_out_of_memory_waits_and_the_others_go_on(
    database_dsn: str, redis_url: str, key_prefix: str, start_redis: StartRedis
) -> None:
    small = start_redis()
    world = World(database_dsn, key_prefix, [redis_url, small.url])
    world.add_topic("orders", partitions=2)
    _configure(small.url, "maxmemory", "1")
    world.publish(100, keys=100)
    with world.relay():
        wait_until(lambda: _count(world, range(512)) == _published(world, range(512)), what="the first node's LPs")
        assert _count(world, range(512, 1024)) == 0
        _configure(small.url, "maxmemory", "0")
        world.wait_until_whole()


def test_the_compensating_pass_relays_what_nobody_holds_and_nothing_else(world: World) -> None:
    world.publish(100)
    assert relay_once(world.settings(), limits=QUICK) == 100
    assert world.whole()
    with world.relay(lease_s=10.0) as relay:
        wait_until(lambda: _shares(world) == {relay.relay_id: 16}, what="the relay to hold all")
        assert relay_once(world.settings(), limits=QUICK) == 0
        assert _shares(world) == {relay.relay_id: 16}
    assert _shares(world) == {None: 16}


def test_a_pass_waits_for_nodes_that_it_neither_reached_nor_was_refused_by(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine connects later than the first scan: the rows wait, and the pass with them.
    monkeypatch.setattr(relay_session, "FIRST_CONNECT_S", 0.0)
    world.publish(12)
    assert relay_once(world.settings(), limits=QUICK) == 12
    assert world.whole()


def test_progress_is_recorded_and_the_next_relay_begins_there(world: World) -> None:
    world.publish(100)
    with world.relay():
        world.wait_until_whole()
    assert world.rows("SELECT sum(seq)::int FROM mqlayer_app.relayed") == [(100,)]
    world.publish(10, tag="later")
    with world.relay() as relay:
        world.wait_until_whole()
    # It counts when it has the answer, a moment after the node has the messages.
    assert relay.appended_count == 10


def test_rows_go_on_while_the_record_of_progress_waits(world: World) -> None:
    waiting = "SELECT count(*)::int FROM pg_locks WHERE relation = 'mqlayer_app.relayed'::regclass AND NOT granted"
    with world.relay(), kept_session(world.dsn) as connection:
        world.publish(10)
        world.wait_until_whole()
        with connection.transaction():
            connection.execute("LOCK TABLE mqlayer_app.relayed IN SHARE MODE")
            world.publish(20, tag="recorded later")
            wait_until(lambda: world.rows(waiting) == [(1,)], what="the record to wait")
            world.publish(20, tag="behind")
            world.wait_until_whole(timeout_s=10)
            assert world.rows(waiting) == [(1,)]
    assert world.rows("SELECT sum(seq)::int FROM mqlayer_app.relayed") == [(50,)]


def test_a_copy_of_the_database_is_refused_with_what_to_do(world: World) -> None:
    relay_once(world.settings(), limits=QUICK)
    world.rows("UPDATE mqlayer.source SET cluster = '1/elsewhere'")
    with pytest.raises(ConfigurationRefused, match="outbox adopt"):
        relay_once(world.settings(), limits=QUICK)


def test_a_restored_database_goes_on_as_a_new_source_and_loses_nothing(world: World) -> None:
    world.publish(30, keys=3)
    relay_once(world.settings(), limits=QUICK)
    world.publish(6, keys=3, tag="waiting")
    world.rows("UPDATE mqlayer.source SET cluster = '1/elsewhere'")
    assert adopt(world.database) == 6
    world.publish(6, keys=3, tag="after")
    assert relay_once(world.settings(), limits=QUICK) == 12
    records = list(world.records())
    for key in ("key-0", "key-1", "key-2"):
        tags = [record.value.partition("-")[0] for record in records if record.key == key]
        assert tags == ["m"] * 10 + ["waiting"] * 2 + ["after"] * 2
    assert {record.source for record in records} == {1, 2}


def test_an_outbox_that_a_relay_works_on_keeps_its_identity(world: World) -> None:
    with world.relay(lease_s=10.0) as relay:
        wait_until(lambda: _shares(world) == {relay.relay_id: 16}, what="the relay to work")
        with pytest.raises(InvalidInput, match="stop its relays first"):
            adopt(world.database)


def test_a_copy_gets_an_identity_and_an_empty_outbox_of_its_own(world: World) -> None:
    relay_once(world.settings(), limits=QUICK)
    world.publish(6, keys=3)
    world.rows("UPDATE mqlayer.source SET cluster = '1/elsewhere'")
    renew(world.database)
    world.publish(3, keys=3, tag="own")
    assert relay_once(world.settings(), limits=QUICK) == 3
    assert {record.value.partition("-")[0] for record in world.records()} == {"own"}


def test_a_database_without_the_schema_is_refused(empty_database_dsn: str, world: World) -> None:
    world.app_dsn = empty_database_dsn
    with pytest.raises(SchemaMismatch, match="mqlayer migrate"):
        relay_once(world.settings(), limits=QUICK)


def test_memory_does_not_depend_on_the_backlog(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []

    def watched(rows: Any, lanes: Any) -> Any:
        chunks.append(len(rows))
        return plan(rows, lanes)

    monkeypatch.setattr("mqlayer.relay.relay_session.plan", watched)
    world.publish(2_000, keys=200)
    with world.relay(limits=RelayLimits(chunk_rows=100, chunk_bytes=10_000)):
        world.wait_until_whole()
    assert max(chunks) <= 100


def _shares(world: World) -> dict[str | None, int]:
    return dict(world.rows("SELECT relay_id, count(*)::int FROM mqlayer_app.lp_set GROUP BY 1"))


def _insert_row(world: World, *, lp: int, key: str, body: bytes) -> None:
    """Put a row into the outbox past the functions, which would refuse it."""
    world.rows(
        "WITH c AS (UPDATE mqlayer_app.counter SET seq = seq + 1 WHERE topic_id = 1 AND lp = %s RETURNING lp, seq) "
        "INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, body) "
        "SELECT nextval('mqlayer_app.outbox_number'), 1, lp, 0, seq, now(), %s, %s FROM c",
        lp, key, body,
    )  # fmt: skip


def _count(world: World, lps: range) -> int:
    return sum(len(chain) for (_, lp), chain in world.relayed().items() if lp in lps)


def _published(world: World, lps: range) -> int:
    return sum(len(chain) for (_, lp), chain in world.published().items() if lp in lps)


def _configure(url: str, name: str, value: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.config_set(name, value)
