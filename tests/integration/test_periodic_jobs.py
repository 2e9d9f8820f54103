"""Periodic jobs: claimed by one of several schedulers, run by a real worker from a real beat."""

from __future__ import annotations

import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from mqlayer import App, Producer, failpoints
from mqlayer.errors import NodeNotArmed, NotFound
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.maintenance import clean_fence, fence_cleanup
from mqlayer.maintenance.job_status import job_statuses
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Right
from mqlayer.redis.keys import partition_keys
from mqlayer.relay import relay_once
from mqlayer.routes import finish_changes, give_up_node
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.topics import register_node
from mqlayer.topics.nodes import find_node
from mqlayer.workers.job_claims import claimed, recorded
from mqlayer.workers.schedule import beat_schedule, task_name
from mqlayer.workers.tasks import TASKS
from tests.fixtures.forked_programs import CELERY_STOP_S, start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.jobs import idle_job
from tests.proof.route_steps import move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(right=Right.WORK, tasks=True)


def test_of_many_schedulers_one_gets_the_job(database_dsn: str) -> None:
    got: list[bool] = []
    start = threading.Barrier(8)

    def claim() -> None:
        with Database(database_dsn) as database:
            start.wait()
            got.append(claimed(database, idle_job("trim", 60)) is not None)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_a_job_is_due_again_a_little_before_its_interval_ends(database_dsn: str) -> None:
    with Database(database_dsn) as database:
        assert claimed(database, idle_job("trim", 60))
        with database.connection() as connection:
            connection.execute("UPDATE mqlayer.job SET next_at = next_at - interval '49 seconds'")
        assert claimed(database, idle_job("trim", 60))
        assert claimed(database, idle_job("relay", 60)), "jobs are claimed one by one"


def test_every_job_is_scheduled_and_has_a_task() -> None:
    from mqlayer.workers.app import app

    app.loader.import_default_modules()
    assert {entry["task"] for entry in beat_schedule().values()} == {task_name(job) for job in PERIODIC_JOBS}
    assert {task_name(job) for job in PERIODIC_JOBS} <= set(app.tasks)
    assert TASKS["relay"].name == "mqlayer.relay"
    assert app.conf.accept_content == ["json"]
    assert app.conf.task_serializer == "json"


def due_again(world: World) -> None:
    world.rows("UPDATE mqlayer.job SET next_at = now()")


def test_the_end_of_a_run_and_its_error_are_noted_without_the_words_of_others(world: World) -> None:
    """Another library's message may hold a body."""
    job, statuses = idle_job("trim", 60), dict[str, tuple[str, str | None]]()

    def run(name: str, error: Exception | None) -> None:
        epoch = claimed(world.database, job)
        assert epoch is not None
        running = {one.name: one for one in job_statuses(world.database)}["trim"]
        assert running.outcome == "running"
        with suppress(Exception), recorded(world.database, job.name, epoch):
            if error is not None:
                raise error
        ended = {one.name: one for one in job_statuses(world.database)}["trim"]
        statuses[name] = ended.outcome, ended.error
        assert (ended.took_s or 0) > 0
        due_again(world)

    run("well", None)
    run("ours", NotFound("topic", "x", "create it"))
    run("theirs", ValueError("a secret body"))
    assert statuses == {
        "well": ("done", None),
        "ours": ("failed", "NotFound: unknown topic 'x': create it"),
        "theirs": ("failed", "ValueError, see the worker's log"),
    }
    late = recorded(world.database, job.name, 1)
    with late:
        pass
    (status,) = [one for one in job_statuses(world.database) if one.name == "trim"]
    assert status.outcome == "failed", "an earlier run says nothing about the last one"
    TASKS["trim"]()
    (status,) = [one for one in job_statuses(world.database) if one.name == "trim"]
    assert status.outcome == "done", "the worker's right suffices"


