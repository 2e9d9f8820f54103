"""A Postgres that loses commits on the same timeline: in a crash, or because an older copy of its disk is put back.

What our functions commit is not lost in a crash, whatever the session says (cases 72, 74); and where commits are lost
all the same, the next relay notices before anything that was committed later is taken for what was lost (TRAPS 2h).
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
import pytest
import redis

from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.redis.keys import terms_key
from mqlayer.relay import relay_once
from mqlayer.routes import finish_changes
from mqlayer.stack import PostgresServer
from mqlayer.topics import create_topic, register_node
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.functions import GOOD, call, signatures
from tests.fixtures.servers import FAST_POSTGRES, InitialisedClusters, StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import move
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

# Nothing but a commit that waits writes the log to the disk: what does not wait is lost in a crash for sure.
LAZY: Final = {"wal_writer_delay": "10000", "bgwriter_delay": "10000", "autovacuum": "off"}
WRITES: Final = sorted(
    {
        "publish_v1", "publish_v2", "publish_many_v1", "publish_once_v1", "publish_many_once_v1", "publish_at_v1",
        "fence_v1", "fence_many_v1", "fence_many_v2", "fence_raise_v1", "inbox_put_v1", "version_take_v1",
        "version_set_v1",
    }
)  # fmt: skip
TABLES: Final = (
    "outbox", "delayed", "dedup", "fence_epoch", "fence_applied", "inbox", "entity_version", "held_version",
)  # fmt: skip
LEVELS: Final = ("ALTER ROLE postgres SET", "ALTER DATABASE app SET", "SET")

pytestmark = pytest.mark.world(own_node=True)


@pytest.fixture(scope="module")
def lazy_postgres(server_directory: Path, initialised_clusters: InitialisedClusters) -> Iterator[PostgresServer]:
    """A server of these tests' own, with both schemas in a database that is copied."""
    initialised_clusters.numbers = itertools.count()
    # Tests copy its disk: it keeps no more of its log than it needs.
    options = {**FAST_POSTGRES, **LAZY, "min_wal_size": "32MB", "max_wal_size": "64MB"}
    server = PostgresServer(server_directory / "postgres-lazy", options=options)
    server.start()
    migrate(server.create_database("migrated"))
    yield server
    server.erase()


