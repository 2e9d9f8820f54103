"""How much may wait in Postgres: what finds no room waits in the stream, in order and visibly; others go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from mqlayer import App, Context, Event
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput
from mqlayer.groups.admin import set_group
from mqlayer.groups.seek import apply_seek, planned_seek
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.postgres.queries import query
from mqlayer.redelivery import (
    DeadFilter,
    bulk_actions,
    discard_parked,
    new_worker,
    resume_bulk,
    retry_scan,
    start_redrive,
    work_on,
)
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.failed_messages import Failing
from tests.fixtures.variants import some_of
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.parking_shop import LATER_S, Fault, ParkingShop, parked, release, rows
from tests.proof.runtimes import runtime_of


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A topic of one partition; what finds no room is tried again soon."""
    monkeypatch.setattr("mqlayer.consuming.ordered.parking_worker.FULL_RETRY_S", 0.1)
    monkeypatch.setattr("mqlayer.redelivery.bulk_worker.FULL_WAIT_S", 0.2)
    return start_stage(redis_url, partitions=1)


def consume(stage: Stage, handler: Callable[..., Any], **rules: Any) -> tuple[App, list[Event]]:
    """Start a member whose keys are parked at their first failure; return it with what it tells."""
    events: list[Event] = []
    app = stage.app()
    app.consumer(stage.topic, group="g", backoff_s=(LATER_S,), **rules)(handler)
    app.on_event(events.append)
    app.start()
    return app, events


def set_limit(stage: Stage, name: str, limit: int) -> None:
    """Change one limit of the group."""
    changed: dict[str, Any] = {name: limit}
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", **changed)


def stall(stage: Stage) -> str | None:
    """Return why the group is stuck in the partition."""
    (status,) = group_statuses(stage.runtime, stage.topic, "g")
    found = status.partitions[0].stall
    return None if found is None else found.reason


def counted(stage: Stage) -> tuple[int, int]:
    """Return messages and bytes that are parked by the counts, which are those that there are."""
    size = "octet_length(body) + octet_length(key) + octet_length(m)"
    [there] = rows(stage, f"SELECT count(*), coalesce(sum({size}), 0) FROM mqlayer.parked_message")
    [total] = rows(stage, "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM mqlayer.parked_total")
    [keys] = rows(stage, "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM mqlayer.parked_key")
    assert there == total == keys
    return int(there[0]), int(there[1])


@pytest.mark.parametrize("limit", [{"key_messages_limit": 3}, {"key_bytes_limit": 1}])
def test_what_follows_a_key_at_its_limit_waits_in_the_stream_and_the_others_go_on(
    stage: Stage, limit: dict[str, int]
) -> None:
    """Case 64: nothing is lost, order holds over both places, and it is told once, shown in lag and explain."""
    (name,) = limit
    room = 3 if name == "key_messages_limit" else 1
    shop = ParkingShop("k")
    stage.send([("k", b"%d" % number) for number in range(1, 11)])
    app, events = consume(stage, shop.recorder, **limit)
    wait_until(lambda: len(parked(stage).get("k", [])) == room, what="the key is parked as far as there is room")
    stage.send([("other", b"%d" % number) for number in range(1, 50)])
    wait_until(lambda: len(shop.recorder.bodies("other")) == 49, what="the other key handled")
    wait_until(lambda: stall(stage) == "parking_full", what="a stall that says why")
    assert not stage.all_settled()
    assert counted(stage)[0] == room
    says = explain_key(stage.runtime, stage.topic, "k", "g").run_next
    assert f"{name} is" in says
    assert says.startswith("nothing: it is tried again at")
    assert [(e.kind, e.cause) for e in events if e.kind == "parking_full"] == [("parking_full", name[: -len("_limit")])]
    assert member_of(app).stats.parked == room
    shop.broken.clear()
    release(stage)
    stage.wait_settled()
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")
    assert shop.recorder.bodies("k") == [b"%d" % number for number in range(1, 11)]
    shop.recorder.assert_in_order()
    assert counted(stage) == (0, 0)


def test_what_follows_is_parked_once_the_limit_is_raised(stage: Stage) -> None:
    shop = ParkingShop("k")
    stage.send([("k", b"1"), ("k", b"2"), ("k", b"3")])
    consume(stage, shop.recorder, key_messages_limit=1)
    wait_until(lambda: parked(stage) == {"k": [1]}, what="one parked")
    wait_until(lambda: stall(stage) is not None, what="the others wait")
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", key_messages_limit=10)
    stage.wait_settled()
    assert parked(stage) == {"k": [1, 2, 3]}