@pytest.mark.parametrize(("at_most_s", "all_gone"), [(0.0, False), (60.0, True)])
def test_the_fence_is_cleaned_for_a_part_of_the_interval(
    world: World, monkeypatch: pytest.MonkeyPatch, at_most_s: float, *, all_gone: bool
) -> None:
    """With a bound of rows alone, keys that come faster would stay for good."""
    monkeypatch.setattr(fence_cleanup, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(fence_cleanup, "ROWS", 10)
    note_effects(world, 1_000)
    assert (clean_fence(world.database, horizon_s=0, at_most_s=at_most_s) == 1_000) == all_gone


def test_a_pass_over_the_fence_reads_each_row_once_however_many_are_old(world: World) -> None:
    """A call with a limit of rows read the table from its start: each further call passed what stays once more."""
    note_effects(world, 20_000)
    asks = "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::int FROM pg_stat_xact_all_tables WHERE relname = %s"
    with world.database.connection() as connection, connection.transaction():
        connection.execute("UPDATE mqlayer_app.fence_applied SET applied_at = now() WHERE seq % 2 = 0")
        facts = {"horizon_s": 3_600, "block": 0, "blocks": 0}
        ((forgotten, size, _),) = connection.execute(query("fence_clean"), facts).fetchall()
        assert (forgotten, size > 100) == (0, True)
        ((before,),) = connection.execute(asks, ("fence_applied",)).fetchall()
        steps, gone = 0, 0
        for block in range(0, size, 20):
            ((forgotten, _, _),) = connection.execute(
                query("fence_clean"), facts | {"block": block, "blocks": 20}
            ).fetchall()
            steps, gone = steps + 1, gone + forgotten
        ((after,),) = connection.execute(asks, ("fence_applied",)).fetchall()
    assert (steps > 10, gone) == (True, 10_000)
    assert 20_000 <= after - before <= 21_000


def test_a_run_of_the_fence_job_reads_one_part_and_all_runs_read_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_cleanup, "BLOCKS_AT_ONCE", 2)
    for size in (0, 1, 24, 25, 311):
        parts = [fence_cleanup._part(size, turn) for turn in range(7, 7 + fence_cleanup.PARTS)]
        assert {block for first, end in parts for block in range(first, end)} == set(range(size)), size
        assert max(end - first for first, end in parts) <= max(24, size // 12 + 1), size
    note_effects(world, 5_000)
    gone = []
    for turn in range(fence_cleanup.PARTS):
        ((now,),) = world.rows("SELECT date_part('epoch', now())")
        gone.append(clean_fence(world.database, horizon_s=0, every_s=now / (turn + 0.5)))
    assert sum(gone) == 5_000
    assert max(gone) < 1_000


def note_effects(world: World, count: int) -> None:
    """Have the fence note so many keys, a week and a day ago."""
    world.rows(
        "INSERT INTO mqlayer_app.fence_applied (group_id, lp, source_id, key, seq, applied_at) "
        f"SELECT 1, 0, 1, n::text, n, now() - interval '8 days' FROM generate_series(1, {count}) AS n"
    )


def test_a_change_that_its_driver_left_is_finished_by_the_job(world: World) -> None:
    """Case 16: to one outcome; the repair repeated does nothing."""
    failpoints.arm("change.after_seal", "raise")
    with pytest.raises(failpoints.FailpointHit):
        split(runtime_of(world.database, world.key_prefix), "orders", 1, at=[100])
    TASKS["repair_routes"]()
    route = load_route(world.database, "orders")
    assert (route.version, [r.lp_from for r in route.ranges]) == (2, [0, 100, 512])
    due_again(world)
    TASKS["repair_routes"]()
    assert load_route(world.database, "orders") == route


def test_a_partition_that_every_group_has_drained_is_retired_by_the_job(world: World) -> None:
    """Cases 18 and 28."""
    state = "SELECT state, retired_at IS NOT NULL FROM mqlayer.partition WHERE partition_id = 1"
    split(runtime_of(world.database, world.key_prefix), "orders", 1, at=[100])
    for name in ("slow", "fast"):
        ensure_group(
            runtime_of(world.database, world.key_prefix),
            RouteCache(world.database),
            topic="orders",
            name=name,
            settings=GroupSettings(start="earliest"),
        )
    world.rows("INSERT INTO mqlayer.drained (group_id, partition_id) VALUES (2, 1)")
    TASKS["repair_routes"]()
    assert world.rows(state) == [("sealed", False)], "one group has not drained it"
    world.rows("INSERT INTO mqlayer.drained (group_id, partition_id) VALUES (1, 1)")
    TASKS["repair_routes"]()
    assert world.rows(state) == [("sealed", False)], "the job is not due yet"
    due_again(world)
    TASKS["repair_routes"]()
    assert world.rows(state) == [("deleted", True)]
    keys = redis.Redis.from_url(world.urls[0], decode_responses=True).keys(f"{world.key_prefix}:{{1}}:*")
    assert keys == [f"{world.key_prefix}:{{1}}:meta"]
    assert world.rows("SELECT DISTINCT version FROM mqlayer.consumer_group") == [(2,)]


@pytest.mark.full
def test_a_node_that_restarted_while_nobody_used_it_is_armed_by_the_job(world: World, start_redis: StartRedis) -> None:
    """Else what changes or retires a partition there would wait for a visitor that never comes."""
    server = start_redis()
    register_node(runtime_of(world.database), name="idle", url=server.url)
    move(runtime_of(world.database, world.key_prefix), "orders", 1, to="idle")
    server.kill()
    server.start()
    split(
        runtime_of(world.database, world.key_prefix),
        "orders",
        load_route(world.database, "orders").ranges[1].partition,
        at=[700],
    )
    with pytest.raises(NodeNotArmed):
        move(
            runtime_of(world.database, world.key_prefix),
            "orders",
            load_route(world.database, "orders").ranges[0].partition,
        )
    TASKS["rearm_nodes"]()
    assert find_node(world.database, "idle").armed_run_id == redis.Redis.from_url(server.url).info("server")["run_id"]
    TASKS["repair_routes"]()
    assert set(finish_changes(runtime_of(world.database, world.key_prefix))) == set()


def test_a_node_that_is_away_or_was_given_up_is_left_alone_by_the_job(world: World, start_redis: StartRedis) -> None:
    server = start_redis()
    armed = register_node(runtime_of(world.database), name="idle", url=server.url).armed_run_id
    server.kill()
    TASKS["rearm_nodes"]()
    assert find_node(world.database, "idle").armed_run_id == armed
    give_up_node(runtime_of(world.database, world.key_prefix, application=world.database), "idle")
    server.start()
    due_again(world)
    TASKS["rearm_nodes"]()
    assert find_node(world.database, "idle").armed_run_id is None


def test_a_topic_without_groups_keeps_its_sealed_partitions(world: World) -> None:
    split(runtime_of(world.database, world.key_prefix), "orders", 1, at=[100])
    TASKS["repair_routes"]()
    assert world.rows("SELECT state FROM mqlayer.partition WHERE partition_id = 1") == [("sealed",)]


def test_the_fence_forgets_what_is_older_than_the_horizon(database_dsn: str) -> None:
    with Database(database_dsn) as database:
        with database.connection() as connection:
            connection.execute(
                "INSERT INTO mqlayer_app.fence_applied (group_id, lp, source_id, key, seq, applied_at) "
                "SELECT 1, 0, 1, 'key-' || n, n, now() - n * interval '1 day' FROM generate_series(1, 10) AS n"
            )
        assert clean_fence(database) == 4
        assert clean_fence(database) == 0
        assert clean_fence(database, horizon_s=0) == 6


def test_the_task_of_rotation_empties_a_slot_once_it_is_due(world: World) -> None:
    world.publish(10)
    relay_once(world.settings(), limits=QUICK)
    world.rows(
        "UPDATE mqlayer_app.outbox SET slot = (floor(date_part('epoch', clock_timestamp()) / 900)::bigint + 2) & 3"
    )
    TASKS["rotate_outbox"]()
    assert world.published() == {}
    world.publish(1)
    assert world.rows("SELECT epoch FROM mqlayer.job WHERE name = 'rotate_outbox'") == [(1,)]
    TASKS["rotate_outbox"]()
    assert world.rows("SELECT epoch FROM mqlayer.job WHERE name = 'rotate_outbox'") == [(1,)]


def test_the_task_of_the_fence_forgets_what_is_older_than_the_horizon(world: World) -> None:
    world.rows(
        "INSERT INTO mqlayer_app.fence_applied (group_id, lp, source_id, key, seq, applied_at) "
        "SELECT 1, 0, 1, 'key-' || n, n, now() - n * interval '1 day' FROM generate_series(1, 10) AS n"
    )
    TASKS["clean_fence"]()
    assert world.rows("SELECT count(*)::int FROM mqlayer_app.fence_applied") == [(6,)]


def marks_of(client: redis.Redis, names: list[str], source: int) -> list[bytes]:
    fields: list[Any] = [field for name in names for field in client.hkeys(name)]
    return [field for field in fields if field.startswith(b"%d:" % source)]


def test_the_task_of_marks_removes_those_of_a_producer_that_ended_days_ago(world: World, redis_url: str) -> None:
    with Producer(replace(world, right=Right.PUBLISH).settings(), name="billing") as producer:
        source = producer.send("orders", key="k", body=b"1").identity.source
    marks = [partition_keys(world.key_prefix, partition).marks.decode() for partition in (1, 2)]
    with redis.Redis.from_url(redis_url) as client:
        assert marks_of(client, marks, source)
        world.rows("UPDATE mqlayer.source SET closed_at = closed_at - interval '2 days' WHERE source_id = %s", source)
        TASKS["clean_marks"]()
        assert not marks_of(client, marks, source)
    assert world.rows("SELECT 1 FROM mqlayer.source WHERE dropped_at IS NULL") == []


def test_the_tasks_of_relaying_and_trimming_run_and_keep_what_no_group_has_settled(world: World) -> None:
    world.publish(10)
    TASKS["relay"]()
    TASKS["trim"]()
    assert world.whole()
    assert {name for (name,) in world.rows("SELECT name FROM mqlayer.job")} == {"relay", "trim"}


def test_the_task_of_retired_groups_drops_positions_of_instances_that_are_away_and_their_keys(
    world: World, redis_url: str
) -> None:
    app = App(replace(world, right=Right.CONSUME).settings())
    app.consumer("orders", group="cache", mode="broadcast", instance="web", instance_expiry_s=0.01)(lambda body: None)
    app.start()
    app.stop()
    wait_until(
        lambda: world.rows("SELECT 1 FROM mqlayer.consumer_group WHERE absent_since < now() - interval '0.01 s'"),
        what="the limit",
    )
    TASKS["retire_groups"]()
    assert world.rows("SELECT state FROM mqlayer.consumer_group ORDER BY name") == [("live",), ("retired",)]
    world.rows("UPDATE mqlayer.consumer_group SET retired_at = retired_at - interval '1 hour' WHERE instance = 'web'")
    world.rows("UPDATE mqlayer.job SET next_at = now()")
    TASKS["retire_groups"]()
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter(f"{world.key_prefix}:*:g2:*")) == []
    world.rows("UPDATE mqlayer.consumer_group SET retired_at = retired_at - interval '8 days' WHERE instance = 'web'")
    world.rows("UPDATE mqlayer.job SET next_at = now()")
    TASKS["retire_groups"]()
    assert world.rows("SELECT name FROM mqlayer.consumer_group") == [("cache",)]


@pytest.mark.full
@pytest.mark.world
@pytest.mark.slow
def test_a_worker_with_its_beat_makes_up_for_a_dead_relay(
    world: World, start_redis: StartRedis, tmp_path: Path
) -> None:
    world.publish(50)
    log = tmp_path / "log"
    environment = world.environment(MQLAYER_BROKER_URL=start_redis().url)
    arguments = ["--beat", "--schedule", str(tmp_path / "schedule"), "--concurrency", "2", "--loglevel", "INFO"]
    with log.open("wb") as output:
        celery = ("celery", "-A", "mqlayer.workers.app", "worker", *arguments)
        worker = start_python(*celery, env=environment, stdout=output, stderr=output)
    try:
        world.wait_until_whole()
        jobs = "SELECT count(*)::int FROM mqlayer.job WHERE epoch >= 1"
        wait_until(lambda: world.rows(jobs)[0][0] >= 2, timeout_s=60, what="jobs to be claimed")
        assert "Traceback" not in log.read_text()
    finally:
        worker.terminate()
        try:
            worker.wait(CELERY_STOP_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            pytest.fail(f"the worker does not stop:\n{log.read_text()}")
