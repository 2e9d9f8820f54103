"""What an open transaction has published, read by its own connection; nothing commits."""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, NotRequired, TypedDict

import psycopg
import pytest
import sqlalchemy
from django.db import connections, transaction
from django.test import TestCase
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import mqlayer
from mqlayer import outbox
from mqlayer.errors import AlreadyApplied, InvalidInput, SchemaMismatch
from mqlayer.outbox.transaction_sources import open_transaction
from mqlayer.testing import (
    TestApp,
    apublished,
    assert_not_published,
    assert_published,
    batch,
    context,
    prepare_database,
    published,
)
from tests.fixtures.django_connections import django_connection
from tests.fixtures.kept_connections import ask_postgres, kept_session
from tests.fixtures.servers import Postgres
from tests.fixtures.sqlalchemy_engines import url_of


class Order(TypedDict):
    customer: str
    amount: NotRequired[int]


orders = mqlayer.Topic("orders", body=Order, key=lambda order: order["customer"])


@pytest.fixture
def dsn(database_dsn: str) -> str:
    """A database of tests, with the topics that it may publish to."""
    prepare_database(database_dsn, orders, "audit")
    return database_dsn


def test_psycopg_sees_its_own_transaction_with_savepoints_and_no_other(dsn: str) -> None:
    with kept_session(dsn) as other, kept_session(dsn) as connection:
        orders.publish(other, {"customer": "of another transaction"})
        orders.publish(connection, {"customer": "committed before"})
        connection.commit()
        orders.publish(connection, {"customer": "ann", "amount": 7}, headers={"trace": "1"}, tags=("eu",))
        with connection.transaction():
            orders.publish(connection, {"customer": "in a savepoint"})
        with suppress(ZeroDivisionError), connection.transaction():
            orders.publish(connection, {"customer": "rolled back"})
            raise ZeroDivisionError
        with outbox.transaction(connection) as tx:
            tx.publish("audit", key="collected", body=b"1")
            with suppress(ZeroDivisionError), outbox.transaction(connection) as inner:
                inner.publish("audit", key="rolled back", body=b"2")
                raise ZeroDivisionError
            keys = [message.key for message in published(on=connection)]
        assert_published(orders, on=connection, key="ann", body={"amount": 7}, headers={"trace": "1"}, tags=["eu"])
        orders.publish_delayed(connection, {"customer": "later"}, delay_s=60)
        assert [m.key for m in published(orders, on=connection) if m.delayed] == ["later"]
        assert_not_published(orders, on=connection, key="of another transaction")
        connection.rollback()
        assert published(on=connection) == []
        other.rollback()
    assert keys == ["ann", "in a savepoint", "collected"]


def test_sqlalchemy_sessions_show_what_they_collected(dsn: str) -> None:
    engine = sqlalchemy.create_engine(url_of(dsn))
    # As SQLAlchemy's documentation joins a session to a transaction of the test.
    with engine.connect() as connection, connection.begin() as outer:
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            orders.publish(session, {"customer": "ann"})
            session.commit()
            with suppress(ZeroDivisionError), session.begin_nested():
                orders.publish(session, {"customer": "rolled back"})
                raise ZeroDivisionError
            first = orders.publish_once(session, {"customer": "bob"}, dedup_id="1")
            assert_published(orders, on=session, key="ann", count=1)
            assert [message.key for message in published(on=session)] == ["bob", "ann"]
            assert not first.duplicate
        assert_published(orders, on=connection, key="ann")
        outer.rollback()
        assert published(on=connection) == []
    engine.dispose()
    assert ask_postgres(dsn, "SELECT count(*) FROM mqlayer_app.outbox") == [(0,)]


