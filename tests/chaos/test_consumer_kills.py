"""Each place between two writes of a consumer, hit by a kill: the next one goes on, and the verdict is clean.

Cases 34, 50 to 53, 71, 77: no message is lost or reversed, and each fenced effect is there once.
"""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from mqlayer import outbox
from mqlayer.relay import relay_once
from tests.chaos.actors import TOPIC
from tests.fixtures.kill_scenes import COUNT, KEYS, KillScene, judge
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

AT_WORK: Final = [
    "group.after_insert", "group.before_starts", "group.before_live", "member.before_join",
    "member.before_join_commit", "member.after_join_commit",
    "acquire.before_send", "acquire.after_send", "read.after_reply",
    "handler.after_success@40", "handler.after_failure@3", "fence.before@40", "fence.after@40",
    "ack.before_send@2", "ack.after_send@2",
]  # fmt: skip
WITH_A_FILTER: Final = [
    "select.after_reply@2", "handler.after_success@20", "fence.after@20", "ack.before_send@2", "ack.after_send@2",
]  # fmt: skip
AT_STOP: Final = ["release.before_redis", "release.after_redis"]


@pytest.mark.parametrize("place", some_of(AT_WORK, 6))
def test_a_kill_at_work_loses_and_reverses_nothing(kill_scene: KillScene, place: str) -> None:
    name, _, occurrence = place.partition("@")
    kill_scene.publish()
    killed = kill_scene.start("first", f"{name}=kill@{occurrence or 1}")
    assert killed.wait(40) == -9, "the place was not reached"
    kill_scene.start("second")
    kill_scene.wait_until_drained()
    judge(kill_scene)


@pytest.mark.parametrize("place", some_of(WITH_A_FILTER, 4))
def test_a_kill_behind_a_filter_loses_and_reverses_nothing(kill_scene: KillScene, place: str) -> None:
    """Case 62: what the filter takes has its effect once and in order, the rest is settled without."""
    kill_scene.environment["MQLAYER_TEST_TAG_FILTER"] = "any:eu,vip"
    wanted: dict[str, list[str]] = {f"key-{number}": [] for number in range(KEYS)}
    with (
        psycopg.connect(kill_scene.settings.control_dsn()) as connection,
        outbox.transaction(connection) as transaction,
    ):
        for number in range(COUNT):
            key, tags = f"key-{number % KEYS}", ((), ("us",), ("eu", "us"), ("vip",))[number // KEYS % 4]
            transaction.publish(TOPIC, key=key, body=str(number), tags=tags)
            if {"eu", "vip"} & set(tags):
                wanted[key].append(str(number))
    assert relay_once(kill_scene.settings) == COUNT
    name, _, occurrence = place.partition("@")
    killed = kill_scene.start("first", f"{name}=kill@{occurrence or 1}")
    assert killed.wait(40) == -9, "the place was not reached"
    kill_scene.start("second")
    wait_until(kill_scene.settled, timeout_s=40, what="all settled")
    with psycopg.connect(kill_scene.settings.control_dsn()) as connection:
        rows = connection.execute("SELECT key, value FROM sink ORDER BY position").fetchall()
    assert {key: [value for of, value in rows if of == key] for key in wanted} == wanted


@pytest.mark.parametrize("place", some_of(AT_STOP, 2))
def test_a_kill_at_the_stop_loses_and_reverses_nothing(kill_scene: KillScene, place: str) -> None:
    first = kill_scene.start("first", f"{place}=kill")
    with psycopg.connect(kill_scene.settings.control_dsn(), autocommit=True) as connection:
        wait_until(
            lambda: connection.execute("SELECT 1 FROM mqlayer.assignment WHERE member_id IS NOT NULL").fetchone(),
            timeout_s=40, what="the first consumer owns partitions",
        )  # fmt: skip
        kill_scene.publish()
        wait_until(
            lambda: connection.execute("SELECT 1 FROM sink LIMIT 1").fetchone(), timeout_s=40, what="it is at work"
        )
    first.terminate()
    assert first.wait(40) == -9, "the place was not reached"
    kill_scene.start("second")
    kill_scene.wait_until_drained()
    judge(kill_scene)
