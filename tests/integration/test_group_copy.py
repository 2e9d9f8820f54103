"""A copy of a group begins where its source stands: positions, attempts, parked keys, effects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from mqlayer import Context
from mqlayer.domain.routing import NodeId
from mqlayer.errors import AlreadyApplied, Conflict, NotFound, StoreUnavailable
from mqlayer.groups import find_group
from mqlayer.groups.copy import CopyReport, copy_group
from mqlayer.inspect import group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.redis.copy_script import group_copy_command, group_copy_reply
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import LockTaken
from mqlayer.runtime.runtime import Runtime
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.partition_harness import GROUP, PartitionHarness
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import ParkingShop, parked, release
from tests.proof.runtimes import runtime_of

PLACES = [
    "group_copy.after_positions",
    "group_copy.before_commit",
    "group_copy.after_commit",
    "group_copy.before_resume",
]


def operator(stage: Stage) -> Runtime:
    return runtime_of(stage.database, stage.prefix, application=stage.database, actor="a test")


def copy(stage: Stage, name: str = "h", **options: Any) -> CopyReport:
    return copy_group(operator(stage), stage.topic, "g", name, **options)


class Gate:
    """A handler that holds one key up."""

    def __init__(self, key: str) -> None:
        self.open, self.key = threading.Event(), key
        self.recorder = Recorder(self._act)

    def _act(self, body: bytes, ctx: Context) -> None:
        if ctx.key == self.key and not self.open.wait(20):
            raise TimeoutError


def test_a_copy_gets_what_its_source_has_not_settled_and_nothing_else(stage: Stage) -> None:
    """Settled above a message in hand stays settled; what is in hand comes to both; both go on by themselves."""
    gate = Gate("key-0")
    stage.send_numbers(6, 10)
    stage.consume(gate.recorder)
    wait_until(lambda: gate.recorder.count() == 50, what="all other keys handled")
    wait_until(lambda: sum(stage.redis.bitcount(stage.group_keys(p).acks) for p in stage.partitions) > 0, what="bits")
    wait_until(lambda: lag(stage) == 10, what="all of them settled")

    report = copy(stage)
    assert (report.group.state, report.partitions, report.parked_messages) == ("live", 2, 0)
    assert report.group.copied_from == stage.group_id()

    copied = Recorder()
    stage.send_numbers(6, 5, first=11)
    stage.consume(copied, group="h")
    stage.wait_settled("h")
    assert sorted(copied.bodies("key-0"), key=int) == [b"%d" % n for n in range(1, 16)]
    for key in range(1, 6):
        assert copied.bodies(f"key-{key}") == [b"%d" % n for n in range(11, 16)]
    copied.assert_in_order()
    gate.open.set()
    stage.wait_settled()
    assert gate.recorder.count() == 90
    gate.recorder.assert_in_order()


def lag(stage: Stage) -> int:
    """Return how many messages the group has not settled, by the node."""
    (status,) = group_statuses(operator(stage), stage.topic, "g")
    return status.lag


def test_parked_keys_and_attempts_come_along(stage: Stage) -> None:
    """With all that waits behind them, at the attempt that they had; the source's stay where they are."""
    shop = ParkingShop("key-1")
    stage.send_numbers(3, 5)
    stage.consume(shop.recorder, backoff_s=(0.01,), attempt_limit=2, policy="park")
    stage.wait_settled()
    wait_until(lambda: len(parked(stage).get("key-1", [])) == 5, what="the key is parked")

    report = copy(stage, policy="dead_letter", rate_limit=1000.0)
    assert (report.parked_keys, report.parked_messages) == (1, 5)
    assert (report.group.rules.policy, report.group.rate_limit) == ("dead_letter", 1000.0)
    assert find_group(stage.database, stage.topic, "g").rules.policy == "park"

    copied = Recorder()
    stage.send_numbers(3, 2, first=6)
    stage.consume(copied, group="h", backoff_s=None)
    stage.wait_settled("h")
    assert copied.bodies("key-1") == []
    release(stage, "h")
    wait_until(lambda: copied.bodies("key-1") == [b"%d" % n for n in range(1, 8)], what="the parked key handled")
    assert len(parked(stage)["key-1"]) >= 5


@pytest.mark.full
def test_failed_attempts_are_counted_on(stage: Stage) -> None:
    failing = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 2:
            failing.set()
        raise ValueError

    stage.send([("k", b"1")])
    app = stage.consume(Recorder(act), backoff_s=(0.05, 30.0), policy="block")
    assert failing.wait(20)
    key = stage.group_keys(next(p for p in stage.partitions if stage.position(p).next == 2)).attempts
    wait_until(lambda: any(b"2:" in bytes(value)[:2] for value in stage.redis.hvals(key)), what="two attempts noted")  # type: ignore[arg-type]  # bytes
    copy(stage)
    app.stop()
    copied = Recorder()
    stage.consume(copied, group="h", backoff_s=None)
    stage.wait_settled("h")
    assert copied.attempts(b"1") == [3]


