"""Routes that change by themselves, on live servers: what is measured, decided, changed, noted and stopped."""

from __future__ import annotations

import pytest

from mqlayer.autopilot import AutoPass, auto_routes, decisions_of, explain_routes, set_policy
from mqlayer.autopilot.journal import JOURNAL_ROWS
from mqlayer.doctor.health import system_health
from mqlayer.errors import NotFound
from mqlayer.exporter.samples import control_samples
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.postgres.rights import Right
from mqlayer.routes import drop_change
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from mqlayer.topics import set_durability, set_node_replicas
from mqlayer.workers.tasks import TASKS
from tests.fixtures.auto_scenes import (
    MEASURED,
    age_changes,
    bounds,
    journal,
    key_of,
    load,
    one_pass,
    put_load,
    spread_over,
    until_changed,
)
from tests.fixtures.commands import Commands
from tests.fixtures.wait import wait_until
from tests.proof.world import World

EVENLY = (100, 200, 300, 700, 800, 900)


def switch_on(world: World, **policy: object) -> None:
    set_policy(world.runtime(), "orders", **({"mode": "on", "capacity_per_s": 100.0, "cool_down_s": 5.0} | policy))


@pytest.mark.world(partitions=1)
def test_a_hot_partition_is_measured_and_split_where_its_load_halves(world: World) -> None:
    here = world.runtime(actor="worker")
    assert auto_routes(here, times=MEASURED) == AutoPass(), "nothing is done for a topic without a policy"
    assert world.rows("SELECT 1 FROM mqlayer.route_load") == []
    # A second change, or the end of the cool-down, would alter the reported decision.
    switch_on(world, capacity_per_s=20.0, cool_down_s=60.0)
    with load(world, EVENLY):
        wait_until(lambda: auto_routes(here, times=MEASURED).changed, timeout_s=20, what="it to be split")
        ((_, cut), _) = bounds(world)
        assert 300 <= cut <= 700
        wait_until(
            lambda: not auto_routes(here, times=MEASURED).changed and judged(world), what="the change to be judged"
        )
        report = explain_routes(here, "orders", times=MEASURED)
    ((actor, reason),) = world.rows("SELECT actor, facts ->> 'reason' FROM mqlayer.audit WHERE act = 'route split'")
    assert actor == "autopilot"
    assert f"LP {cut} halves its load" in reason
    (decision,) = decisions_of(world.database, "orders")
    assert (decision.verdict, decision.state, decision.helped) == ("changed", "done", True)
    # Each part has a share, and neither has all: rates of different windows do not compare.
    assert 0 < decision.facts["after_heaviest_per_s"] < decision.facts["after_per_s"]
    assert [one.verdict for one in report.partitions] == ["split wanted"] * 2
    assert report.waits.startswith("cool-down")
    assert report.changes_left == 19


def told(world: World) -> list[str]:
    """Return the problems of automatic routes that the overview tells."""
    known = ("MqlayerAutopilotStopped", "MqlayerKeyHot")
    return [one.alert.name for one in system_health(world.runtime()).problems if one.alert.name in known]


def judged(world: World) -> bool:
    return world.rows("SELECT 1 FROM mqlayer.route_decision WHERE judged_at IS NOT NULL") == [(1,)]


@pytest.mark.world(partitions=1, right=Right.WORK, tasks=True)
def test_the_job_isolates_a_hot_key_and_names_it_under_its_own_right(world: World) -> None:
    switch_on(world)
    with load(world, (300, 300, 300, 700)):
        put_load(world, {1: 90})
        TASKS["auto_routes"]()
    assert bounds(world) == [(0, 300), (300, 301), (301, 1024)]
    (decision,) = decisions_of(world.database, "orders")
    assert f"key '{key_of(300)}' of LP 300 has 7" in decision.reason
    age_changes(world)
    world.rows("UPDATE mqlayer.job SET next_at = now()")
    with load(world, (300,)):
        put_load(world, {2: 1, 3: 90, 4: 1})
        TASKS["auto_routes"]()
    assert len(bounds(world)) == 3
    (refused, _) = decisions_of(world.database, "orders")
    assert (refused.verdict, refused.lp) == ("refused", 300)
    assert f"single LP 300 of key '{key_of(300)}', so no split helps: divide the key" in refused.reason
    assert explain_routes(world.runtime(), "orders").partitions[1].reason == refused.reason
    assert told(world) == ["MqlayerKeyHot"]
    assert control_samples(world.runtime())["mqlayer.autopilot.hot_lps"] == [(1, {"topic": "orders"})]