def test_async_sessions_are_read_by_an_await(dsn: str) -> None:
    async def run() -> list[list[str | None]]:
        engine = create_async_engine(url_of(dsn))
        async with AsyncSession(engine) as session, await psycopg.AsyncConnection.connect(dsn) as connection:
            await orders.apublish(session, {"customer": "ann"})
            await orders.apublish(connection, {"customer": "bob"})
            with pytest.raises(InvalidInput, match="await apublished"):
                published(on=session)
            found = await apublished(orders, on=session), await apublished(on=connection)
            assert_published(orders, on=found[0], body={"customer": "ann"})
            await connection.rollback()
        await engine.dispose()
        return [[message.key for message in messages] for messages in found]

    assert asyncio.run(run()) == [["ann"], ["bob"]]


@pytest.fixture(name="django_connection")
def lent_django_connection(dsn: str) -> Iterator[Any]:
    """Django's default connection, on the test's database."""
    with django_connection(dsn) as connection:
        yield connection


def test_a_test_case_of_django_sees_its_atomic_blocks_and_delivers_them(django_connection: Any) -> None:
    with django_connection.cursor() as cursor:
        cursor.execute("CREATE TABLE booking (customer text)")
    app = mqlayer.App()

    @app.consumer(orders, group="ledger")
    def book(order: Order, ctx: mqlayer.Context, connection: Annotated[Any, mqlayer.fenced("default")]) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO booking VALUES (%s)", [order["customer"]])

    def booked() -> list[tuple[str]]:
        with django_connection.cursor() as cursor:
            cursor.execute("SELECT customer FROM booking")
            return list(cursor.fetchall())

    class OrderTest(TestCase):  # type: ignore[misc]
        def test_the_next_test_finds_the_connection_and_no_booking(self) -> None:
            assert booked() == []

        def test_order(self) -> None:
            with transaction.atomic():
                orders.publish("default", {"customer": "ann"})
            with suppress(ZeroDivisionError), transaction.atomic():
                orders.publish("default", {"customer": "rolled back"})
                raise ZeroDivisionError
            assert_published(orders, on="default", key="ann")
            assert_not_published(orders, on=django_connection, key="rolled back")
            with TestApp(app) as test:
                test.deliver(published(on="default"))
                test.run()
            with open_transaction("default") as connection, connection.cursor() as cursor:
                cursor.execute("INSERT INTO booking VALUES ('bob')")
            assert booked() == [("ann",), ("bob",)]

    result = unittest.TestResult()
    names = ("test_order", "test_the_next_test_finds_the_connection_and_no_booking")
    unittest.TestSuite(map(OrderTest, names)).run(result)
    assert (result.errors, result.failures, result.testsRun) == ([], [], 2)


def test_a_database_without_the_schema_shows_what_was_collected(empty_database_dsn: str) -> None:
    engine = sqlalchemy.create_engine(url_of(empty_database_dsn))
    with Session(engine) as session:
        orders.publish(session, {"customer": "ann"})
        assert_published(orders, on=session, key="ann")
    engine.dispose()
    with (
        pytest.raises(SchemaMismatch, match=r"has no application schema, .*: call mqlayer.testing.prepare_database\("),
        TestApp(database=empty_database_dsn),
    ):
        pass


def test_a_context_fences_the_tests_own_transaction(dsn: str) -> None:
    with kept_session(dsn) as connection:
        ctx = context({"customer": "ann"}, topic=orders, connection=connection)
        ctx.fence(connection)
        ctx.inbox(connection, name="mail-1")
        assert ask_postgres(dsn, "SELECT count(*) FROM mqlayer_app.fence_applied") == [(0,)]
        again = context({"customer": "ann"}, topic=orders, connection=connection)
        with pytest.raises(AlreadyApplied):
            again.inbox(connection, name="mail-1")
        connection.rollback()


def one_batch(connection: Any) -> mqlayer.Batch[Any]:
    return batch([{"customer": "ann"}], topic=orders, connection=connection)


def one_context(connection: Any) -> mqlayer.Context:
    return context({"customer": "ann"}, topic=orders, connection=connection)


