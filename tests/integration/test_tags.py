"""Groups that want some messages by their tags: what they get, and that all else is settled and stays where it is."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mqlayer import Context, Message, Producer, Receiver, all_of, any_of
from mqlayer.consuming.ordered.member import OrderedMember
from mqlayer.domain.message import encode_facts
from mqlayer.domain.routing import lp_of
from mqlayer.domain.tags import TagFilter, tags_text
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.failpoints import arm, disarm_all
from mqlayer.groups import apply_seek, planned_seek
from mqlayer.groups.admin import set_group
from mqlayer.groups.group import find_group
from mqlayer.inspect import explain_key
from mqlayer.maintenance import trim_pass
from mqlayer.redelivery import DeadFilter, new_worker, release_all, show_dead, start_redrive, work_on
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import MessageRun, append_command
from mqlayer.runtime.route_cache import RouteCache, load_route
from tests.fixtures.consumers import SOURCE, Recorder, Stage, StartStage, member_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of

ALIKE = ("t26821", "t49091")
"""Two tags with one hash."""
KEYS = 10
SETS = ((), ("eu",), ("us",), ("eu", "vip"), ("us", "vip"), ("eu", "us", "vip"))
MANY = 100_000


@pytest.fixture
def producer(stage: Stage) -> Iterator[Producer]:
    """A producer of the topic."""
    with Producer(stage.settings(), name="tags") as producer:
        yield producer


class Published:
    """Messages of random tags, numbered on within each key, and what of them a filter takes."""

    def __init__(self, producer: Producer, seed: int = 1) -> None:
        self._producer, self._random = producer, random.Random(seed)
        self.sent: list[tuple[str, bytes, tuple[str, ...]]] = []

    def more(self, count: int, sets: Sequence[tuple[str, ...]] = SETS) -> None:
        """Publish so many, with one of these sets of tags each."""
        numbers = range(len(self.sent) + 1, len(self.sent) + count + 1)
        new = [(f"key-{n % KEYS}", b"%d" % n, self._random.choice(sets)) for n in numbers]
        self._producer.send_many("orders", [Message(key, body, tags=tags) for key, body, tags in new])
        self.sent += new

    def wanted(self, tag_filter: str) -> dict[str, list[bytes]]:
        """Return what a filter takes, by key, in order."""
        wanted = TagFilter.of(tag_filter)
        found: dict[str, list[bytes]] = {f"key-{number}": [] for number in range(KEYS)}
        for key, body, tags in self.sent:
            if wanted is None or wanted.takes(tags):
                found[key].append(body)
        return found


def by_key(recorder: Recorder) -> dict[str, list[bytes]]:
    """Return what was handled, by key, in order."""
    return {f"key-{number}": recorder.bodies(f"key-{number}") for number in range(KEYS)}


def settled_bits(stage: Stage) -> int:
    """Return how many ack bitmaps are left: with everything settled, none."""
    return sum(stage.redis.exists(stage.group_keys(partition).acks) for partition in stage.partitions)


@pytest.mark.parametrize(
    "tag_filter", some_of(["any:eu", "any:us,vip", "all:eu,vip", "all:eu,us,vip", "any:nobody", "none"], 2)
)
def test_a_group_gets_what_its_filter_takes_in_order(stage: Stage, producer: Producer, tag_filter: str) -> None:
    """Case 62: tag mismatch; the rest is settled."""
    published = Published(producer)
    published.more(400)
    tags: dict[bytes, tuple[str, ...]] = {}
    recorder = Recorder(lambda body, ctx: tags.__setitem__(body, ctx.tags))
    app = stage.consume(recorder, tag_filter=tag_filter)
    stage.wait_settled()
    published.more(200)
    stage.wait_settled()
    assert by_key(recorder) == published.wanted(tag_filter)
    assert {body: tags[body] for body in tags} == {body: of for _, body, of in published.sent if body in tags}
    recorder.assert_in_order()
    assert settled_bits(stage) == 0
    handled = sum(map(len, published.wanted(tag_filter).values()))
    # Both are counted once the node has them.
    wait_until(lambda: member_of(app).stats.unmatched == 600 - handled, what="the others counted")
    wait_until(lambda: member_of(app).stats.settled == handled, what="acks counted")
    assert {(owned.room.count, owned.room.bytes) for owned in member_of(app).ownership.all()} == {(0, 0)}


def test_a_tag_with_the_hash_of_another_is_told_from_it(every_stage: Stage) -> None:
    """Case 62: hash collision."""
    one, other = ALIKE
    with Producer(every_stage.settings(), name="tags") as producer:
        for number in range(1, 41):
            producer.send("orders", key="k", body=b"%d" % number, tags=(one if number % 2 else other,))
    recorder = Recorder()
    app = every_stage.consume(recorder, tag_filter=any_of(one))
    every_stage.wait_settled()
    assert recorder.bodies("k") == [b"%d" % number for number in range(1, 41, 2)]
    wait_until(lambda: member_of(app).stats.unmatched == 20, what="the others counted")


def test_what_waits_behind_a_message_that_is_not_settled_is_settled_where_it_does_not_match(
    stage: Stage, producer: Producer
) -> None:
    """Case 62: gaps in the bitmap are those of messages that match, and nothing else."""
    released = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            released.wait(20)

    recorder = Recorder(act)
    key = stage.key_in(stage.partitions[0])
    stage.consume(recorder, tag_filter="any:eu")
    producer.send("orders", key=key, body=b"1", tags=("eu",))
    for number in range(2, 102):
        producer.send("orders", key=key, body=b"%d" % number, tags=("eu",) if number % 10 == 0 else ())
    keys = stage.group_keys(stage.partitions[0])
    wait_until(lambda: stage.redis.bitcount(keys.acks) == 90, what="the others settled")
    assert stage.position(stage.partitions[0]).committed == 1
    released.set()
    stage.wait_settled()
    assert recorder.bodies(key) == [b"1", *(b"%d" % number for number in range(10, 102, 10))]
    assert settled_bits(stage) == 0


def test_a_filter_holds_over_a_split_and_a_merge(stage: Stage, producer: Producer) -> None:
    """Case 62: the command record inside a batch; a parent whose end does not match is drained nevertheless."""
    published = Published(producer)
    published.more(300)
    split(runtime_of(stage.database, stage.prefix, application=stage.database), "orders", stage.partitions[0])
    published.more(200)
    recorder = Recorder()
    stage.consume(recorder, tag_filter="all:us,vip")
    first, second, *_ = (line.partition for line in load_route(stage.database, "orders").ranges if line.lp_from < 512)
    published.more(100, [("eu",)])
    merge(runtime_of(stage.database, stage.prefix, application=stage.database), "orders", (first, second))
    published.more(200)
    wanted = published.wanted("all:us,vip")
    wait_until(lambda: by_key(recorder) == wanted, timeout_s=30, what="all of it handled")
    stage.partitions = [line.partition for line in load_route(stage.database, "orders").ranges]
    stage.wait_settled()
    recorder.assert_in_order()


def send_unmatched(stage: Stage, count: int, body: bytes) -> None:
    """Append messages of other tags to one partition, quickly."""
    key = stage.key_in(stage.partitions[0]).encode()
    lp = lp_of(key)
    facts = encode_facts(1, None, tags_text(("us",)))
    with stage.connection() as connection:
        connection.call(
            [
                append_command(
                    connection,
                    stage.prefix,
                    stage.partitions[0],
                    SOURCE,
                    [MessageRun(lp, at + 1, 500, [facts, key, body] * 500)],
                )
                for at in range(0, count, 500)
            ]
        )


@pytest.mark.full
def test_a_long_run_of_others_moves_committed_with_few_calls_and_nothing_in_hand(
    start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 62: a run of only-unmatched records. Calls are counted, and the bodies that come back."""
    stage = start_stage(redis_url, partitions=1)
    body = b"x" * 64
    send_unmatched(stage, MANY, body)
    calls: list[tuple[int, int]] = []
    ranges: list[int] = []
    call = NodeConnection.call

    def counted(line: NodeConnection, commands: Sequence[Command]) -> list[Any]:
        replies = call(line, commands)
        calls.append((len(commands), repr(replies).count(body.decode())))
        ranges.extend(len(owned.results) for app in apps for owned in member_of(app).ownership.all())
        return replies

    monkeypatch.setattr(NodeConnection, "call", counted)
    recorder = Recorder()
    apps = [stage.app()]
    apps[0].consumer("orders", group="g", tag_filter="any:eu")(recorder)
    apps[0].start()
    stage.wait_settled()
    assert recorder.begun == []
    owned = member_of(apps[0]).ownership.all()[0]
    assert (owned.room.count, owned.room.bytes, len(owned.queues)) == (0, 0, 0)
    assert len(calls) < MANY / 200
    assert sum(bodies for _, bodies in calls) <= 2
    assert max(ranges) <= MANY / 1_000
    wait_until(lambda: member_of(apps[0]).stats.unmatched == MANY, what="all counted")


