"""Samples of each minute and the curves of them: bounded rows, under the worker's right alone."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from mqlayer.doctor.health import system_health
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.inspect import curves
from mqlayer.maintenance.sampling import take_samples
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.workers.tasks import TASKS
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_for_room_in_minute
from tests.proof.route_steps import split
from tests.proof.world import QUICK, World

PROGRAM = "from mqlayer.workers.tasks import TASKS; TASKS['sample']()"


def shifted(world: World, minutes: int) -> None:
    """Have all samples be so many minutes older, as it is not through waiting."""
    # In two steps: in one, a row may meet another that has not moved yet.
    world.rows("UPDATE mqlayer.sample SET at = at - interval '1000 days'")
    world.rows("UPDATE mqlayer.sample SET at = at + interval '1000 days' - make_interval(mins => %s)", minutes)


def count(world: World) -> int:
    ((rows,),) = world.rows("SELECT count(*)::int FROM mqlayer.sample")
    return int(rows)


@pytest.mark.world(right=Right.WORK, tasks=True)
def test_the_job_samples_groups_topics_and_nodes_under_its_own_right(world: World) -> None:
    here = world.runtime()
    ensure_group(here, RouteCache(world.database), topic="orders", name="g", settings=GroupSettings(start="earliest"))
    world.publish(30)
    relay_once(world.settings(), limits=QUICK)
    world.publish(10)
    TASKS["sample"]()
    (lag, oldest_s, parked, dead) = curves(world.database, "group", "g", topic="orders")
    assert [one.points[0].mean for one in (lag, parked, dead)] == [30, 0, 0]
    assert 0 <= (oldest_s.points[0].highest or -1) < 60
    ((row),) = world.rows("SELECT committed, relayed, stored FROM mqlayer.sample WHERE kind = 'topic'")
    assert row == (40, 30, 30)
    memory, ops = curves(world.database, "node", "node-1")
    assert (memory.points[0].mean or 0) > 100_000
    assert ops.points[0].mean is not None


@pytest.mark.world(partitions=1, relayed=30)
def test_a_count_goes_on_over_a_split_and_the_end_of_its_parent(world: World) -> None:
    here = world.runtime()

    def stored() -> int:
        world.rows("DELETE FROM mqlayer.sample")
        take_samples(here)
        ((count,),) = world.rows("SELECT stored FROM mqlayer.sample WHERE kind = 'topic'")
        return int(count)

    assert stored() == 30
    route = split(here, "orders", 1, at=[512])
    world.publish(20)
    relay_once(world.settings(), limits=QUICK)
    assert stored() == 50
    world.rows("UPDATE mqlayer.partition SET state = 'deleted' WHERE partition_id = 1")
    assert stored() == 50, "its messages were handled, and are not gone"
    rates = dict(world.rows("SELECT partition_id, per_s FROM mqlayer.partition_rate"))
    assert sum(rates[one.partition] for one in route.ranges) > 1, "children have a rate at their first sample"


@pytest.mark.world(relayed=5)
def test_rows_are_bounded_by_the_minutes_kept_times_the_things_of_a_run(world: World) -> None:
    wait_for_room_in_minute()
    here = world.runtime()
    for _ in range(6):
        assert take_samples(here, kept_s=180, objects_limit=2) == 2
        assert take_samples(here, kept_s=180, objects_limit=2) == 2, "a minute has one row of a thing"
        assert count(world) <= 2 * 180 / 60
        shifted(world, 1)
    assert count(world) == 2 * 180 / 60


@pytest.mark.full
@pytest.mark.parametrize(("place", "rows"), some_of([("sample.before_put", 0), ("sample.after_put", 2)], 2))
@pytest.mark.world(relayed=5, tasks=True)
def test_a_run_that_is_killed_costs_its_minute_at_most_and_makes_no_row_twice(
    world: World, tmp_path: Path, place: str, rows: int
) -> None:
    TASKS["sample"]()
    shifted(world, 1)
    world.rows("UPDATE mqlayer.job SET next_at = now() RETURNING 1")
    wait_for_room_in_minute(20)
    killed = ask_python("-c", PROGRAM, env=world.environment(f"{place}=kill"), cwd=tmp_path)
    assert killed.returncode == -9, killed.stderr
    assert count(world) == 2 + rows
    ((due_s,),) = world.rows("SELECT extract(epoch FROM next_at - last_at)::int FROM mqlayer.job WHERE name = 'sample'")
    assert due_s < 60, "the next tick of a beat runs it again"
    assert take_samples(world.runtime()) == 2, "by another scheduler, in that same minute"
    assert count(world) == 4
    shifted(world, 1)
    world.rows("UPDATE mqlayer.job SET next_at = now() RETURNING 1")
    TASKS["sample"]()
    ((longest,),) = world.rows(
        "SELECT max(gap) FROM (SELECT at - lag(at) OVER (PARTITION BY kind, object_id ORDER BY at) AS gap "
        "FROM mqlayer.sample) AS those"
    )
    assert timedelta(minutes=1) <= longest <= timedelta(minutes=2)


@pytest.mark.world(relayed=5)
def test_a_count_that_is_not_known_makes_no_rate_of_nothing(world: World) -> None:
    """A node that was away: zero would be taken for a standstill."""
    wait_for_room_in_minute()
    world.rows(
        "INSERT INTO mqlayer.sample (kind, object_id, at, committed, relayed, stored) "
        "SELECT 'topic', 1, date_trunc('minute', now(), 'UTC') - make_interval(mins => n), 60 * (100 - n), 0, "
        "CASE WHEN n > 3 THEN 60 * (100 - n) END FROM generate_series(0, 9) AS n"
    )
    here = world.runtime()
    _, _, stored = curves(here.control, "topic", "orders", last=timedelta(minutes=10), points=10)
    assert {one.mean for one in stored.points if one.mean is not None} == {1.0}
    totals = system_health(here).totals
    assert (totals.committed_per_s, totals.stored_per_s) == (1.0, None)


@pytest.mark.world(by_commands=True, relayed=5)
def test_a_curve_has_at_most_so_many_points_and_counts_become_rates(world: World, run: Commands) -> None:
    wait_for_room_in_minute()
    here = world.runtime()
    world.rows(
        "INSERT INTO mqlayer.sample (kind, object_id, at, committed, relayed, stored) "
        "SELECT 'topic', 1, date_trunc('minute', now(), 'UTC') - make_interval(mins => n), 60 * (100 - n), 0, "
        "CASE WHEN n > 50 THEN 1000 - n ELSE 100 END FROM generate_series(1, 100) AS n"
    )
    for points in (1, 7, 60):
        committed, relayed, stored = curves(here.control, "topic", "orders", last=timedelta(hours=1), points=points)
        assert 1 <= len(committed.points) <= points
        assert {round(one.mean or 0, 6) for one in committed.points[1:]} <= {1.0}
        assert {one.highest for one in relayed.points[1:]} <= {0.0}
        told = [value for one in stored.points for value in (one.mean, one.highest) if value is not None]
        assert min(told) >= 0, "a count that fell counts as none"
        assert max(told) <= 1.01 / 60
    text = run.text("topic", "history", "orders", "--hours", "2", "--points", "10")
    assert re.search(r"committed per second +1 +1 +█{9,10}\n", text)
    (line, *_) = run.lines("topic", "history", "orders", "--hours", "2", "--points", "10")
    assert (line["name"], len(line["points"]) <= 10) == ("committed_per_s", True)
    assert "no sample of it" in run.text("node", "history", "node-1")
    assert "unknown node" in run.failure("node", "history", "x")
    with pytest.raises(InvalidInput, match="1 to 1,000"):
        curves(here.control, "topic", "orders", points=0)
    with pytest.raises(NotFound, match="orders/x"):
        curves(here.control, "group", "x", topic="orders")
    with pytest.raises(InvalidInput, match="kept for a week"):
        curves(here.control, "topic", "orders", last=timedelta(days=8))
