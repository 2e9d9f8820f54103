"""Kills while partitions pass from one deployment to another, and back: effects are there once and in order."""

from __future__ import annotations

from typing import Final

import pytest

from tests.chaos.actors import GROUP, TOPIC
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import PARTITIONS, KillScene, judge
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

OF_BLUE: Final = [
    "release.before_redis",
    "release.after_redis",
    "ack.before_send@2",
    "ack.after_send@2",
    "handler.after_success@40",
]
OF_GREEN: Final = ["acquire.before_send", "acquire.after_send", "read.after_reply", "fence.after@5"]
OWNERS: Final = """
SELECT m.deployment, count(*) FROM mqlayer.assignment a JOIN mqlayer.member m USING (group_id, member_id) GROUP BY 1
"""


def start(scene: KillScene, name: str, deployment: str, failpoints: str = "") -> None:
    """Start a member of a deployment, and wait until it has joined."""
    scene.environment["MQLAYER_DEPLOYMENT"] = deployment
    scene.start(name, failpoints)
    statement = "SELECT 1 FROM mqlayer.member WHERE deployment = %s AND lease_until >= now()"
    wait_until(
        lambda: ask_postgres(scene.settings.control_dsn(), statement, [deployment]), timeout_s=40, what="it joined"
    )


def deploy(scene: KillScene, *words: str, failpoints: str = "") -> int:
    """Run the command; return how it ended."""
    said = ("group", "deploy", TOPIC, GROUP, *words, "--yes")
    return ask_python("mqlayer", *said, env=scene.environment | armed(failpoints)).returncode


def owned_by(scene: KillScene, deployment: str) -> bool:
    """Say whether all partitions are a deployment's."""
    return dict(ask_postgres(scene.settings.control_dsn(), OWNERS)) == {deployment: len(PARTITIONS)}


@pytest.mark.full
@pytest.mark.parametrize("place", ["group_deploy.before_commit", "group_deploy.after_commit"])
def test_a_deploy_that_is_killed_is_done_or_not_at_all(kill_scene: KillScene, place: str) -> None:
    start(kill_scene, "first", "blue")
    wait_until(lambda: owned_by(kill_scene, "blue"), timeout_s=40, what="blue has all")
    start(kill_scene, "second", "green")
    assert deploy(kill_scene, "--to", "green", failpoints=f"{place}=kill") == -9
    if place == "group_deploy.before_commit":
        assert owned_by(kill_scene, "blue")
        assert deploy(kill_scene, "--to", "green") == 0
    wait_until(lambda: owned_by(kill_scene, "green"), timeout_s=20, what="green has all")


@pytest.mark.parametrize("place", some_of(OF_BLUE, 3))
def test_an_owner_that_is_killed_while_it_hands_over_loses_and_reverses_nothing(
    kill_scene: KillScene, place: str
) -> None:
    """And what went over comes back: the group is rolled back under load."""
    name, _, occurrence = place.partition("@")
    start(kill_scene, "first", "blue", f"{name}=kill@{occurrence or 1}")
    start(kill_scene, "second", "green")
    kill_scene.publish()
    assert deploy(kill_scene, "--to", "green") == 0
    assert kill_scene.running[0].wait(40) == -9, "the place was not reached"
    start(kill_scene, "third", "blue")
    wait_until(lambda: owned_by(kill_scene, "green"), timeout_s=20, what="green has all")
    kill_scene.publish()
    assert deploy(kill_scene, "--back") == 0
    kill_scene.wait_until_drained()
    wait_until(lambda: owned_by(kill_scene, "blue"), timeout_s=20, what="blue has all again")
    judge(kill_scene)


@pytest.mark.full
@pytest.mark.parametrize("place", some_of(OF_GREEN, 1))
def test_a_green_that_is_killed_as_it_begins_leaves_the_group_to_blue(kill_scene: KillScene, place: str) -> None:
    """With the fallback, by itself."""
    name, _, occurrence = place.partition("@")
    start(kill_scene, "first", "blue")
    start(kill_scene, "second", "green", f"{name}=kill@{occurrence or 1}")
    kill_scene.publish()
    assert deploy(kill_scene, "--to", "green", "--fallback") == 0
    # Blue may have handled all that was there.
    kill_scene.publish()
    assert kill_scene.running[1].wait(40) == -9, "the place was not reached"
    kill_scene.publish()
    kill_scene.wait_until_drained()
    wait_until(lambda: owned_by(kill_scene, "blue"), timeout_s=20, what="blue has all again")
    judge(kill_scene)
