"""A consumer killed while it arms a node that restarted: whoever comes next arms it, and the verdict is clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, register_node
from tests.chaos.actors import SINK, TOPIC
from tests.chaos.test_consumer_kills import Scene, judge
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


@pytest.fixture
def scene(database_dsn: str, node: RedisServer, key_prefix: str, tmp_path: Path) -> Iterator[Scene]:
    """A backlog on that node, and consumers."""
    with Database(database_dsn) as database, psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
        register_node(runtime_of(database), name="n1", url=node.url)
        create_topic(runtime_of(database, key_prefix, application=database), TOPIC, partitions=4)
    scene = Scene(Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix), tmp_path)
    yield scene
    for process in scene.running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", ["rearm.before_fence", "rearm.before_remake", "rearm.before_arm"])
def test_a_kill_while_a_node_is_armed_leaves_it_to_the_next(scene: Scene, node: RedisServer, place: str) -> None:
    scene.publish()
    first = scene.start("first", f"{place}=kill")
    with psycopg.connect(scene.settings.control_dsn(), autocommit=True) as connection:
        wait_until(
            lambda: connection.execute("SELECT 1 FROM sink LIMIT 1").fetchone(), timeout_s=40, what="it is at work"
        )
    node.kill()
    node.start()
    assert first.wait(40) == -9, "the place was not reached"
    scene.start("second")
    scene.wait_until_drained()
    judge(scene)
