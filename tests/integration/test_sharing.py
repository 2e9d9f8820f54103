"""Shared consumption on every Redis: cases 59, 61, 67, 70 and 71 with whole members."""

from __future__ import annotations

import threading
import time

import pytest

from mqlayer import Context
from mqlayer.errors import Conflict, InvalidInput
from tests.fixtures.consuming import Recorder, Stage
from tests.fixtures.sharing import due, pending, share, shared_member
from tests.fixtures.waiting import wait_until


def test_members_share_one_partition_and_each_message_is_handled_once(every_stage: Stage) -> None:
    """More members than partitions help: all of them get something, of the same partition too."""
    keys = [every_stage.key_in(every_stage.partitions[0])]
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(20)

    recorders = [Recorder(act) for _ in range(3)]
    for recorder in recorders:
        share(every_stage, recorder, concurrency=2, prefetch_count=4)
    every_stage.send((keys[0], b"%d" % number) for number in range(40))
    wait_until(lambda: all(len(r.begun) == 2 for r in recorders), what="all of them are at work")
    go_on.set()
    every_stage.wait_settled()
    handled = sorted(int(body) for recorder in recorders for body in recorder.bodies())
    assert handled == list(range(40))
    assert {h.attempt for r in recorders for h in r.begun} == {1}


def test_what_is_behind_a_handler_that_hangs_goes_to_other_workers_and_is_settled(every_stage: Stage) -> None:
    """Case 58."""
    go_on = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"3":
            go_on.wait(20)

    recorder = Recorder(act)
    partition = every_stage.partitions[0]
    key = every_stage.key_in(partition)
    # So many that a worker takes several at a time.
    every_stage.send((key, b"%d" % number) for number in range(400, 1400))
    app = share(every_stage, recorder, concurrency=2, invisible_s=30.0)
    every_stage.wait_settled()
    every_stage.send((key, b"%d" % number) for number in range(20))
    wait_until(lambda: shared_member(app).stats.settled == 1019, what="all but one are settled")
    assert len(recorder.begun) == 1020
    go_on.set()
    every_stage.wait_settled()


def test_an_append_wakes_a_member(every_stage: Stage) -> None:
    """Case 61."""
    recorder = Recorder()
    app = share(every_stage, recorder)
    wait_until(lambda: shared_member(app).health().ready, what="it reads")
    began = time.monotonic()
    every_stage.send([("k", b"1")])
    wait_until(lambda: recorder.count() == 1, what="handled")
    assert time.monotonic() - began < 1.0
    every_stage.wait_settled()


def test_what_fails_is_tried_again_and_dies_when_its_attempts_run_out(every_stage: Stage) -> None:
    """Neighbours of the same key go on meanwhile."""

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"bad":
            raise ValueError("no")

    recorder = Recorder(act)
    app = share(every_stage, recorder, attempt_limit=3)
    every_stage.send([("k", b"1"), ("k", b"bad"), ("k", b"2")])
    every_stage.wait_settled()
    assert recorder.attempts(b"bad") == [1, 2, 3]
    assert sorted(recorder.bodies()) == [b"1", b"2"]
    with every_stage.database.connection() as connection:
        rows = connection.execute("SELECT body, cause, attempts FROM mqlayer.dead_message").fetchall()
    assert [(bytes(body), cause, attempts) for body, cause, attempts in rows] == [(b"bad", "exhausted", 3)]
    assert shared_member(app).stats.dead == 1


def test_what_nobody_began_goes_to_others_at_once_at_a_stop(every_stage: Stage) -> None:
    """Case 71: long before the invisible time, and not as an attempt."""
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(20)

    first, second = Recorder(act), Recorder()
    every_stage.send_numbers(keys=10, each=10)
    app = share(every_stage, first, concurrency=2, invisible_s=60.0)
    wait_until(lambda: len(first.begun) == 2 and shared_member(app).pool.count > 2, what="two begun, more in hand")
    stopper = threading.Thread(target=app.stop)
    stopper.start()
    member = shared_member(app)
    wait_until(lambda: not member.running, what="it is stopping")
    go_on.set()
    stopper.join(20)
    assert len(first.ended) == 2
    share(every_stage, second, invisible_s=60.0)
    every_stage.wait_settled()
    assert len(second.begun) == 98
    assert {handled.attempt for handled in second.begun} == {1}


def test_a_member_keeps_what_it_is_at_for_longer_than_the_invisible_time_up_to_a_cap(every_stage: Stage) -> None:
    """Case 70: while it lives, nobody else gets its message; beyond the cap somebody does."""
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(20)

    first, second = Recorder(act), Recorder()
    share(every_stage, first, invisible_s=0.3, keep_limit_s=1.5)
    every_stage.send([("k", b"1")])
    wait_until(lambda: len(first.begun) == 1, what="begun")
    began = time.monotonic()
    share(every_stage, second, invisible_s=0.3)
    wait_until(lambda: len(second.begun) == 1, what="given to the other")
    assert time.monotonic() - began > 1.0
    assert second.begun[0].attempt >= 1
    go_on.set()
    every_stage.wait_settled()


def test_a_group_has_one_mode_and_no_policy_that_keeps_messages_in_line(every_stage: Stage) -> None:
    share(every_stage, Recorder(), group="s")
    with pytest.raises(Conflict, match="consumed in mode shared"):
        every_stage.consume(Recorder(), group="s")
    every_stage.consume(Recorder(), group="e")
    with pytest.raises(Conflict, match="consumed in mode exclusive"):
        share(every_stage, Recorder(), group="e")
    for policy in ("park", "block"):
        with pytest.raises(InvalidInput, match="has no order to keep"):
            share(every_stage, Recorder(), group="x", policy=policy)


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
