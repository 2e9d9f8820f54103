"""A FastAPI application: its consumers live as long as it does, and a request's messages commit with its session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import mqlayer
from mqlayer import outbox
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.integrations.fastapi import lifespan, transaction
from tests.fixtures.outboxes import CommittedOutbox
from tests.fixtures.sqlalchemy_engines import engine_of, url_of
from tests.fixtures.wait import wait_until
from tests.proof.world import World


class Placed(msgspec.Struct):
    customer: str
    amount: int


placed = mqlayer.Topic("orders", body=Placed, key=lambda order: order.customer)


def test_a_request_commits_with_its_message_and_the_web_applications_consumer_books_it(world: World) -> None:
    """The service of the how-to page: orders placed by requests, booked in order by the same process."""
    engine = engine_of(world.dsn)
    sessions = sessionmaker(engine)
    with sessions.begin() as session:
        session.execute(text("CREATE TABLE ledger (customer text, amount int)"))
    consumers = mqlayer.App(world.settings(lease_s=10.0))
    seen: list[bool] = []

    def book(order: Placed, ctx: mqlayer.Context, session: Any) -> None:
        session.execute(text("INSERT INTO ledger VALUES (:customer, :amount)"), msgspec.structs.asdict(order))

    book.__annotations__["session"] = Annotated[Session, mqlayer.fenced(sessions)]
    consumers.consumer(placed, group="ledger")(book)

    @asynccontextmanager
    async def own(web: FastAPI) -> AsyncIterator[dict[str, str]]:
        seen.append(consumers.running)
        yield {"name": "shop"}
        seen.append(consumers.running)

    web = FastAPI(lifespan=lifespan(consumers, own))

    def place(amount: int, session: Any) -> dict[str, int]:
        placed.publish(session, Placed("ann", amount))
        if amount > 100:
            raise HTTPException(422, "too much")
        return {"amount": amount}

    place.__annotations__["session"] = Annotated[Any, transaction(sessions)]
    web.post("/orders")(place)

    with world.relay(), TestClient(web) as client:
        assert consumers.running
        answers = [client.post("/orders", params={"amount": amount}).status_code for amount in (10, 200, 20)]
        assert answers == [200, 422, 200]
        wait_until(lambda: world.rows("SELECT amount FROM ledger") == [(10,), (20,)], what="both booked, in order")
    assert seen == [False, False]
    assert consumers.members == []
    engine.dispose()


def test_consumers_that_can_t_start_stop_the_server() -> None:
    with (
        pytest.raises(InvalidInput, match="the application has no consumers"),
        TestClient(FastAPI(lifespan=lifespan(mqlayer.App(mqlayer.Settings())))),
    ):
        pass


class Places:
    """Where an application keeps its connections, one of each kind; all are closed at the end."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.closed: list[Any] = []

    def sync_sessions(self) -> Any:
        return sessionmaker(create_engine(url_of(self.dsn)))

    def engine(self) -> Any:
        return create_engine(url_of(self.dsn))

    def async_sessions(self) -> Any:
        return async_sessionmaker(create_async_engine(url_of(self.dsn)))

    def asyncpg_sessions(self) -> Any:
        url = url_of(self.dsn).set(drivername="postgresql+asyncpg")
        return async_sessionmaker(create_async_engine(url, connect_args={"ssl": False}))

    def pool(self) -> Any:
        return ConnectionPool(self.dsn, min_size=0, max_size=1, open=True)

    def async_pool(self) -> Any:
        return AsyncConnectionPool(self.dsn, min_size=0, max_size=1, open=False)


@asynccontextmanager
async def opened(source: Any) -> AsyncIterator[None]:
    """Open and close what needs it."""
    yield
    engine = getattr(source, "kw", {}).get("bind") or source
    ended = engine.dispose() if hasattr(engine, "dispose") else engine.close()
    if hasattr(ended, "__await__"):
        await ended


KINDS = ["sync_sessions", "engine", "async_sessions", "asyncpg_sessions", "pool", "async_pool"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_comes_before_the_response_and_its_failure_is_the_requests(
    kind: str, outbox_dsn: str, committed: CommittedOutbox
) -> None:
    source = getattr(Places(outbox_dsn), kind)()
    is_async = "async" in kind

    @asynccontextmanager
    async def own(web: FastAPI) -> AsyncIterator[None]:
        async with opened(source):
            yield

    web = FastAPI(lifespan=own)

    async def aplace(topic: str, session: Any) -> None:
        await outbox.apublish(session, topic, key="a", body=topic.encode())

    def place(topic: str, session: Any) -> None:
        outbox.publish(session, topic, key="a", body=topic.encode())

    def refuse(topic: str, session: Any) -> None:
        raise HTTPException(409)

    handler: Callable[..., Any] = aplace if is_async else place
    for function in (handler, refuse):
        function.__annotations__["session"] = Annotated[Any, transaction(source)]
    web.post("/{topic}")(handler)
    web.put("/{topic}")(refuse)
    with TestClient(web) as client:
        assert client.post("/orders").status_code == 200
        assert committed.bodies() == [b"orders"]
        assert client.put("/orders").status_code == 409
        with pytest.raises(NotFound, match="nowhere"):
            client.post("/nowhere")
        # A server answers 500, as the response was not sent yet.
        client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        assert client.post("/nowhere").status_code == 500
    assert committed.bodies() == [b"orders"]


def test_what_opens_no_transaction_is_refused_where_the_dependency_is_made() -> None:
    with pytest.raises(InvalidInput, match="a dict opens no transactions"):
        transaction({})
