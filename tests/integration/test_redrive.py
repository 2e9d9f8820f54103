"""Dead messages are given back to their group: in order, once, at a rate, over kills; one, or many. Case 68."""

from __future__ import annotations

import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.domain.message import Record
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.parking import ParkingStore, Span
from mqlayer.redelivery import (
    BulkAction,
    DeadFilter,
    bulk_actions,
    bulk_items,
    cancel_bulk,
    count_dead,
    new_worker,
    resume_bulk,
    start_redrive,
    work_on,
)
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.failpoints import armed, broken_off_at
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

ALL = DeadFilter()


@pytest.fixture
def failing(stage: Stage) -> Failing:
    """A group of a topic of two partitions."""
    return Failing(stage)


def begin(failing: Failing, wanted: DeadFilter = ALL, **changes: Any) -> tuple[int, str]:
    worker = new_worker()
    here = runtime_of(failing.stage.database, actor="a test")
    return start_redrive(here, "orders", failing.group, wanted, **{"worker": worker} | changes), worker


def redrive(failing: Failing, wanted: DeadFilter = ALL, *, batch: int = 100, **changes: Any) -> BulkAction:
    redrive_id, worker = begin(failing, wanted, **changes)
    return work_on(failing.stage.database, redrive_id, worker=worker, batch=batch)


def words(failing: Failing, redrive_id: int) -> list[str | None]:
    return [one.result for one in bulk_items(failing.stage.database, redrive_id)]


def numbered(failing: Failing, key: str, *numbers: int) -> list[tuple[int, Record]]:
    return failing.publish(*((key, str(number).encode()) for number in numbers))


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_a_key_comes_back_in_order_with_all_that_makes_its_messages_whatever_the_batch(
    failing: Failing, batch: int
) -> None:
    """Case 68: original key, headers and identity; by the order in which they were published."""
    a, b = numbered(failing, "a", 1, 2, 3), numbered(failing, "b", 4, 5)
    with_headers = (a[0][0], a[0][1]._replace(m=a[0][1].m + b':{"trace":"t-1"}'))
    failing.dead_letter(a[2], b[0], a[1], b[1], with_headers)
    before = failing.parking()
    done = redrive(failing, batch=batch)
    assert (done.state, done.done, done.skipped) == ("done", 5, 0)
    assert (failing.parked("a"), failing.parked("b")) == ([b"1", b"2", b"3"], [b"4", b"5"])
    assert failing.dead() == []
    assert failing.key_row("a") == ("redriven", True, 0)
    assert failing.parking() > before
    whole = "SELECT {} FROM mqlayer.{} ORDER BY lp, source, seq"
    columns = "group_id, lp, source, seq, partition_id, log_offset, key, m, body"
    assert failing.sql(whole.format(columns, "parked_message")) == failing.sql(whole.format(columns, "dead_message"))
    assert failing.sql("SELECT DISTINCT redriven FROM mqlayer.parked_message") == [(True,)]
    assert failing.sql("SELECT DISTINCT redriven_seek FROM mqlayer.dead_message") == [(0,)]


def test_the_same_redrive_twice_gives_nothing_back_twice(failing: Failing) -> None:
    """Case 68."""
    dead = failing.dead_letter(*numbered(failing, "a", 1, 2, 3))
    named = DeadFilter(dead_ids=tuple(dead[:2]))
    first = redrive(failing, named)
    assert words(failing, first.bulk_id) == ["done", "done"]
    second = redrive(failing, named)
    assert (second.done, second.skipped, words(failing, second.bulk_id)) == (0, 2, ["already", "already"])
    assert redrive(failing).done == 1
    assert redrive(failing).done == 0
    assert failing.parked("a") == [b"1", b"2", b"3"]


def test_two_redrives_at_once_give_each_message_back_once(failing: Failing) -> None:
    failing.dead_letter(*(one for key in "abcd" for one in numbered(failing, key, *range(20))))
    works = [begin(failing) for _ in range(2)]
    done: list[BulkAction] = []
    threads = [
        threading.Thread(target=lambda r=r, w=w: done.append(work_on(failing.stage.database, r, worker=w, batch=7)))
        for r, w in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one.done for one in done) == 80
    for key in "abcd":
        assert failing.parked(key) == [str(number).encode() for number in range(20)]