def test_no_effect_is_recorded_where_no_transaction_is_open(dsn: str, django_connection: Any) -> None:
    """It would be recorded alone, and after a failure behind it the effect would never come."""
    versions = mqlayer.Versions("orders")
    engine = sqlalchemy.create_engine(url_of(dsn)).execution_options(isolation_level="AUTOCOMMIT")
    with kept_session(dsn, autocommit=True) as connection, Session(engine) as session, engine.begin() as core:
        for alone in (connection, session, core, django_connection):
            refused = pytest.raises(InvalidInput, match="no transaction is open")
            with refused:
                one_context(connection).fence(alone)
            with refused:
                one_context(connection).inbox(alone)
            with refused:
                one_batch(connection).fence(alone)
            with refused:
                versions.take(alone, one_context(connection), entity="e", version=1)
        with connection.transaction():
            one_context(connection).fence(connection)
            one_batch(connection).fence(connection)
        with transaction.atomic():
            one_context(django_connection).fence(django_connection)
    engine.dispose()

    async def awaited() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            with pytest.raises(InvalidInput, match="no transaction is open"):
                await one_context(connection).afence(connection)
            with pytest.raises(InvalidInput, match="no transaction is open"):
                await one_batch(connection).afence(connection)
            async with connection.transaction():
                await one_batch(connection).afence(connection)

    asyncio.run(awaited())


def test_messages_that_a_handlers_own_transactions_commit_are_handled(dsn: str) -> None:
    ask_postgres(dsn, "CREATE TABLE book (customer text, amount int)")
    app, seen, fails = mqlayer.App(), list[str](), [True]

    @app.consumer(orders, group="ledger", backoff_s=(5,))
    def book(order: Order, ctx: mqlayer.Context) -> None:
        with psycopg.connect(app.settings.application_dsn()) as connection:
            ctx.fence(connection)
            connection.execute("INSERT INTO book VALUES (%s, %s)", (order["customer"], order.get("amount")))
            outbox.publish(connection, "audit", key=order["customer"], body=b"booked")
            outbox.publish_delayed(connection, "audit", delay_s=60, key=order["customer"], body=b"reminder")
            if fails.pop():
                raise ValueError("once")
            fails.append(False)

    @app.consumer("audit", group="log")
    def note(body: str) -> None:
        seen.append(body)

    with psycopg.connect(dsn) as connection:
        orders.publish(connection, {"customer": "before", "amount": 0})
    with TestApp(app, database=dsn) as test:
        with psycopg.connect(dsn) as connection:
            orders.publish(connection, {"customer": "ann", "amount": 1})
        fails.append(False)
        fails.append(True)
        test.run(raises=False)
        assert ask_postgres(dsn, "SELECT count(*) FROM book") == [(0,)]
        test.clock.advance(5)
        test.run()
        assert seen == ["booked"]
        test.run_until_idle()
        assert seen == ["booked", "reminder"]
        assert [message.key for message in test.handled(orders)] == ["ann"]
        test.assert_published("audit", key="ann", body=b"booked", count=1)
    assert ask_postgres(dsn, "SELECT * FROM book") == [("ann", 1)]


def test_an_effect_in_another_database_is_refused(dsn: str, postgres_server: Postgres) -> None:
    """A program that took its address at import would book where it is developed."""
    app = mqlayer.App(mqlayer.Settings(dsn=SecretStr("postgresql://where-it-is-developed/shop")))

    @app.consumer(orders, group="ledger")
    def book(order: Order, ctx: mqlayer.Context) -> None:
        with psycopg.connect(postgres_server.dsn("postgres")) as connection:
            ctx.fence(connection)

    with TestApp(app, database=dsn) as test:
        test.publish(orders, {"customer": "ann"})
        with pytest.raises(InvalidInput, match=r"to database 'postgres'.*app\.settings\.application_dsn"):
            test.run()
    assert app.settings.application_dsn() == "postgresql://where-it-is-developed/shop"
