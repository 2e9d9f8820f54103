"""A control database and three application databases on three servers, of several versions where these are there.

Each application database has its relay, its consumers, and a worker with its own address (docs/how-to/deploy.md).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import psycopg
import pytest

from mqlayer import App, Context
from mqlayer.maintenance import late_jobs
from mqlayer.maintenance.job_status import job_statuses
from mqlayer.postgres.migrations import migrate
from mqlayer.runtime.runtime import open_runtime
from mqlayer.settings import Settings
from mqlayer.stack import PostgresPrograms, PostgresServer, RedisServer
from mqlayer.topics import create_topic
from mqlayer.topics.topics import attach_topics
from mqlayer.workers.job_claims import claim_name, run_when_due
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.servers import StartPostgres
from tests.fixtures.wait import wait_until
from tests.matrix.programs import cache_place
from tests.proof.jobs import BY_NAME
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

NAMES = ("shop", "stock", "books")
EACH, KEYS = 20, 4
ROTATE = BY_NAME["rotate_outbox"]


def other_programs() -> list[PostgresPrograms | None]:
    """Return two other Postgres than the machine's own, as far as `scripts/matrix` has unpacked them."""
    found: list[PostgresPrograms | None] = []
    for number in (18, 17):
        place = cache_place() / f"postgres-{number}"
        if (place / "ready").exists():
            directory = place / f"root/usr/lib/postgresql/{number}/bin"
            found.append(PostgresPrograms(directory, (number, 0), "machine"))
    return [*found, None, None][:2]


@dataclass(frozen=True)
class Place:
    """An application database, as its processes reach it."""

    name: str
    dsn: str
    world: World

    @property
    def settings(self) -> Settings:
        """The settings of its processes."""
        return self.world.settings(lease_s=5.0)

    def publish(self, tag: str) -> None:
        """Publish messages of its own keys."""
        with psycopg.connect(self.dsn) as connection:
            for number in range(EACH):
                arguments = (f"{self.name}-{number % KEYS}", f"{self.name} {tag} {number}".encode())
                connection.execute("SELECT mqlayer_app.publish_v1('orders', %s, %s)", arguments)

    def booked(self) -> dict[str, list[str]]:
        """Return what its consumer booked there by key, each in order."""
        found: dict[str, list[str]] = {}
        with psycopg.connect(self.dsn) as connection:
            for key, value in connection.execute("SELECT key, value FROM sink ORDER BY position").fetchall():
                found.setdefault(key, []).append(value)
        return found

    def wait_booked(self, *tags: str) -> None:
        """Wait until its consumer has booked all messages with these tags, each key's in order."""
        wanted = {
            f"{self.name}-{key}": [f"{self.name} {tag} {number}" for tag in tags for number in range(key, EACH, KEYS)]
            for key in range(KEYS)
        }
        wait_until(lambda: self.booked() == wanted, timeout_s=60, what=f"{self.name} to be booked")

    def app(self) -> App:
        """Return its consumer: a group of its own, which books its own messages."""
        app = App(self.settings)

        @app.consumer("orders", group=self.name, start="earliest", backoff_s=(0.1,))
        def book(body: bytes, ctx: Context) -> None:
            if body.startswith(self.name.encode()):
                with psycopg.connect(self.dsn) as connection:
                    ctx.fence(connection)
                    connection.execute("INSERT INTO sink (key, value) VALUES (%s, %s)", (ctx.key, body.decode()))

        return app


class Company:
    """The control database, and three others on two servers."""

    def __init__(self, start: StartPostgres, node: RedisServer, key_prefix: str) -> None:
        first, second = other_programs()
        self.servers = [start(), start(programs=first), start(programs=second)]
        control, one, other = self.servers
        self._prefix = key_prefix
        self.control = control.create_database("control")
        migrate(self.control, schema="control")
        world = World(self.control, key_prefix, [node.url])
        create_topic(runtime_of(world.database, key_prefix), "orders", partitions=2)
        self.places = [self._add(server, name) for server, name in zip((one, other, other), NAMES, strict=True)]

    def _add(self, server: PostgresServer, name: str) -> Place:
        dsn = server.create_database(name)
        migrate(dsn, schema="application")
        ask_postgres(dsn, "CREATE TABLE sink (position bigserial PRIMARY KEY, key text, value text)")
        place = Place(name, dsn, World(self.control, self._prefix, [], app_dsn=dsn))
        with open_runtime(place.settings) as runtime:
            attach_topics(runtime)
        return place


@pytest.fixture
def company(start_postgres: StartPostgres, node: RedisServer, key_prefix: str) -> Company:
    """The company's databases."""
    return Company(start_postgres, node, key_prefix)


@pytest.mark.full
def test_while_a_server_is_away_the_other_outboxes_go_on(company: Company) -> None:
    """And its own do when it is back: nothing is lost, repeated or reversed."""
    shop, stock, books = company.places
    away = company.servers[2]
    with ExitStack() as cleanup:
        relays = [cleanup.enter_context(place.world.relay(lease_s=5.0)) for place in company.places]
        for place in company.places:
            app = place.app()
            app.start()
            cleanup.callback(app.stop)
            place.publish("before")
        for place in company.places:
            place.wait_booked("before")
        stock.publish("unsent")
        away.kill()
        shop.publish("meanwhile")
        shop.wait_booked("before", "meanwhile")
        assert relays[0].health().ready
        with open_runtime(shop.settings) as runtime:
            assert run_when_due(runtime, ROTATE)
        away.start()
        books.publish("after")
        stock.wait_booked("before", "unsent")
        books.wait_booked("before", "after")
        for relay in relays:
            wait_until(lambda relay=relay: relay.health().ready, timeout_s=30, what="the relay to be ready")  # type: ignore[misc]


@pytest.mark.world(partitions=1)
def test_each_application_database_has_its_own_jobs(world: World, empty_database_dsn: str) -> None:
    """A worker that rotates one outbox keeps no other from rotating its own; of late ones, the worst is told."""
    migrate(empty_database_dsn, schema="application")
    other = World(world.dsn, world.key_prefix, [], app_dsn=empty_database_dsn)
    ran = {}
    for one in (world, other):
        with open_runtime(one.settings()) as runtime:
            ran[claim_name(runtime, ROTATE)] = [run_when_due(runtime, ROTATE), run_when_due(runtime, ROTATE)]
            assert claim_name(runtime, BY_NAME["trim"]) == "trim", "it works on nodes, for all"
    assert [*ran.values()] == [[True, False], [True, False]]
    first, second = ran
    assert (first, second[:14]) == ("rotate_outbox", "rotate_outbox@")
    world.rows("UPDATE mqlayer.job SET last_at = now() - interval '1 hour' WHERE name = %s", second)
    assert "rotate_outbox" in {late.name for late in late_jobs(world.database)}
    world.rows("UPDATE mqlayer.job SET last_at = now() - interval '2 days' WHERE name = %s", second)
    assert "rotate_outbox" not in {late.name for late in late_jobs(world.database)}, "its database is no more"
    (status,) = (one for one in job_statuses(world.database) if one.name == "rotate_outbox")
    assert status.outcome == "done"
