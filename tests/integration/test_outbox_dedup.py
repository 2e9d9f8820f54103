"""Dedup ids in outboxes: every way in, within and across transactions, and what becomes of the ids."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from mqlayer import outbox
from mqlayer.domain.dedup import encode_dedup_id, token_of
from mqlayer.domain.routing import lp_of
from mqlayer.errors import BodyTooLarge, InvalidInput, NotFound, TransactionConflict
from mqlayer.outbox import Published, clean_dedup
from mqlayer.postgres.database import Database
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.outboxes import BODY_LIMIT, CommittedOutbox
from tests.fixtures.sqlalchemy_engines import engine_of


def test_a_second_message_with_an_id_is_not_published_and_the_first_ones_seq_is_told(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    """Case 8, for outboxes: also in the same transaction."""
    with kept_session(outbox_dsn) as connection:
        outbox.publish(connection, "orders", key="k", body=b"0")
        assert outbox.publish_once(connection, "orders", key="k", body=b"1", dedup_id="a") == Published(2, False)
        assert outbox.publish_once(connection, "orders", key="k", body=b"x", dedup_id="a") == Published(2, True)
        outbox.publish(connection, "orders", key="k", body=b"x", dedup_id="a")
    with kept_session(outbox_dsn) as connection:
        assert outbox.publish_once(connection, "orders", key="k", body=b"x", dedup_id="a") == Published(2, True)
        assert outbox.publish_once(connection, "orders", key="k", body=b"2", dedup_id="b") == Published(3, False)
        assert outbox.publish_once(connection, "orders", key="l", body=b"3", dedup_id="a").duplicate is False
        assert outbox.publish_once(connection, "invoices", key="k", body=b"4", dedup_id="a").duplicate is False
    assert committed.bodies() == [b"0", b"1", b"2", b"3", b"4"]


def by_collecting(dsn: str) -> None:
    with kept_session(dsn) as connection, outbox.transaction(connection) as tx:
        for number in range(6):
            tx.publish("orders", key="k", body=b"%d" % number, dedup_id="a" if number % 2 else None)
        tx.publish("orders", body=b"9", headers={"h": "v"}, tags=["eu"], dedup_id="unkeyed")


def by_asyncio(dsn: str) -> None:
    async def publish() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection, outbox.atransaction(connection) as tx:
            for number in range(6):
                await tx.apublish("orders", key="k", body=b"%d" % number, dedup_id="a" if number % 2 else None)
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            answer = await outbox.apublish_once(
                connection, "orders", body=b"9", headers={"h": "v"}, tags=["eu"], dedup_id="unkeyed"
            )
            assert answer == Published(1, False)

    asyncio.run(publish())


def by_sqlalchemy(dsn: str) -> None:
    engine = engine_of(dsn)
    with Session(engine) as session, session.begin():
        for number in range(6):
            outbox.publish(session, "orders", key="k", body=b"%d" % number, dedup_id="a" if number % 2 else None)
        answer = outbox.publish_once(session, "orders", body=b"9", headers={"h": "v"}, tags=["eu"], dedup_id="unkeyed")
        assert answer == Published(1, False)
    engine.dispose()


@pytest.mark.parametrize("publish", [by_collecting, by_asyncio, by_sqlalchemy])
def test_every_way_in_takes_ids_and_keeps_the_order_of_the_key(
    outbox_dsn: str, committed: CommittedOutbox, publish: Any
) -> None:
    publish(outbox_dsn)
    publish(outbox_dsn) if publish is by_collecting else None
    of_key = [body for _, key, body in committed.messages() if key == "k"]
    assert of_key[:4] == [b"0", b"1", b"2", b"4"]
    assert of_key[4:] == ([b"0", b"2", b"4"] if publish is by_collecting else [])
    unkeyed = [lp for lp, (_, key, _) in zip(committed.lps(), committed.messages(), strict=True) if key is None]
    assert unkeyed == [lp_of(b"unkeyed")]


def test_what_is_rolled_back_leaves_no_id(outbox_dsn: str, committed: CommittedOutbox) -> None:
    with kept_session(outbox_dsn) as connection:
        outbox.publish_once(connection, "orders", key="k", body=b"x", dedup_id="a")
        connection.rollback()
        assert outbox.publish_once(connection, "orders", key="k", body=b"1", dedup_id="a") == Published(1, False)
    assert committed.bodies() == [b"1"]


def test_of_many_who_publish_an_id_at_once_one_does(outbox_dsn: str, committed: CommittedOutbox) -> None:
    """The second waits for the first one's COMMIT or ROLLBACK, then sees its id or does not."""
    answers: list[Published] = []
    start = threading.Barrier(8)

    def publish(number: int) -> None:
        with kept_session(outbox_dsn) as connection:
            start.wait()
            for _ in range(10):
                answer = outbox.publish_once(connection, "orders", key="k", body=b"%d" % number, dedup_id="a")
                if number % 2:
                    connection.rollback()
                else:
                    connection.commit()
                    answers.append(answer)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(committed.messages()) == 1
    assert sorted(answers) == [Published(1, False)] + [Published(1, True)] * 39


