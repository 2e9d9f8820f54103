"""Each place between two writes of a consumer, hit by a kill: the next one goes on, and the verdict is clean.

Cases 34, 50 to 53, 71, 77: no message is lost or reversed, and each fenced effect is there once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer import outbox
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.relay import relay_once
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.chaos.actors import GROUP, SINK, TOPIC
from tests.chaos.harness.stores import drained, note_sink, note_streams
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.wait import wait_until
from tests.proof.checker import check
from tests.proof.history import History, Publish, read_histories
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]
COUNT: Final = 300
KEYS: Final = 20

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


class Scene:
    """A backlog in the partitions, consumers that are killed, and what they leave."""

    def __init__(self, settings: Settings, directory: Path, **environment: str) -> None:
        self.settings, self.directory = settings, directory
        self._environment = os.environ | {
            "MQLAYER_DSN": settings.control_dsn(),
            "MQLAYER_KEY_PREFIX": settings.key_prefix,
            "MQLAYER_LEASE_S": "1.0",
            "MQLAYER_TEST_FAILING": "7",
            **environment,
        }
        self.running: list[Process] = []
        self.published = 0

    def start(self, name: str, failpoints: str = "", *, role: str = "consumer") -> Process:
        """Start a consumer, to be killed at a place."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = start_python(
                "tests.chaos.actors", role, name, str(self.directory),
                cwd=ROOT, env=self._environment | armed(failpoints), stdout=log, stderr=log,
            )  # fmt: skip
        self.running.append(process)
        return process

    def publish(self) -> None:
        """Commit messages, numbered on, and bring them to the partitions."""
        first = self.published
        with (
            psycopg.connect(self.settings.control_dsn()) as connection,
            History(self.directory, f"writer-{first}") as history,
        ):
            for number in range(first, first + COUNT):
                key, value = f"key-{number % KEYS}", str(number)
                operation = history.begin(Publish(topic=TOPIC, key=key, value=value))
                row = connection.execute(
                    "SELECT mqlayer_app.publish_v1(%s, %s, %s)", (TOPIC, key, value.encode())
                ).fetchone()
                connection.commit()
                operation.ok(source=1, lp=lp_of(key.encode()), seq=row[0] if row else 0)
        assert relay_once(self.settings) == COUNT
        self.published += COUNT

    def wait_until_drained(self) -> None:
        """Wait until every message has its effect."""
        with psycopg.connect(self.settings.control_dsn(), autocommit=True) as connection:
            wait_until(lambda: drained(connection), timeout_s=40, what="every message has its effect")


@pytest.fixture
def scene(database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path) -> Iterator[Scene]:
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database, psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
        register_node(runtime_of(database), name="n1", url=redis_url)
        create_topic(runtime_of(database, key_prefix, application=database), TOPIC, partitions=4)
    scene = Scene(settings, tmp_path)
    yield scene
    for process in scene.running:
        process.kill()
        process.wait()


def judge(scene: Scene, *, partitions: int = 4) -> None:
    """Have the histories, the streams and the sink judged."""
    with History(scene.directory, "witness") as history:
        note_streams(history, scene.settings.control_dsn(), scene.settings.key_prefix, [*range(1, partitions + 1)])
        note_sink(history, scene.settings.control_dsn())
    verdict = check(read_histories(scene.directory), flows=[(GROUP, TOPIC)])
    assert verdict.clean, verdict
    assert verdict.messages == scene.published


@pytest.mark.parametrize("place", AT_WORK)
def test_a_kill_at_work_loses_and_reverses_nothing(scene: Scene, place: str) -> None:
    name, _, occurrence = place.partition("@")
    scene.publish()
    killed = scene.start("first", f"{name}=kill@{occurrence or 1}")
    assert killed.wait(40) == -9, "the place was not reached"
    scene.start("second")
    scene.wait_until_drained()
    judge(scene)


@pytest.mark.parametrize("place", WITH_A_FILTER)
def test_a_kill_behind_a_filter_loses_and_reverses_nothing(scene: Scene, redis_url: str, place: str) -> None:
    """Case 62: what the filter takes has its effect once and in order, the rest is settled without."""
    scene = Scene(scene.settings, scene.directory, MQLAYER_TEST_TAG_FILTER="any:eu,vip")
    wanted: dict[str, list[str]] = {f"key-{number}": [] for number in range(KEYS)}
    with psycopg.connect(scene.settings.control_dsn()) as connection, outbox.transaction(connection) as transaction:
        for number in range(COUNT):
            key, tags = f"key-{number % KEYS}", ((), ("us",), ("eu", "us"), ("vip",))[number // KEYS % 4]
            transaction.publish(TOPIC, key=key, body=str(number), tags=tags)
            if {"eu", "vip"} & set(tags):
                wanted[key].append(str(number))
    assert relay_once(scene.settings) == COUNT
    name, _, occurrence = place.partition("@")
    killed = scene.start("first", f"{name}=kill@{occurrence or 1}")
    try:
        assert killed.wait(40) == -9, "the place was not reached"
        scene.start("second")
        with redis.Redis.from_url(redis_url) as server:
            wait_until(lambda: all_settled(server, scene.settings.key_prefix), timeout_s=40, what="all settled")
    finally:
        for process in scene.running:
            process.kill()
            process.wait()
    with psycopg.connect(scene.settings.control_dsn()) as connection:
        rows = connection.execute("SELECT key, value FROM sink ORDER BY position").fetchall()
    assert {key: [value for of, value in rows if of == key] for key in wanted} == wanted


def all_settled(server: redis.Redis, prefix: str) -> bool:
    """Say whether the group has settled all that is there."""
    for partition in range(1, 5):
        end = server.hget(partition_keys(prefix, partition).meta, "next")
        if end is None or server.hget(group_keys(prefix, partition, 1).lock, "committed") != end:
            return False
    return True


@pytest.mark.parametrize("place", AT_STOP)
def test_a_kill_at_the_stop_loses_and_reverses_nothing(scene: Scene, place: str) -> None:
    first = scene.start("first", f"{place}=kill")
    with psycopg.connect(scene.settings.control_dsn(), autocommit=True) as connection:
        wait_until(
            lambda: connection.execute("SELECT 1 FROM mqlayer.assignment WHERE member_id IS NOT NULL").fetchone(),
            timeout_s=40, what="the first consumer owns partitions",
        )  # fmt: skip
        scene.publish()
        wait_until(
            lambda: connection.execute("SELECT 1 FROM sink LIMIT 1").fetchone(), timeout_s=40, what="it is at work"
        )
    first.terminate()
    assert first.wait(40) == -9, "the place was not reached"
    scene.start("second")
    scene.wait_until_drained()
    judge(scene)