@pytest.fixture
def postgres(lazy_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """That server; a test may do with it what it likes: it runs again afterwards, without the test's database."""
    yield lazy_postgres
    lazy_postgres.start()
    with closing(psycopg.connect(lazy_postgres.dsn(), autocommit=True)) as connection:
        connection.execute("DROP DATABASE app WITH (FORCE)")
        connection.execute("ALTER ROLE postgres RESET ALL")


def own_database(postgres: PostgresServer) -> str:
    """Make a database that no test has used."""
    with closing(psycopg.connect(postgres.dsn(), autocommit=True)) as connection:
        connection.execute("CREATE DATABASE app TEMPLATE migrated STRATEGY file_copy")
    return postgres.dsn("app")


@pytest.fixture
def world_dsn(postgres: PostgresServer) -> str:
    """A database on the server that a test may crash."""
    return own_database(postgres)


def counts(world: World) -> list[int]:
    """Return how many rows the tables have that callers write to."""
    return [world.rows(f"SELECT count(*) FROM mqlayer_app.{table}")[0][0] for table in TABLES]


def crash(postgres: PostgresServer) -> None:
    """End all of a server's processes at once, and start it again."""
    postgres.kill()
    postgres.start()


class Disk:
    """A copy of a server's disk as it is now, which is put back later."""

    def __init__(self, server: PostgresServer) -> None:
        self._server, self._copy = server, server.data.resolve().with_name("copy")
        server.stop()
        shutil.rmtree(self._copy, ignore_errors=True)
        subprocess.run(["cp", "-a", server.data.resolve(), self._copy], check=True)
        server.start()

    def come_back(self) -> None:
        """Crash the server and put the copy in its disk's place."""
        self._server.kill()
        data = self._server.data.resolve()
        shutil.rmtree(data)
        subprocess.run(["cp", "-a", self._copy, data], check=True)
        self._server.start()


def values(world: World) -> list[str]:
    return [record.value for record in world.records()]


def arrived_once_in_order(world: World, count: int, *tags: str, keys: int = 5) -> bool:
    """Say whether all messages of some parts are there, once each, each key's in their order."""
    wanted = {f"key-{k}": [f"{tag}-{n}" for tag in tags for n in range(k, count, keys)] for k in range(keys)}
    records = [record for record in world.records() if record.value.rpartition("-")[0] in tags]
    return all([record.value for record in records if record.key == key] == wanted[key] for key in wanted)


# -- what our functions commit is on the disk ------------------------------------------------------------------------


@pytest.mark.parametrize("level", some_of(LEVELS, 3))
def test_what_a_function_of_ours_wrote_survives_a_crash_whatever_the_session_waits_for(
    world: World, postgres: PostgresServer, level: str
) -> None:
    with closing(psycopg.connect(world.dsn, autocommit=True)) as connection:
        types = {name: of for name, of in signatures(connection, "postgres").items() if name in WRITES}
    assert sorted(types) == WRITES
    world.rows("CREATE TABLE own (n int)")
    setting = f"{level} synchronous_commit = off"
    if level != "SET":
        world.rows(setting)
    for function in WRITES:
        # The crash before left nothing in memory, so nothing but this transaction is written.
        with closing(psycopg.connect(world.dsn, autocommit=True)) as connection:
            if level == "SET":
                connection.execute(setting)
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
            with connection.transaction():
                call(connection, function, GOOD[function], types[function])
                connection.execute("INSERT INTO own VALUES (1)")
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",), "for the transaction only"
            before = counts_on(connection)
            postgres.kill()
        postgres.start()
        assert counts(world) == before, function
        assert world.rows("SELECT count(*) FROM own") == [(1,)], function
        world.rows("TRUNCATE own")
    if level == "SET":
        with closing(psycopg.connect(world.dsn, autocommit=True)) as connection:
            connection.execute(setting)
            connection.execute("INSERT INTO own VALUES (1)")
            postgres.kill()
        postgres.start()
        assert world.rows("SELECT count(*) FROM own") == [(0,)], "what these crashes do to a commit that does not wait"


def counts_on(connection: psycopg.Connection) -> list[int]:
    row = connection.execute(
        "SELECT " + ", ".join(f"(SELECT count(*) FROM mqlayer_app.{table})" for table in TABLES)
    ).fetchone()
    assert row is not None
    return list(row)


@pytest.mark.parametrize("value", some_of(["local", "remote_write", "on", "remote_apply"], 4))
def test_a_session_that_waits_for_the_disk_at_least_is_left_as_it_is(
    database_dsn: str, redis_url: str, key_prefix: str, value: str
) -> None:
    World(database_dsn, key_prefix, [redis_url]).add_topic("orders")
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        connection.execute(f"SET synchronous_commit = {value}")
        with connection.transaction():
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')")
            assert connection.execute("SHOW synchronous_commit").fetchone() == (value,)


# -- commits that are lost all the same ------------------------------------------------------------------------------


def identity(world: World) -> object:
    return world.rows("SELECT outbox_uuid, timeline FROM mqlayer_app.identity")[0]


def recovered(world: World) -> int:
    """Return how often the outbox was recovered."""
    return int(world.rows("SELECT count(*) FROM mqlayer.audit WHERE act = 'outbox recover'")[0][0])


@pytest.mark.parametrize("new", some_of([10, 20, 60], 3))
def test_numbers_that_an_older_disk_gives_out_again_are_not_taken_for_what_it_lost(
    world: World, postgres: PostgresServer, new: int
) -> None:
    """Fewer, as many, or more than were lost: a counter behind its mark tells of the first ones only."""
    world.publish(20, keys=5, tag="kept")
    relay_once(world.settings(), limits=QUICK)
    disk = Disk(postgres)
    world.publish(20, keys=5, tag="lost")
    relay_once(world.settings(), limits=QUICK)
    disk.come_back()
    world.publish(new, keys=5, tag="new")
    with world.relay():
        wait_until(lambda: arrived_once_in_order(world, new, "new"), timeout_s=30, what="the new messages")
        world.publish(10, keys=5, tag="later")
        wait_until(lambda: arrived_once_in_order(world, 10, "later"), timeout_s=30, what="what is later")
    assert arrived_once_in_order(world, 20, "kept", "lost"), "what only Redis holds stays"
    assert len(values(world)) == 40 + new + 10
    assert recovered(world) == 1
    assert world.rows("SELECT 1 FROM mqlayer.audit WHERE act = 'postgres replaced'") == [(1,)]


def forget_relays(world: World) -> None:
    """Do not wait for the lease of a relay that was killed."""
    world.rows("UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity'")
    world.rows("DELETE FROM mqlayer_app.relay")


def test_a_commit_that_was_relayed_and_lost_in_a_crash_is_noticed(
    world: World, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing keeps a session from setting it off once more behind the call; then the next relay sees what is gone."""

    def recorded() -> bool:
        return world.rows("SELECT sum(seq) FROM mqlayer_app.relayed") == world.rows(
            "SELECT sum(seq) FROM mqlayer_app.counter WHERE seq > 0"
        )

    def is_relayed(value: str) -> bool:
        return value in values(world)

    for attempt in range(20):
        tag = f"lost{attempt}"
        relay_once(world.settings(), limits=QUICK)
        with (
            closing(psycopg.connect(world.dsn)) as connection,
            # With a long lease it writes once a second; what it commits takes along all that was committed before.
            world.relay_process(lease_s=60) as process,
        ):
            world.publish(1, keys=1, tag=f"kept{attempt}")
            wait_until(recorded, timeout_s=30, what="the relay to be at work")
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'key-0', %s)", (f"{tag}-0".encode(),))
            connection.execute("SET LOCAL synchronous_commit = off")
            connection.commit()
            wait_until(partial(is_relayed, f"{tag}-0"), timeout_s=30, what="the message to be relayed")
            postgres.kill()
            process.kill()
            process.wait(timeout=30)
        postgres.start()
        if not any(value == f"{tag}-0" for chain in world.published().values() for _, _, value in chain):
            break
        forget_relays(world)
    else:
        pytest.fail("no commit was lost")
    forget_relays(world)
    world.publish(20, keys=1, tag="new")
    with world.relay():
        wait_until(lambda: arrived_once_in_order(world, 20, "new", keys=1), timeout_s=30, what="the new messages")
    assert recovered(world) == 1
    assert f"{tag}-0" in values(world)


@pytest.mark.full
@pytest.mark.parametrize("failpoint", some_of(["relay.after_append", "relay.before_progress"], 2))
def test_a_crash_in_which_nothing_was_lost_changes_no_number(
    world: World, postgres: PostgresServer, failpoint: str
) -> None:
    """Messages that are in Redis and not recorded are compared, and found to be the outbox's."""
    before = identity_after_first(world)
    for number in range(3):
        world.publish(40, keys=20, tag=f"m{number}")
        with world.relay_process(failpoints=f"{failpoint}=kill") as process:
            assert process.wait(timeout=30) == -signal.SIGKILL
        assert values(world), "in Redis, and not recorded"
        crash(postgres)
    with world.relay():
        world.wait_until_whole()
        crash(postgres)
        world.publish(40, keys=20, tag="last")
        world.wait_until_whole()
    assert identity(world) == before
    assert recovered(world) == 0


def identity_after_first(world: World) -> object:
    world.publish(1, keys=1, tag="first")
    relay_once(world.settings(), limits=QUICK)
    return identity(world)


@pytest.mark.full
def test_rows_that_a_relay_read_before_the_crash_and_sends_after_it_take_no_other_messages_place(
    world: World, postgres: PostgresServer
) -> None:
    """It is stuck between its last look at Postgres and the write to the node, and no other has told the node."""
    world.publish(5, keys=5, tag="kept")
    relay_once(world.settings(), limits=QUICK)
    disk = Disk(postgres)
    with world.relay_process(failpoints="relay.before_append=stop") as stopped:
        world.publish(10, keys=5, tag="lost")
        wait_until(lambda: is_stopped(stopped), timeout_s=30, what="the relay to get stuck")
        disk.come_back()
        world.publish(20, keys=5, tag="new")
        stopped.send_signal(signal.SIGCONT)
        wait_until(lambda: arrived_once_in_order(world, 20, "new"), timeout_s=30, what="the new messages")
    assert recovered(world) == 1


@pytest.mark.full
@pytest.mark.parametrize("earlier", some_of([False, True], 2))
def test_a_node_takes_nothing_that_was_read_before_the_crash_once_another_relay_told_it(
    world: World, postgres: PostgresServer, *, earlier: bool
) -> None:
    """Else messages of the other relay that are under way would go behind it, ahead of one whose place it took."""
    world.publish(5, keys=5, tag="kept")
    relay_once(world.settings(), limits=QUICK)
    disk = Disk(postgres)
    if earlier:
        world.publish(10, keys=5, tag="lost")
        relay_once(world.settings(), limits=QUICK)
        assert arrived_once_in_order(world, 10, "lost")
    with world.relay_process(failpoints="relay.before_append=stop") as stopped:
        world.publish(10, keys=5, tag="late")
        wait_until(lambda: is_stopped(stopped), timeout_s=30, what="the relay to get stuck")
        disk.come_back()
        with world.relay():
            world.publish(5, keys=5, tag="before")
            wait_until(lambda: arrived_once_in_order(world, 5, "before"), timeout_s=30, what="the other one's")
            stopped.send_signal(signal.SIGCONT)
            world.publish(20, keys=5, tag="new")
            wait_until(lambda: arrived_once_in_order(world, 20, "new"), timeout_s=30, what="the new messages")
            # By now it has its own view of the servers, and what it read before is gone.
            wait_until(lambda: len(live_relays(world)) == 2, timeout_s=30, what="the stopped one to relay with it")
            world.publish(20, keys=5, tag="both")
            wait_until(lambda: arrived_once_in_order(world, 20, "both"), timeout_s=30, what="what both relay")
    assert arrived_once_in_order(world, 5, "before")
    assert arrived_once_in_order(world, 20, "new", "both"), "nothing of a key ahead of what was published before it"
    assert not any(value.startswith("late") for value in values(world))
    assert recovered(world) == earlier


def live_relays(world: World) -> list[str]:
    return [row[0] for row in world.rows("SELECT DISTINCT relay_id FROM mqlayer_app.lp_set WHERE lease_until > now()")]


@pytest.mark.full
@pytest.mark.parametrize("failpoint", some_of(["relay.before_term", "relay.after_term"], 2))
def test_a_relay_that_tells_a_node_of_a_term_that_is_over_sends_nothing_by_it(
    world: World, postgres: PostgresServer, failpoint: str
) -> None:
    """It is stuck before or behind the telling, over a crash; the other one's are refused once, and come again."""
    world.publish(5, keys=5, tag="kept")
    relay_once(world.settings(), limits=QUICK)
    with world.relay_process(failpoints=f"{failpoint}=stop") as stopped:
        wait_until(lambda: is_stopped(stopped), timeout_s=30, what="the relay to get stuck")
        crash(postgres)
        forget_relays(world)
        with world.relay():
            world.publish(20, keys=5, tag="a")
            wait_until(lambda: arrived_once_in_order(world, 20, "a"), timeout_s=30, what="the other one's")
            stopped.send_signal(signal.SIGCONT)
            wait_until(lambda: len(live_relays(world)) == 2, timeout_s=30, what="the stopped one to relay with it")
            world.publish(20, keys=5, tag="b")
            wait_until(lambda: arrived_once_in_order(world, 20, "a", "b"), timeout_s=30, what="the new messages")
    assert recovered(world) == 0


@pytest.mark.parametrize("failpoint", some_of(["relay.before_term", "relay.after_term"], 2))
def test_a_relay_that_ends_around_the_telling_leaves_nothing_undone(world: World, failpoint: str) -> None:
    world.publish(10, keys=5, tag="a")
    with world.relay_process(failpoints=f"{failpoint}=kill") as process:
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert values(world) == []
    forget_relays(world)
    with world.relay():
        world.wait_until_whole()


@pytest.mark.full
def test_a_node_that_lost_what_it_was_told_is_told_again(world: World) -> None:
    with world.relay(), closing(redis.Redis.from_url(world.urls[0])) as client:
        world.publish(10, keys=5, tag="a")
        world.wait_until_whole()
        assert client.delete(terms_key(world.key_prefix)) == 1
        world.publish(10, keys=5, tag="b")
        world.wait_until_whole()
        assert client.exists(terms_key(world.key_prefix)) == 1


@pytest.mark.full
def test_a_partition_that_comes_to_a_node_waits_for_the_node_that_knows_what_its_parent_took(
    database_dsn: str, postgres: PostgresServer, start_redis: StartRedis, key_prefix: str
) -> None:
    """Its marks are from before the crash; without its parent's records a lost message is not told from a new one."""
    own = own_database(postgres)
    first, second = start_redis(), start_redis()
    world = World(own, key_prefix, [], control_dsn=database_dsn)
    with Database(database_dsn) as control, Database(own) as application:
        register_node(runtime_of(control), name="node-1", url=first.url)
        create_topic(runtime_of(control, key_prefix, application=application), "orders", partitions=1)
        register_node(runtime_of(control), name="node-2", url=second.url)
        member = ManualMember(control, key_prefix, "orders")
        world.publish(5, keys=5, tag="kept")
        relay_once(world.settings(), limits=QUICK)
        disk = Disk(postgres)
        world.publish(10, keys=5, tag="lost")
        relay_once(world.settings(), limits=QUICK)
        with broken_off_at("change.after_open"):
            move(runtime_of(control, key_prefix, application=application), "orders", 1, to="node-2")
        disk.come_back()
        first.kill()
        with closing(redis.Redis.from_url(second.url)) as client:
            then = client.hvals(terms_key(key_prefix))
        with closing(redis.Redis.from_url(second.url)) as client, world.relay():
            told = partial(client.hvals, terms_key(key_prefix))
            wait_until(lambda: told() != then and live_relays(world), timeout_s=30, what="the relay to be on node-2")
            # Before the move, or the relay may see at once that counters are behind marks, and waits to recover.
            world.publish(20, keys=5, tag="new")
            assert set(finish_changes(runtime_of(control, key_prefix, application=application)).values()) == {"done"}
            # So long that a relay that takes the new ones for the lost ones has recorded them as relayed.
            for _ in range(3):
                wait_until(partial(beat_since, world, lease_end(world)), timeout_s=30, what="the relay's next beat")
            first.start()
            wait_until(lambda: recoveries(control) == 1, timeout_s=30, what="the lost commits to be noticed")
            wait_until(lambda: unrelayed(world) == 0, timeout_s=30, what="all to be relayed")
        member.consume_all()
    new = {f"key-{k}": [f"new-{n}" for n in range(k, 20, 5)] for k in range(5)}
    assert {key: [body for body in bodies if body.startswith("new")] for key, bodies in member.bodies().items()} == new


def lease_end(world: World) -> datetime:
    (end,) = world.rows("SELECT max(lease_until) FROM mqlayer_app.lp_set WHERE relay_id IS NOT NULL")[0]
    assert isinstance(end, datetime)
    return end


def beat_since(world: World, then: datetime) -> bool:
    return lease_end(world) > then


def unrelayed(world: World) -> int:
    lines = "mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp)"
    return int(world.rows(f"SELECT count(*) FROM {lines} WHERE coalesce(r.seq, 0) < c.seq")[0][0])


def recoveries(control: Database) -> int:
    with control.connection() as connection:
        return len(connection.execute("SELECT FROM mqlayer.audit WHERE act = 'outbox recover'").fetchall())


@pytest.mark.parametrize("way", some_of(["backend", "postmaster", "restart"], 3))
def test_a_term_ends_with_each_recovery_from_a_crash_and_each_start(
    world: World, postgres: PostgresServer, way: str
) -> None:
    """A backend that is killed has all others ended and the log read again, by a postmaster that lives on."""

    def term() -> object:
        return world.rows("SELECT mqlayer_app.term_v1()")[0][0]

    before = term()
    assert term() == before
    if way == "backend":
        with closing(psycopg.connect(world.dsn)) as victim, closing(psycopg.connect(world.dsn)) as other:
            os.kill(victim.info.backend_pid, signal.SIGKILL)
            # Until the postmaster has noticed, Postgres answers as before.
            wait_until(lambda: is_ended(other), timeout_s=30, what="the other sessions to end")
        started = "SELECT pg_postmaster_start_time()"
        wait_until(lambda: answers(world, started), timeout_s=30, what="Postgres to be back")
    elif way == "postmaster":
        crash(postgres)
    else:
        postgres.stop()
        postgres.start()
    after = term()
    assert after != before
    assert term() == after


def is_ended(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("SELECT")
    except psycopg.OperationalError:
        return True
    return False


def answers(world: World, statement: str) -> bool:
    try:
        return bool(world.rows(statement))
    except psycopg.OperationalError:
        return False


@pytest.mark.full
def test_what_is_due_and_what_has_a_dedup_id_is_compared_as_all_else(world: World, postgres: PostgresServer) -> None:
    disk = Disk(postgres)
    once = "SELECT mqlayer_app.publish_once_v1('orders', 'key-0', %s, %s)"
    world.rows(once, b"lost-0", "id-0")
    world.rows("SELECT mqlayer_app.publish_at_v1('orders', 'key-0', 'lost-1', now())")
    relay_once(world.settings(), limits=QUICK)
    assert values(world) == ["lost-0", "lost-1"]
    disk.come_back()
    world.rows(once, b"new-0", "id-0")
    world.rows("SELECT mqlayer_app.publish_at_v1('orders', 'key-0', 'new-1', now())")
    with world.relay():
        wait_until(lambda: arrived_once_in_order(world, 2, "new", keys=1), timeout_s=30, what="the new messages")
    assert recovered(world) == 1