def test_a_member_that_brings_another_filter_is_refused(stage: Stage) -> None:
    """Case 63: the error names both."""
    stage.consume(Recorder(), tag_filter=any_of("vip", "eu"))
    with pytest.raises(Conflict, match=r"tag_filter = any:eu,vip \(settings version 1\), this member brings any:us"):
        stage.consume(Recorder(), tag_filter=any_of("us"))
    with pytest.raises(Conflict, match=r"tag_filter = any:eu,vip .* brings none"):
        stage.consume(Recorder(), tag_filter="none")
    stage.consume(Recorder(), tag_filter=any_of("eu", "vip"))
    stage.consume(Recorder())
    assert find_group(stage.database, "orders", "g").tag_filter == "any:eu,vip"
    with pytest.raises(InvalidInput, match="is no filter"):
        stage.consume(Recorder(), group="h", tag_filter="eu")
    with pytest.raises(InvalidInput, match="is no filter"):
        set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="eu")


def knows(members: list[OrderedMember], tag_filter: str) -> bool:
    """Say whether all members have a filter."""
    return all(str(member.settings.tag_filter or "none") == tag_filter for member in members)


def test_ordered_pop_has_tags_and_a_filter(stage: Stage, producer: Producer) -> None:
    producer.send("orders", key="k", body=b"1", tags=("vip", "eu"))
    with Receiver("orders", group="g", settings=stage.settings()) as receiver:
        (message,) = receiver.receive(wait_s=10)
        assert message.tags == ("eu", "vip")
        receiver.ack([message])
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="any:us")
    producer.send("orders", key="k", body=b"2", tags=("eu",))
    producer.send("orders", key="k", body=b"3", tags=("us",))
    with Receiver("orders", group="g", settings=stage.settings()) as receiver:
        (message,) = receiver.receive(wait_s=10)
        assert message.body == b"3"


