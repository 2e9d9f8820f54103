"""Stopping: cases 36, 37 and 71, and members that stop while something hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mqlayer import App, Context
from mqlayer.errors import StoreUnavailable
from mqlayer.failpoints import arm
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of, migrated
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.wait import awake_s, wait_until


def threads_of(group: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"mqlayer-{group}")]


def test_a_running_handler_ends_and_is_acknowledged_and_nothing_is_handled_twice(every_stage: Stage) -> None:
    """Cases 36 and 71: nothing runs after stop; what was not started goes to others at once, attempts not raised."""
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(30)

    first, second = Recorder(act), Recorder()
    every_stage.send_numbers(keys=4, each=50)
    app = every_stage.consume(first, concurrency=2)
    wait_until(lambda: len(first.begun) == 2, what="two begun")
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(app.stop()))
    member = member_of(app)
    stopper.start()
    wait_until(lambda: not member.running, what="it is stopping")
    go_on.set()
    stopper.join(20)
    assert stopped == [True]
    ended = len(first.ended)
    assert len(first.begun) == ended == 2
    began = awake_s()
    every_stage.consume(second)
    every_stage.wait_settled()
    assert awake_s() - began < 10
    assert len(first.begun) == 2
    assert len(second.begun) == 198
    assert {handled.attempt for handled in second.begun} == {1}
    assert not {(h.key, h.body) for h in first.ended} & {(h.key, h.body) for h in second.ended}


def test_another_member_takes_over_as_soon_as_one_stops(every_stage: Stage) -> None:
    """Long before the lease of the one that left could have run out."""
    settings = every_stage.settings(lease_s=60.0)
    first, second = Recorder(), Recorder()
    one = every_stage.consume(first, settings=settings)
    every_stage.consume(second, settings=settings)
    wait_until(lambda: len(set(every_stage.owners().values())) == 2, timeout_s=20, what="one partition each")
    every_stage.send_numbers(keys=10, each=5)
    every_stage.wait_settled()
    assert one.stop()
    every_stage.send_numbers(keys=10, each=5, first=6)
    every_stage.wait_settled()
    handled = [(h.key, h.body) for h in first.ended + second.ended]
    assert len(handled) == len(set(handled)) == 100


@pytest.mark.full
def test_a_handler_that_hangs_is_given_up_after_the_limit_and_its_ack_is_refused(every_stage: Stage) -> None:
    """Case 37: the message goes to the next member; when the old handler ends at last, it changes nothing."""
    go_on = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"hang":
            go_on.wait(30)

    first, second = Recorder(act), Recorder()
    every_stage.send([("k", b"hang"), ("k", b"2")])
    app = every_stage.consume(first, drain_timeout_s=0.3)
    member = member_of(app)
    wait_until(lambda: first.begun, what="the hanging one begun")
    began = awake_s()
    assert not app.stop()
    assert awake_s() - began < 10
    every_stage.consume(second)
    every_stage.wait_settled()
    assert second.bodies() == [b"hang", b"2"]
    before = every_stage.positions()
    go_on.set()
    wait_until(lambda: first.bodies() == [b"hang"], what="the old handler ended")
    assert every_stage.positions() == before
    assert member.stats.settled == 0
    assert first.bodies() == [b"hang"]


def test_a_hand_over_waits_for_the_running_handler_only_up_to_the_limit(every_stage: Stage) -> None:
    """A second member joins; the partition whose handler hangs goes to it after the drain limit."""
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(60)

    first = Recorder(act)
    second = Recorder()
    every_stage.send_numbers(keys=30, each=1)
    every_stage.consume(first, drain_timeout_s=0.5, concurrency=30)
    wait_until(lambda: len(first.begun) == 30, what="all begun")
    every_stage.consume(second)
    wait_until(lambda: second.ended, timeout_s=20, what="the second has begun")
    go_on.set()
    every_stage.wait_settled()
    assert {handled.partition for handled in second.begun} < set(every_stage.partitions)
    assert {(h.key, h.body) for h in first.ended + second.ended} == {(f"key-{n}", b"1") for n in range(30)}


def drop_while_it_runs(stage: Stage, owner: App, monkeypatch: pytest.MonkeyPatch, second: Recorder) -> tuple[int, App]:
    """Let a second member ask for a partition whose owned partition the owner drops with handlers at work; return
    both."""
    member = member_of(owner)
    monkeypatch.setattr(member.assignments, "follow", lambda _session, _answer: None)
    asking = stage.consume(second, settings=stage.settings(lease_s=5.0))

    def asked_for() -> list[int]:
        return [partition for partition, _, _, target in stage.assignments() if target not in (None, member.member_id)]

    [partition] = wait_until(asked_for, what="the second to ask for a partition")
    [owned] = [owned for owned in member.ownership.all() if owned.partition == partition]
    member.ownership.lock_lost(owned)
    monkeypatch.undo()
    return partition, asking


def see_beats(app: App, count: int) -> None:
    """Wait until a member has followed some more heartbeats."""
    heartbeat = member_of(app)._heartbeat
    for _ in range(count):
        before = heartbeat.lease.until
        heartbeat.wake.set()
        wait_until(lambda: heartbeat.lease.until > before, what="a heartbeat")  # noqa: B023


@pytest.mark.full
def test_a_partition_that_was_dropped_is_given_away_when_its_last_handler_has_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held any more that could be drained, and yet the key runs: the other member must not start it."""
    go_on = threading.Event()
    first, second = hold_all(go_on), Recorder()
    stage.send_numbers(keys=30, each=2)
    owner = stage.consume(first, settings=stage.settings(lease_s=5.0), concurrency=30)
    wait_until(lambda: len(first.begun) == 30, what="all keys begun")
    partition, _ = drop_while_it_runs(stage, owner, monkeypatch, second)
    see_beats(owner, 5)
    assert stage.owners()[partition] == member_of(owner).member_id
    assert second.begun == []
    go_on.set()
    wait_until(lambda: second.ended, what="the other goes on")
    stage.wait_settled()
    ended = {h.key for h in first.ended if h.partition == partition and h.body == b"1"}
    assert {h.key for h in second.begun} == ended
    second.assert_in_order()


