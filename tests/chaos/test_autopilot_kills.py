"""A pass of the autopilot, or a command on its policy, killed at each step: whoever comes next goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mqlayer.autopilot import set_policy
from mqlayer.routes import finish_changes
from tests.fixtures.auto_scenes import bounds, journal, one_pass, put_load
from tests.fixtures.forked_programs import ask_python, is_stopped, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.world import World

PASS = """
from mqlayer.autopilot import auto_routes
from mqlayer.runtime import open_runtime
from mqlayer.settings import Settings
from tests.fixtures.auto_scenes import NOTED
with open_runtime(Settings(), actor="worker") as runtime:
    auto_routes(runtime, times=NOTED)
"""
POLICY = """
from mqlayer.autopilot import set_policy
from mqlayer.runtime import open_runtime
from mqlayer.settings import Settings
with open_runtime(Settings(), actor="ann") as runtime:
    set_policy(runtime, "orders", mode="off")
"""
ROOT = Path(__file__).parents[2]


def killed(world: World, program: str, failpoint: str) -> None:
    process = ask_python("-c", program, cwd=ROOT, env=os.environ | world.environment(failpoint))
    assert process.returncode == -9, "the place was not reached"


@pytest.mark.parametrize(
    ("place", "planned"),
    some_of(
        [
            ("change.after_plan", True),
            ("auto.before_plan", False),
            ("change.before_plan_commit", False),
            ("change.after_seal", True),
            ("change.before_done_commit", True),
        ],
        3,
    ),
)
def test_a_pass_killed_anywhere_leaves_a_change_with_its_row_or_neither(
    world: World, place: str, planned: bool
) -> None:
    set_policy(world.runtime(), "orders", mode="on", capacity_per_s=100.0)
    put_load(world, {1: 1, 2: 1})
    killed(world, PASS, f"{place}=kill")
    assert journal(world) == [("changed", "merge", [1, 2])] * planned
    assert world.rows("SELECT count(*)::int FROM mqlayer.audit WHERE actor = 'autopilot'") == [(int(planned),)]
    if planned:
        assert one_pass(world).changed == (), "an open change is waited for"
    assert list(finish_changes(world.runtime()).values()) == ["done"] * planned
    assert one_pass(world).changed == (() if planned else ("orders",))
    assert bounds(world) == [(0, 1024)]
    assert journal(world) == [("changed", "merge", [1, 2])]


def test_a_pass_killed_before_a_judgement_leaves_it_to_the_next(world: World) -> None:
    set_policy(world.runtime(), "orders", mode="on", capacity_per_s=100.0)
    put_load(world, {1: 1, 2: 1})
    assert one_pass(world).changed == ("orders",)
    put_load(world, {3: 2})
    killed(world, PASS, "auto.before_judge_commit=kill")
    waiting = "SELECT count(*)::int FROM mqlayer.route_decision WHERE judged_at IS NULL"
    assert world.rows(waiting) == [(1,)]
    one_pass(world)
    assert world.rows(waiting) == [(0,)]


def test_a_pass_that_slept_over_the_change_of_another_one_makes_none(world: World) -> None:
    set_policy(world.runtime(), "orders", mode="on", capacity_per_s=100.0, min_partitions=1)
    put_load(world, {1: 1, 2: 1})
    late = start_python("-c", PASS, cwd=ROOT, env=os.environ | world.environment("auto.before_plan=stop"))
    try:
        wait_until(lambda: is_stopped(late), timeout_s=40, what="the first pass to have decided")
        assert one_pass(world).changed == ("orders",)
        late.send_signal(signal.SIGCONT)
        assert late.wait(40) == 0
    finally:
        late.kill()
        late.wait()
    assert journal(world) == [("changed", "merge", [1, 2])], "its plan was of an earlier version"


def test_a_command_killed_before_its_commit_leaves_the_policy(world: World) -> None:
    set_policy(world.runtime(), "orders", mode="on")
    killed(world, POLICY, "auto.before_policy_commit=kill")
    assert world.rows("SELECT mode FROM mqlayer.route_policy") == [("on",)]
    assert world.rows("SELECT 1 FROM mqlayer.audit WHERE actor = 'ann'") == []