def test_a_changed_filter_counts_for_what_is_read_then_in_all_members(stage: Stage, producer: Producer) -> None:
    """Case 63, the other half: group-wide, with a new version of the settings."""
    recorder = Recorder()
    members = [member_of(stage.consume(recorder)) for _ in range(2)]
    wait_until(lambda: [len(member.owned()) for member in members] == [1, 1], what="one partition each")
    expected: dict[str, list[bytes]] = {f"key-{number}": [] for number in range(KEYS)}
    published = Published(producer)
    steps = ["none", any_of("eu"), all_of("us", "vip"), "none", any_of("vip")]
    for version, tag_filter in enumerate(steps, 1):
        if version > 1:
            changed = set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter=tag_filter)
            assert (changed.settings_version, changed.tag_filter) == (version, tag_filter)
        wait_until(lambda wanted=tag_filter: knows(members, wanted), what="the members to know")  # type: ignore[misc]
        before = len(published.sent)
        published.more(100)
        stage.wait_settled()
        of_step = Published(producer)
        of_step.sent = published.sent[before:]
        for key, bodies in of_step.wanted(tag_filter).items():
            expected[key] += bodies
        assert by_key(recorder) == expected
    recorder.assert_in_order()


def test_another_filter_and_a_seek_give_what_was_left_out(stage: Stage, producer: Producer) -> None:
    """What a filter left out is settled: a seek gives it again."""
    published = Published(producer)
    recorder = Recorder()
    app = stage.consume(recorder, tag_filter="any:eu")
    published.more(60, [("eu",), ("us",)])
    stage.wait_settled()
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="any:us")
    wait_until(lambda: knows([member_of(app)], "any:us"), what="the member to know")
    recorder.begun.clear()
    recorder.ended.clear()
    routes = RouteCache(stage.database)
    plan = planned_seek(stage.runtime, routes, topic="orders", name="g", to="earliest")
    apply_seek(runtime_of(stage.database, stage.prefix, actor="a test"), plan)
    routes.close()
    wait_until(lambda: by_key(recorder) == published.wanted("any:us"), what="what was left out")


