"""A Postgres that lost commits: a lagging standby is promoted, or a copy of its disk takes its place (TRAPS 2h).

Redis holds messages whose commits are gone, and numbers are given out once more. Nothing new is taken for an old one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
from psycopg import errors as pg_errors

from mqlayer import App, Context
from mqlayer.errors import StoreUnavailable
from mqlayer.groups import apply_seek, planned_seek
from mqlayer.logs import event_of
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.rights import Right
from mqlayer.producing import Message, Producer
from mqlayer.relay import recover_now, relay_once
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.consumers import member_of
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.replicas import Switch
from tests.fixtures.roles import Roles
from tests.fixtures.servers import StartPostgres
from tests.fixtures.standbys import Couple, couple_of
from tests.fixtures.wait import wait_until
from tests.proof.lost_commits import EarlierState, expected, recovered, values
from tests.proof.manual_member import ManualMember
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World


@pytest.fixture
def couple(start_postgres: StartPostgres, server_directory: Path, key_prefix: str) -> Iterator[Couple]:
    """A Postgres and its standby."""
    with couple_of(start_postgres, server_directory / f"standby-{key_prefix}") as couple:
        yield couple


def epochs(dsn: str) -> int:
    """Return the next epoch."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT nextval('mqlayer.epoch')").fetchone()
    assert row is not None
    return int(row[0])


