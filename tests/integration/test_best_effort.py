"""Topics of the strategy best_effort: what a partition does not take goes to another one, marked; strict never does."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

import pytest

from mqlayer import App, Context
from mqlayer.domain.message import Record, mark_reordered, records_of
from mqlayer.domain.routing import lp_of
from mqlayer.errors import BacklogFull, PublishAborted, PublishUnknown
from mqlayer.producing import Message, Receipt
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.refused_sends import send_to_the_end
from tests.proof.route_ranges import range_of
from tests.proof.world import World

STRATEGIES = ("best_effort", "strict")

pytestmark = pytest.mark.world(nodes=2, proxied=True, partitions=0)


@pytest.fixture(autouse=True)
def _topics(world: World) -> None:
    """A topic of each strategy, named so, of two partitions, one on each node."""
    for strategy in STRATEGIES:
        world.add_topic(strategy, partitions=2, backlog_limit=20, strategy=strategy)


def key_at(world: World, topic: str, node: int) -> str:
    """Return a key of the partition on a node."""
    names = (f"key-{number}" for number in range(1_000))
    return next(name for name in names if range_of(world.routes[topic], lp_of(name.encode())).node == node)


def records(world: World, receipts: list[Receipt], topic: str) -> list[Record]:
    """Return the records that receipts name."""
    nodes = {partition: node for _, partition, node in world.partitions(topic)}
    found = []
    for receipt in receipts:
        at = f"{receipt.offset}-0"
        with world.client(nodes[receipt.partition]) as client:
            answer: Any = client.execute_command("XRANGE", world.keys(receipt.partition).log, at, at)
        entries = [(entry_id, [part for pair in fields.items() for part in pair]) for entry_id, fields in answer]
        found += records_of(entries)
    return found


def fill(world: World, topic: str, node: int) -> str:
    """Bring the partition on a node to its backlog limit; return a key of it."""
    key = key_at(world, topic, node)
    with world.producer() as producer:
        producer.send_many(topic, [Message(key, b"filler")] * 20)
    return key


@pytest.mark.parametrize("way", ["send", "send_async", "send_many"])
def test_what_a_full_partition_refuses_goes_to_another_one_marked(world: World, way: str) -> None:
    """Case 10, of best effort."""
    key = fill(world, "best_effort", 1)
    messages = [Message(key, b"%d" % n, {"h": "v"} if n % 2 else None, ("eu",) if n % 3 else ()) for n in range(6)]
    with world.producer() as producer:
        if way == "send":
            receipts = [
                producer.send("best_effort", key=m.key, body=m.body, headers=m.headers, tags=m.tags) for m in messages
            ]
        elif way == "send_async":
            futures: list[Future[Receipt]] = [
                producer.send_async("best_effort", key=m.key, body=m.body, headers=m.headers, tags=m.tags)
                for m in messages
            ]
            receipts = [future.result(20) for future in futures]
        else:
            receipts = list(producer.send_many("best_effort", messages))
        assert producer.stats.diverted == 6
        assert producer.stats.pending_bytes == 0
    nodes = {partition: node for _, partition, node in world.partitions("best_effort")}
    assert {nodes[receipt.partition] for receipt in receipts} == {2}
    found = records(world, receipts, "best_effort")
    assert [(r.key, r.body, dict(r.headers), r.tags) for r in found] == [
        (key.encode(), m.body, dict(m.headers or {}), tuple(m.tags)) for m in messages
    ]
    assert all(record.reordered for record in found)
    assert [record.identity for record in found] == [receipt.identity for receipt in receipts]
    world.chains("best_effort")


def test_a_strict_topic_never_does_that(world: World) -> None:
    """Case 10: what is refused fails, and nothing behind it is stored before it."""
    key = fill(world, "strict", 1)
    with world.producer() as producer:
        first = producer.send_async("strict", key=key, body=b"1", timeout_s=2.0)
        second = producer.send_async("strict", key=key, body=b"2", timeout_s=15.0)
        wait([first, second], 20)
        assert isinstance(first.exception(), BacklogFull)
        assert isinstance(second.exception(), PublishAborted)
        assert producer.stats.diverted == 0
    assert world.by_key("strict") == {key: ["filler"] * 20}


@pytest.mark.parametrize("topic", STRATEGIES)
def test_while_a_node_is_away_best_effort_goes_on_and_strict_waits(world: World, proxy: TcpProxy, topic: str) -> None:
    """Case 10: what may be stored there stays, so that nothing is stored twice."""
    key = key_at(world, topic, 1)
    with world.producer() as producer:
        assert producer.send(topic, key=key, body=b"0").offset == 1
        proxy.refuse_new()
        proxy.reset_all()
        with pytest.raises(PublishUnknown) as raised:
            producer.send(topic, key=key, body=b"unknown", timeout_s=0.2)
        futures = [producer.send_async(topic, key=key, body=b"%d" % number) for number in range(1, 8)]
        if topic == "strict":
            assert not wait(futures, 0.5).done
        else:
            assert all(record.reordered for record in records(world, [f.result(20) for f in futures], topic))
            assert producer.stats.diverted >= 7
        proxy.heal()
        assert raised.value.future is not None
        assert raised.value.future.result(20).identity.seq == 2
        wait_until(lambda: producer.stats.pending == 0, what="all settled")
        wait_until(lambda: not records(world, [producer.send(topic, key=key, body=b"z")], topic)[0].reordered,
                   what="the node to be used again")  # fmt: skip
    bodies = [body for bodies in world.by_key(topic).values() for body in bodies if body != "z"]
    assert sorted(bodies) == sorted(["0", "unknown", *map(str, range(1, 8))])
    if topic == "strict":
        assert bodies == ["0", "unknown", *map(str, range(1, 8))]


@pytest.mark.full
def test_where_no_partition_takes_it_a_message_fails_as_in_a_strict_topic(world: World) -> None:
    key = fill(world, "best_effort", 1)
    fill(world, "best_effort", 2)
    with world.producer() as producer, pytest.raises(BacklogFull):
        send_to_the_end(producer, "best_effort", key=key, body=b"x", timeout_s=2.0)


def test_a_full_partition_is_used_again_when_it_takes_messages(world: World) -> None:
    key = fill(world, "best_effort", 1)
    home = range_of(world.routes["best_effort"], lp_of(key.encode())).partition
    with world.producer() as producer, world.client(1) as client:
        assert producer.send("best_effort", key=key, body=b"1").partition != home
        client.xtrim(world.keys(home).log, maxlen=0)
        wait_until(
            lambda: producer.send("best_effort", key=key, body=b"2").partition == home, what="its own partition again"
        )


def test_messages_with_a_dedup_id_or_without_a_key(world: World) -> None:
    """An id is known in its own LP only, so its message waits; without a key there is no order to lose, and no mark."""
    key = fill(world, "best_effort", 1)
    with world.producer() as producer:
        with pytest.raises(BacklogFull):
            send_to_the_end(producer, "best_effort", key=key, body=b"x", dedup_id="a", timeout_s=2.0)
        receipts = [producer.send("best_effort", body=b"x") for _ in range(12)]
    assert not any(record.reordered for record in records(world, receipts, "best_effort"))


def test_a_handler_sees_which_messages_may_be_out_of_order(world: World) -> None:
    key = fill(world, "best_effort", 1)
    with world.producer() as producer:
        producer.send("best_effort", key=key, body=b"1", headers={"h": "v"})
    seen: list[tuple[bytes, bool, dict[str, str]]] = []
    app = App(world.settings(lease_s=10.0))

    @app.consumer("best_effort", group="g")
    def handle(body: bytes, ctx: Context) -> None:
        seen.append((body, ctx.reordered, dict(ctx.headers)))

    app.start()
    try:
        wait_until(lambda: len(seen) == 21, what="all handled")
    finally:
        app.stop()
    assert [one for one in seen if one[1]] == [(b"1", True, {"h": "v"})]
    assert seen.count((b"filler", False, {})) == 20


@pytest.mark.parametrize("facts", [b"17", b'17:{"h":"v"}', b'17:{"mq-tags":"0011:eu","h":"a:b"}'])
def test_the_mark_is_put_once_and_hides_nothing(facts: bytes) -> None:
    before = Record(1, b"1:2:3:" + facts, b"k", b"b")
    marked = Record(1, b"1:2:3:" + mark_reordered(mark_reordered(facts)), b"k", b"b")
    assert (marked.reordered, before.reordered) == (True, False)
    assert (marked.headers, marked.tags, marked.at_ms) == (before.headers, before.tags, before.at_ms)
    assert marked.m.count(b"mq-reordered") == 1
