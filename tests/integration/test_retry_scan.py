"""The worker's scan of parked keys: those that nobody takes up, redrives that nobody works on, old attempts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mqlayer.groups import join
from mqlayer.maintenance.late_jobs import late_jobs
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.redelivery import (
    DeadFilter,
    bulk_action,
    bulk_actions,
    cancel_bulk,
    clean_attempts,
    new_worker,
    parked_scan,
    retry_scan,
    start_redrive,
)
from mqlayer.workers import connections
from mqlayer.workers.tasks import TASKS
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

DAY_S = 86_400.0


@pytest.fixture
def failing(stage: Stage) -> Failing:
    """A group of a topic of two partitions, with a member that lives."""
    failing = Failing(stage)
    join(stage.database, group_id=failing.group_id, member_id="m1", lease_s=600)
    return failing


@pytest.fixture
def worker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tasks that are called in this process work on the stage."""
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    connections.close()
    yield
    connections.close()


def test_a_group_is_told_again_of_keys_that_are_due_for_a_while(failing: Failing) -> None:
    heard: list[str] = []
    notices = NotificationListener(failing.stage.database, GROUP, heard.append, application="a test")
    notices.start()
    wait_until(lambda: heard == [""], what="the listener")
    database, before = failing.stage.database, failing.parking()
    failing.park(*failing.publish(("a", b"1")), due_in_s=600)
    failing.park(*failing.publish(("b", b"2")))
    failing.park(*failing.publish(("c", b"3")), due_in_s=0)
    assert (retry_scan(database), failing.parking()) == (0, before), "not due, or not for long"
    failing.park(*failing.publish(("d", b"4")), due_in_s=-6)
    assert (retry_scan(database), failing.parking()) == (1, before + 1)
    wait_until(lambda: str(failing.group_id) in heard, what="the notice")
    notices.close()


@pytest.mark.parametrize(
    "rest",
    [
        "UPDATE mqlayer.consumer_group SET paused_at = now()",
        "UPDATE mqlayer.member SET lease_until = '-infinity'",
        "UPDATE mqlayer.consumer_group SET state = 'retired'",
    ],
)
def test_a_group_that_could_do_nothing_about_it_is_not_told(failing: Failing, rest: str) -> None:
    failing.park(*failing.publish(("a", b"1")), due_in_s=-60)
    failing.sql(rest)
    assert retry_scan(failing.stage.database) == 0


def test_redrives_that_nobody_works_on_are_gone_on_with(failing: Failing) -> None:
    failing.dead_letter(*failing.publish(*(("a", b"%d" % number) for number in range(3))))
    database = failing.stage.database
    left = start_redrive(runtime_of(database, actor="a test"), "orders", "g", DeadFilter(key="a"))
    retry_scan(database)
    (done,) = bulk_actions(database)
    assert (done.bulk_id, done.state, done.done) == (left, "done", 3)
    assert failing.parked("a") == [b"0", b"1", b"2"]


@pytest.mark.parametrize("told", ["[1]", '{"nonsense": 1}', '{"since": "never"}'])
def test_a_redrive_that_makes_no_sense_does_not_keep_others_waiting(failing: Failing, told: str) -> None:
    """Consumers write their groups' replays; the scan is everyone's. A row may be older than the check."""
    failing.dead_letter(*failing.publish(("a", b"1")))
    for constraint in ("names", "values", "times"):
        failing.sql(f"ALTER TABLE mqlayer.redrive DROP CONSTRAINT redrive_filter_{constraint}")
    failing.sql(f"""INSERT INTO mqlayer.redrive (group_id, kind, filter, per_s, actor, upto_batch, position, newer)
                    VALUES ({failing.group_id}, 'replay', '{told}', 0, 'a test', 9, 1, 'between')""")
    left = start_redrive(runtime_of(failing.stage.database, actor="a test"), "orders", "g", DeadFilter(key="a"))
    retry_scan(failing.stage.database)
    assert bulk_action(failing.stage.database, left).state == "done"


def test_a_group_whose_counts_are_full_does_not_keep_others_from_being_told(failing: Failing) -> None:
    failing.park(*failing.publish(("a", b"1")), due_in_s=-60)
    failing.sql(f"""INSERT INTO mqlayer.failure_count (group_id, partition_id, event, count)
                    VALUES ({failing.group_id}, 0, 'overdue', 9007199254740991)""")
    assert retry_scan(failing.stage.database) == 1
    assert failing.sql("SELECT count FROM mqlayer.failure_count") == [(9007199254740991,)]