def test_a_message_joins_the_line_of_its_key_before_the_later_ones_of_its_source(failing: Failing) -> None:
    """Its own attempts begin anew; when it is tried is what was said of the key."""
    a = numbered(failing, "a", 1, 2, 3, 4)
    failing.park(a[1], a[3], attempts=5)
    failing.dead_letter(a[0], a[2])
    redrive(failing)
    assert failing.parked("a") == [b"1", b"2", b"3", b"4"]
    assert failing.key_row("a") == ("exhausted", False, 0)


def test_behind_a_head_that_stays_its_attempts_stay_too(failing: Failing) -> None:
    a = numbered(failing, "a", 1, 2, 3)
    failing.park(a[0], a[2], attempts=5, due_in_s=600)
    failing.dead_letter(a[1])
    redrive(failing)
    assert failing.parked("a") == [b"1", b"2", b"3"]
    assert failing.key_row("a") == ("exhausted", False, 5)


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_a_sources_numbers_count_more_than_where_its_messages_lay(failing: Failing, batch: int) -> None:
    """A node that fell back was sent the later ones again, at lower offsets; between sources the log's order counts."""
    a = numbered(failing, "a", 1, 2, 3, 4)
    moved = [
        (partition, record._replace(offset=offset)) for (partition, record), offset in zip(a, (1, 9, 4, 5), strict=True)
    ]
    failing.dead_letter(*moved)
    redrive(failing, batch=batch)
    assert failing.parked("a") == [b"1", b"2", b"3", b"4"]


def test_messages_of_several_sources_come_in_the_order_of_the_log(failing: Failing) -> None:
    first = numbered(failing, "a", 1)
    failing.stage.forget_numbers()
    second = failing.publish(("a", b"2"), source=9)
    third = [(first[0][0], replace_seq(first[0][1], seq=2, offset=second[0][1].offset + 1, body=b"3"))]
    failing.dead_letter(*third, *second, *first)
    redrive(failing)
    assert failing.parked("a") == [b"1", b"2", b"3"]


def replace_seq(record: Record, *, seq: int, offset: int, body: bytes) -> Record:
    source, lp, _ = record.identity
    return Record(offset, b"%d:%d:%d:%d" % (source, lp, seq, record.at_ms), record.key, body)


def test_messages_that_stand_alone_wait_under_their_own_names(stage: Stage) -> None:
    failing = Failing(stage, group="each", ordered=False)
    failing.dead_letter(*numbered(failing, "a", 1, 2), *failing.publish((None, b"3")))
    redrive(failing)
    names = failing.sql("SELECT name, source, lp, seq FROM mqlayer.parked_message")
    assert {bytes(name) for name, *_ in names} == {b"\xff%d:%d:%d" % tuple(rest) for _, *rest in names}
    assert len(names) == 3
    ordered = Failing(stage)
    ordered.dead_letter(*ordered.publish((None, b"4"), (None, b"5")))
    redrive(ordered)
    assert ordered.sql("SELECT count(*) FROM mqlayer.parked_key WHERE group_id = %s", ordered.group_id) == [(2,)]


def test_what_has_no_body_and_what_is_not_there_is_told(failing: Failing) -> None:
    a, b = numbered(failing, "a", 1), numbered(failing, "b", 2)
    (bodiless,) = failing.dead_letter(*a, cause="skipped", body=False)
    (whole,) = failing.dead_letter(*b)
    done = redrive(failing, DeadFilter(dead_ids=(bodiless, whole, 4_711)))
    found = {one.dead_id: (one.result, one.key) for one in bulk_items(failing.stage.database, done.bulk_id)}
    assert found == {bodiless: ("no_body", "a"), whole: ("done", "b"), 4_711: ("gone", None)}
    assert (done.state, done.done, done.skipped) == ("done", 1, 2)
    assert failing.dead() == [None]
    # It is passed by, not asked for over and over.
    assert redrive(failing).skipped == 1