def test_a_hand_over_under_load_keeps_the_filter(stage: Stage, producer: Producer) -> None:
    """Members come, go in order and die; every message that matches is handled, in order, and no other."""
    published = Published(producer)
    recorder = Recorder()
    first = stage.consume(recorder, tag_filter="any:eu")
    published.more(300)
    second = stage.consume(recorder)
    published.more(300)
    first.stop()
    published.more(300)
    third = stage.consume(recorder)
    arm("ack.before_send", "raise", occurrence=1)
    second.stop()
    published.more(300)
    stage.wait_settled()
    assert knows([member_of(third)], "any:eu")
    wanted = published.wanted("any:eu")
    assert {key: list(dict.fromkeys(bodies)) for key, bodies in by_key(recorder).items()} == wanted
    recorder.assert_in_order()
    assert settled_bits(stage) == 0


def test_what_every_group_has_passed_over_is_trimmed(stage: Stage, producer: Producer) -> None:
    """Settled is settled, whether anybody handled it or not."""
    published = Published(producer)
    stage.consume(Recorder(), tag_filter="any:nobody")
    published.more(600)
    stage.wait_settled()
    trim_pass(stage.runtime)
    left = sum(stage.redis.xlen(stage.keys(partition).log) for partition in stage.partitions)
    assert left < 600


def rows(stage: Stage, sql: str) -> list[tuple[Any, ...]]:
    """Return what the control database says."""
    with stage.database.connection() as connection:
        return connection.execute(sql.encode()).fetchall()


def test_a_parked_key_keeps_its_tags_and_others_pass_it(stage: Stage, producer: Producer) -> None:
    """Case 64 with a filter: followers that don't match are settled, not parked; those that do keep their tags."""
    broken = {"key-1"}
    seen: list[tuple[bytes, tuple[str, ...]]] = []

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key in broken:
            raise ValueError(body)
        seen.append((body, ctx.tags))

    for number in range(1, 31):
        producer.send("orders", key="key-1", body=b"%d" % number, tags=("eu", "vip") if number % 3 == 0 else ("us",))
    stage.consume(Recorder(act), tag_filter="any:eu", backoff_s=(3600.0,))
    stage.wait_settled()
    assert [seq for (seq,) in rows(stage, "SELECT seq FROM mqlayer.parked_message ORDER BY seq")] == [*range(3, 31, 3)]
    broken.clear()
    assert release_all(runtime_of(stage.database, actor="a test"), "orders", "g") == 1
    wait_until(lambda: len(seen) == 10, what="the parked key handled")
    assert seen == [(b"%d" % number, ("eu", "vip")) for number in range(3, 31, 3)]


def test_a_message_parked_and_not_settled_by_a_dead_owner_waits_for_that_though_the_filter_leaves_it_out_now(
    stage: Stage, producer: Producer
) -> None:
    """Its key is handled from Postgres once its offset is settled: not before, or it could come once more."""
    broken = {"key-1"}
    recorder = Recorder(lambda body, ctx: (_ for _ in ()).throw(ValueError()) if ctx.key in broken else None)
    first = stage.consume(recorder, tag_filter="any:eu", backoff_s=(3600.0,))
    for number in range(1, 4):
        producer.send("orders", key="key-1", body=b"%d" % number, tags=("eu",))
    # The first owner parks, and never gets to settle.
    for occurrence in range(1, 400):
        arm("ack.before_send", "raise", occurrence=occurrence)
    wait_until(lambda: len(rows(stage, "SELECT FROM mqlayer.parked_message")) == 3, what="parked")
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="any:us")
    first.stop(0.0)
    disarm_all()
    broken.clear()
    stage.consume(recorder, backoff_s=None)
    stage.wait_settled()
    assert release_all(runtime_of(stage.database, actor="a test"), "orders", "g") == 1
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")
    assert recorder.bodies("key-1") == [b"1", b"2", b"3"]


def test_attempts_of_what_the_filter_leaves_out_now_are_forgotten(stage: Stage, producer: Producer) -> None:
    """They would stay on the node for as long as the partition."""

    def act(_body: bytes, _ctx: Context) -> None:
        raise ValueError

    (partition, *_) = stage.partitions
    attempts = stage.group_keys
    first = stage.consume(Recorder(act), tag_filter="any:eu", backoff_s=(5.0,))
    producer.send("orders", key=stage.key_in(partition), body=b"1", tags=["eu"])
    wait_until(lambda: stage.redis.hlen(attempts(partition).attempts) == 1, what="the attempt counted")
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="any:us")
    first.stop(0.0)
    second = stage.consume(Recorder(), backoff_s=None)
    stage.wait_settled()
    assert stage.redis.hlen(attempts(partition).attempts) == 0
    wait_until(
        lambda: not any(owned.attempts for owned in member_of(second).ownership.all()), what="forgotten here too"
    )


