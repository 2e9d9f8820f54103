"""Connections that each kind of process holds, counted by Postgres and a node: the table of docs/how-to/size.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from mqlayer import App, Receiver
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = [pytest.mark.full, pytest.mark.world(own_node=True, partitions=4)]

PAGE = Path(__file__).parents[3] / "docs/how-to/size.md"
ROW = re.compile(r"^\| ([a-z ]+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
"""A process, and how many connections it holds under a light load, to Postgres and to each node."""
ROUNDS = 40


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


KINDS: dict[str, tuple[str, Callable[[World], AbstractContextManager[Callable[[], object]]]]] = {
    "relay": ("mqlayer relay", relay),
    "one consumer": ("mqlayer consumer", lambda world: members(world, 1)),
    "three consumers": ("mqlayer consumer", lambda world: members(world, 3)),
    "direct producer": ("mqlayer producer", producing),
    "receiver": ("mqlayer receiver", receiving),
}


def test_each_kind_of_process_holds_no_more_connections_than_the_page_says(world: World) -> None:
    page = {name: (int(postgres), int(nodes)) for name, postgres, nodes in ROW.findall(PAGE.read_text("utf-8"))}
    assert set(page) == set(KINDS)
    for kind, (name, run) in KINDS.items():
        before, counted = clients(world), []
        with run(world) as work:
            for _ in range(ROUNDS):
                work()
                counted.append((sessions(world, name), clients(world) - before))
        most = max(postgres for postgres, _ in counted), max(nodes for _, nodes in counted)
        assert all(0 < seen <= said for seen, said in zip(most, page[kind], strict=True)), (kind, most, page[kind])
        wait_until(lambda: clients(world) <= before, what="its connections to be closed")  # noqa: B023


def sessions(world: World, name: str) -> int:
    """Return how many sessions Postgres has of a kind of process."""
    asked = (
        "SELECT count(*)::int FROM pg_stat_activity WHERE application_name LIKE %s || '%%' "
        "AND datname = current_database()"
    )
    [(count,)] = ask_postgres(world.dsn, asked, (name,))
    return int(count)


def clients(world: World) -> int:
    """Return how many connections the node has, without the one that asks."""
    with world.client() as client:
        return len(client.client_list()) - 1