@pytest.mark.world(partitions=1)
def test_a_dry_run_notes_a_change_once_and_makes_none(world: World) -> None:
    switch_on(world, mode="report")
    put_load(world, {1: 90})
    with load(world, EVENLY):
        wait_until(lambda: one_pass(world) == AutoPass(topics=1) and journal(world), what="a report")
        assert one_pass(world) == AutoPass(topics=1)
    assert bounds(world) == [(0, 1024)]
    assert journal(world) == [("reported", "split", [1])]


@pytest.mark.world(partitions=4)
def test_cold_neighbours_are_merged_one_after_the_other_down_to_the_bound(world: World) -> None:
    switch_on(world, min_partitions=2)
    put_load(world, {1: 30, 2: 20, 3: 10, 4: 10})
    assert one_pass(world).changed == ("orders",)
    assert bounds(world) == [(0, 256), (256, 512), (512, 1024)]
    put_load(world, {1: 10, 2: 10, 5: 24})
    assert one_pass(world).changed == (), "cool-down"
    age_changes(world)
    assert one_pass(world).changed == ("orders",)
    assert bounds(world) == [(0, 512), (512, 1024)]
    put_load(world, {5: 1, 6: 1})
    age_changes(world)
    assert one_pass(world).changed == ()
    assert "keeps at least 2" in explain_routes(world.runtime(), "orders").waits


@pytest.mark.world(partitions=1)
def test_a_group_that_is_behind_shows_what_a_partition_can_take(world: World) -> None:
    switch_on(world, capacity_per_s=None)
    put_load(world, {1: 50})
    one_pass(world)
    assert "default" in explain_routes(world.runtime(), "orders").capacity_from
    put_load(world, {1: 50}, served_per_s=40)
    one_pass(world)
    report = explain_routes(world.runtime(), "orders")
    assert report.capacity_per_s == pytest.approx(40, rel=0.1)
    assert report.partitions[0].verdict == "split wanted"


@pytest.mark.world(partitions=1, by_commands=True)
def test_two_changes_in_a_row_that_do_not_help_stop_it_until_an_operator_begins_again(
    world: World, run: Commands
) -> None:
    switch_on(world)
    for parent, made in ((1, (2, 3)), (3, (4, 5))):
        put_load(world, {parent: 90})
        with load(world, spread_over(world, parent)):
            until_changed(world)
        put_load(world, {made[0]: 2, made[1]: 88})
        assert one_pass(world).stopped == (() if parent == 1 else ("orders",))
        age_changes(world)
    assert [row[:2] for row in journal(world)] == [("changed", "split")] * 2 + [("stopped", "none")]
    assert world.rows("SELECT count(*)::int FROM mqlayer.audit WHERE act = 'route auto stop'") == [(1,)]
    assert told(world) == ["MqlayerAutopilotStopped"]
    samples = control_samples(world.runtime())
    assert samples["mqlayer.autopilot.stopped"] == [(1, {"topic": "orders"})]
    assert samples["mqlayer.autopilot.changes"] == [(2, {"topic": "orders"})]
    (found,) = [one for one in run("doctor", "--json").stdout.splitlines() if '"autopilot"' in one]
    assert "repair the cause, then: mqlayer route auto orders --on" in found
    assert "stopped itself: 2 changes in a row did not help" in " ".join(run.text("route", "why", "orders").split())
    with load(world, spread_over(world, 5)):
        assert one_pass(world).changed == ()
        run.text("route", "auto", "orders", "--on")
        until_changed(world)


@pytest.mark.world(partitions=2, own_node=True)
def test_three_changes_in_a_row_that_fail_stop_it(world: World, node: RedisServer) -> None:
    switch_on(world)
    put_load(world, {1: 1, 2: 1})
    node.kill()
    for _ in range(3):
        assert one_pass(world).changed == ()
        drop_change(world.runtime(), "orders")
    report = explain_routes(world.runtime(), "orders")
    assert report.state.stopped_because is not None
    assert "3 changes in a row failed" in report.state.stopped_because
    assert report.waits.startswith("it stopped itself")
    assert bounds(world) == [(0, 512), (512, 1024)]


@pytest.mark.full
@pytest.mark.world(partitions=2)
def test_the_journal_is_bounded(world: World) -> None:
    switch_on(world, min_partitions=1)
    world.rows(
        "INSERT INTO mqlayer.route_decision (topic_id, at, verdict, kind, partitions, reason) "
        "SELECT 1, now() - make_interval(days => CASE WHEN n <= 5 THEN 31 ELSE 1 END), 'refused', 'split', '{1}', 'r' "
        f"FROM generate_series(1, {JOURNAL_ROWS + 20}) AS n"
    )
    put_load(world, {1: 1, 2: 1})
    assert one_pass(world).changed == ("orders",)
    assert len(journal(world)) == JOURNAL_ROWS
    world.rows("UPDATE mqlayer.route_decision SET at = at - interval '40 days'")
    put_load(world, {3: 90})
    age_changes(world)
    with load(world, spread_over(world, 3)):
        until_changed(world)
    assert [row[0] for row in journal(world)] == ["changed"], "the earlier one was judged, and is old"


