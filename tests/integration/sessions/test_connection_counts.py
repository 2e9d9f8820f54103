"""Connections that each kind of process holds, counted by its servers: the tables of docs/how-to/size.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import psycopg
import pytest
import redis
import sqlalchemy
from celery import Celery
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy.orm import sessionmaker

from mqlayer import App, AsyncProducer, Receiver, outbox
from mqlayer.console.runtimes import POOL
from mqlayer.consuming.api.app import CONNECTIONS, CONNECTIONS_OF_A_MEMBER
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.relay.relay import MOST_CONNECTIONS as OF_A_RELAY
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from mqlayer.workers.connections import MOST_CONNECTIONS as OF_A_WORKER
from tests.fixtures.console import VIEWER, console_client
from tests.fixtures.django_connections import django_connection
from tests.fixtures.forked_programs import start_python
from tests.fixtures.health_probes import ask_until, free_ports
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.scrapes import scrape
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = [pytest.mark.full, pytest.mark.world(own_node=True, partitions=4)]

PAGE = Path(__file__).parents[3] / "docs/how-to/size.md"
ROW = re.compile(r"^\| ([A-Za-z, ]+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
BROKER = re.compile(r"^\| ([a-z ]+) \| (\d+) \|$", re.MULTILINE)
"""A process of Celery, and how many connections it holds to the broker."""
ROUNDS = 40
AT_ONCE = 8
START_S = 60.0
CELERY = ("celery", "-A", "mqlayer.workers.app")
WORKER = "worker of two processes"
ROOM = 2
"""On a busy machine, pools open up to so many times the page's count."""

Work = AbstractContextManager[Callable[[], object]]


class Row(NamedTuple):
    """The most Postgres connections that pools allow; the counts of Postgres and of each node."""

    most: int
    postgres: int
    nodes: int


class Kind(NamedTuple):
    """A process: its sessions' names, its most connections to Postgres by the code, and how it runs."""

    names: tuple[str, ...]
    most: int
    run: Callable[[World], Work]


@contextmanager
def relay(world: World) -> Iterator[Callable[[], object]]:
    """A relay that sends messages."""
    with world.relay():
        yield lambda: world.publish(50)


@contextmanager
def members(world: World, count: int) -> Iterator[Callable[[], object]]:
    """A process with consumers, each of a group of its own, which handle messages."""
    app = App(world.settings(lease_s=5.0))
    for number in range(count):

        @app.consumer("orders", group=f"g{number}", start="earliest")
        def handle(body: bytes) -> None:
            del body

    app.start()
    try:
        with world.producer() as producer:
            yield lambda: producer.send("orders", key="k", body=b"1")
    finally:
        app.stop()


@contextmanager
def producing(world: World) -> Iterator[Callable[[], object]]:
    """A direct producer."""
    with world.producer() as producer:
        yield lambda: producer.send("orders", key="k", body=b"1")


@contextmanager
def receiving(world: World) -> Iterator[Callable[[], object]]:
    """A receiver."""
    with Receiver("orders", group="pop", settings=world.settings()) as receiver:
        yield lambda: receiver.receive(1, wait_s=0)