def test_looking_for_room_reads_one_message_of_what_waits_and_says_nothing_new(stage: Stage) -> None:
    """Case 64: a key at its limit for ever costs its node and its member next to nothing, whatever waits behind it."""
    shop = ParkingShop("k")
    stage.send([("k", b"1"), *[("k", b"x" * 50_000)] * 100])
    _, events = consume(stage, shop.recorder, key_messages_limit=1)
    wait_until(lambda: stall(stage) == "parking_full", what="the others wait")
    before = told_by_node(stage)
    wait_until(lambda: told_by_node(stage)[0] >= before[0] + 5, what="looked for room five times")
    after = told_by_node(stage)
    assert after[1] - before[1] < 500_000 * (after[0] - before[0])
    set_limit(stage, "key_messages_limit", 50)
    wait_until(lambda: len(parked(stage)["k"]) >= 50, what="as much as there is room for")
    set_limit(stage, "key_messages_limit", 1000)
    stage.wait_settled()
    assert len(parked(stage)["k"]) == 101
    assert [event.cause for event in events if event.kind == "parking_full"] == ["key_messages"]


def told_by_node(stage: Stage) -> tuple[int, int]:
    """Return how often the node was asked for records that were read before, and how many bytes it sent in all."""
    ranges: Any = stage.redis.info("commandstats")
    sent: Any = stage.redis.info("stats")
    return ranges.get("cmdstat_xrange", {"calls": 0})["calls"], sent["total_net_output_bytes"]


def test_what_two_sources_sent_comes_again_in_front_of_a_full_key_in_its_order(stage: Stage) -> None:
    """A seek: the other source, of which nothing is parked, would wait for room, and the key for what is behind it."""
    fails = {b"5"}

    def act(body: bytes, _ctx: Context) -> None:
        if body in fails:
            raise Fault("no stock")

    recorder = Recorder(act)
    for number, source in enumerate((1, 2, 1, 2, 1), start=1):
        send_from(stage, source, b"%d" % number)
    consume(stage, recorder, key_messages_limit=1)
    wait_until(lambda: len(parked(stage).get("k", [])) == 1, what="parked")
    stage.wait_settled()
    with closing(RouteCache(stage.database)) as routes:
        plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
        apply_seek(runtime_of(stage.database, stage.prefix, actor="test"), plan)
    wait_until(lambda: len(parked(stage)["k"]) == 5, what="all of it parked")
    fails.clear()
    release(stage)
    stage.wait_settled()
    wait_until(lambda: len(recorder.bodies()) == 9, what="all handled")
    assert recorder.bodies() == [b"1", b"2", b"3", b"4", b"1", b"2", b"3", b"4", b"5"]


def send_from(stage: Stage, source: int, body: bytes) -> None:
    """Append a message of the key that a source numbers by itself."""
    lp = int(lp_of(b"k"))
    numbers: Counter[int] = stage.__dict__.setdefault("_numbers", Counter())
    stage._seqs[lp] = numbers[source]
    stage.send([("k", body)], source=source)
    numbers[source] = stage._seqs[lp]


@pytest.mark.parametrize("limit", ["parked_messages_limit", "parked_bytes_limit"])
def test_a_key_that_fails_in_a_full_group_waits_in_place_and_is_tried_again_there(stage: Stage, limit: str) -> None:
    """Before Postgres fills up; with room again it is parked as any other one."""
    shop = ParkingShop("a", "b")
    stage.send([("a", b"1")])
    app, events = consume(stage, shop.recorder, **{limit: 1})
    wait_until(lambda: parked(stage) == {"a": [1]}, what="one parked")
    stage.send([("b", b"1"), ("b", b"2"), ("c", b"1"), ("a", b"2")])
    full = "group" + limit.removeprefix("parked").removesuffix("_limit")
    wait_until(lambda: {e.cause for e in events if e.kind == "parking_full"} == {full}, what="an alarm")
    wait_until(lambda: shop.recorder.bodies("c") == [b"1"], what="the healthy one")
    wait_until(lambda: stall(stage) == "parking_full", what="a stall that says why")
    assert parked(stage) == {"a": [1]}
    assert app.counts()["orders", "g"].parking_full >= 1
    assert discard_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", key="a", reason="a test's") == 1
    member_of(app).dispatcher.retry_now()
    # By one of them, or by both in one transaction.
    wait_until(lambda: parked(stage), what="room is used", timeout_s=20)
    shop.broken.clear()
    set_limit(stage, limit, 1000)

    def settled() -> bool:
        # What found no room a moment ago may come to wait for its backoff only now.
        member_of(app).dispatcher.retry_now()
        release(stage)
        return stage.all_settled("g")

    wait_until(settled, timeout_s=20, what="all settled")
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")
    assert (shop.recorder.bodies("a"), shop.recorder.bodies("b")) == ([b"2"], [b"1", b"2"])
    assert counted(stage) == (0, 0)


