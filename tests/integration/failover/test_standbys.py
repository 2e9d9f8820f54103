"""Postgres as it is run: a primary, a synchronous and an asynchronous standby, addresses that name all three (case 72).

Publishers, a relay, a consumer with fenced effects and a route change are at work while a server dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer import App, Context, failpoints
from mqlayer.doctor import diagnose
from mqlayer.doctor.findings import CheckLimits
from mqlayer.doctor.health import system_health
from mqlayer.errors import MqlayerError, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.routes import finish_changes
from mqlayer.settings import Settings
from mqlayer.stack import PostgresServer, RedisServer
from tests.fixtures.servers import StartPostgres
from tests.fixtures.standbys import Trio, trio_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

DATABASE = "app"
KEYS = 5
PATIENCE_S = 60.0


@pytest.fixture
def trio(start_postgres: StartPostgres, server_directory: Path, key_prefix: str) -> Iterator[Trio]:
    """A primary and its two standbys."""
    with trio_of(start_postgres, server_directory / f"trio-{key_prefix}", DATABASE) as trio:
        yield trio


class Shop:
    """Bills of a few keys: each is a row and a message of one transaction, and a handler books it once."""

    def __init__(self, trio: Trio, node: RedisServer, key_prefix: str) -> None:
        self.ways = trio.dsn(DATABASE)
        self.world = World(trio.primary.dsn(DATABASE), key_prefix, [node.url], app_dsn=self.ways, control_dsn=self.ways)
        self.world.add_topic("orders", partitions=2)
        self.world.rows("CREATE TABLE bill (key text, number int, PRIMARY KEY (key, number))")
        self.world.rows("CREATE TABLE sink (position bigserial PRIMARY KEY, key text, number int)")
        self.acknowledged: set[tuple[str, int]] = set()
        self.app = App(self.world.settings(lease_s=5.0))

        @self.app.consumer("orders", group="books", start="earliest", backoff_s=(0.1,))
        def book(body: bytes, ctx: Context) -> None:
            with psycopg.connect(self.ways) as connection:
                ctx.fence(connection)
                connection.execute("INSERT INTO sink (key, number) VALUES (%s, %s)", (ctx.key, int(body)))

    def move_to(self, server: PostgresServer) -> None:
        """Ask another server from now on."""
        self.world.dsn = server.dsn(DATABASE)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Publish and book until the end of the block."""
        closing = threading.Event()
        publishing = threading.Thread(target=self._publish, args=(closing,), name="publisher")
        self.app.start()
        publishing.start()
        try:
            yield
        finally:
            closing.set()
            publishing.join(PATIENCE_S)
            self.app.stop()
        assert not publishing.is_alive()

    def wait_acknowledged(self, more: int) -> None:
        """Wait until so many more bills are acknowledged."""
        there = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) >= there + more, timeout_s=PATIENCE_S, what="more bills")

    def bills(self) -> list[tuple[str, int]]:
        """Return what is committed."""
        return self.world.rows("SELECT key, number FROM bill ORDER BY key, number")

    def booked(self) -> list[tuple[str, int]]:
        """Return what is booked, by key, each in the order of booking."""
        return self.world.rows("SELECT key, number FROM sink ORDER BY key, position")

    def _publish(self, closing: threading.Event) -> None:
        number = 0
        while not closing.is_set():
            for key in (f"key-{one}" for one in range(KEYS)):
                while not self._pay(key, number) and not closing.is_set():
                    time.sleep(0.05)
            number += 1

    def _pay(self, key: str, number: int) -> bool:
        """Commit a bill and its message, unless it is there; say whether that is known."""
        with suppress(psycopg.Error), psycopg.connect(self.ways, connect_timeout=2) as connection:
            done = connection.execute(
                "INSERT INTO bill VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING key", (key, number)
            )
            if done.fetchone():
                connection.execute("SELECT mqlayer_app.publish_v1('orders', %s, %s)", (key, str(number).encode()))
            connection.commit()
            self.acknowledged.add((key, number))
            return True
        return False


@pytest.fixture
def shop(trio: Trio, node: RedisServer, key_prefix: str) -> Shop:
    """A shop on these servers."""
    return Shop(trio, node, key_prefix)