@contextmanager
def program(world: World, *words: str, **variables: str) -> Iterator[None]:
    """A process, ended with all that it starts."""
    process = start_python(*words, env=world.environment(**variables), new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def exporting(world: World) -> Iterator[Callable[[], object]]:
    """An exporter that is scraped, and a group to look at."""
    runtime, port = world.runtime(), free_ports()
    with contextlib.closing(RouteCache(runtime.control)) as routes:
        ensure_group(runtime, routes, topic="orders", name="ledger", settings=GroupSettings(start="earliest"))
    with program(world, "mqlayer", "exporter", "--port", str(port), "--every", "1"):
        ask_until(port, "/ready", 200, timeout_s=START_S)
        yield lambda: scrape(port)


@contextmanager
def browsing(world: World) -> Iterator[Callable[[], object]]:
    """A console that several requests reach at a time."""
    with console_client(world, VIEWER) as browser, ThreadPoolExecutor(AT_ONCE) as pool:
        pages = ["/", "/topics/orders", "/nodes", "/problems"] * (AT_ONCE // 4)
        yield lambda: [one.status_code for one in pool.map(browser.get, pages)]


@contextmanager
def fastapi_requests(world: World) -> Iterator[Callable[[], object]]:
    """A web application that publishes both ways: by SQLAlchemy's pool and by an async producer."""
    dsn = world.dsn
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn, application_name="shop")
    )
    sessions, producers = sessionmaker(engine), list[AsyncProducer]()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncProducer(world.settings(), name="shop") as producer:
            producers.append(producer)
            yield

    web = FastAPI(lifespan=lifespan)

    @web.post("/transactions")
    def place() -> None:
        with sessions.begin() as session:
            outbox.publish(session, "orders", key="k", body=b"1")

    @web.post("/directly")
    async def place_directly() -> None:
        await producers[0].send("orders", key="k", body=b"1")

    with TestClient(web) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        paths = ["/transactions", "/directly"] * (AT_ONCE // 2)
        yield lambda: [one.raise_for_status() for one in pool.map(client.post, paths)]
    engine.dispose()


@contextmanager
def django_requests(world: World) -> Iterator[Callable[[], object]]:
    """A Django application on a server of several threads, which keep their connections."""
    from django.db import connections, transaction

    together = Barrier(AT_ONCE)

    def place(_: int) -> None:
        together.wait(timeout=START_S)
        with transaction.atomic():
            outbox.publish(connections["default"], "orders", key="k", body=b"1")

    def leave(_: int) -> None:
        together.wait(timeout=START_S)
        connections["default"].close()

    with django_connection(world.dsn) as connection, ThreadPoolExecutor(AT_ONCE) as pool:
        connection.settings_dict["OPTIONS"] = {"application_name": "shop"}
        try:
            yield lambda: list(pool.map(place, range(AT_ONCE)))
        finally:
            list(pool.map(leave, range(AT_ONCE)))
            connection.settings_dict["OPTIONS"] = {}


ROUTES = "mqlayer routes"
"""Sessions that hear of new routes and assignments."""
PRODUCER = 4 + 2
"""With those to large bodies."""


def of_consumers(count: int) -> int:
    """Return the most connections of a process with consumers: with heartbeats', the application's, and `LISTEN`."""
    return 7 + CONNECTIONS + CONNECTIONS_OF_A_MEMBER * count


KINDS = {
    "relay": Kind(("mqlayer relay", ROUTES), 2 * OF_A_RELAY + 2, relay),
    "one consumer": Kind(("mqlayer consumer", ROUTES), of_consumers(1), lambda world: members(world, 1)),
    "three consumers": Kind(("mqlayer consumer", ROUTES), of_consumers(3), lambda world: members(world, 3)),
    "direct producer": Kind(("mqlayer producer",), PRODUCER, producing),
    "receiver": Kind(("mqlayer receiver", ROUTES), 4 + 1, receiving),
    "exporter": Kind(("mqlayer exporter",), 4 + 4, exporting),
    "console, eight requests at once": Kind(("mqlayer console",), 2 * POOL, browsing),
    "FastAPI, eight requests at once": Kind(("shop", "mqlayer producer"), 5 + 10 + PRODUCER, fastapi_requests),
    "Django, eight threads": Kind(("shop",), AT_ONCE, django_requests),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_holds_no_more_connections_than_the_page_says(world: World, kind: str) -> None:
    names, most, run = KINDS[kind]
    row, before, counted = page()[kind], clients(world), []
    with run(world) as work, ThreadPoolExecutor(1) as worker:
        for _ in range(ROUNDS):
            working, has_ended = worker.submit(work), False
            while not has_ended:
                has_ended = working.done()
                counted.append((sessions(world, *names), clients(world) - before))
            working.result()
    seen = Row(most, max(postgres for postgres, _ in counted), max(nodes for _, nodes in counted))
    check(kind, seen, row)
    wait_until(lambda: clients(world) <= before, what="its connections to be closed")


def check(kind: str, seen: Row, row: Row) -> None:
    """Compare counts with a row of the page."""
    assert seen.most == row.most
    assert 0 < seen.postgres <= min(row.most, ROOM * row.postgres), (kind, seen, row)
    assert row.postgres <= row.most
    assert seen.nodes <= ROOM * row.nodes, (kind, seen, row)


def test_the_page_has_a_row_for_each_kind_of_process() -> None:
    assert set(page()) == {*KINDS, WORKER}
    assert set(of_broker()) == {WORKER, "beat"}


def test_a_worker_holds_no_more_connections_than_the_page_says(world: World, start_redis: StartRedis) -> None:
    """All jobs are due at once. Pools keep what they opened for a minute."""
    broker, before, counted = start_redis(), clients(world), [(0, 0, 0)]
    ended = "SELECT count(*)::int FROM mqlayer.job WHERE ended_at IS NOT NULL"

    def all_ended() -> bool:
        counted.append((sessions(world, "mqlayer worker"), clients(world) - before, broker_clients(broker)))
        return bool(ask_postgres(world.dsn, ended)[0][0] >= len(PERIODIC_JOBS))

    with program(world, *CELERY, "worker", "--concurrency", "2", MQLAYER_BROKER_URL=broker.url):
        with Celery(broker=broker.url) as sender:
            for job in PERIODIC_JOBS:
                sender.send_task(f"mqlayer.{job.name}", queue="mqlayer")
        wait_until(all_ended, timeout_s=START_S, what="all jobs")
    postgres, nodes, of_its_broker = (max(counts) for counts in zip(*counted, strict=True))
    check(WORKER, Row(2 * 2 * OF_A_WORKER, postgres, nodes), page()[WORKER])
    assert 0 < of_its_broker <= of_broker()[WORKER]


def test_a_beat_holds_no_more_connections_than_the_page_says(
    world: World, start_redis: StartRedis, tmp_path: Path
) -> None:
    broker, counted = start_redis(), [0]

    def sent() -> bool:
        counted.append(broker_clients(broker))
        with redis.Redis.from_url(broker.url) as client:
            return bool(client.llen("mqlayer") > 0)

    files = ("--schedule", str(tmp_path / "schedule"), "--pidfile", "")
    with program(world, *CELERY, "beat", *files, MQLAYER_BROKER_URL=broker.url):
        wait_until(sent, timeout_s=START_S, what="the beat to send jobs")
        counted += [broker_clients(broker) for _ in range(ROUNDS)]
        assert not sessions(world, "mqlayer worker"), "a beat needs no Postgres"
    assert 0 < max(counted) <= of_broker()["beat"]


def page() -> dict[str, Row]:
    """Return the rows of processes."""
    return {
        name: Row(int(most), int(postgres), int(nodes))
        for name, most, postgres, nodes in ROW.findall(PAGE.read_text("utf-8"))
    }


def of_broker() -> dict[str, int]:
    """Return the page's connections to a broker."""
    return {name: int(count) for name, count in BROKER.findall(PAGE.read_text("utf-8"))}


def sessions(world: World, *names: str) -> int:
    """Return how many sessions of these names Postgres has."""
    asked = (
        "SELECT count(*)::int FROM pg_stat_activity WHERE application_name = ANY(%s) AND datname = current_database()"
    )
    [(count,)] = ask_postgres(world.dsn, asked, (list(names),))
    return int(count)


def clients(world: World) -> int:
    """Return how many connections the node has, without the one that asks."""
    with world.client() as client:
        return len(client.client_list()) - 1


def broker_clients(broker: RedisServer) -> int:
    """Return how many connections the broker has, without the one that asks."""
    with redis.Redis.from_url(broker.url) as client:
        return len(client.client_list()) - 1
