"""Publishing on a psycopg connection: at once, collected, within savepoints, asynchronously; what is refused."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from mqlayer import outbox
from mqlayer.domain.names import KEY_LIMIT
from mqlayer.domain.routing import lp_of
from mqlayer.errors import (
    BodyTooLarge,
    InvalidInput,
    InvalidName,
    KeyTooLarge,
    NotFound,
    ReservedHeader,
    SchemaMismatch,
    StoreUnavailable,
    TransactionConflict,
)
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.outboxes import BODY_LIMIT, CommittedOutbox
from tests.fixtures.wait import wait_until

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass
class Order:
    number: int


def test_a_message_is_sent_with_the_transaction_and_not_before(
    connection: Connection, committed: CommittedOutbox
) -> None:
    outbox.publish(connection, "orders", key="a", body=b"1")
    assert committed.messages() == []
    connection.commit()
    assert committed.messages() == [("orders", "a", b"1")]


def test_a_rolled_back_transaction_sends_nothing(connection: Connection, committed: CommittedOutbox) -> None:
    outbox.publish(connection, "orders", key="a", body=b"1")
    connection.rollback()
    with pytest.raises(ZeroDivisionError), outbox.transaction(connection) as tx:  # noqa: PT012
        tx.publish("orders", key="a", body=b"2")
        raise ZeroDivisionError
    assert committed.messages() == []


def test_in_autocommit_each_call_is_its_own_transaction(outbox_dsn: str, committed: CommittedOutbox) -> None:
    with kept_session(outbox_dsn, autocommit=True) as connection:
        outbox.publish(connection, "orders", key="a", body=b"1")
        assert committed.bodies() == [b"1"]


def test_collected_messages_are_written_right_before_commit_in_the_order_of_their_lps(
    connection: Connection, committed: CommittedOutbox
) -> None:
    keys = [f"key-{number}" for number in range(30)]
    with outbox.transaction(connection) as tx:
        for key in keys:
            tx.publish("orders", key=key, body=b"first")
            outbox.publish(connection, "orders", key=key, body=b"second")
        assert connection.execute("SELECT count(*) FROM mqlayer_app.counter WHERE seq > 0").fetchone() == (0,)
    assert committed.lps() == sorted(committed.lps())
    by_key = {key: [body for _, k, body in committed.messages() if k == key] for key in keys}
    assert all(bodies == [b"first", b"second"] for bodies in by_key.values())


def test_what_a_rolled_back_savepoint_collected_is_not_sent(connection: Connection, committed: CommittedOutbox) -> None:
    with outbox.transaction(connection) as tx:
        tx.publish("orders", key="a", body=b"1-outer")
        with pytest.raises(ZeroDivisionError), outbox.transaction(connection) as inner:  # noqa: PT012
            inner.publish("orders", key="a", body=b"2-lost")
            raise ZeroDivisionError
        with outbox.transaction(connection) as inner:
            inner.publish("orders", key="a", body=b"3-kept")
        tx.publish("orders", key="a", body=b"4-outer")
    assert [body for _, _, body in committed.messages()] == [b"1-outer", b"3-kept", b"4-outer"]


def test_a_savepoint_left_by_psycopgs_own_rollback_is_noticed(
    connection: Connection, committed: CommittedOutbox
) -> None:
    with outbox.transaction(connection):
        with connection.transaction() as plain:
            outbox.publish(connection, "orders", key="a", body=b"1-lost")
            take_back(plain)
        with connection.transaction():
            outbox.publish(connection, "orders", key="a", body=b"2-kept")
        with connection.transaction(force_rollback=True):
            with outbox.transaction(connection) as inner:
                inner.publish("orders", key="a", body=b"3-lost")
            with connection.transaction():
                outbox.publish(connection, "orders", key="a", body=b"4-lost")
        with connection.transaction(), connection.transaction():
            outbox.publish(connection, "orders", key="a", body=b"5-kept")
    assert committed.bodies() == [b"2-kept", b"5-kept"]


def test_collecting_again_on_the_same_connection_starts_empty(
    connection: Connection, committed: CommittedOutbox
) -> None:
    for turn in (b"1", b"2"):
        with outbox.transaction(connection):
            outbox.publish(connection, "orders", key="a", body=turn)
    assert committed.bodies() == [b"1", b"2"]


def test_a_transaction_that_was_open_already_still_decides(connection: Connection, committed: CommittedOutbox) -> None:
    connection.execute("SELECT 1")
    with outbox.transaction(connection) as tx:
        tx.publish("orders", key="a", body=b"1")
    connection.rollback()
    assert committed.messages() == []


def take_back(savepoint: psycopg.Transaction) -> None:
    """Have the savepoint rolled back at the end of its block."""
    raise psycopg.Rollback(savepoint)


async def _publish_async(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await outbox.apublish(connection, "orders", key="a", body=b"1-at-once")
        await connection.commit()
        async with outbox.atransaction(connection) as tx:
            await tx.apublish("orders", key="a", body=b"2-collected")
            async with connection.transaction(force_rollback=True):
                await outbox.apublish(connection, "orders", key="a", body=b"3-lost")
            async with outbox.atransaction(connection) as inner:
                await inner.apublish("orders", key="a", body=b"4-nested")
        with pytest.raises(InvalidInput, match="apublish"):
            tx.publish("orders", key="a")


def test_asynchronous_connections_do_the_same(outbox_dsn: str, committed: CommittedOutbox) -> None:
    import asyncio

    asyncio.run(_publish_async(outbox_dsn))
    assert committed.bodies() == [b"1-at-once", b"2-collected", b"4-nested"]


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (b"\x00raw", b"\x00raw"),
        (bytearray(b"raw"), b"raw"),
        (memoryview(b"raw"), b"raw"),
        ("tëxt", "tëxt".encode()),
        ({"a": [1, None]}, b'{"a":[1,null]}'),
        (Order(7), b'{"number":7}'),
    ],
)
def test_bodies_that_are_not_bytes_are_text_or_json(
    connection: Connection, committed: CommittedOutbox, body: object, stored: bytes
) -> None:
    outbox.publish(connection, "orders", key="a", body=body, headers={"trace": "ä"})
    connection.commit()
    assert committed.bodies() == [stored]
    assert committed.headers() == ['{"trace": "ä"}']


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topic": "Orders"}, InvalidName),
        ({"key": "x" * (KEY_LIMIT + 1)}, KeyTooLarge),
        ({"key": "nul\0"}, InvalidInput),
        ({"key": "\ud800"}, InvalidInput),
        ({"body": bytes(1_000_001)}, BodyTooLarge),
        ({"body": object()}, InvalidInput),
        ({"headers": {"mq-own": "x"}}, ReservedHeader),
        ({"headers": {"a": "nul\0"}}, ReservedHeader),
        ({"headers": {"a": 1}}, ReservedHeader),
    ],
)
def test_what_can_never_be_sent_is_refused_at_the_call(
    connection: Connection, arguments: dict[str, Any], error: type[Exception]
) -> None:
    topic = arguments.pop("topic", "orders")
    with pytest.raises(error):
        outbox.publish(connection, topic, **arguments)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_the_database_says_what_it_does_not_take(connection: Connection) -> None:
    with pytest.raises(NotFound, match=r"'nowhere'.*mqlayer topic create"):
        outbox.publish(connection, "nowhere", key="a", body=b"")
    connection.rollback()
    with pytest.raises(InvalidInput, match=str(BODY_LIMIT)), outbox.transaction(connection) as tx:  # noqa: PT012
        tx.publish("orders", key="a", body=bytes(BODY_LIMIT + 1))
        tx.publish("orders", key="a", body=b"")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_other_objects_and_dead_connections_are_refused(outbox_dsn: str, empty_database_dsn: str) -> None:
    with pytest.raises(InvalidInput, match="psycopg 3 connection"):
        outbox.publish(object(), "orders")
    with pytest.raises(InvalidInput, match="collect by themselves"), outbox.transaction(object()):  # type: ignore[arg-type]
        pass
    dead = psycopg.connect(outbox_dsn)
    dead.close()
    with pytest.raises(StoreUnavailable):
        outbox.publish(dead, "orders", key="a")
    with kept_session(empty_database_dsn) as bare, pytest.raises(SchemaMismatch, match="mqlayer migrate"):
        outbox.publish(bare, "orders", key="a")


def test_a_busy_lp_under_repeatable_read_is_a_conflict_to_run_again(outbox_dsn: str, connection: Connection) -> None:
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("SELECT 1")
    with kept_session(outbox_dsn) as other:
        outbox.publish(other, "orders", key="a", body=b"other")
    with pytest.raises(TransactionConflict) as caught:
        outbox.publish(connection, "orders", key="a", body=b"ours")
    assert caught.value.sqlstate == "40001"


def test_collected_transactions_on_the_same_lps_in_opposite_order_do_not_deadlock(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    keys = ["key-1", "key-2"]
    assert lp_of(b"key-1") != lp_of(b"key-2")
    both = threading.Barrier(2)
    failures: list[BaseException] = []

    def publish(order: list[str]) -> None:
        try:
            with kept_session(outbox_dsn) as connection:
                for _ in range(100):
                    with outbox.transaction(connection) as tx:
                        for key in order:
                            tx.publish("orders", key=key, body=b"")
        except BaseException as error:  # noqa: BLE001  # shown below
            failures.append(error)

    def run(order: list[str]) -> None:
        both.wait()
        publish(order)

    threads = [threading.Thread(target=run, args=(order,)) for order in (keys, keys[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(committed.messages()) == 400


def test_published_at_once_in_opposite_order_a_deadlock_is_a_conflict(outbox_dsn: str) -> None:
    with kept_session(outbox_dsn) as one, kept_session(outbox_dsn) as two:
        outbox.publish(one, "orders", key="key-1")
        outbox.publish(two, "orders", key="key-2")
        conflicts: list[TransactionConflict] = []

        def cross(connection: Connection, key: str) -> None:
            try:
                outbox.publish(connection, "orders", key=key)
            except TransactionConflict as conflict:
                conflicts.append(conflict)
            connection.rollback()

        waiting = threading.Thread(target=cross, args=(one, "key-2"))
        waiting.start()
        cross(two, "key-1")
        waiting.join()
    assert [conflict.sqlstate for conflict in conflicts] == ["40P01"]


def test_two_transactions_of_one_key_are_ordered_by_their_commits(outbox_dsn: str, committed: CommittedOutbox) -> None:
    """Case 74: whoever holds the LP commits first, whatever began first."""
    with kept_session(outbox_dsn) as early, kept_session(outbox_dsn) as late:
        early.execute("SELECT pg_current_xact_id()")
        outbox.publish(late, "orders", key="a", body=b"late")
        waiting = threading.Thread(target=lambda: outbox.publish(early, "orders", key="a", body=b"early"))
        waiting.start()
        wait_until(lambda: _is_waiting(outbox_dsn), what="the second writer to wait for the LP")
        late.commit()
        waiting.join()
        early.commit()
    assert [body for _, _, body in committed.messages()] == [b"late", b"early"]


def _is_waiting(dsn: str) -> bool:
    with kept_session(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    return bool(row and row[0])