def test_what_a_former_owner_parked_and_did_not_settle_needs_no_room(stage: Stage) -> None:
    """Else its key would wait for room, and the room for its key."""
    shop = ParkingShop("k")
    stage.send([("k", b"1"), ("k", b"2"), ("k", b"3")])
    app, _ = consume(stage, shop.recorder, key_messages_limit=2)
    wait_until(lambda: parked(stage) == {"k": [1, 2]}, what="two parked")
    app.stop()
    (partition,) = stage.partitions
    stage.redis.hset(stage.group_keys(partition).lock, mapping={"committed": 1, "base": 1})
    stage.redis.delete(stage.group_keys(partition).acks)
    shop.broken.clear()
    consume(stage, shop.recorder)
    release(stage)
    stage.wait_settled()
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")
    assert shop.recorder.bodies("k") == [b"1", b"2", b"3"]
    assert counted(stage) == (0, 0)


def test_what_comes_again_in_front_of_a_full_key_is_parked_in_front_of_it(stage: Stage) -> None:
    """A seek: to wait in the stream for room it would come behind what it lay before."""
    fails = {b"3"}

    def act(body: bytes, _ctx: Context) -> None:
        if body in fails:
            raise Fault("no stock")

    recorder = Recorder(act)
    stage.send([("k", b"%d" % number) for number in range(1, 5)])
    consume(stage, recorder, key_messages_limit=2)
    wait_until(lambda: parked(stage) == {"k": [3, 4]}, what="parked")
    stage.wait_settled()
    with closing(RouteCache(stage.database)) as routes:
        plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
        apply_seek(runtime_of(stage.database, stage.prefix, actor="test"), plan)
    wait_until(lambda: parked(stage) == {"k": [1, 2, 3, 4]}, what="all of it parked")
    fails.clear()
    release(stage)
    stage.wait_settled()
    wait_until(lambda: recorder.bodies() == [b"1", b"2", b"1", b"2", b"3", b"4"], what="all handled in order")


@pytest.mark.parametrize(
    "limit", some_of(["parked_keys_limit", "parked_messages_limit", "key_messages_limit", "key_bytes_limit"], 2)
)
def test_a_redrive_waits_for_room_and_says_so(stage: Stage, limit: str) -> None:
    """What is given back is parked: as much as may be, the rest when that was handled. Nothing is sent twice."""
    failing = Failing(stage)
    bodies = [b"1", b"2", b"3"]
    keys = ["k"] * 3 if limit.startswith("key") else ["a", "b", "c"]
    failing.dead_letter(*failing.publish(*zip(keys, bodies, strict=True)))
    set_limit(stage, limit, 1)
    started = start_redrive(runtime_of(stage.database, actor="a test"), "orders", "g", DeadFilter())

    def blocked_by() -> str | None:
        retry_scan(stage.database, at_most_s=0.3)
        return bulk_actions(stage.database)[0].blocked_by

    # A scan may be at its end before it comes to the one that finds no room.
    assert limit in (wait_until(blocked_by, what="it to be blocked") or "")
    (found,) = bulk_actions(stage.database)
    assert (found.state, found.done, len(failing.parked())) == ("running", 1, 1)
    stage.consume(recorder := Recorder(), backoff_s=None)
    worker = new_worker()
    resume_bulk(runtime_of(stage.database, actor="a test"), started, worker=worker)
    done = work_on(stage.database, started, worker=worker)
    assert (done.state, done.done, done.blocked_by) == ("done", 3, None)
    wait_until(lambda: sorted(recorder.bodies()) == bodies, what="all handled")
    if limit.startswith("key"):
        assert recorder.bodies() == bodies


