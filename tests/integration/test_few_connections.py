"""What jobs and drivers do needs one connection of each pool at a time.

Who holds locks and waits for a second one waits for those who have the others, and wait for these locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import redis

from mqlayer import failpoints
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.postgres.database import Database
from mqlayer.relay import recover_now
from mqlayer.routes import finish_changes, give_up_node, reopen_forgotten
from mqlayer.runtime.route_cache import load_route
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node, register_node
from mqlayer.workers.app import app
from mqlayer.workers.schedule import task_name
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

SHORT_S = 5.0
"""How long a pool is asked for a connection that it can't have."""

pytestmark = pytest.mark.world(nodes=2, relayed=50, tasks=True)


@pytest.fixture
def control(database_dsn: str) -> Iterator[Database]:
    """A pool of one connection."""
    with Database(database_dsn, max_size=1, timeout_s=SHORT_S) as database:
        yield database


@pytest.fixture
def application(database_dsn: str) -> Iterator[Database]:
    """Another one, on the outbox."""
    with Database(database_dsn, max_size=1, timeout_s=SHORT_S) as database:
        yield database


def leave_sealed(world: World) -> None:
    """Leave a split of the second node's partition where its driver died."""
    with Database(world.dsn) as database:
        failpoints.arm("change.after_seal", "raise")
        with pytest.raises(failpoints.FailpointHit):
            split(runtime_of(database, world.key_prefix), "orders", 2, at=[700])


def test_who_wait_for_a_change_do_not_keep_its_driver_waiting(world: World) -> None:
    """Two threads of a worker have both connections of its pool when the change's row comes free."""
    leave_sealed(world)
    waiting = (
        "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with Database(world.dsn, max_size=2, timeout_s=SHORT_S) as database, ThreadPoolExecutor(2) as threads:
        with psycopg.connect(world.dsn) as other:
            other.execute("SELECT FROM mqlayer.route_change FOR UPDATE")
            both = [threads.submit(finish_changes, runtime_of(database, world.key_prefix)) for _ in range(2)]
            wait_until(lambda: world.rows(waiting) == [(2,)], what="both threads wait for the change")
        assert [one.result() for one in both] == [{1: "done"}, {1: "done"}]


def test_every_job_does_with_one_connection_of_each_pool(
    world: World, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is most to do: a change to be finished, and a node to be filled up again."""
    leave_sealed(world)

    def small(dsn: str, *, application: str, max_size: int) -> Database:
        return Database(dsn, application=application, max_size=1, timeout_s=SHORT_S)

    monkeypatch.setattr("mqlayer.runtime.runtime.Database", small)
    app.loader.import_default_modules()
    for job in PERIODIC_JOBS:
        if job.name == "rearm_nodes":
            redis.Redis.from_url(node.url).flushall()
            node.kill()
            node.start()
        app.tasks[task_name(job)]()
        if job.name == "rearm_nodes":
            run_id = redis.Redis.from_url(node.url, decode_responses=True).info("server")["run_id"]
            assert world.rows("SELECT armed_run_id FROM mqlayer.node WHERE name = 'node-2'") == [(run_id,)]
    with Database(world.dsn) as database:
        assert [r.lp_from for r in load_route(database, "orders").ranges] == [0, 512, 700]
    with world.relay():
        world.wait_until_whole()


def test_nodes_and_routes_are_repaired_with_one_connection_of_each_pool(
    world: World, node: RedisServer, start_redis: StartRedis, control: Database, application: Database
) -> None:
    """A sealed partition is filled up from the outbox while its node's row is held; a dead node is given up."""
    split(runtime_of(control, world.key_prefix), "orders", 2, at=[700])
    redis.Redis.from_url(node.url).flushall()
    rearm_node(runtime_of(control, world.key_prefix, application=application), "node-2")
    assert world.relayed() == world.published()
    assert reopen_forgotten(runtime_of(control, world.key_prefix), "orders").opened == []
    register_node(runtime_of(control), name="node-3", url=start_redis().url)
    move(
        runtime_of(control, world.key_prefix), "orders", load_route(control, "orders").ranges[0].partition, to="node-3"
    )
    node.kill()
    lost = give_up_node(runtime_of(control, world.key_prefix, application=application), "node-2")
    assert len(lost.moved) == 2


def test_an_outbox_is_recovered_with_one_connection_of_each_pool(
    world: World, node: RedisServer, control: Database, application: Database
) -> None:
    """A node that has to prove something is filled up from the outbox first, a sealed partition too."""
    split(runtime_of(control, world.key_prefix), "orders", 2, at=[700])
    redis.Redis.from_url(node.url).flushall()
    world.rows("UPDATE mqlayer_app.identity SET timeline = 77")
    assert recover_now(runtime_of(control, settings=world.settings(), application=application)) is not None
    assert {record.value for record in world.records()} == {f"m-{number}" for number in range(50)}
