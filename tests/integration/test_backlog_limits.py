"""Backlog limits: who waits, who fails, who takes back; and limits that change while a topic is in use."""

from __future__ import annotations

import asyncio
import os

import pytest

from mqlayer import Message
from mqlayer.errors import BacklogFull, BodyTooLarge, InvalidInput, NotFound, PartlyPublished, PublishAborted
from mqlayer.postgres.database import Database
from mqlayer.topics import set_limits
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import run_python
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

LIMIT = 4

pytestmark = pytest.mark.world(partitions=1, backlog_limit=LIMIT)


def bodies(world: World) -> list[str]:
    return [body for of_key in world.by_key().values() for body in of_key]


def test_who_does_not_wait_is_told_at_once_whichever_way_it_publishes(world: World, database: Database) -> None:
    with world.producer(options={"on_backlog": "error"}) as producer:
        producer.send_many("orders", [Message("k", b"%d" % number) for number in range(LIMIT)])
        began = awake_s()
        for number in range(20):
            with pytest.raises(BacklogFull, match="limit of 4"):
                producer.send("orders", key=f"k{number}", body=b"refused", timeout_s=60)
        future = producer.send_async("orders", key="k", body=b"refused", timeout_s=60)
        assert isinstance(future.exception(5), BacklogFull)
        with pytest.raises(PartlyPublished) as raised:
            producer.send_many("orders", [Message(f"k{number}", b"refused") for number in range(50)], timeout_s=60)
        assert {type(outcome) for outcome in raised.value.outcomes} <= {BacklogFull, PublishAborted}
        with pytest.raises(PartlyPublished):
            producer.send_many("orders", [Message("k", b"refused", dedup_id="a")], timeout_s=60)
        assert awake_s() - began < 5
        # One that waits, in between, and takes its turn once there is room.
        waiting = producer.send_async("orders", key="k", body=b"4", timeout_s=60, on_backlog="wait")
        set_limits(runtime_of(database), "orders", backlog_limit=100)
        assert waiting.result(20).identity.seq == LIMIT + 1
        assert producer.send("orders", key="k", body=b"5").identity.seq == LIMIT + 2
        assert producer.stats.pending == 0
    assert world.by_key() == {"k": [str(number) for number in range(6)]}


def test_what_waits_can_be_taken_back_and_what_is_behind_it_keeps_its_order(world: World, database: Database) -> None:
    with world.producer() as producer:
        producer.send_many("orders", [Message("k", b"%d" % number) for number in range(LIMIT)])
        futures = [producer.send_async("orders", key="k", body=b"%d" % number, timeout_s=60) for number in range(4, 10)]
        wait_until(futures[1].cancel, what="the partition refuses it")
        assert futures[1].cancelled()

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(futures[3]), 0.2)

        def taken_back() -> bool:
            asyncio.run(give_up())
            return futures[3].cancelled()

        # Under way at that moment, to be refused again, it can't be taken back.
        wait_until(taken_back, what="a timeout takes it back")
        set_limits(runtime_of(database), "orders", backlog_limit=0)
        seqs = [future.result(20).identity.seq for future in futures if not future.cancelled()]
        assert seqs == [5, 6, 7, 8]
        assert not futures[0].cancel()
        stats = producer.stats
        assert (stats.withdrawn, stats.pending, stats.failed) == (2, 0, 0)
    assert world.by_key() == {"k": ["0", "1", "2", "3", "4", "6", "8", "9"]}


def test_a_producer_learns_of_another_limit_within_seconds(world: World, database: Database) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
        assert set_limits(runtime_of(database), "orders", backlog_limit=2, body_limit=10)
        assert not set_limits(runtime_of(database), "orders", backlog_limit=2)

        def refused() -> bool:
            try:
                producer.send("orders", key="k", body=b"x" * 11, on_backlog="error")
            except BodyTooLarge:
                return True
            except BacklogFull:
                return False
            return False

        set_limits(runtime_of(database), "orders", backlog_limit=0)
        wait_until(refused, timeout_s=20, what="the producer knows")
    assert world.rows("SELECT facts FROM mqlayer.audit WHERE act = 'topic set' ORDER BY audit_id") == [
        ({"before": {"body_limit": 262144, "backlog_limit": 4}, "body_limit": 10, "backlog_limit": 2},),
        ({"before": {"body_limit": 10, "backlog_limit": 2}, "body_limit": 10, "backlog_limit": 0},),
    ]
    with pytest.raises(NotFound):
        set_limits(runtime_of(database), "none", backlog_limit=1)
    for wrong in ({}, {"body_limit": 0}, {"backlog_limit": -1}, {"body_limit": 10**7}):
        with pytest.raises(InvalidInput):
            set_limits(
                runtime_of(database),
                "orders",
                body_limit=wrong.get("body_limit"),
                backlog_limit=wrong.get("backlog_limit"),
            )


def test_a_relay_that_waits_goes_on_when_the_limit_is_raised_and_publishing_never_waits(
    database_dsn: str, redis_url: str, key_prefix: str, database: Database
) -> None:
    world = World(database_dsn, key_prefix, [redis_url])
    world.add_topic("narrow", partitions=1, backlog_limit=5)
    world.publish(20, topic="narrow", keys=20)
    with world.relay():
        wait_until(lambda: sum(map(len, world.relayed().values())) >= 5, what="a full partition")
        world.publish(20, topic="narrow", keys=20)
        began = awake_s()
        set_limits(runtime_of(database), "narrow", backlog_limit=1000)
        world.wait_until_whole()
        assert awake_s() - began < 5


def test_an_outbox_goes_by_another_body_limit_also_where_the_command_dies_before_it_says_so(
    database_dsn: str, redis_url: str, key_prefix: str, database: Database
) -> None:
    world = World(database_dsn, key_prefix, [redis_url])
    world.add_topic("small", partitions=1)
    env = {"MQLAYER_DSN": database_dsn, "MQLAYER_KEY_PREFIX": key_prefix}
    words = ("topic", "set", "small", "--body-limit", "10")
    killed = armed("topic.after_limits=kill")
    assert run_python("mqlayer", *words, env=os.environ | env | killed, timeout=20) == -9
    limit = "SELECT body_limit FROM mqlayer_app.topic"
    assert world.rows(limit) != [(10,)]
    assert run_python("mqlayer", *words, env=os.environ | env, timeout=20) == 0
    assert world.rows(limit) == [(10,)]