def test_a_dead_letter_keeps_its_tags_and_comes_again_whatever_the_filter_says_then(
    stage: Stage, producer: Producer
) -> None:
    """What an operator sends again was chosen by the operator."""
    broken = {"k"}
    got: list[tuple[bytes, tuple[str, ...]]] = []

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key in broken:
            raise ValueError
        got.append((body, ctx.tags))

    producer.send("orders", key="k", body=b"1", tags=("eu", "vip"), headers={"a": "b"})
    stage.consume(Recorder(act), tag_filter="any:eu", attempt_limit=1, policy="dead_letter")
    stage.wait_settled()
    shown = show_dead(stage.database, 1)
    assert (shown.tags, shown.headers) == (("eu", "vip"), {"a": "b"})
    broken.clear()
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", tag_filter="any:us")
    worker = new_worker()
    redrive = start_redrive(runtime_of(stage.database, actor="a test"), "orders", "g", DeadFilter(), worker=worker)
    assert work_on(stage.database, redrive, worker=worker).done == 1
    wait_until(lambda: got == [(b"1", ("eu", "vip"))], what="it came again")


def test_a_key_that_does_not_match_is_explained(stage: Stage, producer: Producer) -> None:
    """Somebody looks for a message that never came."""
    stage.consume(Recorder(), tag_filter="any:eu").stop()
    for key, tags in (("in", ["eu"]), ("out", ["us"]), ("bare", [])):
        producer.send("orders", key=key, body=b"1", tags=tags)
    for key, unmatched in (("in", False), ("out", True), ("bare", True)):
        head = explain_key(stage.runtime, "orders", key, "g").search.head
        assert head is not None
        assert head.unmatched is unmatched


def test_every_way_of_a_producer_takes_tags_and_refuses_bad_ones(stage: Stage, producer: Producer) -> None:
    """What can never match is refused before anything is queued."""
    got: dict[bytes, tuple[tuple[str, ...], dict[str, str]]] = {}
    stage.consume(Recorder(lambda body, ctx: got.__setitem__(body, (ctx.tags, dict(ctx.headers)))))
    producer.send("orders", key="k", body=b"1", tags=("vip", "eu", "vip"))
    producer.send_async("orders", key="k", body=b"2", tags=["eu"], headers={"a": "b"}).result(5)
    producer.send_oneway("orders", key="k", body=b"3", tags=["us"])
    producer.send_many(
        "orders", [Message("k", b"4", {"a": "b"}, ("x",)), Message("k", b"5"), Message("k", b"6", {"c": "d"})]
    )
    stage.wait_settled()
    wait_until(lambda: len(got) == 6, what="all handled")
    assert got == {
        b"1": (("eu", "vip"), {}),
        b"2": (("eu",), {"a": "b"}),
        b"3": (("us",), {}),
        b"4": (("x",), {"a": "b"}),
        b"5": ((), {}),
        b"6": ((), {"c": "d"}),
    }
    for bad in ("eu", ["Eu"], [f"t{number}" for number in range(9)], [None]):
        with pytest.raises(InvalidInput, match="tag"):
            producer.send("orders", body=b"", tags=bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="tag"):
            producer.send_many("orders", [Message("k", b"", None, bad)])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="reserved"):
        producer.send("orders", body=b"", headers={"mq-tags": tags_text(["eu"])})


def test_a_group_with_a_filter_waits_for_the_next_message_without_asking_over_and_over(
    stage: Stage, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its partitions a member waits on the node; a message that comes is handled at once."""
    counter = itertools.count()
    call = NodeConnection.call

    def counted(line: NodeConnection, commands: Sequence[Command]) -> list[Any]:
        if any(command[0] == "XREAD" for command in commands):
            next(counter)
        return call(line, commands)

    recorder = Recorder()
    app = stage.consume(recorder, tag_filter="any:eu")
    wait_until(lambda: len(member_of(app).owned()) == 2, what="both partitions held")
    producer.send("orders", key="k", body=b"0", tags=("us",))
    stage.wait_settled()
    monkeypatch.setattr(NodeConnection, "call", counted)
    for number in range(1, 21):
        producer.send("orders", key="k", body=b"%d" % number, tags=("eu",))
        wait_until(lambda wanted=number: len(recorder.ended) == wanted, what="handled")  # type: ignore[misc]
    assert next(counter) < 100
