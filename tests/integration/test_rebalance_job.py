"""The periodic rebalance: silent deaths are noticed although no member beats; and what goes on without any job."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

import psycopg
import pytest

from mqlayer.domain.retry_rules import DEFAULT_BACKOFF_S
from mqlayer.groups import GroupSettings, MemberSession, ensure_group, join, leave, rebalance_groups
from mqlayer.groups.members import release, send_heartbeat, start_leaving
from mqlayer.groups.rebalance import ALONE_S, change_group
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.maintenance.late_jobs import late_jobs
from mqlayer.postgres.database import Database
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.workers.job_claims import claimed
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.forked_programs import start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.jobs import BY_NAME, idle_job

LEASE_S = 60.0


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of four partitions with a group."""
    stage = start_stage(redis_url, partitions=4)
    make_group(stage, "g")
    return stage


def make_group(stage: Stage, name: str) -> None:
    ensure_group(
        stage.runtime,
        RouteCache(stage.database),
        topic=stage.topic,
        name=name,
        settings=GroupSettings(),
    )


def joined(stage: Stage, name: str, lease_s: float = LEASE_S, group: str = "g") -> MemberSession:
    return join(stage.database, group_id=stage.group_id(group), member_id=name, lease_s=lease_s)


def hand_over(stage: Stage, *sessions: MemberSession) -> None:
    """Let members release what they are asked for, without anybody rebalancing for them."""
    for session in sessions:
        for assigned in send_heartbeat(stage.database, session, lease_s=LEASE_S).assignments:
            if assigned.release:
                release(stage.database, session, assigned)


def shares(stage: Stage, group: str = "g") -> dict[str | None, int]:
    return dict(Counter(stage.owners(group).values()))


def run_sql(stage: Stage, sql: str, *facts: object) -> list[tuple[object, ...]]:
    with stage.database.connection() as connection:
        cursor = connection.execute(sql.encode(), facts)
        return cursor.fetchall() if cursor.description else []


def expire(stage: Stage, name: str, ago_s: float = 0.001) -> None:
    """Let a lease have run out, by the database's clock."""
    sql = "UPDATE mqlayer.member SET lease_until = now() - make_interval(secs => %s) WHERE member_id = %s"
    run_sql(stage, sql, ago_s, name)


def allocation(stage: Stage, group: str = "g") -> int:
    ((number,),) = run_sql(
        stage, "SELECT allocation FROM mqlayer.consumer_group WHERE group_id = %s", stage.group_id(group)
    )
    assert isinstance(number, int)
    return number


def test_a_death_is_noticed_although_no_other_member_beats(stage: Stage) -> None:
    """Case 46: the lease runs out by the database's clock, the scan does the rest."""
    a = joined(stage, "a")
    b = joined(stage, "b")
    hand_over(stage, a, b)
    expire(stage, "a")
    assert shares(stage) == {"a": 2, "b": 2}
    assert rebalance_groups(stage.database) == 1
    assert shares(stage) == {"b": 4}
    assert rebalance_groups(stage.database) == 0


def test_the_last_member_that_died_owns_nothing_any_more(stage: Stage) -> None:
    """It may have been the database that was away, so it has some time to come back."""
    joined(stage, "a")
    expire(stage, "a", ALONE_S - 10)
    assert rebalance_groups(stage.database) == 0
    assert shares(stage) == {"a": 4}
    expire(stage, "a", ALONE_S + 1)
    assert rebalance_groups(stage.database) == 1
    assert shares(stage) == {None: 4}
    assert rebalance_groups(stage.database) == 0, "a group without members is left alone"
    joined(stage, "b")
    assert shares(stage) == {"b": 4}


def test_what_a_crash_left_without_owner_or_with_a_dead_one_is_given_out(stage: Stage) -> None:
    joined(stage, "a")
    run_sql(stage, "UPDATE mqlayer.assignment SET member_id = NULL, target = NULL WHERE partition_id = 1")
    assert rebalance_groups(stage.database) == 1
    assert shares(stage) == {"a": 4}
    joined(stage, "b")
    run_sql(stage, "UPDATE mqlayer.member SET lease_until = '-infinity' WHERE member_id = 'a'")
    assert rebalance_groups(stage.database) == 1
    assert shares(stage) == {"b": 4}