@pytest.mark.full
def test_a_dropped_partition_whose_handler_hangs_is_given_away_after_the_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    first, second = hold_all(go_on), Recorder()
    stage.send_numbers(keys=30, each=1)
    owner = stage.consume(first, settings=stage.settings(lease_s=5.0), concurrency=30, drain_timeout_s=1.0)
    wait_until(lambda: len(first.begun) == 30, what="all keys begun")
    partition, _ = drop_while_it_runs(stage, owner, monkeypatch, second)
    wait_until(lambda: second.ended, what="the other goes on")
    assert first.ended == []
    assert {h.partition for h in second.begun} == {partition}
    go_on.set()
    stage.wait_settled()


def test_what_is_asked_back_again_gets_the_whole_limit_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The asking member goes away in between: the time since counts for nothing."""
    go_on = threading.Event()
    first = hold_all(go_on)
    stage.send_numbers(keys=30, each=1)
    owner = stage.consume(first, settings=stage.settings(lease_s=5.0), concurrency=30)
    wait_until(lambda: len(first.begun) == 30, what="all keys begun")
    partition, asking = drop_while_it_runs(stage, owner, monkeypatch, Recorder())
    wait_until(lambda: partition in member_of(owner).assignments._release_by, what="the limit begun")
    assert asking.stop()
    wait_until(lambda: partition in member_of(owner).owned(), what="the partition held again")
    assert member_of(owner).assignments._release_by == {}
    go_on.set()
    stage.wait_settled()


def hold_all(go_on: threading.Event) -> Recorder:
    """Return a handler that lets a message end when the test says so."""

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(60)

    return Recorder(act)


def test_an_async_member_stops_in_order_too(every_stage: Stage) -> None:
    begun: list[bytes] = []
    ended: list[bytes] = []
    go_on = threading.Event()

    async def handle(body: bytes) -> None:
        begun.append(body)
        await asyncio.to_thread(go_on.wait, 30)
        ended.append(body)

    every_stage.send_numbers(keys=6, each=10)
    app = every_stage.consume(handle, concurrency=3)
    wait_until(lambda: len(begun) == 3, what="three begun")
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(app.stop()))
    member = member_of(app)
    stopper.start()
    wait_until(lambda: not member.running, what="it is stopping")
    go_on.set()
    stopper.join(20)
    assert stopped == [True]
    assert len(begun) == len(ended) == 3
    second = Recorder()
    every_stage.consume(second)
    every_stage.wait_settled()
    assert len(second.begun) == 57


def test_no_thread_is_left_after_a_stop(stage: Stage) -> None:
    stage.send_numbers(keys=5, each=5)
    app = stage.consume(Recorder(), group="left-nothing")
    stage.wait_settled("left-nothing")
    assert threads_of("left-nothing") != []
    assert app.stop()
    assert threads_of("left-nothing") == []


def test_a_member_that_can_not_start_leaves_no_thread(stage: Stage) -> None:
    arm("member.before_join_commit", "raise")
    with pytest.raises(Exception, match="armed to raise"):
        stage.consume(Recorder(), group="never-began")
    assert threads_of("never-began") == []


def test_stopping_while_redis_is_away_ends_within_the_limit(start_stage: StartStage, start_redis: StartRedis) -> None:
    server = start_redis()
    stage = start_stage(server.url)
    stage.send_numbers(keys=5, each=5)
    app = stage.consume(Recorder(), drain_timeout_s=1.0)
    stage.wait_settled()
    server.kill()
    began = awake_s()
    assert app.stop()
    assert awake_s() - began < 15


@pytest.mark.full
def test_stopping_while_postgres_is_away_leaves_the_rest_to_the_lease(
    start_stage: StartStage, redis_url: str, start_postgres: StartPostgres
) -> None:
    server = start_postgres()
    stage = start_stage(redis_url, dsn=migrated(server))
    recorder = Recorder()
    stage.send_numbers(keys=5, each=5)
    app = stage.consume(recorder)
    stage.wait_settled()
    server.kill()
    began = awake_s()
    assert app.stop()
    assert awake_s() - began < 20
    with pytest.raises(StoreUnavailable):
        app.start()