def test_what_a_promoted_standby_numbers_again_is_not_taken_for_what_it_lost(
    couple: Couple, node: RedisServer, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = couple.primary.create_database("app")
    migrate(dsn)
    with Switch("127.0.0.1", couple.primary.port) as switch, ExitStack() as cleanup:
        way = f"postgresql://postgres@{switch.host}:{switch.port}/app"
        world = World(dsn, key_prefix, [node.url], app_dsn=way, control_dsn=way)
        world.add_topic("orders", partitions=2)
        with world.relay() as relay:
            world.publish(40, keys=10)
            world.wait_until_whole()
            couple.wait_in_step()
            standby = cleanup.enter_context(Database(couple.standby.dsn("app"), timeout_s=2.0))
            with pytest.raises(StoreUnavailable, match="standby"), standby.connection():
                pass
            couple.cut_connection()
            world.publish(20, keys=10, tag="lost")
            world.wait_until_whole()
            with closing(Producer(world.settings(), name="p")) as producer:
                of_the_lost = producer.send("orders", key="direct", body=b"1").identity.source
            last_epoch = epochs(dsn)
            couple.promote()
            world.dsn = couple.standby.dsn("app")
            # Before anybody noticed: these have seqs that Redis knows.
            world.publish(30, keys=10, tag="new")
            switch.lead_to(couple.standby)
            switch.reset_all()
            wanted = expected(10, ("m", 40), ("lost", 20), ("new", 30))
            wait_until(lambda: len(list(world.records())) == 91, timeout_s=30, what="the new messages to arrive")
            wait_until(lambda: relay.health().ready, timeout_s=30, what="the relay to be ready")
            world.publish(10, keys=10, tag="after")
            wanted = expected(10, ("m", 40), ("lost", 20), ("new", 30), ("after", 10))
            wait_until(lambda: len(list(world.records())) == 101, timeout_s=30, what="the new messages to arrive")
        assert values(world) == wanted | {"direct": ["1"]}
        (told,) = (record for record in caplog.records if event_of(record) == "outbox_lost_commits")
        assert told.__dict__["unproven"] == 20
        acts = world.rows("SELECT act FROM mqlayer.audit WHERE act IN ('postgres replaced', 'outbox recover')")
        assert sorted(acts) == [("outbox recover",), ("postgres replaced",)]
        # Numbers of lost commits are given to nobody else.
        assert epochs(world.dsn) > last_epoch
        with closing(Producer(world.settings(), name="p")) as producer:
            assert producer.send("orders", key="direct", body=b"2").identity.source > of_the_lost
        assert values(world)["direct"] == ["1", "2"]
        assert len(world.rows("SELECT 1 FROM mqlayer.source WHERE kind = 'outbox' AND closed_at IS NULL")) == 1


@pytest.mark.full
def test_members_and_their_fenced_effects_go_on_with_a_promoted_standby(
    couple: Couple, node: RedisServer, key_prefix: str
) -> None:
    """What Redis has settled is not handled again: of that the effects are lost with their commits, of nothing else."""
    dsn = couple.primary.create_database("app")
    migrate(dsn)
    with Switch("127.0.0.1", couple.primary.port) as switch:
        way = f"postgresql://postgres@{switch.host}:{switch.port}/app"
        world = World(dsn, key_prefix, [node.url], app_dsn=way, control_dsn=way)
        world.add_topic("orders", partitions=2)
        world.rows("CREATE TABLE sink (position bigserial PRIMARY KEY, key text, value text)")
        app = App(world.settings(lease_s=10.0))

        @app.consumer("orders", group="g", start="earliest", backoff_s=(0.1,))
        def book(body: bytes, ctx: Context) -> None:
            with psycopg.connect(way) as connection:
                ctx.fence(connection)
                connection.execute("INSERT INTO sink (key, value) VALUES (%s, %s)", (ctx.key, body.decode()))

        def booked(*parts: tuple[str, int]) -> bool:
            found: dict[str | None, list[str]] = {}
            for key, value in world.rows("SELECT key, value FROM sink ORDER BY position"):
                found.setdefault(key, []).append(value)
            return found == expected(10, *parts)

        app.start()
        try:
            with world.relay():
                world.publish(40, keys=10)
                wait_until(lambda: booked(("m", 40)), timeout_s=30, what="all booked")
                couple.wait_in_step()
                couple.cut_connection()
                world.publish(20, keys=10, tag="lost")
                wait_until(lambda: booked(("m", 40), ("lost", 20)), timeout_s=30, what="what is to be lost booked")
                app_settled(app)
                couple.promote()
                world.dsn = couple.standby.dsn("app")
                switch.lead_to(couple.standby)
                switch.reset_all()
                world.publish(30, keys=10, tag="new")
                wait_until(lambda: booked(("m", 40), ("new", 30)), timeout_s=40, what="what is new booked")
                wait_until(lambda: app.health().ready, timeout_s=20, what="the member ready")
        finally:
            app.stop()
        assert booked(("m", 40), ("new", 30))


def app_settled(app: App) -> None:
    """Wait until a member's node knows all that it has handled."""
    stats = member_of(app).stats
    wait_until(lambda: stats.settled == stats.handled == 60, what="all settled")


@pytest.mark.full
@pytest.mark.world(own_node=True)
@pytest.mark.slow
def test_a_copy_of_the_disk_in_its_place_is_noticed_by_the_marks(world: World) -> None:
    """The same timeline: only that Redis holds more than was ever numbered shows it. Relays may die over it."""
    parts = [("m", 20)]
    world.publish(20, keys=5)
    relay_once(world.settings(), limits=QUICK)
    places = (
        "recover.before_suspect=kill", "recover.before_source=kill", "recover.after_end=kill",
        "recover.before_renumber=kill", "recover.after_renumber=kill",
    )  # fmt: skip
    for place in places:
        then = EarlierState(world)
        lost, new = (f"{word}-{len(parts)}" for word in ("lost", "new"))
        parts += [(lost, 20), (new, 20)]
        world.publish(20, keys=5, tag=lost)
        relay_once(world.settings(), limits=QUICK)
        then.come_back()
        with world.relay_process(failpoints=place) as process:
            assert process.wait(timeout=30) == -signal.SIGKILL
        with world.relay():
            # Numbers leap once in five seconds.
            wait_until(lambda: recovered(world), timeout_s=30, what="the outbox to be recovered")
            world.publish(20, keys=5, tag=new)
            count = sum(size for _, size in parts)
            wait_until(lambda: len(list(world.records())) == count, timeout_s=30, what="the new messages")  # noqa: B023
    assert values(world) == expected(5, *parts)
    assert len(world.rows("SELECT 1 FROM mqlayer.source WHERE closed_at IS NULL")) == 1


@pytest.mark.full
@pytest.mark.world(own_node=True, partitions=1, relayed=20, keys=5)
def test_a_relay_that_was_slower_to_notice_does_not_have_a_recovered_outbox_recovered_again(world: World) -> None:
    """It compared marks of the old source with counters, of whichever; stopped then, it must not say so of the new."""
    then = EarlierState(world)
    world.publish(20, keys=5, tag="lost")
    relay_once(world.settings(), limits=QUICK)
    then.come_back()
    with world.relay_process(failpoints="recover.before_suspect=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the relay to suspect")
        with world.relay():
            wait_until(lambda: recovered(world), timeout_s=20, what="the outbox to be recovered")
            identity = world.rows("SELECT outbox_uuid, timeline FROM mqlayer_app.identity")
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert world.rows("SELECT outbox_uuid, timeline FROM mqlayer_app.identity") == identity


@pytest.mark.world(own_node=True, partitions=1, relayed=10, keys=1)
def test_no_number_of_what_a_copy_of_the_disk_forgot_is_given_out_again(world: World) -> None:
    """Else the outbox would go on under a producer's source that Redis knows, and its first messages be swallowed."""
    then = EarlierState(world)
    with closing(Producer(world.settings(), name="p")) as producer:
        lost = producer.send_many("orders", [Message("key-0", b"direct")] * 3)[0].identity.source
    world.publish(10, keys=1, tag="lost")
    relay_once(world.settings(), limits=QUICK)
    last_epoch = [epochs(world.dsn) for _ in range(5)][-1]
    then.come_back()
    world.rows("DELETE FROM mqlayer.source WHERE source_id = %s", lost)
    world.rows("SELECT setval('mqlayer.source_source_id_seq', 1), setval('mqlayer.epoch', 1)")
    world.publish(5, keys=1, tag="new")
    with world.relay():
        wait_until(lambda: recovered(world), timeout_s=30, what="the outbox to be recovered")
        wait_until(lambda: len(list(world.records())) == 28, timeout_s=30, what="the new messages")
    assert epochs(world.dsn) > last_epoch
    assert values(world) == {
        "key-0": [f"m-{n}" for n in range(10)] + ["direct"] * 3 + [f"lost-{n}" for n in range(10)]
        + [f"new-{n}" for n in range(5)]
    }  # fmt: skip


@pytest.mark.world(own_node=True, partitions=1, relayed=10, keys=2)
@pytest.mark.parametrize("told", [True, False], ids=["by the timeline", "by hand"])
def test_a_seek_after_one_that_was_lost_is_no_repetition_of_it(
    world: World, database_dsn: str, node: RedisServer, key_prefix: str, told: bool
) -> None:
    """Redis knows the number of the lost one: under the same, what was committed since would count."""
    with Database(database_dsn) as database:
        member = ManualMember(database, key_prefix, "orders")
        member.consume_all()
        seek(member)
        member.consume_all()
        assert len(member.handled) == 20
        # As a standby has it that lacks this commit, with another timeline; or a copy of the disk, without.
        world.rows("UPDATE mqlayer.consumer_group SET seek = 0")
        if told:
            world.rows("UPDATE mqlayer.server SET timeline = timeline + 1")
            world.rows("SELECT mqlayer.server_seen_v1()")
        else:
            world.rows("SELECT mqlayer.server_replaced_v1('{}')")
        rearm_node(runtime_of(database, key_prefix), "node-1")
        seek(member)
        member.consume_all()
        assert len(member.handled) == 30


LEAP = "SELECT mqlayer.server_replaced_v1('{}')"
USED = "SELECT last_value FROM mqlayer.topic_topic_id_seq"
NOTE_LEAP = """SELECT setval('mqlayer.repaired_at', floor(extract(epoch FROM clock_timestamp()))::bigint + %s)"""


@pytest.mark.parametrize("noted_s", [-3600, -5, 4, 3600], ids="{:+}s".format)
def test_numbers_leap_whatever_a_clock_that_was_set_makes_of_the_last_leap(
    database_dsn: str, roles: Roles, noted_s: int
) -> None:
    """A leap from a time to come is none of the last 5 seconds: a clock set back holds up no recovery."""
    with (
        closing(psycopg.connect(database_dsn, autocommit=True)) as owner,
        closing(psycopg.connect(roles.login(Right.RELAY), autocommit=True)) as relay,
    ):
        owner.execute(NOTE_LEAP, [noted_s])
        used = owner.execute(USED).fetchall()
        relay.execute(LEAP)
        leapt = owner.execute(USED).fetchall()
        assert leapt > used
        # Then it is noted by the new clock, and the bound holds again.
        with pytest.raises(pg_errors.LockNotAvailable, match="less than 5 seconds ago"):
            relay.execute(LEAP)
        assert owner.execute(USED).fetchall() == leapt


def test_a_clock_set_ahead_lets_numbers_leap_5_seconds_after_the_last_leap_by_it(
    database_dsn: str, roles: Roles
) -> None:
    with (
        closing(psycopg.connect(database_dsn, autocommit=True)) as owner,
        closing(psycopg.connect(roles.login(Right.RELAY), autocommit=True)) as relay,
    ):
        owner.execute(NOTE_LEAP, [0])
        with pytest.raises(pg_errors.LockNotAvailable, match="less than 5 seconds ago"):
            relay.execute(LEAP)
        owner.execute(NOTE_LEAP, [-5])
        relay.execute(LEAP)


@pytest.mark.world(own_node=True, partitions=1, relayed=5, keys=5)
def test_a_node_that_is_away_holds_the_recovery_up_until_an_operator_goes_on_without_it(
    world: World, database_dsn: str, node: RedisServer
) -> None:
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    world.rows("DELETE FROM mqlayer_app.relayed")
    node.kill()
    with Database(database_dsn) as database:
        with pytest.raises(StoreUnavailable, match="mqlayer outbox recover --unproven"):
            recover_now(runtime_of(database, settings=world.settings(), application=database))
        found = recover_now(runtime_of(database, settings=world.settings(), application=database), unproven=True)
        assert found is not None
        assert found.waiting == 5
        assert recover_now(runtime_of(database, settings=world.settings(), application=database)) is None
        node.start()
    assert relay_once(world.settings(), limits=QUICK) == 5
    assert values(world) == expected(5, ("m", 5), ("m", 5))


def seek(member: ManualMember) -> None:
    """Send its group back to the beginning."""
    with closing(RouteCache(member.database)) as routes:
        plan = planned_seek(
            runtime_of(member.database, member.prefix), routes, topic="orders", name="ledger", to="earliest"
        )
    apply_seek(runtime_of(member.database, member.prefix, actor="test"), plan)