@contextmanager
def change_under_way(shop: Shop, directory: Path) -> Iterator[Callable[[], None]]:
    """Begin to split a partition, and stand still behind its seal; the answer lets it go on."""
    reached, go_on = directory / "reached", directory / "go-on"
    failpoints.arm("change.after_seal", f"mark:{reached}")
    failpoints.arm("change.after_seal", f"wait:{go_on}")

    def change() -> None:
        # Its connection ends with the primary; a worker goes on with the change.
        with suppress(MqlayerError), Database(shop.ways) as database:
            split(runtime_of(database, shop.world.key_prefix), "orders", 1)

    changing = threading.Thread(target=change, name="change")
    changing.start()
    wait_until(reached.exists, timeout_s=PATIENCE_S, what="the parent to be sealed")
    try:
        yield go_on.touch
    finally:
        go_on.touch()
        changing.join(PATIENCE_S)
    assert not changing.is_alive()


def wait_ready(shop: Shop, health: Callable[[], object]) -> None:
    """Wait until a relay is ready again."""
    wait_until(lambda: getattr(health(), "ready"), timeout_s=PATIENCE_S, what="the relay to be ready")  # noqa: B009


def finish_route_changes(shop: Shop) -> None:
    """Go on with route changes, as a worker does."""
    with Database(shop.ways) as database:
        runtime = runtime_of(database, settings=shop.world.settings(), application=database)

        def open_changes() -> int:
            with suppress(MqlayerError):
                finish_changes(runtime)
            return len(shop.world.rows("SELECT change_id FROM mqlayer.route_change WHERE state <> 'done'"))

        wait_until(lambda: not open_changes(), timeout_s=PATIENCE_S, what="the change to be finished")


def finish_booking(shop: Shop, count: int) -> None:
    """Book what still waits, with a relay and a consumer that are started anew."""
    app = shop.app
    with shop.world.relay():
        app.start()
        wait_until(lambda: len(shop.booked()) >= count, timeout_s=PATIENCE_S, what="all booked")
        app.stop()


def test_a_promoted_synchronous_standby_has_all_and_all_goes_on_by_itself(
    trio: Trio, shop: Shop, tmp_path: Path
) -> None:
    """The primary is killed under load, with a partition sealed for a split: no bill is lost, or booked twice."""
    with shop.world.relay() as relay, shop.open():
        shop.wait_acknowledged(20)
        with change_under_way(shop, tmp_path) as go_on:
            shop.wait_acknowledged(10)
            trio.primary.kill()
            shop.move_to(trio.promote("synchronous"))
            go_on()
        shop.wait_acknowledged(20)
        finish_route_changes(shop)
        wait_ready(shop, relay.health)
        shop.wait_acknowledged(20)
    bills = shop.bills()
    assert shop.acknowledged <= set(bills)
    finish_booking(shop, len(bills))
    assert shop.booked() == bills
    assert shop.world.rows("SELECT count(*)::int FROM mqlayer.route WHERE version = 2") == [(3,)]
    acts = "SELECT act, facts ->> 'unproven' FROM mqlayer.audit WHERE act IN ('postgres replaced', 'outbox recover')"
    assert sorted(shop.world.rows(acts)) == [("outbox recover", "0"), ("postgres replaced", None)]


@pytest.mark.full
def test_a_promoted_asynchronous_standby_keeps_what_it_has_in_order_and_names_the_rest(trio: Trio, shop: Shop) -> None:
    """It lacks acknowledged bills, whose messages are out: these stay, and no later one is taken for them."""
    with shop.world.relay() as relay, shop.open():
        shop.wait_acknowledged(20)
        trio.wait_in_step()
        trio.cut_connection("asynchronous")
        there = set(shop.acknowledged)
        shop.wait_acknowledged(20)
        wait_until(lambda: set(values(shop)) & (shop.acknowledged - there), what="some of these relayed")
        trio.primary.kill()
        trio.synchronous.kill()
        shop.move_to(trio.promote("asynchronous"))
        shop.wait_acknowledged(20)
        wait_ready(shop, relay.health)
    bills = shop.bills()
    lost = shop.acknowledged - set(bills)
    assert len(lost) > 10, "all but those that were under way when the connection was cut"
    with shop.world.relay():
        wait_until(lambda: set(values(shop)) >= set(bills), timeout_s=PATIENCE_S, what="all bills relayed")
    held = values(shop)
    assert {one for one in held if one not in lost} == set(bills)
    assert [one for one in held if one not in lost] == sorted(bills), "each once, and in its key's order"
    ((unproven,),) = shop.world.rows("SELECT facts ->> 'unproven' FROM mqlayer.audit WHERE act = 'outbox recover'")
    assert int(unproven) == len([one for one in held if one in lost]) > 0


