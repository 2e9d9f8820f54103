"""Publishing on asyncpg connections, and on asyncpg under SQLAlchemy; the fence and the inbox there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from mqlayer import outbox
from mqlayer.domain.message import Identity
from mqlayer.errors import (
    AlreadyApplied,
    BodyTooLarge,
    Conflict,
    InvalidInput,
    NotFound,
    StoreUnavailable,
    TransactionConflict,
)
from mqlayer.idempotency import InboxEntry, arecord_effect
from mqlayer.postgres.asyncpg_connections import numbered
from mqlayer.postgres.caller_connections import Statement, Statements, run_async
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.outboxes import BODY_LIMIT, CommittedOutbox
from tests.fixtures.sqlalchemy_engines import url_of


async def connected(dsn: str) -> Any:
    url = url_of(dsn)
    return await asyncpg.connect(
        host=url.host, port=url.port, user=url.username, password=url.password, database=url.database, ssl=False
    )


def on_asyncpg(dsn: str, work: Callable[[Any], Awaitable[None]]) -> None:
    """Run a coroutine with a connection."""

    async def main() -> None:
        connection = await connected(dsn)
        try:
            await work(connection)
        finally:
            await connection.close()

    asyncio.run(main())


def on_sqlalchemy(dsn: str, work: Callable[[Any], Awaitable[None]]) -> None:
    """Run a coroutine with an engine whose driver is asyncpg."""

    async def main() -> None:
        engine = create_async_engine(url_of(dsn).set(drivername="postgresql+asyncpg"), connect_args={"ssl": False})
        try:
            await work(engine)
        finally:
            await engine.dispose()

    asyncio.run(main())


def test_a_message_is_written_at_once_in_the_transaction_that_is_open(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    async def work(connection: Any) -> None:
        async with connection.transaction():
            await outbox.apublish(connection, "orders", key="a", body={"n": 1}, headers={"kind": "x"}, tags=["vip"])
            assert committed.messages() == []
        assert committed.messages() == [("orders", "a", b'{"n":1}')]
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with connection.transaction():
                await outbox.apublish(connection, "orders", key="a", body=b"lost")
                raise ZeroDivisionError
        async with connection.transaction():
            await outbox.apublish(connection, "orders", key="a", body=b"kept")
            with pytest.raises(LookupError):  # noqa: PT012
                async with connection.transaction():
                    await outbox.apublish(connection, "orders", key="a", body=b"lost")
                    raise LookupError
        await outbox.apublish(connection, "orders", key="a", body=b"alone")

    on_asyncpg(outbox_dsn, work)
    assert committed.bodies() == [b"alone", b"kept", b'{"n":1}']
    assert "vip" in str(committed.headers()[0])


def test_once_and_later_are_there_too_and_a_codec_for_jsonb_changes_nothing(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    async def work(connection: Any) -> None:
        await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=repr, decoder=eval)
        first = await outbox.apublish_once(connection, "orders", key="a", body=b"1", headers={"h": "x"}, dedup_id="d")
        again = await outbox.apublish_once(connection, "orders", key="a", body=b"2", dedup_id="d")
        assert (first.duplicate, again.duplicate, first.seq) == (False, True, again.seq)
        number = await outbox.apublish_delayed(connection, "orders", key="a", at=datetime.now(UTC) + timedelta(hours=1))
        assert await outbox.apublish_delayed(connection, "orders", key="a", delay_s=60) > number
        assert await outbox.acancel_delayed(connection, number)
        assert not await outbox.acancel_delayed(connection, number)

    on_asyncpg(outbox_dsn, work)
    assert committed.bodies() == [b"1"]
    assert committed.headers() == ['{"h": "x"}']


def test_a_connection_of_a_pool_is_one_and_the_pool_is_none(outbox_dsn: str, committed: CommittedOutbox) -> None:
    async def work() -> None:
        url = url_of(outbox_dsn)
        async with asyncpg.create_pool(
            host=url.host, port=url.port, user=url.username, password=url.password, database=url.database, ssl=False,
            min_size=1, max_size=1,
        ) as pool:  # fmt: skip
            async with pool.acquire() as connection, connection.transaction():
                await outbox.apublish(connection, "orders", key="a", body=b"1")
            with pytest.raises(InvalidInput, match="can't use a Pool: give an async connection of psycopg, asyncpg"):
                await outbox.apublish(pool, "orders", key="a")

    asyncio.run(work())
    assert committed.bodies() == [b"1"]


def test_refusals_are_the_same_errors_as_on_psycopg(outbox_dsn: str) -> None:
    async def work(connection: Any) -> None:
        with pytest.raises(NotFound, match="nowhere"):
            await outbox.apublish(connection, "nowhere", key="a")
        with pytest.raises(BodyTooLarge):
            await outbox.apublish(connection, "orders", key="a", body=b"x" * (BODY_LIMIT + 1))
        with pytest.raises(InvalidInput, match="Connection is asynchronous: use the call that is awaited"):
            outbox.publish(connection, "orders", key="a")
        with pytest.raises(InvalidInput, match=r"outbox\.transaction takes a psycopg 3 connection"):
            outbox.transaction(connection).__enter__()
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute("SELECT 1")
            with kept_session(outbox_dsn, autocommit=True) as other:
                outbox.publish(other, "orders", key="a", body=b"other")
            with pytest.raises(TransactionConflict, match="40001"):
                await outbox.apublish(connection, "orders", key="a", body=b"ours")
            with pytest.raises(InvalidInput, match="an earlier statement of this transaction failed"):
                await outbox.apublish(connection, "orders", key="a", body=b"ours")
        await connection.execute("CREATE TEMPORARY TABLE once (n int PRIMARY KEY)")
        with pytest.raises(Conflict, match="once_pkey"):
            await run_async(connection, _twice())
        with pytest.raises(InvalidInput, match="invalid input for query argument"):
            await run_async(connection, _of_a_wrong_type())
        await connection.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await outbox.apublish(connection, "orders", key="a")

    on_asyncpg(outbox_dsn, work)


def _twice() -> Statements[None]:
    text = "INSERT INTO once VALUES (%(n)s), (%(n)s) RETURNING '100%%'"
    yield Statement(text, {"n": 1})


def _of_a_wrong_type() -> Statements[None]:
    yield Statement("SELECT %(n)s::int", {"n": "one"})


def test_a_sessions_messages_are_written_right_before_commit(outbox_dsn: str, committed: CommittedOutbox) -> None:
    async def work(engine: Any) -> None:
        async with AsyncSession(engine) as session:
            for number in range(20):
                await outbox.apublish(session, "orders", key=f"key-{number}", body=b"%d" % number, headers={"h": "x"})
            assert (await session.execute(_LOCKED)).scalar() == 0
            async with session.begin_nested() as savepoint:
                await outbox.apublish(session, "orders", key="a", body=b"lost")
                await savepoint.rollback()
            await session.commit()
        assert committed.lps() == sorted(committed.lps())
        async with engine.begin() as connection:
            await outbox.apublish(connection, "orders", key="a", body=b"one", dedup_id="d")
            assert (await outbox.apublish_once(connection, "orders", key="b", body=b"x", dedup_id="e")).seq >= 1
        async with engine.connect() as connection:
            await outbox.apublish(connection, "orders", key="a", body=b"rolled back")
        async with engine.connect() as connection:
            alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await outbox.apublish(alone, "orders", key="a", body=b"alone")
            assert len(committed.messages()) == 23

    on_sqlalchemy(outbox_dsn, work)
    assert len(committed.messages()) == 23


_LOCKED = sqlalchemy.text("SELECT count(*) FROM mqlayer_app.counter WHERE seq > 0")


def test_a_refusal_at_a_sessions_commit_rolls_it_back(outbox_dsn: str, committed: CommittedOutbox) -> None:
    async def work(engine: Any) -> None:
        async with AsyncSession(engine) as session:
            await outbox.apublish(session, "orders", key="a", body=b"1")
            await outbox.apublish(session, "nowhere", key="a", body=b"2")
            with pytest.raises(NotFound, match="nowhere"):
                await session.commit()
            await session.rollback()
            await outbox.apublish(session, "orders", key="a", body=b"3")
            await session.commit()
            with pytest.raises(BodyTooLarge):
                await outbox.apublish_once(session, "orders", dedup_id="d", body=b"x" * (BODY_LIMIT + 1))

    on_sqlalchemy(outbox_dsn, work)
    assert committed.bodies() == [b"3"]


def test_an_effect_is_recorded_once_and_only_in_a_transaction(outbox_dsn: str) -> None:
    entry = InboxEntry(1, "g", "orders", Identity(1, 2, 3))

    async def on_connection(connection: Any) -> None:
        with pytest.raises(InvalidInput, match="no transaction is open"):
            await arecord_effect(connection, entry)
        async with connection.transaction():
            await arecord_effect(connection, entry)
        with pytest.raises(AlreadyApplied):
            async with connection.transaction():
                await arecord_effect(connection, entry)

    async def on_engine(engine: Any) -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(AlreadyApplied):
                await arecord_effect(session, entry)
        async with engine.connect() as connection:
            alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
            with pytest.raises(InvalidInput, match="no transaction is open"):
                await arecord_effect(alone, entry)

    on_asyncpg(outbox_dsn, on_connection)
    on_sqlalchemy(outbox_dsn, on_engine)


def test_parameters_are_numbered_in_the_order_of_their_first_place() -> None:
    text, values = numbered("SELECT %(b)s, %(a)b::text[], %(b)s || '100%%', %(h)s::jsonb", {"a": 1, "b": 2, "h": 3})
    assert (text, values) == ("SELECT $1, $2::text[], $1 || '100%', $3::text::jsonb", (2, 1, 3))
