"""Bodies over a topic's limit: stored beside the outbox, fetched for the handler, removed once nothing names them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest

from mqlayer import App, Context, outbox
from mqlayer.domain.large_bodies import BODY_HEADER
from mqlayer.large_bodies.options import forget_options
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = pytest.mark.world(partitions=1, relay=True)
SIZE = 3_000_000


@pytest.fixture(autouse=True)
def in_postgres(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Large bodies of this process go to Postgres."""
    monkeypatch.setenv("MQLAYER_LARGE_BODIES", "postgres")
    forget_options()
    yield
    forget_options()


def test_a_large_body_reaches_its_handler_whole_and_in_its_keys_order(world: World) -> None:
    large = os.urandom(SIZE)
    got: list[tuple[bytes, int]] = []
    app = App(world.settings())

    @app.consumer("orders", group="g", start="earliest")
    def handle(body: bytes, ctx: Context) -> None:
        assert BODY_HEADER not in ctx.headers
        got.append((body, 0 if ctx.large_body is None else ctx.large_body.size))

    with psycopg.connect(world.dsn) as connection:
        outbox.publish(connection, "orders", key="k", body=b"first", headers={"a": "b"})
        outbox.publish(connection, "orders", key="k", body=large, headers={"a": "b"})
        outbox.publish(connection, "orders", key="k", body=b"last")
    app.start()
    try:
        wait_until(lambda: len(got) == 3, what="the messages")
    finally:
        app.stop()
    assert got == [(b"first", 0), (large, SIZE), (b"last", 0)]