def test_two_scans_at_once_commit_one_allocation_and_one_set_of_epochs(stage: Stage) -> None:
    """Case 48."""
    for name in ("a", "b", "c"):
        joined(stage, name)
    expire(stage, "a")
    before, epochs = allocation(stage), {epoch for _, _, epoch, _ in stage.assignments()}
    ((drawn,),) = run_sql(stage, "SELECT last_value FROM mqlayer.epoch")
    start = threading.Barrier(2)

    def scan(_: int) -> int:
        with Database(stage.dsn) as database:
            start.wait()
            return rebalance_groups(database)

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(scan, range(2))) == 1
    assert allocation(stage) == before + 1
    assert shares(stage) == {"b": 2, "c": 2}
    now = {epoch for _, _, epoch, _ in stage.assignments()}
    assert len(now) == 4
    assert min(now) > max(epochs)
    assert run_sql(stage, "SELECT last_value - %s FROM mqlayer.epoch", drawn) == [(4,)], "no epoch was given out twice"


def test_scans_of_a_balanced_group_with_idle_members_change_nothing_and_one_takes_over(stage: Stage) -> None:
    """Case 44."""
    sessions = [joined(stage, f"m{number}") for number in range(7)]
    for _ in range(4):
        hand_over(stage, *sessions)
    before, number = stage.assignments(), allocation(stage)
    assert sorted(shares(stage).values()) == [1] * 4
    rows = run_sql(stage, "SELECT xmin::text, * FROM mqlayer.consumer_group")
    assert [rebalance_groups(stage.database) for _ in range(20)] == [0] * 20
    assert (stage.assignments(), allocation(stage)) == (before, number)
    assert run_sql(stage, "SELECT xmin::text, * FROM mqlayer.consumer_group") == rows
    idle = {session.member_id for session in sessions} - set(shares(stage))
    owner = before[0][1]
    expire(stage, str(owner))
    assert rebalance_groups(stage.database) == 1
    after = stage.assignments()
    assert after[1:] == before[1:], "the others keep what they have, epochs too"
    assert after[0][1] in idle


def test_a_group_whose_lock_is_held_is_passed_by_and_others_are_not(stage: Stage) -> None:
    make_group(stage, "h")
    for group in ("g", "h"):
        joined(stage, "a", group=group)
        joined(stage, "b", group=group)
    expire(stage, "a")
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: psycopg.Connection[tuple[object, ...]]) -> None:
        inside.set()
        assert go_on.wait(10)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(change_group, stage.database, stage.group_id("g"), hold)
        assert inside.wait(10)
        assert rebalance_groups(stage.database) == 1
        assert (shares(stage), shares(stage, "h")) == ({"a": 4}, {"b": 4})
        go_on.set()
        holder.result()
    assert rebalance_groups(stage.database) == 1
    assert shares(stage) == {"b": 4}


def test_groups_that_are_retired_are_not_looked_at(stage: Stage) -> None:
    joined(stage, "a")
    expire(stage, "a")
    run_sql(stage, "UPDATE mqlayer.consumer_group SET state = 'retired'")
    assert rebalance_groups(stage.database) == 0
    assert shares(stage) == {"a": 4}


