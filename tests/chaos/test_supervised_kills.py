"""Kills of processes whose supervisor sees it: the others go on at once, in order, and nothing is lost.

Leases last longer than the tests wait: who would have to wait for one fails.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Final

import pytest

from mqlayer.stack.processes import ProcessId, _started, children_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import ROOT, KillScene, judge
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

PLACES: Final = [
    "ack.before_send@2", "member.after_join_commit", "member.before_join", "acquire.after_send", "read.after_reply",
    "fence.after@20", "handler.after_success@20", "ack.after_send@2",
]  # fmt: skip
ENDED: Final = "dead_member_ended"


@pytest.fixture
def scene(kill_scene: KillScene) -> KillScene:
    """A backlog, and leases that nobody can wait for."""
    kill_scene.environment |= {"MQLAYER_LEASE_S": "300", "MQLAYER_TEST_DIRECTORY": str(kill_scene.directory)}
    kill_scene.publish()
    return kill_scene


def supervise(scene: KillScene, failpoints: str = "", **environment: str) -> Process:
    """Start two processes under a supervisor."""
    with (scene.directory / "supervisor.log").open("ab") as log:
        process = start_python(
            "mqlayer", "consume", "tests.chaos.supervised:app", "--processes", "2",
            cwd=ROOT, env=scene.environment | armed(failpoints) | environment, stdout=log, stderr=log,
        )  # fmt: skip
    scene.running.append(process)
    return process


def said(scene: KillScene) -> str:
    """Return what supervisors and their processes logged."""
    return (scene.directory / "supervisor.log").read_text()


def stop(scene: KillScene, supervisor: Process) -> None:
    """End all in order."""
    supervisor.terminate()
    assert supervisor.wait(30) == 0, said(scene)


@pytest.mark.parametrize("place", some_of(PLACES, 8))
def test_a_process_killed_at_a_place_is_followed_without_its_lease(scene: KillScene, place: str) -> None:
    supervisor = supervise(scene, MQLAYER_TEST_KILL=place)
    scene.wait_until_drained()
    wait_until(lambda: "signal=SIGKILL" in said(scene), timeout_s=20, what="the place is reached")
    stop(scene, supervisor)
    judge(scene)
    assert (ENDED in said(scene)) == (place != "member.before_join")


@pytest.mark.full
def test_a_supervisor_killed_after_its_word_leaves_nothing_to_a_lease(scene: KillScene) -> None:
    supervisor = supervise(scene, "member.after_dead_commit=kill", MQLAYER_TEST_KILL="handler.after_success@10")
    assert supervisor.wait(90) == -9, "the word was not said"
    # Its other process hears of its end, and leaves.
    statement = "SELECT count(*) FROM mqlayer.member WHERE lease_until > now()"
    wait_until(lambda: ask_postgres(scene.settings.control_dsn(), statement) == [(0,)], timeout_s=90, what="all left")
    successor = supervise(scene)
    scene.wait_until_drained()
    stop(scene, successor)
    judge(scene)


@pytest.mark.full
def test_kills_at_any_time_under_load_lose_and_reverse_nothing(scene: KillScene) -> None:
    rng, supervisor = random.Random(7), supervise(scene)
    itself = ProcessId(supervisor.pid, _started(supervisor.pid) or "")
    wait_until(lambda: said(scene).count("consumers_started") >= 2, timeout_s=40, what="both are at work")
    for ends in range(1, 5):
        scene.publish()
        later = time.monotonic() + rng.uniform(0, 0.3)
        wait_until(lambda later=later: time.monotonic() > later and children_of(itself), what="a while")  # type: ignore[misc]
        os.kill(rng.choice(children_of(itself)).pid, signal.SIGKILL)
        wait_until(lambda ends=ends: said(scene).count("signal=SIGKILL") == ends, what="its end is seen")  # type: ignore[misc]
    scene.wait_until_drained()
    stop(scene, supervisor)
    judge(scene)
    assert ENDED in said(scene)