def test_a_snapshot_that_is_too_old_to_see_the_first_one_is_a_conflict(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    with psycopg.connect(outbox_dsn) as old, psycopg.connect(outbox_dsn) as other:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT 1 FROM mqlayer_app.identity")
        outbox.publish(other, "orders", key="k", body=b"1", dedup_id="a")
        other.commit()
        with pytest.raises(TransactionConflict):
            outbox.publish(old, "orders", key="k", body=b"x", dedup_id="a")
        old.rollback()
    assert committed.bodies() == [b"1"]


def test_ids_are_forgotten_after_the_window_by_the_job(outbox_dsn: str, committed: CommittedOutbox) -> None:
    with kept_session(outbox_dsn, autocommit=True) as connection, Database(outbox_dsn) as database:
        for number in range(3):
            outbox.publish(connection, "orders", key="k", body=b"%d" % number, dedup_id=f"id-{number}")
        connection.execute("UPDATE mqlayer_app.dedup SET published_at = published_at - interval '61 s' WHERE seq < 3")
        assert clean_dedup(database, window_s=60.0) == 2
        assert clean_dedup(database, window_s=60.0) == 0
        assert outbox.publish_once(connection, "orders", key="k", body=b"3", dedup_id="id-0") == Published(4, False)
        assert outbox.publish_once(connection, "orders", key="k", body=b"x", dedup_id="id-2") == Published(3, True)
    assert committed.bodies() == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("dedup_id", ["", "x" * 129, "a\0b", 7, None])
def test_what_is_no_id_is_refused_at_the_call(outbox_dsn: str, dedup_id: Any) -> None:
    with kept_session(outbox_dsn) as connection, pytest.raises(InvalidInput, match="dedup id"):
        outbox.publish_once(connection, "orders", key="k", body=b"x", dedup_id=dedup_id)


def test_the_functions_refuse_by_themselves_what_can_not_be_sent(outbox_dsn: str) -> None:
    wrong = {
        ("orders", "k", b"x", ""): InvalidInput,
        ("orders", "k", b"x", "x" * 129): InvalidInput,
        ("orders", "k", b"x", None): InvalidInput,
        ("orders", "k" * 513, b"x", "a"): InvalidInput,
        ("orders", "k", None, "a"): InvalidInput,
        ("orders", "k", b"x" * (BODY_LIMIT + 1), "a"): BodyTooLarge,
        ("nobody", "k", b"x", "a"): NotFound,
    }
    with Database(outbox_dsn) as database:
        for arguments, kind in wrong.items():
            with pytest.raises(kind), database.connection() as connection:
                connection.execute("SELECT mqlayer_app.publish_once_v1(%s, %s, %s, %s)", arguments)
        many = "SELECT mqlayer_app.publish_many_once_v1('{orders}', '{a,b}', '{a}', '{a}')"
        with pytest.raises(InvalidInput, match="different lengths"), database.connection() as connection:
            connection.execute(many)


@pytest.mark.parametrize("key", [None, "", "k", "注文"])
def test_sql_and_python_compare_the_same_of_an_id(outbox_dsn: str, key: str | None) -> None:
    with kept_session(outbox_dsn) as connection:
        row = connection.execute("SELECT mqlayer_app.dedup_token_v1(%s, 'ü-1')", [key]).fetchone()
    assert row is not None
    assert bytes(row[0]) == token_of(None if key is None else key.encode(), encode_dedup_id("ü-1"))