@pytest.mark.parametrize("limit", [0, -1, 1.5, 2**63])
def test_what_no_limit_can_be_is_refused(stage: Stage, limit: Any) -> None:
    stage.consume(Recorder())
    with pytest.raises(InvalidInput, match="whole number"):
        set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", parked_bytes_limit=limit)


def test_what_a_page_costs_does_not_grow_with_what_is_parked_of_its_key(stage: Stage) -> None:
    """Case 64: neither to park behind it, nor to find that there is no room, nor what comes again in front of it."""
    stage.consume(Recorder()).stop()
    group_id, (partition,), count = stage.group_id(), stage.partitions, 500
    with stage.database.connection() as connection:
        connection.execute("INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) VALUES (%s, 5, 'k', 'retry')",
                           [group_id])  # fmt: skip
        connection.execute(
            "INSERT INTO mqlayer.parked_message "
            "(group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body) "
            "SELECT %s, 5, 'k', 1, n, nextval('mqlayer.parked_position'), %s, n, 'k', 'm', 'b' "
            "FROM generate_series(50001, 100000) n",
            [group_id, partition],
        )

        # As the server does by itself after a while.
        connection.execute("ANALYZE mqlayer.parked_message")

        def took(name: str, source: int, first: int) -> float:
            numbers = list(range(first, first + count))
            facts: dict[str, list[Any]] = {
                "lps": [5], "names": [b"k"], "sources": [source], "keys": [b"k"], "ms": [b"m"], "bodies": [b"b"],
                "attempts": [0], "tried": [0],
            }  # fmt: skip
            columns = {column: value * count for column, value in facts.items()} | {"seqs": numbers, "offsets": numbers}
            began = awake_s()
            connection.execute(
                query(name), columns | {"group_id": group_id, "partition_id": partition, "member_id": "m"}
            )
            return awake_s() - began

        # Often enough that the server makes one plan for all.
        times = [took("parked_in_front", 3, 200_000) for _ in range(8)]
        times += [took("parked_messages_put", 1, 100_001 + count * turn) for turn in range(8)]
        times += [took("parked_messages_put", source, 1 + count * source) for source in (1, 2, 3)]
    assert max(times) < 1.0, times


@pytest.mark.full
def test_a_page_of_a_group_that_is_younger_than_the_statistics_costs_no_more(stage: Stage) -> None:
    """Case 64: the planner takes such a group for one that has nothing parked, and every index of it for as good."""
    for group in ("old", "young"):
        stage.consume(Recorder(), group=group).stop()
    old, young, (partition,), count = stage.group_id("old"), stage.group_id("young"), stage.partitions, 500
    keys = (
        "INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) "
        "SELECT %s, n, format('k%%s', n)::bytea, 'retry' FROM generate_series(1, 200) n"
    )
    messages = (
        "INSERT INTO mqlayer.parked_message "
        "(group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body) "
        "SELECT %s, n %% 200 + 1, format('k%%s', n %% 200 + 1)::bytea, 1, n, nextval('mqlayer.parked_position'), "
        "%s, n, "
        "'k', 'm', 'b' FROM generate_series(50001, 80000) n"
    )
    with stage.database.connection() as connection:
        for group_id in (old, young):
            connection.execute(keys, [group_id])
            connection.execute(messages, [group_id, partition])
            if group_id == old:
                connection.execute("ANALYZE mqlayer.parked_message")
        numbers = list(range(1, count + 1))
        columns = {"lps": [n % 200 + 1 for n in numbers], "names": [b"k%d" % (n % 200 + 1) for n in numbers],
                   "sources": [2] * count, "seqs": numbers, "offsets": numbers, "keys": [b"k"] * count,
                   "ms": [b"m"] * count, "bodies": [b"b"] * count, "attempts": [0] * count,
                   "tried": [0] * count}  # fmt: skip
        facts = columns | {"group_id": young, "partition_id": partition - 1, "member_id": "m"}
        began = awake_s()
        connection.execute(query("parked_in_front"), facts)
        connection.execute(query("parked_messages_put"), facts | {"partition_id": partition})
    assert awake_s() - began < 2.0