@pytest.fixture
def worker(stage: Stage, start_redis: StartRedis, tmp_path: Path) -> Iterator[Path]:
    """A real worker with its beat; its log."""
    log = tmp_path / "worker.log"
    environment = {**os.environ, "MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    environment["MQLAYER_BROKER_URL"] = start_redis().url
    command = ["celery", "-A", "mqlayer.workers.app", "worker", "--beat", "--loglevel", "INFO"]
    command += ["--schedule", str(tmp_path / "beat"), "--without-gossip", "--without-mingle", "--concurrency", "1"]
    with log.open("wb") as output:
        process = start_python(*command, env=environment, stdout=output, stderr=output, new_session=True)
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.full
@pytest.mark.slow
def test_a_worker_with_its_beat_notices_a_silent_death(stage: Stage, worker: Path) -> None:
    """Case 46, with nobody in the group who beats; and the health check sees that the job runs."""
    run_sql(stage, "UPDATE mqlayer.migration SET at = at - interval '1 day'")
    assert {late.name for late in late_jobs(stage.database)} == {job.name for job in PERIODIC_JOBS}
    wait_until(
        lambda: BY_NAME["rebalance"].name not in {late.name for late in late_jobs(stage.database)},
        timeout_s=40,
        what=f"a first scan:\n{worker.read_text()}",
    )
    waits = [scanned_after_s(stage) for _ in range(3)]
    # The job's own period; a machine that others keep busy may be late now and then.
    assert min(waits) < BY_NAME["rebalance"].every_s + 0.5, waits
    assert "Traceback" not in worker.read_text()


def scanned_after_s(stage: Stage) -> float:
    """Let a lease end beside a member that does not beat; return how long its partitions waited, by the database."""
    a, b = joined(stage, "a"), joined(stage, "b")
    for _ in range(2):
        hand_over(stage, a, b)
    assert shares(stage) == {"a": 2, "b": 2}
    ((ended,),) = run_sql(
        stage, "UPDATE mqlayer.member SET lease_until = clock_timestamp() WHERE member_id = 'a' RETURNING lease_until"
    )
    wait_until(lambda: shares(stage) == {"b": 4}, timeout_s=20, what="the scan")
    ((waited_s,),) = run_sql(
        stage, "SELECT extract(epoch FROM max(changed_at) - %s)::float8 FROM mqlayer.assignment", ended
    )
    assert isinstance(waited_s, float)
    return waited_s


def targets(stage: Stage) -> dict[str | None, int]:
    """Return how many partitions each member has or is to be given."""
    return dict(Counter(target or owner for _, owner, _, target in stage.assignments()))


def test_a_member_that_comes_or_leaves_is_reallocated_for_in_that_very_transaction(stage: Stage) -> None:
    """Case 46: the switch waits for no heartbeat and no scan; only the hand-over is to come."""
    a = joined(stage, "a")
    assert targets(stage) == {"a": 4}
    b = joined(stage, "b")
    assert targets(stage) == {"a": 2, "b": 2}
    hand_over(stage, a, b)
    start_leaving(stage.database, a)
    assert targets(stage) == {"b": 4}
    leave(stage.database, a)
    assert shares(stage) == {"b": 4}


def test_a_member_that_starts_or_stops_has_handed_over_within_two_seconds(stage: Stage) -> None:
    """Case 46, over the whole switch, hand-over and reading included: by the median of five, under load."""
    recorder = Recorder()
    stage.consume(recorder, backoff_s=DEFAULT_BACKOFF_S, settings=stage.settings(lease_s=30.0))
    wait_until(lambda: list(shares(stage).values()) == [4], what="the first member has all")
    came, went = list[float](), list[float]()
    for number in range(5):
        stage.send_numbers(keys=12, each=20, first=20 * number + 1)
        began = time.monotonic()
        second = stage.consume(recorder, backoff_s=DEFAULT_BACKOFF_S, settings=stage.settings(lease_s=30.0))
        wait_until(lambda app=second: len(member_of(app).owned()) == 2, what="the second reads its share")  # type: ignore[misc]
        came.append(time.monotonic() - began)
        began = time.monotonic()
        second.stop()
        wait_until(lambda: list(shares(stage).values()) == [4], what="the first one has all again")
        went.append(time.monotonic() - began)
    assert median(came) < 2.0, came
    assert median(went) < 2.0, went
    stage.wait_settled()
    recorder.assert_in_order()


SILENT: Final = """
import sys, threading
import mqlayer

app = mqlayer.App()

@app.consumer(sys.argv[1], group="g", start="earliest")
def handle(body: bytes, ctx: mqlayer.Context) -> None:
    pass

app.start()
threading.Event().wait()
"""


def test_a_killed_member_is_reallocated_for_within_its_lease_and_a_heartbeat(stage: Stage) -> None:
    """Case 46, silent death, where another member beats: no worker is needed."""
    recorder, waits = Recorder(), list[float]()
    beating = member_of(stage.consume(recorder, backoff_s=DEFAULT_BACKOFF_S)).member_id
    for _ in range(3):
        environment = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix, "MQLAYER_LEASE_S": "1.0"}
        silent = start_python("-c", SILENT, stage.topic, env=os.environ | environment)
        try:
            wait_until(lambda: sorted(shares(stage).values()) == [2, 2], timeout_s=60, what="it has its share")
        finally:
            silent.kill()
            silent.wait()
        ends_sql = "SELECT lease_until FROM mqlayer.member WHERE lease_until > '-infinity' AND member_id <> %s"
        lease = run_sql(stage, ends_sql, beating)
        wait_until(lambda: list(shares(stage).values()) == [4], timeout_s=30, what="the other has all")
        # Looked at too late, it is noted as run out already.
        for (ends,) in lease:
            ((waited_s,),) = run_sql(
                stage, "SELECT extract(epoch FROM max(changed_at) - %s)::float8 FROM mqlayer.assignment", ends
            )
            assert isinstance(waited_s, float)
            waits.append(waited_s)
    assert min(waits) < BY_NAME["rebalance"].every_s, waits
    stage.send_numbers(keys=8, each=5)
    stage.wait_settled()
    recorder.assert_in_order()


