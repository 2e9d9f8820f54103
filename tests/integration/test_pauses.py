"""What an operator pauses: topics, groups, partitions and keys; what goes on beside them, and how it goes on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import pytest

from mqlayer import App, Context, Receiver
from mqlayer.consuming.ordered.workers import TIME_SLICE_S
from mqlayer.errors import Conflict, NotFound
from mqlayer.groups.pauses import (
    pause_partitions,
    pause_topic,
    resume_partitions,
    resume_topic,
    running_partitions,
    wait_paused,
)
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.postgres.queries import query
from mqlayer.redelivery import discard_parked, pause_key, release_all, release_parked, resume_key
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import run_python
from tests.fixtures.wait import wait_until, within
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of


def audit(stage: Stage) -> list[tuple[str, str, Any]]:
    with stage.database.connection() as connection:
        rows = connection.execute(
            "SELECT act, object, facts FROM mqlayer.audit WHERE act ~ '(pause|resume)' ORDER BY audit_id"
        ).fetchall()
    return [(act, target, facts) for act, target, facts in rows]


def stalls(stage: Stage, group: str = "g") -> dict[int, str]:
    (status,) = group_statuses(stage.runtime, stage.topic, group)
    return {one.facts.partition: one.stall.detail for one in status.partitions if one.stall is not None}


# -- topics and partitions -------------------------------------------------------------------------------------------


def test_a_paused_topic_rests_for_all_of_its_groups_and_publishing_goes_on(stage: Stage) -> None:
    ours, others = Recorder(), Recorder()
    apps = [stage.consume(ours), stage.consume(others, group="h")]
    stage.send_numbers(keys=4, each=5)
    stage.wait_settled()
    stage.wait_settled("h")
    assert pause_topic(runtime_of(stage.database, actor="ann"), stage.topic)
    assert not pause_topic(runtime_of(stage.database, actor="ann"), stage.topic)
    assert wait_paused(stage.database, stage.topic, timeout_s=30) == 0
    stage.send_numbers(keys=4, each=5, first=6)
    # A group that comes while it rests gets nothing either.
    late = Recorder()
    stage.consume(late, group="late")
    assert list(stalls(stage).values()) == ["ann paused topic orders"] * 2
    assert (ours.count(), others.count(), late.count()) == (20, 20, 0)
    assert resume_topic(runtime_of(stage.database, actor="ann"), stage.topic)
    wait_until(lambda: ours.count() == others.count() == late.count() == 40, what="all groups go on")
    ours.assert_in_order()
    assert [act for act, _, _ in audit(stage)] == ["topic pause", "topic resume"]
    assert all(app.members[0].running for app in apps)
    numbers = itertools.count(11)

    def resumed_s() -> float:
        number = next(numbers)
        assert pause_topic(runtime_of(stage.database, actor="ann"), stage.topic)
        assert wait_paused(stage.database, stage.topic, timeout_s=30) == 0
        stage.send_numbers(keys=4, each=1, first=number)
        began = time.monotonic()
        assert resume_topic(runtime_of(stage.database, actor="ann"), stage.topic)
        wait_until(lambda: {one.count() for one in (ours, others, late)} == {4 * number}, what="all groups go on")
        return time.monotonic() - began

    within(resumed_s, 5.0, what="all groups go on")


def test_what_runs_is_finished_first_and_paused_means_that_nothing_runs_any_more(stage: Stage) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def wait(body: bytes, ctx: Context) -> None:
        begun.set()
        assert go_on.wait(30)

    recorder = Recorder(act=wait)
    stage.consume(recorder)
    key = stage.key_in(stage.partitions[0])
    stage.send((key, b"%d" % number) for number in range(3))
    assert begun.wait(10)
    assert (
        pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", stage.partitions)
        == stage.partitions
    )
    one = stage.partitions[:1]
    wait_until(lambda: running_partitions(stage.database, stage.topic, "g") == 1, what="only the one that runs is left")
    assert wait_paused(stage.database, stage.topic, "g", one, timeout_s=0.1) == 1
    assert "finishes what it has in hand" in stalls(stage)[one[0]]
    go_on.set()
    assert wait_paused(stage.database, stage.topic, "g", one, timeout_s=30) == 0
    assert recorder.bodies() == [b"0"]
    assert resume_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", one) == one
    stage.wait_settled()
    assert recorder.bodies() == [b"0", b"1", b"2"]


def test_a_partition_rests_for_one_group_and_the_others_go_on(stage: Stage) -> None:
    resting, other = stage.partitions
    ours, others = Recorder(), Recorder()
    stage.consume(ours)
    stage.consume(others, group="h")
    assert pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [resting]) == [resting]
    assert pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [resting]) == []
    assert wait_paused(stage.database, stage.topic, "g", [resting], timeout_s=30) == 0
    stage.send((stage.key_in(partition), b"%d" % number) for number in range(20) for partition in stage.partitions)
    stage.wait_settled("h")
    wait_until(lambda: ours.count() == 20, what="what does not rest is handled")
    assert {handled.partition for handled in ours.ended} == {other}
    assert stalls(stage) == {resting: f"ann paused partition {resting} for the group"}
    found = explain_key(stage.runtime, stage.topic, stage.key_in(resting), "g")
    assert found.run_next == f"mqlayer group resume orders g --partition {resting}  # it is paused"
    assert resume_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [resting]) == [resting]
    wait_until(lambda: ours.count() == 40, what="it goes on")
    with pytest.raises(NotFound):
        pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [resting, 10**6])
    assert [(act, facts) for act, _, facts in audit(stage)] == [
        ("partition pause", {"partitions": [resting]}),
        ("partition resume", {"partitions": [resting]}),
    ]


def test_the_pause_of_a_partition_ends_with_it_and_can_be_taken_back_after_it(stage: Stage) -> None:
    """It was said of one that the group was done with: nobody is told of it for ever."""
    recorder = Recorder()
    stage.consume(recorder)
    stage.send_numbers(keys=4, each=5)
    stage.wait_settled()
    parent = stage.partitions[0]
    split(stage.runtime, stage.topic, parent)
    wait_until(lambda: drained(stage, parent), what="the group is done with it")
    assert pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [parent]) == [parent]
    assert resting(stage) == 1
    stage.wait_retired(parent)
    assert resting(stage) == 0
    assert resume_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [parent]) == [parent]
    with pytest.raises(NotFound):
        pause_partitions(runtime_of(stage.database, actor="ann"), stage.topic, "g", [parent])


def drained(stage: Stage, partition: int) -> bool:
    with stage.database.connection() as connection:
        facts = (stage.group_id(), partition)
        found = connection.execute("SELECT FROM mqlayer.drained WHERE group_id = %s AND partition_id = %s", facts)
        return found.fetchone() is not None


def resting(stage: Stage) -> int:
    """Return how many pauses the doctor tells of."""
    with stage.database.connection() as connection:
        return len(connection.execute(query("check_pauses")).fetchall())


def test_receivers_are_given_nothing_of_a_topic_that_rests_and_settle_what_they_have(stage: Stage) -> None:
    stage.send_numbers(keys=4, each=2)
    with Receiver(stage.topic, group="g", settings=stage.settings()) as receiver:
        first = receiver.receive(1, wait_s=20)
        assert pause_topic(runtime_of(stage.database, actor="ann"), stage.topic)
        wait_until(lambda: not receiver._opened().fetcher._cache.views or receiver.receive(1, wait_s=0.05) is None,
                   what="the receiver knows")  # fmt: skip
        receiver.ack(first)
        assert receiver.receive(10, wait_s=0.3) == []
        resume_topic(runtime_of(stage.database, actor="ann"), stage.topic)
        assert receiver.receive(10, wait_s=20)


# -- keys ------------------------------------------------------------------------------------------------------------


def parked(stage: Stage) -> dict[bytes, int]:
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT name, messages FROM mqlayer.parked_key ORDER BY name").fetchall()
    return {bytes(name): messages for name, messages in rows}


def test_a_paused_key_waits_in_order_while_the_others_go_on(stage: Stage) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    stage.send_numbers(keys=3, each=5)
    stage.wait_settled()
    assert pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
    assert not pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
    wait_until(lambda: holds_paused(app, b"key-1"), what="the owner knows")
    stage.send_numbers(keys=3, each=5, first=6)
    stage.wait_settled()
    assert recorder.bodies("key-1") == [b"%d" % number for number in range(1, 6)]
    assert recorder.count() == 25
    assert parked(stage) == {b"key-1": 5}
    found = explain_key(stage.runtime, stage.topic, "key-1", "g")
    assert found.parked is not None
    assert found.parked.paused_by == "ann"
    assert found.run_next == "mqlayer key resume orders key-1 --group g  # it is paused"
    # It is due at no time, whoever says so, and whoever owns it.
    assert release_all(runtime_of(stage.database, actor="bob"), stage.topic, "g") == 0
    with pytest.raises(Conflict, match="is paused since"):
        release_parked(runtime_of(stage.database, actor="bob"), stage.topic, "g", key="key-1")
    app.stop()
    again = stage.consume(recorder)
    wait_until(lambda: holds_paused(again, b"key-1"), what="the next owner knows")
    stage.send([("key-1", b"11")])
    stage.wait_settled()
    assert recorder.count() == 25
    assert resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
    wait_until(lambda: recorder.count() == 31, what="the key goes on")
    assert not resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
    wait_until(lambda: not parked(stage), what="it is in line")
    stage.send([("key-1", b"12")])
    stage.wait_settled()
    recorder.assert_in_order()
    assert [(act, facts) for act, _, facts in audit(stage)] == [
        ("key pause", {"key": "key-1"}),
        ("key resume", {"key": "key-1"}),
    ]
    numbers = itertools.count(13)

    def resumed_s() -> float:
        assert pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
        wait_until(lambda: holds_paused(again, b"key-1"), what="the owner knows")
        count, number = recorder.count(), next(numbers)
        stage.send([("key-1", b"%d" % number)])
        wait_until(lambda: parked(stage) == {b"key-1": 1}, what="it waits")
        began = time.monotonic()
        assert resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key-1")
        wait_until(lambda: recorder.count() == count + 1, what="the key goes on")
        took_s = time.monotonic() - began
        wait_until(lambda: not parked(stage), what="it is in line")
        return took_s

    within(resumed_s, 2.5, what="the key goes on")


def holds_paused(app: App, key: bytes) -> bool:
    return any(key in owned.parked.by_name for owned in member_of(app).ownership.all())


def test_a_key_that_is_paused_while_its_messages_are_in_hand_stops_behind_the_one_that_runs(stage: Stage) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def wait(body: bytes, ctx: Context) -> None:
        begun.set()
        assert go_on.wait(30)

    recorder = Recorder(act=wait)
    app = stage.consume(recorder)
    stage.send(("key", b"%d" % number) for number in range(50))
    assert begun.wait(10)
    pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: holds_paused(app, b"key"), what="the owner knows")
    # Longer than a worker's turn: it looks up from its batch then.
    turn_ends = time.monotonic() + TIME_SLICE_S
    wait_until(lambda: time.monotonic() > turn_ends, what="the end of the turn")
    go_on.set()
    stage.wait_settled()
    assert recorder.bodies() == [b"0"]
    assert parked(stage) == {b"key": 49}
    resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: recorder.count() == 50, what="the rest")
    recorder.assert_in_order()


def test_a_parked_key_that_is_paused_in_the_middle_of_its_messages_rests_behind_those_handed_out(stage: Stage) -> None:
    go_on, again = threading.Event(), threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if stage_of["paused"]:
            again.set()
            assert go_on.wait(30)

    stage_of = {"paused": False}
    recorder = Recorder(act=act)
    app = stage.consume(recorder)
    stage.send([("key", b"0")])
    stage.wait_settled()
    pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: holds_paused(app, b"key"), what="the owner knows")
    stage.send(("key", b"%d" % number) for number in range(1, 301))
    wait_until(lambda: parked(stage) == {b"key": 300}, what="all are parked")
    stage_of["paused"] = True
    resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    assert again.wait(10)
    pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    go_on.set()
    wait_until(lambda: 0 < parked(stage)[b"key"] < 300, what="what was handed out is handled")
    left = parked(stage)[b"key"]
    assert left >= 200
    stage.send([("key", b"301")])
    wait_until(lambda: parked(stage)[b"key"] == left + 1, what="nothing more is handed out")
    resume_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: recorder.count() == 302, what="the rest")
    recorder.assert_in_order()


def test_what_is_discarded_of_a_paused_key_does_not_end_its_rest(stage: Stage) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: holds_paused(app, b"key"), what="the owner knows")
    stage.send([("key", b"1")])
    wait_until(lambda: parked(stage) == {b"key": 1}, what="it is parked")
    discard_parked(runtime_of(stage.database, actor="ann"), stage.topic, "g", key="key", reason="of no use")
    stage.send([("key", b"2")])
    wait_until(lambda: parked(stage) == {b"key": 1}, what="the next one is parked")
    assert recorder.count() == 0


def test_groups_whose_keys_are_not_parked_refuse_to_pause_one(stage: Stage) -> None:
    stage.consume(Recorder(), ordered=False)
    with pytest.raises(Conflict, match="by itself"):
        pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    with Receiver(stage.topic, group="p", settings=stage.settings()), pytest.raises(Conflict, match="mode pop"):
        pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "p", "key")


# -- the command line, and deaths -------------------------------------------------------------------------------------


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """Commands on the stage."""
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    return Commands()


def test_the_commands_say_what_rests_and_what_goes_on(stage: Stage, run: Commands) -> None:
    stage.consume(Recorder())
    first = str(stage.partitions[0])
    assert run.text("topic", "pause", "orders", "--wait", "30") == "topic orders is paused\n"
    assert "topic resume orders" in run("doctor").stdout
    assert run.text("topic", "resume", "orders") == "topic orders goes on\n"
    assert run.text("group", "pause", "orders", "g", "--partition", first, "--wait", "30") == (
        f"partition {first} is paused\n"
    )
    assert run.text("group", "resume", "orders", "g", "--partition", first) == f"partition {first} goes on\n"
    assert run.text("key", "pause", "orders", "k", "--group", "g").startswith("key k is paused for")
    assert "paused since" in run.text("key", "explain", "orders", "k", "--group", "g")
    assert run.text("key", "resume", "orders", "k", "--group", "g").startswith("key k goes on")
    assert "50 messages/s, 50 at once" in run.text("group", "set", "orders", "g", "--rate", "50")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("pause.before_commit", ("topic", "pause", "orders")),
        ("key_pause.before_commit", ("key", "pause", "orders", "other", "--group", "g")),
        ("key_resume.before_commit", ("key", "resume", "orders", "key", "--group", "g")),
    ],
)
def test_a_word_that_is_cut_off_was_not_said(stage: Stage, place: str, words: tuple[str, ...]) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    pause_key(runtime_of(stage.database, actor="ann"), stage.topic, "g", "key")
    wait_until(lambda: holds_paused(app, b"key"), what="the owner knows")
    env = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix, **armed(f"{place}=kill")}
    assert run_python("mqlayer", *words, env=os.environ | env, timeout=60) == -9
    stage.send([("key", b"1"), ("other", b"2")])
    wait_until(lambda: parked(stage) == {b"key": 1} and recorder.bodies() == [b"2"], what="as before")
    assert len(audit(stage)) == 1
