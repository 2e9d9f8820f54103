"""The gates of successors taken away: what chaos could bring about, made certain, so that the judge is tried, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer.postgres.database import Database
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from tests.chaos.actors import SINK, TOPIC
from tests.chaos.harness.play import Play
from tests.chaos.harness.scene import Scene
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.checker import Breach, Verdict, check
from tests.proof.history import read_histories
from tests.proof.planted_bugs import read_successors_at_once
from tests.proof.route_steps import merge, move
from tests.proof.runtimes import runtime_of


@pytest.fixture
def scene(database_dsn: str, key_prefix: str, start_redis: StartRedis, tmp_path: Path) -> Iterator[Scene]:
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
    with Database(database_dsn) as database:
        yield Scene(database, [start_redis() for _ in range(2)], settings, tmp_path)


def change_under_backlog(scene: Scene, play: Play) -> Verdict:
    """Let a backlog grow, move and merge what holds it, let consumers in, and judge what they do."""
    play.start("relay-0")
    play.start("publisher-0")
    wait_until(lambda: scene.committed() > 600, timeout_s=30, what="a backlog")
    first, second, third, _ = (r.partition for r in load_route(scene.database, TOPIC).ranges)
    merge(runtime_of(scene.database, scene.prefix), TOPIC, [first, second])
    move(runtime_of(scene.database, scene.prefix), TOPIC, third)
    behind = scene.committed() + 600
    wait_until(lambda: scene.committed() > behind, timeout_s=30, what="more behind the change")
    play.start("pair-0")
    wait_until(lambda: scene.rows("SELECT 1 FROM sink LIMIT 1"), timeout_s=30, what="a consumer at work")
    play.end("publisher")
    wait_until(lambda: scene.rows("SELECT count(*) FROM sink")[0][0] >= 600, timeout_s=60, what="it goes on")
    for role in ("pair", "relay"):
        play.end(role)
    scene.witness()
    return check(read_histories(scene.directory), drained=False)


@pytest.mark.parametrize("planted", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_judge_sees_a_group_that_reads_successors_before_it_has_drained_their_parents(
    scene: Scene, planted: bool
) -> None:
    """The gates taken away, and nothing else: the judge names it. With the gates it has nothing to say."""
    play = Play(scene.settings, scene.directory, MQLAYER_TEST_PAUSE_S="0.002")
    if planted:
        with psycopg.connect(scene.settings.control_dsn(), autocommit=True) as connection:
            read_successors_at_once(connection)
    try:
        verdict = change_under_backlog(scene, play)
    finally:
        play.kill_all()
    if not planted:
        assert verdict.clean, verdict
        return
    assert {Breach.BEFORE_GATE, Breach.INVERSION} <= verdict.broken, verdict
