"""What a handler's parameters depend on is made for each message, and ends before the message is settled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import pytest
from psycopg_pool import ConnectionPool
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import mqlayer
from mqlayer import outbox
from tests.fixtures.consumers import Stage
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.sqlalchemy_engines import url_of
from tests.fixtures.wait import wait_until


def ledger(stage: Stage) -> list[tuple[Any, ...]]:
    return ask_postgres(stage.dsn, "SELECT body, attempt FROM ledger ORDER BY body")


@pytest.fixture
def booking(stage: Stage) -> Stage:
    """A stage with a table of the application, and an outbox that knows the topic."""
    ask_postgres(stage.dsn, "CREATE TABLE ledger (body text, attempt int)")
    return stage


def test_a_fenced_session_commits_with_the_handler_and_rolls_back_with_its_exception(booking: Stage) -> None:
    """The first attempt fails after its effect, which is gone; the second one commits, also what it published."""
    pool = ConnectionPool(booking.dsn, min_size=0, max_size=2)

    def book(body: bytes, ctx: mqlayer.Context, session: Any) -> None:
        session.execute("INSERT INTO ledger VALUES (%s, %s)", (body.decode(), ctx.attempt))
        if ctx.attempt == 1 and body == b"2":
            raise LookupError

    book.__annotations__["session"] = Annotated[Any, mqlayer.fenced(pool)]
    booking.send([("a", b"1"), ("a", b"2"), ("b", b"3")])
    with pool:
        booking.consume(book)
        booking.wait_settled()
        assert ledger(booking) == [("1", 1), ("2", 2), ("3", 1)]


def test_a_handler_is_not_called_for_an_effect_that_is_there(booking: Stage) -> None:
    """The factory's `ctx.fence` raises AlreadyApplied, and the message is settled."""
    calls: list[bytes] = []
    sessions = async_sessionmaker(create_async_engine(url_of(booking.dsn), poolclass=NullPool))

    async def failing_late(ctx: mqlayer.Context) -> AsyncIterator[None]:
        yield
        raise LookupError("the session, which was opened later, ended before: its effect is committed")

    async def book(body: bytes, ctx: mqlayer.Context, late: Any, session: Any) -> None:
        calls.append(body)
        await session.execute(text("INSERT INTO ledger VALUES (:b, :a)"), {"b": body.decode(), "a": ctx.attempt})

    book.__annotations__ |= {
        "late": Annotated[None, mqlayer.Depends(failing_late)],
        "session": Annotated[Any, mqlayer.fenced(sessions)],
    }
    booking.send([("a", b"1")])
    booking.consume(book)
    booking.wait_settled()
    assert (calls, ledger(booking)) == ([b"1"], [("1", 1)])


def test_a_generators_end_is_part_of_the_attempt(booking: Stage) -> None:
    """It sees the handler's exception; what it raises itself is a failed attempt; values need no end."""
    seen: list[tuple[str, int]] = []

    def watched(ctx: mqlayer.Context) -> Iterator[int]:
        try:
            yield ctx.attempt
        except LookupError:
            seen.append(("failed", ctx.attempt))
            raise
        if ctx.attempt == 2:
            raise ArithmeticError
        seen.append(("done", ctx.attempt))

    def handle(body: bytes, ctx: mqlayer.Context, attempt: Any, *, name: Any) -> None:
        assert name == f"attempt {attempt}"
        if attempt == 1:
            raise LookupError

    def named(ctx: mqlayer.Context) -> str:
        return f"attempt {ctx.attempt}"

    handle.__annotations__ |= {
        "attempt": Annotated[int, mqlayer.Depends(watched)],
        "name": Annotated[str, mqlayer.Depends(named)],
    }
    booking.send([("a", b"1")])
    booking.consume(handle)
    booking.wait_settled()
    assert seen == [("failed", 1), ("done", 3)]


def test_what_a_fenced_handler_publishes_commits_with_it(world: Any, key_prefix: str) -> None:
    """A chain of two topics: the second group's message is there once, though the first attempt failed."""
    world.add_topic("invoices", partitions=1)
    pool = ConnectionPool(world.dsn, min_size=0, max_size=2)
    app = mqlayer.App(world.settings(lease_s=10.0))

    def invoice(body: bytes, ctx: mqlayer.Context, session: Any) -> None:
        outbox.publish(session, "invoices", key=ctx.key, body=body)
        if ctx.attempt == 1:
            raise LookupError

    invoice.__annotations__["session"] = Annotated[Any, mqlayer.fenced(pool)]
    app.consumer("orders", group="billing", backoff_s=(0.05,))(invoice)
    with pool, world.relay():
        app.start()
        try:
            world.publish(2, keys=1)
            wait_until(lambda: len(world.by_key("invoices").get("key-0", ())) == 2, what="both invoices")
        finally:
            app.stop(5.0)
    assert world.by_key("invoices") == {"key-0": ["m-0", "m-1"]}