@pytest.mark.world(partitions=1, by_commands=True)
def test_a_policy_is_set_shown_and_kept(world: World, run: Commands) -> None:
    said = run.text("route", "auto", "orders", "--report", "--max-partitions", "8", "--quiet", "22:00-06:00")
    assert "1 to 8" in said
    said = run.text("route", "auto", "orders", "--on", "--capacity", "900")
    assert all(part in said for part in ("on", "1 to 8", "900 messages/s", "22:00-06:00"))
    said = run.text("route", "auto", "orders", "--capacity", "0", "--quiet", "none")
    assert "measured" in said
    assert world.rows("SELECT mode, max_partitions, capacity_per_s, quiet_from FROM mqlayer.route_policy") == [
        ("on", 8, None, None)
    ]
    assert "bounds are two of these in order" in run.failure("route", "auto", "orders", "--min-partitions", "9")
    assert "say 22:00-06:00" in run.failure("route", "auto", "orders", "--quiet", "night")
    assert "create it: mqlayer topic create nope" in run.failure("route", "auto", "nope", "--on")
    (line,) = run.lines("route", "why", "orders")
    assert (line["topic"], line["policy"]["mode"], line["changes_left"]) == ("orders", "on", 20)
    assert [one["verdict"] for one in line["partitions"]] == ["unknown"]
    run.text("route", "auto", "orders", "--off")
    assert one_pass(world) == AutoPass()


@pytest.mark.world(partitions=1)
def test_a_topic_without_a_policy_is_told_from_one_that_is_not_there(world: World) -> None:
    with pytest.raises(NotFound, match="changed by hand: mqlayer route auto orders --report"):
        explain_routes(world.runtime(), "orders")
    with pytest.raises(NotFound, match="create it"):
        explain_routes(world.runtime(), "nope")


@pytest.mark.world(partitions=1)
def test_a_group_without_members_shows_no_limit(world: World) -> None:
    here = world.runtime(actor="worker")
    ensure_group(here, RouteCache(world.database), topic="orders", name="g", settings=GroupSettings(start="earliest"))
    switch_on(world, capacity_per_s=None)
    with load(world, EVENLY):
        wait_until(lambda: is_measured(world), what="a load to be measured")
    ((measured,),) = world.rows("SELECT measured_per_s FROM mqlayer.route_policy")
    assert measured is None


def is_measured(world: World) -> bool:
    here = world.runtime(actor="worker")
    auto_routes(here, times=MEASURED)
    return bool(explain_routes(here, "orders", times=MEASURED).partitions[0].per_s)


@pytest.mark.world(partitions=4)
def test_a_new_node_is_filled_by_moves_one_after_the_other(world: World, node: RedisServer) -> None:
    switch_on(world, capacity_per_s=1_000.0, min_partitions=4)
    world.add_node(node.url)
    put_load(world, dict.fromkeys((1, 2, 3, 4), 100.0))
    assert one_pass(world).changed == ("orders",)
    assert one_pass(world).changed == (), "a minute between two moves"
    (decision,) = decisions_of(world.database, "orders")
    assert "node node-1 has 400 messages/s, 2.00 times the mean; 100 messages/s go to node-2" in decision.reason
    age_changes(world)
    put_load(world, dict.fromkeys((2, 3, 4, 5), 100.0))
    assert one_pass(world).changed == ("orders",)
    age_changes(world)
    put_load(world, dict.fromkeys((3, 4, 5, 6), 100.0))
    assert one_pass(world).changed == (), "it is balanced"
    placed = world.rows(
        "SELECT node_id, count(*)::int FROM mqlayer.partition WHERE state = 'open' GROUP BY 1 ORDER BY 1"
    )
    assert placed == [(1, 2), (2, 2)]


@pytest.mark.world(partitions=2)
def test_no_partition_moves_to_a_node_that_can_not_hold_its_topic_s_class(world: World, node: RedisServer) -> None:
    switch_on(world, mode="report", capacity_per_s=1_000.0, min_partitions=2)
    set_node_replicas(world.runtime(), "node-1", 1)
    set_durability(world.runtime(), "orders", "replica")
    world.add_node(node.url)
    put_load(world, dict.fromkeys((1, 2), 100.0))
    one_pass(world)
    assert decisions_of(world.database, "orders") == []
    set_node_replicas(world.runtime(), "node-2", 1)
    one_pass(world)
    (decision,) = decisions_of(world.database, "orders")
    assert decision.reason.endswith("messages/s go to node-2")