def test_without_any_worker_members_join_and_leave_in_order_and_the_jobs_are_late(stage: Stage) -> None:
    """Beat is dead: nothing of this needs it, and a health check says so."""
    run_sql(stage, "UPDATE mqlayer.migration SET at = at - interval '1 day'")
    recorder = Recorder()
    first = stage.consume(recorder, backoff_s=DEFAULT_BACKOFF_S)
    stage.send_numbers(keys=12, each=5)
    second = stage.consume(recorder, backoff_s=DEFAULT_BACKOFF_S)
    wait_until(lambda: sorted(shares(stage).values()) == [2, 2], what="the second member has its share")
    stage.send_numbers(keys=12, each=5, first=6)
    first.stop()
    wait_until(lambda: list(shares(stage).values()) == [4], what="the first one's partitions went on")
    stage.send_numbers(keys=12, each=5, first=11)
    stage.wait_settled()
    second.stop()
    assert recorder.count() == 12 * 15
    recorder.assert_in_order()
    assert [late.name for late in late_jobs(stage.database)] == sorted(job.name for job in PERIODIC_JOBS)


def test_a_member_that_leaves_while_no_job_runs_needs_nobody_else(stage: Stage) -> None:
    a, b = joined(stage, "a"), joined(stage, "b")
    start_leaving(stage.database, a)
    hand_over(stage, a)
    leave(stage.database, a)
    assert shares(stage) == {"b": 4}
    leave(stage.database, b)
    assert shares(stage) == {None: 4}


def test_jobs_are_late_after_three_intervals_or_half_a_minute_by_the_databases_clock(stage: Stage) -> None:
    database = stage.database
    run_sql(stage, "UPDATE mqlayer.migration SET at = now()")
    assert late_jobs(database) == [], "a new installation has time to start its workers"
    run_sql(stage, "UPDATE mqlayer.migration SET at = now() - interval '20 s'")
    assert late_jobs(database) == []
    run_sql(stage, "UPDATE mqlayer.migration SET at = now() - interval '31 s'")
    names = {late.name for late in late_jobs(database)}
    assert names == {job.name for job in PERIODIC_JOBS if job.every_s <= 10}
    assert {"relay", "rebalance", "archive"} <= names
    assert all(late.last_at is None and late.late_s is None for late in late_jobs(database))
    assert claimed(database, BY_NAME["trim"])
    assert {late.name for late in late_jobs(database)} == names - {"trim"}
    run_sql(stage, "UPDATE mqlayer.job SET last_at = last_at - interval '31 s'")
    (late,) = [late for late in late_jobs(database) if late.name == "trim"]
    assert late.every_s == BY_NAME["trim"].every_s
    assert late.last_at is not None
    assert late.late_s is not None
    assert 21 <= late.late_s < 30


@pytest.mark.parametrize(("every_s", "limit_s"), [(2, 30), (10, 30), (60, 180), (300, 900)])
def test_how_long_a_job_may_go_without_a_run(every_s: float, limit_s: float) -> None:
    assert idle_job("one", every_s).late_after_s == limit_s
