"""A control database that lost a whole route change: parents are sealed on their nodes, and nobody serves their LPs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import psycopg
import pytest

from mqlayer.doctor.verify import verify
from mqlayer.errors import AcknowledgedLoss, Conflict, PublishUnknown
from mqlayer.producing import Message
from mqlayer.routes import reopen_forgotten
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.stack import PostgresServer
from mqlayer.topics import rearm_node
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import start_python
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = [pytest.mark.world(partitions=1), pytest.mark.usefixtures("new_sessions")]


@pytest.fixture
def past(postgres_server: PostgresServer, world: World) -> Iterator[Callable[[], str]]:
    """Keeps the control database as it is; the second call puts it back to that, on another timeline."""
    name = world.dsn.rsplit("/", 1)[1]
    copy, kept = f"{name}_past", False

    def go() -> str:
        nonlocal kept
        if not kept:
            with psycopg.connect(postgres_server.dsn("postgres"), autocommit=True) as connection:
                # A copy is made of what nobody uses.
                connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
                wait_until(lambda: copied(connection, name, copy), what="a copy of the control database")
                connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            kept = True
            return world.dsn
        postgres_server.drop_database(name)
        with psycopg.connect(postgres_server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{copy}" RENAME TO "{name}"')
        with psycopg.connect(world.dsn, autocommit=True) as connection:
            connection.execute("UPDATE mqlayer.server SET timeline = timeline + 1")
        return world.dsn

    yield go
    postgres_server.drop_database(copy)


def copied(connection: psycopg.Connection, name: str, copy: str) -> bool:
    """Copy a database, unless somebody is still in it."""
    with suppress(psycopg.errors.ObjectInUse):
        connection.execute(f'CREATE DATABASE "{copy}" TEMPLATE "{name}"')
        return True
    return False


def split_once(world: World) -> None:
    """Split the topic's partition."""
    ((partition, _),) = [(r.partition, r.node) for r in load_route(world.database, "orders").ranges]
    split(runtime_of(world.database, world.key_prefix), "orders", partition, at=[512])


def reopen(world: World) -> tuple[list[int], dict[int, int]]:
    """Do what `mqlayer route reopen` does."""
    done = reopen_forgotten(runtime_of(world.database, world.key_prefix), "orders")
    return done.opened, done.deleted


def reopen_process(world: World, *options: str, failpoints: str = "") -> int:
    """Say `mqlayer route reopen`; return the exit code."""
    names = {"MQLAYER_DSN": world.dsn, "MQLAYER_APP_DSN": world.dsn, "MQLAYER_KEY_PREFIX": world.key_prefix}
    environment = {**os.environ, **names, **armed(failpoints)}
    return start_python("mqlayer", "route", "reopen", "orders", *options, env=environment).wait(60)


def states(world: World, partitions: int) -> list[str]:
    """Return what the node says of the first partitions."""
    with world.client() as client:
        return [client.hget(world.keys(number).meta, "state").decode() for number in range(1, partitions + 1)]


