"""A consumer killed while it arms a node that restarted: whoever comes next arms it, and the verdict is clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from mqlayer.stack import RedisServer
from tests.fixtures.kill_scenes import KillScene, judge, kill_scene_on
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until


@pytest.fixture
def node(start_redis: StartRedis) -> RedisServer:
    """A Redis that may be killed."""
    return start_redis()


@pytest.fixture
def scene(database_dsn: str, node: RedisServer, key_prefix: str, tmp_path: Path) -> Iterator[KillScene]:
    """A backlog on that node, and consumers."""
    with kill_scene_on(node.url, dsn=database_dsn, prefix=key_prefix, directory=tmp_path) as scene:
        yield scene


@pytest.mark.parametrize("place", some_of(["rearm.before_fence", "rearm.before_remake", "rearm.before_arm"], 3))
def test_a_kill_while_a_node_is_armed_leaves_it_to_the_next(scene: KillScene, node: RedisServer, place: str) -> None:
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