def values(shop: Shop) -> list[tuple[str, int]]:
    """Return what the partitions hold, by key, each in the order of offsets."""
    found = [(str(record.key), int(record.value)) for record in shop.world.records()]
    return sorted(found, key=lambda one: one[0])


@pytest.mark.full
def test_without_its_synchronous_standby_publishers_wait_and_nothing_else_breaks(trio: Trio, shop: Shop) -> None:
    """Nothing that only the primary has reaches Redis. Direct producers go on, and the doctor says what is missing."""
    waiting = "SELECT count(*)::int > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with shop.world.relay() as relay, shop.world.producer() as producer, shop.open():
        producer.send("orders", key="direct", body=b"1")
        shop.wait_acknowledged(10)
        trio.synchronous.kill()
        wait_until(lambda: shop.world.rows(waiting) == [(True,)], timeout_s=PATIENCE_S, what="a commit to wait")
        producer.send("orders", key="direct", body=b"2")
        found = diagnose(shop.world.settings(), limits=CheckLimits(synchronous_s=0.0))
        (finding,) = (one for one in found if one.check == "durability" and "synchronous" in one.seen)
        assert finding.verdict == "broken"
        assert "synchronous_standby_names" in finding.fix
        # Once, though both schemas are there.
        told = [one.alert.name for one in system_health(shop.world.runtime()).problems]
        assert told.count("MqlayerCommitsWait") == 1
        assert {one for one in values(shop) if one[0] != "direct"} <= shop.acknowledged
        trio.synchronous.start()
        shop.wait_acknowledged(20)
        wait_ready(shop, relay.health)
        trio.synchronous.kill()
        wait_until(lambda: shop.world.rows(waiting) == [(True,)], timeout_s=PATIENCE_S, what="a commit to wait")
        # As the doctor says where the standby stays away.
        trio.wait_for("")
        shop.wait_acknowledged(20)
        wait_ready(shop, relay.health)
    bills = shop.bills()
    assert shop.acknowledged <= set(bills)
    finish_booking(shop, len(bills) + 2)
    assert shop.booked() == sorted([*bills, ("direct", 1), ("direct", 2)])


@pytest.mark.full
def test_an_address_that_leads_to_a_standby_is_refused_and_named(trio: Trio) -> None:
    """Rows become visible in another order there. Of several hosts, the one that takes writes is asked."""
    for dsn in (trio.asynchronous.dsn(DATABASE), trio.dsn(DATABASE, writes=False)):
        with Database(dsn, timeout_s=2.0) as database:
            with pytest.raises(StoreUnavailable, match="standby") as refused, database.connection():
                pass
            assert str(trio.asynchronous.port) in str(refused.value)
    with Database(trio.dsn(DATABASE)) as database, database.connection() as connection:
        assert connection.execute("SELECT inet_server_port()").fetchone() == (trio.primary.port,)
    (finding,) = (
        one
        for one in diagnose(Settings(dsn=SecretStr(trio.asynchronous.dsn(DATABASE))))
        if one.check in ("reachable", "durability") and "standby" in one.seen
    )
    assert finding.verdict == "broken"


@pytest.mark.full
def test_a_standby_that_holds_vacuum_up_is_named(trio: Trio) -> None:
    """A long query on a standby with hot_standby_feedback keeps dead rows on the primary."""
    settings = Settings(dsn=SecretStr(trio.primary.dsn(DATABASE)))

    def named() -> list[str]:
        found = diagnose(settings, limits=CheckLimits(slot_transactions=3))
        return [one.seen for one in found if one.check == "slots" and one.verdict == "broken"]

    assert named() == []
    standby = trio.asynchronous.dsn("postgres")
    with psycopg.connect(standby, autocommit=True) as operator:
        operator.execute("ALTER SYSTEM SET hot_standby_feedback = on")
        operator.execute("ALTER SYSTEM SET wal_receiver_status_interval = '1s'")
        operator.execute("SELECT pg_reload_conf()")
        with psycopg.connect(standby) as reader, psycopg.connect(trio.primary.dsn(DATABASE), autocommit=True) as writer:
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT FROM pg_class")
            for _ in range(5):
                writer.execute("SELECT pg_current_xact_id()")
            (seen,) = wait_until(named, what="the doctor to name the standby")
            assert "standby with hot_standby_feedback 'asynchronous' holds dead rows of all tables" in seen
        wait_until(lambda: named() == [], what="vacuum to go on")