def test_a_change_that_was_lost_is_named_and_undone(
    world: World, past: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 72. A producer of before follows the older route, hears what it lost, and goes on; so do later changes."""
    for name in ("NODE_POLL_S", "IDLE_POLL_S", "IDLE_ROUTE_AGE_S", "ROUTE_CHECK_AFTER_S", "ROUTE_AGE_S"):
        monkeypatch.setattr(f"mqlayer.producing.metadata_refresher.{name}", 0.05)
    with world.producer() as producer:
        producer.send_many("orders", [Message("k", b"%d" % number) for number in range(3)])
        past()
        split_once(world)
        producer.send_many("orders", [Message("k", b"lost"), Message("k", b"lost")])
        assert states(world, 3) == ["sealed", "open", "open"]
        past()
        world.arm_node()
        # The old route is another one's, also for who knows a newer version of it.
        with pytest.raises((PublishUnknown, AcknowledgedLoss)):
            wait_until(lambda: not producer.send("orders", key="k", body=b"?", timeout_s=0.2), what="a refusal")
        told = verify(world.runtime(), "orders")
        (named,) = (finding for finding in told if finding.check == "partition" and finding.verdict == "broken")
        assert "mqlayer route reopen orders" in named.fix
        assert (reopen_process(world), states(world, 3)[0]) == (0, "sealed"), "a plan changes nothing"
        assert reopen_process(world, "--yes", failpoints="lost_change.after_retire=kill") == -signal.SIGKILL
        assert states(world, 3) == ["sealed", "deleted", "open"]
        assert reopen_process(world, "--yes", failpoints="lost_change.after_open=kill") == -signal.SIGKILL
        assert states(world, 3) == ["open", "deleted", "deleted"]
        assert reopen_process(world, "--yes") == 0
        assert reopen(world) == ([], {})
        wait_until(lambda: goes_on(producer), timeout_s=20, what="the producer to go on")
        assert producer.stats.lost >= 2
        split_once(world)
        producer.send("orders", key="k", body=b"in a successor")
    held = world.by_key()["k"]
    assert held[:3] == ["0", "1", "2"]
    assert (held[-1], "lost" in held) == ("in a successor", False)


def goes_on(producer: object) -> bool:
    """Publish, and say whether that is stored."""
    try:
        return bool(producer.send("orders", key="k", body=b"again", timeout_s=1))  # type: ignore[attr-defined]
    except (AcknowledgedLoss, PublishUnknown):
        return False


def test_the_next_change_can_seal_at_once_what_was_opened_again(world: World, past: Callable[[], str]) -> None:
    """The command that was taken back leaves its entry id to the next one, with and without a message before it."""
    for filled in (False, True):
        if filled:
            with world.producer() as producer:
                producer.send("orders", key="k", body=b"0")
    past()
    split_once(world)
    past()
    world.arm_node()
    assert reopen(world) == ([1], {2: 0, 3: 0})
    assert reopen(world) == ([], {})
    audit = world.rows("SELECT facts -> 'opened' FROM mqlayer.audit WHERE act = 'route reopen'")
    assert audit == [([1],)]
    split_once(world)
    assert states(world, 1) == ["sealed"]
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
    assert world.by_key()["k"] == ["0", "1"]


def test_an_old_primary_leaves_the_changes_of_its_successor_alone(world: World, past: Callable[[], str]) -> None:
    """A database that was cut off never gave out, nor leaped over, the numbers that it finds."""
    past()
    split_once(world)
    past()
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        # It has not seen that it was replaced: it was not.
        connection.execute("UPDATE mqlayer.server SET timeline = timeline - 1")
    with pytest.raises(Conflict, match="never gave out"):
        reopen(world)
    assert states(world, 3) == ["sealed", "open", "open"]


def test_a_later_timelines_route_counts_whatever_its_version(world: World, past: Callable[[], str]) -> None:
    with closing(RouteCache(world.database)) as routes:
        past()
        split_once(world)
        assert routes.refresh("orders").version == 2
        newer = routes.refresh("orders")
    past()
    with closing(RouteCache(world.database)) as routes:
        routes._routes["orders"] = (newer, 0.0)
        assert routes.refresh("orders").version == 1
        rearm_node(runtime_of(world.database, world.key_prefix), "node-1")


def test_a_retirement_that_was_lost_does_not_keep_its_node_from_being_armed(world: World) -> None:
    """Case 72. A tombstone is written only when all groups are known to have drained the partition: that stays true."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
    split_once(world)
    with world.client() as client:
        client.delete(world.keys(1).log, world.keys(1).marks, world.keys(1).meta)
        client.hset(world.keys(1).meta, "state", "deleted")
    world.rows("UPDATE mqlayer.node SET armed_run_id = NULL")
    world.arm_node()
    assert world.rows("SELECT state FROM mqlayer.partition WHERE partition_id = 1") == [("deleted",)]
    assert states(world, 3) == ["deleted", "open", "open"]
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
