"""Shared consumption with whole members: cases 58, 61, 67 and 70.

What the scripts do on every Redis is held against a model in `property/test_shared_scripts.py`.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from mqlayer import Context
from mqlayer.errors import Conflict, InvalidInput
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.shared_members import due, pending, share, shared_member
from tests.fixtures.wait import wait_until, within

pytestmark = pytest.mark.usefixtures("as_consumer")


def test_members_share_one_partition_and_each_message_is_handled_once(every_stage: Stage) -> None:
    """More members than partitions help: all of them get something, of the same partition too."""
    keys = [every_stage.key_in(every_stage.partitions[0])]
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(20)

    recorders = [Recorder(act) for _ in range(3)]
    for recorder in recorders:
        share(every_stage, recorder, concurrency=2, prefetch_count=4, visibility_timeout_s=30.0)
    every_stage.send((keys[0], b"%d" % number) for number in range(40))
    wait_until(lambda: all(len(r.begun) == 2 for r in recorders), what="all of them are at work")
    go_on.set()
    every_stage.wait_settled()
    handled = sorted(int(body) for recorder in recorders for body in recorder.bodies())
    assert handled == list(range(40))
    assert {h.attempt for r in recorders for h in r.begun} == {1}


def test_what_is_behind_a_handler_that_hangs_goes_to_other_workers_and_is_settled(stage: Stage) -> None:
    """Case 58."""
    go_on = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"3":
            go_on.wait(20)

    recorder = Recorder(act)
    partition = stage.partitions[0]
    key = stage.key_in(partition)
    # So many that a worker takes several at a time.
    stage.send((key, b"%d" % number) for number in range(400, 1400))
    app = share(stage, recorder, concurrency=2, visibility_timeout_s=30.0)
    stage.wait_settled()
    stage.send((key, b"%d" % number) for number in range(20))
    wait_until(lambda: shared_member(app).stats.settled == 1019, what="all but one are settled")
    assert len(recorder.begun) == 1020
    go_on.set()
    stage.wait_settled()


def test_an_append_wakes_a_member(stage: Stage) -> None:
    """Case 61."""
    recorder = Recorder()
    app = share(stage, recorder)
    wait_until(lambda: shared_member(app).health().ready, what="it reads")
    numbers = itertools.count(1)

    def handled_s() -> float:
        number, began = next(numbers), time.monotonic()
        stage.send([("k", b"%d" % number)])
        wait_until(lambda: recorder.count() == number, what="handled")
        return time.monotonic() - began

    within(handled_s, 1.0, what="an append is handled")
    stage.wait_settled()


def test_what_fails_is_tried_again_and_dies_when_its_attempts_run_out(stage: Stage) -> None:
    """Neighbours of the same key go on meanwhile."""

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"bad":
            raise ValueError("no")

    recorder = Recorder(act)
    app = share(stage, recorder, attempt_limit=3, visibility_timeout_s=30.0)
    stage.send([("k", b"1"), ("k", b"bad"), ("k", b"2")])
    stage.wait_settled()
    assert recorder.attempts(b"bad") == [1, 2, 3]
    assert sorted(recorder.bodies()) == [b"1", b"2"]
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT body, cause, attempts FROM mqlayer.dead_message").fetchall()
    assert [(bytes(body), cause, attempts) for body, cause, attempts in rows] == [(b"bad", "exhausted", 3)]
    assert shared_member(app).stats.dead == 1


def test_a_member_keeps_what_it_is_at_for_longer_than_the_invisible_time_up_to_a_cap(stage: Stage) -> None:
    """Case 70: while it lives, nobody else gets its message; beyond the cap somebody does."""
    go_on = threading.Event()

    times: list[float] = []

    def act(_body: bytes, _ctx: Context) -> None:
        times.append(time.monotonic())
        go_on.wait(20)

    def note(_body: bytes, _ctx: Context) -> None:
        times.append(time.monotonic())

    first, second = Recorder(act), Recorder(note)
    share(stage, first, visibility_timeout_s=3.0, extend_limit_s=6.0)
    stage.send([("k", b"1")])
    wait_until(lambda: len(first.begun) == 1, what="begun")
    share(stage, second, visibility_timeout_s=3.0)
    wait_until(lambda: len(times) == 2, timeout_s=20, what="given to the other")
    assert times[1] - times[0] > 5.0
    assert second.begun[0].attempt >= 1
    go_on.set()
    stage.wait_settled()


def test_a_group_has_one_mode_and_no_policy_that_keeps_messages_in_line(stage: Stage) -> None:
    share(stage, Recorder(), group="s")
    with pytest.raises(Conflict, match="consumed in mode shared"):
        stage.consume(Recorder(), group="s")
    stage.consume(Recorder(), group="e")
    with pytest.raises(Conflict, match="consumed in mode exclusive"):
        share(stage, Recorder(), group="e")
    for policy in ("park", "block"):
        with pytest.raises(InvalidInput, match="has no order to keep"):
            share(stage, Recorder(), group="x", policy=policy)


def test_what_waits_is_counted_by_the_server(every_stage: Stage) -> None:
    partition = every_stage.partitions[0]
    key = every_stage.key_in(partition)

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"0":
            raise ValueError("no")

    share(every_stage, Recorder(act), backoff_s=(60.0,))
    every_stage.send((key, b"%d" % number) for number in range(5))
    wait_until(lambda: due(every_stage, partition) == 1, what="one is back")
    wait_until(lambda: pending(every_stage, partition) == {b"-": 1}, what="the others are settled")
    assert every_stage.position(partition).committed == 1
