"""Publishing on SQLAlchemy sessions and connections, with its own transactions and savepoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from mqlayer import outbox
from mqlayer.errors import InvalidInput, NotFound, TransactionConflict
from tests.fixtures.outboxes import CommittedOutbox
from tests.fixtures.sqlalchemy_engines import url_of


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def url(outbox_dsn: str) -> sqlalchemy.URL:
    """The outbox's database as SQLAlchemy names it."""
    return url_of(outbox_dsn)


@pytest.fixture
def engine(url: sqlalchemy.URL) -> Iterator[Engine]:
    """An engine with a table of the application."""
    engine = sqlalchemy.create_engine(url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_sessions_messages_are_written_right_before_commit(engine: Engine, committed: CommittedOutbox) -> None:
    with Session(engine) as session:
        session.add(Order(number=1))
        for number in range(20):
            outbox.publish(session, "orders", key=f"key-{number}", body=b"%d" % number)
        assert session.execute(text("SELECT count(*) FROM mqlayer_app.counter WHERE seq > 0")).scalar() == 0
        session.commit()
        assert len(committed.messages()) == 20
        assert committed.lps() == sorted(committed.lps())
        outbox.publish(session, "orders", key="a", body=b"next transaction")
        session.commit()
    assert len(committed.messages()) == 21


def test_a_session_that_rolls_back_or_closes_sends_nothing(engine: Engine, committed: CommittedOutbox) -> None:
    with Session(engine) as session:
        outbox.publish(session, "orders", key="a", body=b"rolled back")
        session.rollback()
        outbox.publish(session, "orders", key="a", body=b"closed")
    with pytest.raises(ZeroDivisionError), Session(engine) as session:  # noqa: PT012
        outbox.publish(session, "orders", key="a", body=b"failed")
        raise ZeroDivisionError
    with Session(engine) as session, session.begin():
        outbox.publish(session, "orders", key="a", body=b"kept")
    assert committed.bodies() == [b"kept"]


def test_savepoints_of_a_session_that_are_rolled_back_take_their_messages_along(
    engine: Engine, committed: CommittedOutbox
) -> None:
    with Session(engine) as session, session.begin():
        with session.begin_nested() as first:
            outbox.publish(session, "orders", key="a", body=b"1-lost-with-the-first-message")
            first.rollback()
        outbox.publish(session, "orders", key="a", body=b"2-kept")
        with session.begin_nested():
            outbox.publish(session, "orders", key="a", body=b"3-kept")
            with session.begin_nested() as inner:
                outbox.publish(session, "orders", key="a", body=b"4-lost")
                inner.rollback()
        with session.begin_nested() as outer:
            with session.begin_nested():
                outbox.publish(session, "orders", key="a", body=b"5-lost-with-what-is-around-it")
            outer.rollback()
        outbox.publish(session, "orders", key="a", body=b"6-kept")
    assert [body for _, _, body in committed.messages()] == [b"2-kept", b"3-kept", b"6-kept"]


def test_a_core_connection_does_the_same(engine: Engine, committed: CommittedOutbox) -> None:
    with engine.connect() as connection:
        outbox.publish(connection, "orders", key="a", body=b"lost")
    with engine.begin() as connection:
        outbox.publish(connection, "orders", key="a", body=b"1")
        with connection.begin_nested() as savepoint:
            outbox.publish(connection, "orders", key="a", body=b"lost")
            savepoint.rollback()
    with engine.connect() as connection:
        outbox.publish(connection, "orders", key="a", body=b"2")
        connection.commit()
        outbox.publish(connection, "orders", key="a", body=b"lost")
        connection.rollback()
        outbox.publish(connection, "orders", key="a", body=b"3")
        connection.commit()
    assert committed.bodies() == [b"1", b"2", b"3"]


def test_in_autocommit_nothing_waits_for_a_commit(engine: Engine, committed: CommittedOutbox) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        outbox.publish(connection, "orders", key="a", body=b"1")
        assert committed.bodies() == [b"1"]


def test_a_refusal_at_commit_rolls_the_whole_transaction_back(engine: Engine, committed: CommittedOutbox) -> None:
    with Session(engine) as session:
        session.add(Order(number=1))
        outbox.publish(session, "orders", key="a", body=b"1")
        outbox.publish(session, "nowhere", key="a", body=b"2")
        with pytest.raises(NotFound, match="nowhere"):
            session.commit()
        session.rollback()
        assert session.get(Order, 1) is None
        outbox.publish(session, "orders", key="a", body=b"3")
        session.commit()
    assert committed.bodies() == [b"3"]


def test_a_conflict_at_commit_can_be_run_again(engine: Engine, committed: CommittedOutbox) -> None:
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(text("SELECT 1"))
        with engine.begin() as other:
            outbox.publish(other, "orders", key="a", body=b"other")
        outbox.publish(session, "orders", key="a", body=b"ours")
        with pytest.raises(TransactionConflict):
            session.commit()
        session.rollback()
        outbox.publish(session, "orders", key="a", body=b"ours")
        session.commit()
    assert committed.bodies() == [b"other", b"ours"]


def test_asynchronous_sessions_and_connections_do_the_same(url: sqlalchemy.URL, committed: CommittedOutbox) -> None:
    async def work() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            await outbox.apublish(session, "orders", key="a", body=b"1")
            async with session.begin_nested() as savepoint:
                await outbox.apublish(session, "orders", key="a", body=b"lost")
                await savepoint.rollback()
            await session.commit()
            with pytest.raises(InvalidInput, match="apublish"):
                outbox.publish(session, "orders", key="a")
        async with engine.begin() as connection:
            await outbox.apublish(connection, "orders", key="a", body=b"2")
        await engine.dispose()

    asyncio.run(work())
    assert committed.bodies() == [b"1", b"2"]


def test_an_engine_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match="Session or a Connection"):
        outbox.publish(engine, "orders", key="a")