def test_a_message_that_dies_again_is_not_of_the_same_redrive_and_is_of_the_next(failing: Failing) -> None:
    a = numbered(failing, "a", 1, 2)
    failing.dead_letter(*a)
    redrive_id, worker = begin(failing)
    database = failing.stage.database
    with broken_off_at("bulk.after_commit"):
        work_on(database, redrive_id, worker=worker, batch=1)
    failing.sql("DELETE FROM mqlayer.parked_message")
    failing.sql(
        "UPDATE mqlayer.dead_message SET redriven_at = NULL, died_at = clock_timestamp() WHERE redriven_at IS NOT NULL"
    )
    assert work_on(database, redrive_id, worker=worker, batch=1).done == 2
    assert failing.dead() == [b"1"]
    assert redrive(failing).done == 1


def test_a_filter_narrows_by_key_cause_error_and_time(failing: Failing) -> None:
    a, b = numbered(failing, "a", 1, 2, 3), numbered(failing, "b", 4)
    failing.dead_letter(a[0], reason="TimeoutError at pay.py:3", age_s=3_600)
    failing.dead_letter(a[1], cause="rejected", reason="no such customer")
    failing.dead_letter(a[2], b[0], reason="KeyError at shop.py:9")
    failing.attempt(b[0], 1, "TimeoutError at pay.py:3")
    database, hour_ago = failing.stage.database, datetime.now(UTC) - timedelta(minutes=30)
    for wanted, count in (
        (DeadFilter(key="a"), 3),
        (DeadFilter(cause="rejected"), 1),
        (DeadFilter(error="timeouterror"), 2),
        (DeadFilter(error="timeout", key="a"), 1),
        (DeadFilter(until=hour_ago), 1),
        (DeadFilter(since=hour_ago), 3),
        (ALL, 4),
    ):
        assert count_dead(database, "orders", "g", wanted) == (count, 0), wanted
    done = redrive(failing, DeadFilter(error="timeouterror"))
    assert (done.filter, done.done) == (DeadFilter(error="timeouterror"), 2)
    assert failing.parked() in ([b"1", b"4"], [b"4", b"1"])
    timed = redrive(failing, DeadFilter(since=hour_ago, key="a"))
    assert (timed.filter.since, timed.done) == (hour_ago, 2)


