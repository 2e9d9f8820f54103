"""Publishing on a Django connection, with `atomic` and its savepoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction

from mqlayer import PopMessage, Versions, outbox
from mqlayer.domain.message import Identity
from mqlayer.domain.tags import tags_text
from mqlayer.errors import AlreadyApplied, InvalidInput, NotFound, TransactionConflict
from mqlayer.idempotency import InboxEntry, record_effect
from mqlayer.receiving.pop_message import Token
from tests.fixtures.django_connections import django_connection
from tests.fixtures.outboxes import CommittedOutbox


@pytest.fixture
def connection(outbox_dsn: str) -> Iterator[Any]:
    """Django's default connection, on the outbox's database."""
    with django_connection(outbox_dsn) as found:
        yield found


def test_messages_of_an_atomic_block_are_written_right_before_its_commit(
    connection: Any, committed: CommittedOutbox
) -> None:
    after: list[int] = []
    with transaction.atomic():
        transaction.on_commit(lambda: after.append(len(committed.messages())))
        for number in range(20):
            outbox.publish(connection, "orders", key=f"key-{number}", body={"number": number})
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM mqlayer_app.counter WHERE seq > 0")
            assert cursor.fetchone() == (0,)
    assert after == [20]
    assert committed.lps() == sorted(committed.lps())
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"next")
    assert len(committed.messages()) == 21


def test_tags_are_written_with_their_messages(connection: Any, committed: CommittedOutbox) -> None:
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"1", tags=["vip", "eu"])
    [headers] = committed.headers()
    assert json.loads(headers or "") == {"mq-tags": tags_text(["eu", "vip"])}


def test_a_block_that_fails_sends_nothing(connection: Any, committed: CommittedOutbox) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        outbox.publish(connection, "orders", key="a", body=b"lost")
        raise ZeroDivisionError
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"lost")
        transaction.set_rollback(True)
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"kept")
    assert committed.bodies() == [b"kept"]


def test_nested_blocks_that_fail_take_their_messages_along(connection: Any, committed: CommittedOutbox) -> None:
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"1-kept")
        with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
            outbox.publish(connection, "orders", key="a", body=b"2-lost")
            with transaction.atomic():
                outbox.publish(connection, "orders", key="a", body=b"3-lost-with-what-is-around-it")
            raise ZeroDivisionError
        with transaction.atomic():
            outbox.publish(connection, "orders", key="a", body=b"4-kept")
        savepoint = transaction.savepoint()
        outbox.publish(connection, "orders", key="a", body=b"5-lost")
        transaction.savepoint_rollback(savepoint)
        outbox.publish(connection, "orders", key="a", body=b"6-kept")
    assert [body for _, _, body in committed.messages()] == [b"1-kept", b"4-kept", b"6-kept"]


def test_outside_of_a_block_each_call_is_its_own_transaction(connection: Any, committed: CommittedOutbox) -> None:
    outbox.publish(connection, "orders", key="a", body=b"1")
    assert committed.bodies() == [b"1"]
    transaction.set_autocommit(False)
    try:
        outbox.publish(connection, "orders", key="a", body=b"2")
        transaction.rollback()
        outbox.publish(connection, "orders", key="a", body=b"3")
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert committed.bodies() == [b"1", b"3"]


def test_a_refusal_at_commit_rolls_the_block_back_and_leaves_the_connection_usable(
    connection: Any, committed: CommittedOutbox
) -> None:
    with pytest.raises(NotFound, match="nowhere"), transaction.atomic():  # noqa: PT012
        outbox.publish(connection, "orders", key="a", body=b"1")
        outbox.publish(connection, "nowhere", key="a", body=b"2")
    assert committed.messages() == []
    with transaction.atomic():
        outbox.publish(connection, "orders", key="a", body=b"3")
    assert committed.bodies() == [b"3"]


def test_a_conflict_is_told_as_one(connection: Any, outbox_dsn: str) -> None:
    import psycopg

    with pytest.raises(TransactionConflict), transaction.atomic():  # noqa: PT012
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1")
        with psycopg.connect(outbox_dsn) as other:
            outbox.publish(other, "orders", key="a", body=b"other")
        outbox.publish(connection, "orders", key="a", body=b"ours")


def test_the_thread_local_default_connection_will_do(connection: Any, committed: CommittedOutbox) -> None:
    from django.db import connection as default

    assert connection is connections["default"]
    with transaction.atomic():
        outbox.publish(default, "orders", key="a", body=b"1")
    assert committed.bodies() == [b"1"]


def test_an_alias_will_do_where_django_knows_it(connection: Any, committed: CommittedOutbox) -> None:
    with transaction.atomic():
        outbox.publish("default", "orders", key="a", body=b"1")
        assert committed.messages() == []
    assert committed.bodies() == [b"1"]
    with pytest.raises(InvalidInput, match="'elsewhere'"):
        outbox.publish("elsewhere", "orders", key="a", body=b"1")


def test_the_inbox_notes_a_message_with_its_block_and_needs_one(connection: Any) -> None:
    entry = InboxEntry(1, "g", "orders", Identity(1, 2, 3))
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        record_effect(connection, entry)
        raise ZeroDivisionError
    with transaction.atomic():
        record_effect(connection, entry)
    with transaction.atomic(), pytest.raises(AlreadyApplied):
        record_effect(connection, entry)
    with pytest.raises(InvalidInput, match="no transaction is open"):
        record_effect(connection, entry)


def test_versions_are_taken_with_their_block(connection: Any) -> None:
    versions, message = (
        Versions("orders"),
        PopMessage("k", b"2", {"a": "b"}, Identity(1, 2, 3), 1, Token(1, 1, 1, 1), 0),
    )
    with transaction.atomic():
        assert versions.take(connection, message, entity="e", version=2) == []
    with transaction.atomic():
        first, second = versions.take(connection, message, entity="e", version=1)
    assert (first.version, second.version, second.body, second.headers) == (1, 2, b"2", {"a": "b"})
