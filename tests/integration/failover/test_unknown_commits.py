"""Case 72, DESIGN 9: an answer of Postgres is lost, and nobody knows whether the commit is there. All is asked again.

Sinks, parked messages, drained partitions and heartbeats of a member, whose line to Postgres ends behind so many bytes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from mqlayer import Context
from mqlayer.domain.routing import PartitionId
from mqlayer.routes import apply_change, plan_split
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.kept_connections import ask_postgres, kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, ParkingShop, release, rows
from tests.proof.proxy import TcpProxy

KEYS, EACH = 8, 30
DRAINED = "SELECT partition_id FROM mqlayer.drained"
PUT = "INSERT INTO sink (key, body) VALUES (%s, %s)"


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A stage with a sink beside its schemas."""
    stage = start_stage(redis_url, partitions=1)
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE sink (position bigserial PRIMARY KEY, key text, body int)")
    return stage


@pytest.fixture
def line(stage: Stage) -> Iterator[TcpProxy]:
    """The member's way to Postgres."""
    parts = conninfo_to_dict(stage.dsn)
    with TcpProxy(str(parts["host"]), int(str(parts["port"]))) as line:
        yield line


def through(stage: Stage, line: TcpProxy) -> str:
    """Return the stage's DSN by way of a line."""
    return make_conninfo(stage.dsn, host=line.host, port=line.port)


def effects(stage: Stage) -> dict[str, list[int]]:
    """Return what each key's effects were, in their order."""
    rows = ask_postgres(stage.dsn, "SELECT key, body FROM sink ORDER BY position")
    return {key: [body for name, body in rows if name == key] for key, _ in rows}


def test_an_effect_whose_commit_was_not_answered_is_there_once(stage: Stage, line: TcpProxy) -> None:
    """It was committed; the handler is told that it failed, comes again, and the fence says that it is done."""
    lost = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        with psycopg.connect(through(stage, line)) as connection:
            ctx.fence(connection)
            connection.execute(PUT, (ctx.key, int(body)))
            if not lost.is_set():
                lost.set()
                line.cut_after(server_bytes=0)

    recorder = Recorder(act)
    stage.send_numbers(1, 5)
    stage.consume(recorder)
    stage.wait_settled()
    assert line.cut_count == 1
    assert effects(stage) == {"key-0": [1, 2, 3, 4, 5]}
    # A lease that runs out meanwhile costs one more.
    assert len(recorder.begun) >= 6


@pytest.mark.parametrize("seed", some_of([1, 2], 9))
def test_connections_that_end_anywhere_in_an_answer_cost_nothing(stage: Stage, line: TcpProxy, seed: int) -> None:
    """Two keys fail at first and are parked, the partition is split, each line ends behind up to 400 bytes."""
    rng, shop, dsn = random.Random(seed), ParkingShop("key-1", "key-2"), through(stage, line)

    def act(body: bytes, ctx: Context) -> None:
        shop.act(body, ctx)
        with kept_session(dsn) as connection:
            ctx.fence(connection)
            connection.execute(PUT, (ctx.key, int(body)))

    def cut() -> None:
        cuts = line.cut_count
        line.cut_after(server_bytes=rng.randint(0, 400))
        line.wait_for_cut(cuts + 1, timeout_s=20)

    stage.consume(Recorder(act), settings=stage.settings(dsn=SecretStr(dsn)), backoff_s=(LATER_S,))
    for turn in range(EACH // 2):
        stage.send_numbers(KEYS, 2, first=1 + 2 * turn)
        cut()
    apply_change(stage.runtime, plan_split(stage.route, PartitionId(stage.partitions[0]), [512]))
    for _ in range(3):
        cut()
    line.heal()
    shop.broken.clear()
    whole = {f"key-{key}": list(range(1, EACH + 1)) for key in range(KEYS)}

    def is_whole() -> bool:
        release(stage)
        return effects(stage) == whole

    wait_until(is_whole, timeout_s=40, what="every effect, once and in order")
    wait_until(lambda: rows(stage, DRAINED) == [(1,)], timeout_s=20, what="the parent drained")