def test_a_rate_is_kept_over_batches_and_workers(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", 1, 2, 3, 4))
    database = failing.stage.database
    redrive_id, worker = begin(failing, per_s=2.0)
    first = work_on(database, redrive_id, worker=worker, longest_wait_s=0)
    assert (first.state, first.done, first.worked_on) == ("running", 2, False)
    # Time that passes from here on changes nothing.
    failing.sql("UPDATE mqlayer.redrive SET next_at = next_at + interval '1 minute'")
    another = new_worker()
    resume_bulk(runtime_of(database, actor="a test"), redrive_id, worker=another)
    assert work_on(database, redrive_id, worker=another, longest_wait_s=0).done == 2, "the rate is not the worker's"
    failing.sql("UPDATE mqlayer.redrive SET next_at = next_at - interval '61 seconds'")
    resume_bulk(runtime_of(database, actor="a test"), redrive_id, worker=another)
    assert work_on(database, redrive_id, worker=another, longest_wait_s=0).done == 4


def test_a_cancelled_redrive_ends_for_whoever_works_on_it_and_what_it_gave_back_stays(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", 1, 2, 3))
    database = failing.stage.database
    redrive_id, worker = begin(failing, per_s=0.01)
    done: list[BulkAction] = []
    thread = threading.Thread(target=lambda: done.append(work_on(database, redrive_id, worker=worker)))
    thread.start()
    wait_until(lambda: failing.parked() == [b"1"], what="the first message")
    cancelled = cancel_bulk(runtime_of(database, actor="an operator"), redrive_id)
    assert (cancelled.state, cancelled.done) == ("cancelled", 1)
    thread.join(timeout=20)
    assert (done[0].state, done[0].done) == ("cancelled", 1)
    assert (failing.parked(), failing.dead()) == ([b"1"], [b"2", b"3"])
    with pytest.raises(Conflict, match="is cancelled"):
        resume_bulk(runtime_of(database, actor="a test"), redrive_id, worker=new_worker())
    with pytest.raises(Conflict, match="is cancelled"):
        cancel_bulk(runtime_of(database, actor="a test"), redrive_id)


def test_one_that_was_stopped_is_gone_on_with_by_another_and_the_former_worker_sends_nothing(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", *range(6)))
    database, stop = failing.stage.database, threading.Event()
    redrive_id, worker = begin(failing)
    stop.set()
    assert work_on(database, redrive_id, worker=worker, stop=stop).done == 0
    another = new_worker()
    resume_bulk(runtime_of(database, actor="a test"), redrive_id, worker=another)
    assert work_on(database, redrive_id, worker=worker).state == "running"
    assert failing.parked() == []
    assert work_on(database, redrive_id, worker=another, batch=4).done == 6


def test_every_act_has_its_audit_row_and_bulk_actions_are_listed(failing: Failing) -> None:
    (dead_id,) = failing.dead_letter(*numbered(failing, "a", 1))
    database = failing.stage.database
    redrive_id, worker = begin(failing, DeadFilter(dead_ids=(dead_id,)), per_s=5.0)
    resume_bulk(runtime_of(database, actor="a test"), redrive_id, worker=worker)
    cancel_bulk(runtime_of(database, actor="a test"), redrive_id)
    done = redrive(failing, DeadFilter(key="a"))
    first, second = ({"bulk": one, "act": "redrive"} for one in (redrive_id, done.bulk_id))
    assert failing.audit() == [
        ("bulk plan", "orders/g", first | {"filter": {"dead_ids": [dead_id]}, "size": 1, "matched": 1}),
        ("bulk start", "orders/g", first | {"size": 1, "per_s": 5.0}),
        ("bulk resume", str(redrive_id), {}),
        ("bulk cancel", "orders/g", first | {"done": 0, "skipped": 0, "failed": 0}),
        ("bulk plan", "orders/g", second | {"filter": {"key": "a"}, "size": 1, "matched": 1}),
        ("bulk start", "orders/g", second | {"size": 1, "per_s": 0.0}),
        ("bulk end", "orders/g", second | {"done": 1, "skipped": 0, "failed": 0}),
    ]
    assert [one.bulk_id for one in bulk_actions(database)] == [done.bulk_id, redrive_id]
    assert [one.bulk_id for one in bulk_actions(database, after=done.bulk_id)] == [redrive_id]
    assert bulk_actions(database, topic="orders", group="other") == []


@pytest.mark.parametrize("bad", [DeadFilter(cause="hunger"), DeadFilter(dead_ids=()), DeadFilter(dead_ids=(1,) * 1_001),
                                 DeadFilter(since=datetime(2026, 1, 1))])  # noqa: DTZ001  # fmt: skip
def test_what_no_redrive_can_be_is_refused(failing: Failing, bad: DeadFilter) -> None:
    with pytest.raises(InvalidInput):
        begin(failing, bad)
    with pytest.raises(InvalidInput):
        begin(failing, per_s=-1.0)
    with pytest.raises(NotFound):
        start_redrive(runtime_of(failing.stage.database, actor="a test"), "orders", "nobody", ALL)
    with pytest.raises(NotFound, match="bulk action"):
        work_on(failing.stage.database, 4_711, worker="w")
    failing.sql("UPDATE mqlayer.consumer_group SET state = 'retired'")
    with pytest.raises(Conflict, match="retired"):
        begin(failing)


def test_a_running_member_handles_what_was_given_back_in_order_and_once(failing: Failing) -> None:
    """Case 68: with its fenced effects, although later ones of the key were applied."""
    applied: list[bytes] = []

    def act(body: bytes, ctx: Context) -> None:
        with kept_session(failing.stage.dsn) as connection:
            ctx.fence(connection)
        applied.append(body)

    a = numbered(failing, "a", 1, 2, 3, 4)
    failing.dead_letter(a[0], a[1])
    recorder = Recorder(act)
    failing.stage.consume(recorder, backoff_s=None)
    failing.stage.wait_settled()
    assert applied == [b"3", b"4"], "what is dead is passed over"
    assert redrive(failing).done == 2
    wait_until(lambda: failing.key_row("a") is None, what="the key to be in line again")
    assert applied == [b"3", b"4", b"1", b"2"]
    numbered(failing, "a", 5)
    wait_until(lambda: applied[-1] == b"5", what="what follows")
    assert redrive(failing).done == 0
    assert len(recorder.ended) == 5


def test_what_was_given_back_before_the_stream_was_read_is_handled_once(failing: Failing) -> None:
    """Its record in the stream stands for nothing, also after the parked one was handled."""
    a = numbered(failing, "a", 1, 2)
    failing.dead_letter(a[0])
    redrive(failing)
    recorder = Recorder()
    failing.stage.consume(recorder, backoff_s=None)
    failing.stage.wait_settled()
    wait_until(lambda: failing.key_row("a") is None, what="the key to be in line again")
    assert recorder.bodies("a") == [b"1", b"2"]


def test_a_new_owner_passes_the_record_of_what_was_given_back_over_until_a_seek(failing: Failing) -> None:
    """Also where the parked one was handled before the stream was settled: it would be applied twice."""
    a = numbered(failing, "a", 1)
    failing.dead_letter(a[0])
    redrive(failing)
    failing.sql("DELETE FROM mqlayer.parked_message")
    failing.sql("DELETE FROM mqlayer.parked_key")
    store = ParkingStore(failing.stage.database, failing.group_id, "m1")
    partition = PartitionId(a[0][0])
    assert store.dead(Span(partition, 0, 1024, 1)) == {identity_of(a[0])}
    failing.sql("UPDATE mqlayer.consumer_group SET seek = seek + 1")
    assert store.dead(Span(partition, 0, 1024, 1)) == set()


# -- kills -----------------------------------------------------------------------------------------------------------


def command(failing: Failing, *typed: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    places = {"MQLAYER_DSN": failing.stage.dsn, "MQLAYER_KEY_PREFIX": failing.stage.prefix}
    return ask_python("mqlayer", *typed, env=os.environ | places | armed(failpoint))


@pytest.mark.parametrize(
    ("place", "came"),
    some_of(
        [
            ("bulk.after_start", 0),
            ("bulk.before_commit", 0),
            ("bulk.before_commit@2", 100),
            ("bulk.after_commit", 100),
            ("bulk.after_commit@2", 150),
        ],
        9,
    ),
)
def test_a_redrive_that_is_killed_goes_on_and_gives_nothing_back_twice(failing: Failing, place: str, came: int) -> None:
    """Case 68: at any line; what was given back before it counts, and the rest comes in order."""
    numbers = list(range(50))
    failing.dead_letter(*(one for key in "abc" for one in numbered(failing, key, *numbers)))
    name, _, nth = place.partition("@")
    done = command(failing, "dead", "redrive", "orders", "g", "--all", "--yes", failpoint=f"{name}=kill@{nth or 1}")
    assert done.returncode == -9, done.stderr
    (left,) = bulk_actions(failing.stage.database)
    assert (left.state, left.done, len(failing.parked())) == ("running", came, came)
    again = command(failing, "bulk", "resume", str(left.bulk_id), "--json")
    assert again.returncode == 0, again.stderr
    for key in "abc":
        assert failing.parked(key) == [str(number).encode() for number in numbers]
    (over,) = bulk_actions(failing.stage.database)
    assert (over.state, over.done, over.skipped) == ("done", 150, 0)
    assert len(bulk_items(failing.stage.database, left.bulk_id, limit=1_000)) == 150
    assert command(failing, "bulk", "resume", str(left.bulk_id)).returncode == 1