def test_a_redrive_whose_worker_lives_or_that_is_over_is_left_alone(failing: Failing) -> None:
    failing.dead_letter(*failing.publish(("a", b"1")))
    database = failing.stage.database
    start_redrive(runtime_of(database, actor="a test"), "orders", "g", DeadFilter(), worker=new_worker())
    over = start_redrive(runtime_of(database, actor="a test"), "orders", "g", DeadFilter())
    cancel_bulk(runtime_of(database, actor="a test"), over)
    retry_scan(database)
    assert [(one.state, one.done) for one in bulk_actions(database)] == [("cancelled", 0), ("running", 0)]
    failing.sql("UPDATE mqlayer.redrive SET lease_until = clock_timestamp()")
    retry_scan(database)
    assert [(one.state, one.done) for one in bulk_actions(database)] == [("cancelled", 0), ("done", 1)]


def test_a_slow_redrive_does_not_hold_the_scan_up(failing: Failing) -> None:
    failing.dead_letter(*failing.publish(("a", b"1"), ("a", b"2")))
    database = failing.stage.database
    start_redrive(runtime_of(database, actor="a test"), "orders", "g", DeadFilter(), per_s=0.01)
    retry_scan(database)
    retry_scan(database)
    (found,) = bulk_actions(database)
    assert (found.state, found.done, found.worked_on) == ("running", 1, False)
    failing.sql("UPDATE mqlayer.redrive SET next_at = clock_timestamp()")
    retry_scan(database)
    retry_scan(database)
    assert bulk_actions(database)[0].done == 2


def test_a_scan_that_is_killed_leaves_the_redrive_to_a_later_one(failing: Failing) -> None:
    failing.dead_letter(*failing.publish(("a", b"1")))
    database = failing.stage.database
    start_redrive(runtime_of(database, actor="a test"), "orders", "g", DeadFilter())
    program = "from mqlayer.redelivery import retry_scan\nfrom mqlayer.postgres.database import Database\n"
    program += "import os\nretry_scan(Database(os.environ['MQLAYER_DSN']))"
    done = ask_python(
        "-c", program, env=os.environ | {"MQLAYER_DSN": failing.stage.dsn, **armed("scan.after_claim=kill")}
    )
    assert done.returncode == -9, done.stderr
    retry_scan(database)
    assert bulk_actions(database)[0].worked_on, "its lease lasts"
    failing.sql("UPDATE mqlayer.redrive SET lease_until = clock_timestamp()")
    retry_scan(database)
    assert (bulk_actions(database)[0].state, failing.parked()) == ("done", [b"1"])


@pytest.mark.parametrize("at_once", [2, 5_000])
def test_old_attempts_go_unless_their_message_is_parked_or_dead(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(parked_scan, "ROWS_AT_ONCE", at_once)
    parked, dead, lives, redriven = (failing.publish((key, b"1"))[0] for key in "abcd")
    for age_s in (6 * DAY_S, 8 * DAY_S, 9 * DAY_S, 10 * DAY_S):
        for one in (parked, dead, lives, redriven):
            failing.attempt(one, 1, "boom", age_s=age_s)
    failing.park(parked)
    failing.dead_letter(dead, redriven)
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now() WHERE key = 'd'")
    assert clean_attempts(failing.stage.database) == 6
    assert clean_attempts(failing.stage.database) == 0
    lps = {one[1].identity.lp: name for name, one in zip("abcd", (parked, dead, lives, redriven), strict=True)}
    left = failing.sql("SELECT lp, count(*) FROM mqlayer.failed_attempt GROUP BY lp")
    assert {lps[lp]: count for lp, count in left} == {"a": 4, "b": 4, "c": 1, "d": 1}


def test_the_tasks_claim_their_jobs_and_are_late_like_others(failing: Failing, worker: None) -> None:
    lives = failing.publish(("a", b"1"))[0]
    failing.attempt(lives, 1, "boom", age_s=8 * DAY_S)
    failing.park(*failing.publish(("b", b"2")), due_in_s=-60)
    before = failing.parking()
    TASKS["retry_scan"]()
    TASKS["clean_attempts"]()
    assert failing.parking() == before + 1
    assert failing.sql("SELECT count(*) FROM mqlayer.failed_attempt") == [(0,)]
    TASKS["retry_scan"]()
    assert failing.parking() == before + 1, "not due yet"
    failing.sql("UPDATE mqlayer.job SET last_at = now() - interval '1 hour', next_at = now() - interval '1 hour'")
    late = {one.name for one in late_jobs(failing.stage.database)}
    assert {"retry_scan", "clean_attempts"} <= late