@pytest.mark.full
def test_effects_of_the_source_count_as_applied_where_that_is_wanted(stage: Stage) -> None:
    """A message whose effect is there, and which is not settled: the copy does not apply it again."""
    applied, gate = threading.Event(), threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        with psycopg.connect(stage.dsn) as connection:
            ctx.fence(connection)
        applied.set()
        gate.wait(20)

    stage.send([("k", b"1")])
    stage.consume(Recorder(act))
    assert applied.wait(20)
    copy(stage, "without")
    report = copy(stage, "with_them", effects=True)
    assert report.effects == 1
    assert report.group.paused_at is None
    answers: dict[str, str] = {}

    def again(name: str) -> Callable[[bytes, Context], None]:
        def handle(body: bytes, ctx: Context) -> None:
            try:
                with psycopg.connect(stage.dsn) as connection:
                    ctx.fence(connection)
                answers[name] = "current"
            except AlreadyApplied:
                answers[name] = "applied"

        return handle

    for name in ("without", "with_them"):
        stage.consume(again(name), group=name)
        stage.wait_settled(name)
    gate.set()
    assert answers == {"without": "current", "with_them": "applied"}


@pytest.mark.parametrize("place", some_of(PLACES, 4))
def test_a_copy_that_is_killed_is_made_by_the_next_call(stage: Stage, place: str) -> None:
    """Before the commit there is no group; after it, one that is paused until its effects are there."""
    stage.send_numbers(3, 3)
    stage.consume(Recorder()).stop()
    words = ("group", "copy", stage.topic, "g", "h", "--effects")
    environment = os.environ | {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    armed = {"MQLAYER_FAILPOINTS": f"{place}=kill", "MQLAYER_ALLOW_FAILPOINTS": "1"}
    done = ask_python("mqlayer", *words, env=environment | armed)
    assert done.returncode == -9, done.stderr
    if place in ("group_copy.after_positions", "group_copy.before_commit"):
        with pytest.raises(NotFound):
            find_group(stage.database, stage.topic, "h")
    else:
        assert find_group(stage.database, stage.topic, "h").paused_at is not None
    assert copy(stage, effects=True).group.paused_at is None
    with pytest.raises(Conflict, match="has a group 'h'"):
        copy(stage, effects=True)


@pytest.mark.full
def test_what_the_source_settled_is_not_trimmed_while_the_copy_is_behind(stage: Stage) -> None:
    stage.send_numbers(3, 10)
    app = stage.consume(Recorder(), tag_filter=None)
    stage.wait_settled()
    app.stop()
    copy(stage)
    stage.send_numbers(3, 10, first=11)
    stage.consume(Recorder())
    stage.wait_settled()
    trim_pass(operator(stage), topic=stage.topic)
    copied = Recorder()
    stage.consume(copied, group="h")
    stage.wait_settled("h")
    assert copied.count() == 30


@pytest.mark.full
def test_a_copy_that_fails_leaves_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.send_numbers(3, 3)
    stage.consume(Recorder()).stop()

    def fail(*_: object) -> bool:
        raise StoreUnavailable("postgres", "a test")

    monkeypatch.setattr("mqlayer.groups.copy.still_hold", fail)
    before = set(stage.redis.keys(f"{stage.prefix}:*"))
    with pytest.raises(StoreUnavailable):
        copy(stage)
    assert set(stage.redis.keys(f"{stage.prefix}:*")) == before


def test_what_cannot_be_copied_is_refused(stage: Stage, run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    assert "orders/g" in run.failure("group", "copy", "orders", "g", "h")
    stage.consume(Recorder()).stop()
    said = run.text("group", "copy", "orders", "g", "h", "--attempts", "3")
    assert said == "group h of topic orders begins where g stands: 2 partitions, 0 parked messages of 0 keys\n"
    (row,) = run.lines("group", "show", "orders", "h")
    assert (row["copied_from"], row["attempt_limit"]) == ("g", 3)
    assert "choose another name" in run.failure("group", "copy", "orders", "g", "h")
    monkeypatch.setattr("mqlayer.groups.copy.PARKED_MESSAGES", -1)
    assert "parked list" in run.failure("group", "copy", "orders", "g", "i")
    app = stage.app()
    app.consumer(stage.topic, group="all", mode="shared")(Recorder())
    app.start()
    assert "and seek" in run.failure("group", "copy", "orders", "all", "j")


def test_the_script_answers_for_each_state(redis_url: str, key_prefix: str) -> None:
    """A copy has the bits above committed and no sign of a death; once it is there, another epoch changes nothing."""
    with NodeConnection(Node(NodeId(1), "n", redis_url, None), any_run=True) as connection:
        partition = PartitionHarness(connection, key_prefix)
        partition.fill(20)
        member = partition.member("a", 5)
        member.acquire()
        member.settle([(1, 2), (5, 7)])
        partition.call(("HSET", partition.group.attempts, 3, "2:10:20:a", 4, "0:10:20:s"))

        def ask(epoch: int, number: int = 1) -> int:
            groups = (GROUP, GROUP + 1)
            command = group_copy_command(connection, key_prefix, number, groups, epoch, start=1, seek=0)
            return group_copy_reply(partition.call(command)[0], "")

        assert ask(9) == ask(9) == 3
        with pytest.raises(StoreUnavailable):
            ask(10)
        with pytest.raises(StoreUnavailable):
            ask(9, number=77)
        copied = PartitionHarness(connection, key_prefix, group_id=GROUP + 1)
        assert partition.call(("HGETALL", copied.group.attempts)) == [[b"3", b"2:10:20"]]
        taken, source = copied.member("b", 12).acquire(), partition.member("c", 12).acquire()
        assert isinstance(taken, LockTaken)
        assert isinstance(source, LockTaken)
        assert (taken.committed, taken.base, taken.bits) == (source.committed, source.base, source.bits)
