"""Direct publishing while partitions are sealed, moved and opened: the same seqs, in order, wherever they are."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
import redis

from mqlayer.domain.routing import lp_of
from mqlayer.errors import PublishUnknown
from mqlayer.producing import Message
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.manual_change import hand_over, make_successor, set_meta, switch_route
from tests.proof.proxy import TcpProxy
from tests.proof.route_ranges import range_of
from tests.proof.world import World


def home(world: World, key: str) -> int:
    """Return the partition of a key by the first route."""
    return range_of(world.routes["orders"], lp_of(key.encode())).partition


def elsewhere(world: World, key: str) -> str:
    """Return a key of another partition."""
    names = (f"other-{number}" for number in range(1_000))
    return next(name for name in names if home(world, name) != home(world, key))


def test_a_message_that_a_sealed_partition_refuses_lands_once_in_the_successor(world: World) -> None:
    """Cases 5 and 7: it waits for the newer route, what is behind it waits too, other partitions go on."""
    parent, bystander = home(world, "k"), elsewhere(world, "k")
    with world.producer() as producer:
        assert producer.send("orders", key="k", body=b"1").partition == parent
        set_meta(world, parent, state="sealed", change="7")
        with pytest.raises(PublishUnknown, match="does not serve the LP at present") as raised:
            producer.send("orders", key="k", body=b"2", timeout_s=2)
        behind = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(3, 20)]
        assert producer.send("orders", key=bystander, body=b"x").offset == 1

        child = make_successor(world, parent)
        hand_over(world, parent, child)
        assert not behind[0].done()
        switch_route(world, parent, child)
        assert raised.value.future is not None
        receipt = raised.value.future.result(20)
        assert (receipt.partition, receipt.offset, receipt.identity.seq) == (child, 1, 2)
        wait(behind, 20)
        assert producer.send("orders", key="k", body=b"20").partition == child
    assert world.by_key()["k"] == [str(number) for number in range(1, 21)]


def test_a_repeated_message_is_found_in_the_parent_where_it_was_stored(
    database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    """Case 8: the first copy is in the parent, the retry reaches the child and is answered from the marks."""
    parts = redis.ConnectionPool.from_url(redis_url).connection_kwargs
    with TcpProxy(parts["host"], parts["port"]) as proxy:
        world = World(database_dsn, key_prefix, [f"redis://{proxy.host}:{proxy.port}/0"], [redis_url])
        world.add_topic(partitions=2)
        parent = home(world, "k")
        with world.producer() as producer:
            producer.send("orders", key="k", body=b"1")
            proxy.cut_after(server_bytes=0)
            proxy.refuse_new()
            future = producer.send_async("orders", key="k", body=b"2")
            behind = producer.send_async("orders", key="k", body=b"3")
            proxy.wait_for_cut()
            set_meta(world, parent, state="sealed", change="7")
            child = make_successor(world, parent)
            hand_over(world, parent, child)
            switch_route(world, parent, child)
            proxy.heal()
            first, second = future.result(20), behind.result(20)
            assert (first.partition, first.offset, first.identity.seq) == (parent, 2, 2)
            assert second.identity.seq == 3
        assert world.by_key() == {"k": ["1", "2", "3"]}


@pytest.mark.world(partitions=1)
def test_queues_follow_a_move_to_another_node(world: World, start_redis: StartRedis) -> None:
    with world.producer() as producer:
        receipts = producer.send_many("orders", [Message(f"k{number % 40}", b"%d" % number) for number in range(400)])
        parent = receipts[0].partition
        world.add_node(start_redis().url)
        set_meta(world, parent, state="sealed", change="7")
        futures = [
            producer.send_async("orders", key=f"k{number % 40}", body=b"%d" % number) for number in range(400, 2_000)
        ]
        child = make_successor(world, parent, node=2)
        hand_over(world, parent, child, node=2)
        switch_route(world, parent, child)
        wait(futures, 30)
        assert {future.result(0).partition for future in futures} == {child}
    assert world.by_key() == {f"k{k}": [str(n) for n in range(2_000) if n % 40 == k] for k in range(40)}


def test_order_is_kept_while_partitions_move_under_load(world: World) -> None:
    """Case 7 from four threads in all ways, over five moves of either partition."""
    stop = threading.Event()
    sent: dict[str, int] = {}
    with world.producer() as producer:

        def publish(thread: int) -> None:
            number = 0
            while not stop.is_set():
                key = f"{thread}-{number % 11}"
                sent[key] = sent.get(key, 0) + 1
                body = b"%d" % sent[key]
                if number % 3 == 0:
                    producer.send("orders", key=key, body=body)
                elif number % 3 == 1:
                    producer.send_async("orders", key=key, body=body)
                else:
                    producer.send_many("orders", [Message(key, body)])
                number += 1

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        serving = [partition for _, partition, _ in world.partitions()]
        for turn in range(10):
            before = producer.stats.stored
            wait_until(lambda: producer.stats.stored > before + 50, what="messages to be stored")  # noqa: B023
            parent = serving[turn % 2]
            set_meta(world, parent, state="sealed", change=str(turn))
            child = make_successor(world, parent)
            hand_over(world, parent, child)
            switch_route(world, parent, child)
            serving[turn % 2] = child
        stop.set()
        for thread in threads:
            thread.join(30)
        assert producer.flush(30) == 0
        assert producer.stats.failed == producer.stats.lost == 0
    assert world.by_key() == {key: [str(n) for n in range(1, count + 1)] for key, count in sent.items()}


@pytest.mark.parametrize("state", ["importing", "sealed"])
def test_a_partition_that_opens_under_the_same_route_is_tried_again(world: World, state: str) -> None:
    parent = home(world, "k")
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        set_meta(world, parent, state=state)
        futures = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(2, 5)]
        assert producer.flush(0.3) == 3
        set_meta(world, parent, state="open")
        wait(futures, 20)
    assert world.by_key() == {"k": ["1", "2", "3", "4"]}


def test_an_absent_partition_refuses_and_nothing_is_made_anew(world: World) -> None:
    """Invariant 4: a missing meta means refuse, never new."""
    parent = home(world, "k")
    with world.producer() as producer, world.client() as client:
        producer.send("orders", key="k", body=b"1")
        client.rename(world.keys(parent).meta, "kept-aside")
        future = producer.send_async("orders", key="k", body=b"2")
        assert producer.flush(0.3) == 1
        assert client.xlen(world.keys(parent).log) == 1
        client.rename("kept-aside", world.keys(parent).meta)
        assert future.result(20).offset == 2


def test_lps_that_a_partition_does_not_serve_wait_and_the_others_go_on(world: World) -> None:
    keys = [f"k{number}" for number in range(200) if home(world, f"k{number}") == home(world, "k0")]
    middle = sorted(lp_of(key.encode()) for key in keys)[len(keys) // 2]
    parent = home(world, "k0")
    lp_to = range_of(world.routes["orders"], lp_of(b"k0")).lp_to
    unowned = {key for key in keys if lp_of(key.encode()) >= middle}
    with world.producer() as producer:
        producer.send_many("orders", [Message(key, b"1") for key in keys])
        set_meta(world, parent, lp_to=middle)
        futures = {key: producer.send_async("orders", key=key, body=b"2") for key in keys}
        wait([futures[key] for key in keys if key not in unowned], 20)
        assert {key for key in keys if not futures[key].done()} == unowned
        set_meta(world, parent, lp_to=lp_to)
        wait(list(futures.values()), 20)
    assert world.by_key() == {key: ["1", "2"] for key in keys}


def test_an_old_route_is_read_again_in_the_background(world: World) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"x" * 2_000)
        world.rows("UPDATE mqlayer.topic SET body_limit = 100 WHERE name = 'orders'")
        producer._engine._topics["orders"].read_at = float("-inf")
        producer.send("orders", key="k", body=b"x" * 2_000)
        wait_until(lambda: producer._engine._topics["orders"].route.body_limit == 100, what="the new limit")
