"""Delayed messages: published once when they are due, in their key's order from then on."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from mqlayer import outbox
from mqlayer.domain.routing import lp_of
from mqlayer.errors import BodyTooLarge, InvalidInput, NotFound
from mqlayer.outbox import list_delayed, release_delayed
from mqlayer.postgres.database import Database
from mqlayer.postgres.delayed_release import release_on
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.outboxes import BODY_LIMIT, CommittedOutbox
from tests.fixtures.sqlalchemy_engines import engine_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.world import World


@pytest.fixture
def database(outbox_dsn: str) -> Iterator[Database]:
    """The outbox's database."""
    with Database(outbox_dsn) as database:
        yield database


def delay(dsn: str, body: bytes, *, key: str = "k", due_in_s: float = 0.0) -> int:
    """Delay a message, or one that is overdue by now."""
    with kept_session(dsn, autocommit=True) as connection:
        at = datetime.now(UTC) + timedelta(seconds=due_in_s)
        return outbox.publish_delayed(connection, "orders", key=key, body=body, at=at)


@contextmanager
def busy(dsn: str, key: str = "k") -> Iterator[psycopg.Connection[Any]]:
    """Hold a key's LP, as a transaction that publishes to it does."""
    with kept_session(dsn) as connection:
        connection.execute("SELECT FROM mqlayer_app.counter WHERE lp = %s FOR NO KEY UPDATE", [lp_of(key.encode())])
        yield connection
        connection.rollback()


# Publishing


def by_psycopg(dsn: str) -> int:
    with kept_session(dsn) as connection, outbox.transaction(connection):
        return outbox.publish_delayed(
            connection, "orders", key="k", body={"a": 1}, headers={"h": "v"}, tags=["eu"], delay_s=60
        )


def by_asyncio(dsn: str) -> int:
    async def publish() -> int:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            gone = await outbox.apublish_delayed(connection, "orders", key="k", body=b"x", delay_s=60)
            assert await outbox.acancel_delayed(connection, gone)
            return await outbox.apublish_delayed(
                connection, "orders", key="k", body={"a": 1}, headers={"h": "v"}, tags=["eu"], delay_s=60
            )

    return asyncio.run(publish())


def by_sqlalchemy(dsn: str) -> int:
    engine = engine_of(dsn)
    with Session(engine) as session, session.begin():
        number = outbox.publish_delayed(
            session, "orders", key="k", body={"a": 1}, headers={"h": "v"}, tags=["eu"], delay_s=60
        )
    engine.dispose()
    return number


@pytest.mark.parametrize("publish", [by_psycopg, by_asyncio, by_sqlalchemy])
def test_every_way_in_delays_a_message_with_all_that_belongs_to_it(
    outbox_dsn: str, committed: CommittedOutbox, database: Database, publish: Callable[[str], int]
) -> None:
    number = publish(outbox_dsn)
    (row,) = list_delayed(database)
    assert (row.delayed_id, row.topic, row.key, row.lp, row.size) == (number, "orders", "k", lp_of(b"k"), 7)
    assert timedelta(seconds=59) < row.due_at - row.created_at < timedelta(seconds=61)
    assert list_delayed(database, topic="invoices") == []
    assert release_delayed(database) == 0
    with database.connection() as connection:
        connection.execute("UPDATE mqlayer_app.delayed SET due_at = now()")
    assert release_delayed(database) == 1
    assert committed.messages() == [("orders", "k", b'{"a":1}')]
    assert '"mq-tags"' in str(committed.headers()[0])
    assert list_delayed(database) == []


def test_a_delayed_message_goes_with_its_transaction(outbox_dsn: str, database: Database) -> None:
    with kept_session(outbox_dsn) as connection:
        outbox.publish_delayed(connection, "orders", key="k", body=b"x", delay_s=1)
        connection.rollback()
    assert list_delayed(database) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"delay_s": 1, "at": datetime.now(UTC)},
        {"delay_s": -1},
        {"delay_s": 1e12},
        {"at": datetime.now(UTC).replace(tzinfo=None)},
    ],
)
def test_a_message_needs_either_a_delay_or_a_time(outbox_dsn: str, wrong: dict[str, Any]) -> None:
    with kept_session(outbox_dsn) as connection, pytest.raises(InvalidInput):
        outbox.publish_delayed(connection, "orders", key="k", **wrong)


def test_the_function_refuses_by_itself_what_can_not_be_sent(database: Database) -> None:
    wrong = {
        ("orders", "k", b"x", None): InvalidInput,
        ("orders", "k", b"x", "infinity"): InvalidInput,
        ("orders", "k" * 513, b"x", "2030-01-01"): InvalidInput,
        ("orders", "k", None, "2030-01-01"): InvalidInput,
        ("orders", "k", b"x" * (BODY_LIMIT + 1), "2030-01-01"): BodyTooLarge,
        ("nobody", "k", b"x", "2030-01-01"): NotFound,
    }
    for arguments, kind in wrong.items():
        with pytest.raises(kind), database.connection() as connection:
            connection.execute("SELECT mqlayer_app.publish_at_v1(%s, %s, %s, %s)", arguments)


# Order


def test_a_delayed_message_takes_its_place_when_it_is_due(
    outbox_dsn: str, committed: CommittedOutbox, database: Database
) -> None:
    """Behind what its key published meanwhile, in front of what comes later; several by time, then by number."""
    for body, due_in_s in ((b"d3", -1), (b"d1", -3), (b"d2", -2), (b"later", 60)):
        delay(outbox_dsn, body, due_in_s=due_in_s)
    at = datetime.now(UTC) - timedelta(seconds=0.5)
    with kept_session(outbox_dsn) as connection:
        for number in range(4, 7):
            outbox.publish_delayed(connection, "orders", key="k", body=b"d%d" % number, at=at)
        outbox.publish(connection, "orders", key="k", body=b"before")
        connection.commit()
        assert release_delayed(database) == 6
        outbox.publish(connection, "orders", key="k", body=b"after")
    of_key = [body for _, key, body in committed.messages() if key == "k"]
    assert of_key == [b"before", b"d1", b"d2", b"d3", b"d4", b"d5", b"d6", b"after"]
    with kept_session(outbox_dsn) as connection:
        seqs = connection.execute("SELECT array_agg(seq ORDER BY id) FROM mqlayer_app.outbox").fetchone()
    assert seqs == ([1, 2, 3, 4, 5, 6, 7, 8],)


def test_an_lp_that_somebody_publishes_to_is_passed_by_and_others_are_not(
    outbox_dsn: str, committed: CommittedOutbox, database: Database
) -> None:
    delay(outbox_dsn, b"1")
    delay(outbox_dsn, b"2", key="other")
    with busy(outbox_dsn), database.connection() as connection:
        assert release_on(connection, wait_ms=1_000).moved == 1
        assert committed.bodies() == [b"2"]
    assert release_delayed(database) == 1


def test_an_lp_in_which_a_message_is_overdue_is_waited_for_and_not_for_ever(
    outbox_dsn: str, committed: CommittedOutbox, database: Database
) -> None:
    delay(outbox_dsn, b"1", due_in_s=-2)
    delay(outbox_dsn, b"2", key="other")
    with busy(outbox_dsn) as holder, database.connection() as connection:
        assert release_on(connection, wait_ms=20).moved == 1
        with psycopg.connect(outbox_dsn, autocommit=True) as watcher:
            pid = holder.info.backend_pid
            # Whoever waits gets it as soon as it is free.
            moved: list[int] = []
            waiter = threading.Thread(target=lambda: moved.append(release_on(connection, wait_ms=10_000).moved))
            waiter.start()
            blocked = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            wait_until(lambda: watcher.execute(blocked, [pid]).fetchone() == (1,), what="the wait")
            holder.rollback()
            waiter.join()
            assert moved == [1]
    assert committed.bodies() == [b"1", b"2"]


# Who holds LPs, or cancels, with more that is due than a call moves


def flood(dsn: str, count: int, *, key: str = "k", topic: str = "orders") -> None:
    """Delay messages that have been overdue for long."""
    with kept_session(dsn, autocommit=True) as connection:
        at = datetime.now(UTC) - timedelta(hours=1)
        for number in range(count):
            outbox.publish_delayed(connection, topic, key=key, body=b"%d" % number, at=at)


def move(dsn: str, limit: int = 10, wait_ms: int = 0) -> int:
    """Move so many messages at most."""
    with kept_session(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT released FROM mqlayer_app.delayed_release_v1(%s, %s)", [limit, wait_ms])
        return int(row.fetchall()[0][0])


def hold_an_lp(connection: psycopg.Connection[Any]) -> None:
    outbox.publish(connection, "orders", key="k", body=b"held")


def hold_the_topic(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "SELECT FROM mqlayer_app.counter c JOIN mqlayer_app.topic t USING (topic_id) "
        "WHERE t.name = 'orders' FOR NO KEY UPDATE OF c"
    )


def cancel_the_first(connection: psycopg.Connection[Any]) -> None:
    firsts = connection.execute("SELECT min(delayed_id) FROM mqlayer_app.delayed GROUP BY topic_id, lp").fetchall()
    assert all(outbox.cancel_delayed(connection, number) for (number,) in firsts)


@pytest.mark.parametrize("hold", [hold_an_lp, hold_the_topic, cancel_the_first])
@pytest.mark.parametrize("keys", [["k"], ["k", "k1", "k2", "k3"]])
def test_who_holds_its_topic_with_more_that_is_due_than_a_call_moves_keeps_no_other_topic(
    outbox_dsn: str, committed: CommittedOutbox, hold: Callable[[psycopg.Connection[Any]], None], keys: list[str]
) -> None:
    for key in keys:
        flood(outbox_dsn, 25, key=key)
    with kept_session(outbox_dsn) as holder:
        hold(holder)
        with kept_session(outbox_dsn, autocommit=True) as connection:
            outbox.publish_delayed(connection, "invoices", key="x", body=b"victim", at=datetime.now(UTC))
        wait_until(lambda: move(outbox_dsn) == 0, what="all that is free moved")
        assert ("invoices", "x", b"victim") in committed.messages()
        holder.rollback()
    wait_until(lambda: move(outbox_dsn) == 0, what="the rest moved")
    for key in keys:
        assert [int(body) for _, of, body in committed.messages() if of == key] == list(range(25))


def test_a_transaction_on_one_key_keeps_none_of_its_topics_other_keys(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    flood(outbox_dsn, 25)
    delay(outbox_dsn, b"other", key="other")
    with busy(outbox_dsn):
        assert move(outbox_dsn) == 1
        assert committed.bodies() == [b"other"]


def test_topics_with_more_that_is_due_than_a_call_moves_take_turns(outbox_dsn: str, committed: CommittedOutbox) -> None:
    flood(outbox_dsn, 60)
    flood(outbox_dsn, 60, topic="invoices", key="x")
    assert [move(outbox_dsn) for _ in range(13)] == [10] * 12 + [0]
    first = [topic for topic, _, _ in committed.messages()[:10]]
    assert sorted(first) == ["invoices"] * 5 + ["orders"] * 5
    for topic in ("orders", "invoices"):
        assert [int(body) for of, _, body in committed.messages() if of == topic] == list(range(60))


def test_a_busy_lp_is_waited_for_although_another_topics_oldest_one_stays_busy(outbox_dsn: str) -> None:
    flood(outbox_dsn, 25)
    flood(outbox_dsn, 1, topic="invoices", key="x")
    with psycopg.connect(outbox_dsn) as hostile, psycopg.connect(outbox_dsn) as honest:
        hold_the_topic(hostile)
        outbox.publish(honest, "invoices", key="x", body=b"now")
        done = threading.Event()
        moved: list[int] = []

        def release() -> None:
            while not done.is_set() and not sum(moved):
                moved.append(move(outbox_dsn, wait_ms=500))

        releasing = threading.Thread(target=release)
        releasing.start()
        try:
            with psycopg.connect(outbox_dsn, autocommit=True) as watcher:
                blocked = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
                pid = honest.info.backend_pid
                wait_until(lambda: watcher.execute(blocked, [pid]).fetchone() == (1,), what="the wait")
                honest.rollback()
        finally:
            done.set()
            releasing.join()
        assert sum(moved) <= 1


# Cancelling


def test_a_cancelled_message_never_comes_and_a_published_one_can_not_be_cancelled(
    outbox_dsn: str, committed: CommittedOutbox, database: Database
) -> None:
    first, second = delay(outbox_dsn, b"1"), delay(outbox_dsn, b"2")
    with kept_session(outbox_dsn) as connection:
        assert outbox.cancel_delayed(connection, first)
        assert not outbox.cancel_delayed(connection, first)
        connection.commit()
        assert release_delayed(database) == 1
        assert not outbox.cancel_delayed(connection, second)
    assert committed.bodies() == [b"2"]


@pytest.mark.parametrize("commits", [True, False])
def test_while_somebody_cancels_what_is_behind_waits(
    outbox_dsn: str, committed: CommittedOutbox, database: Database, commits: bool
) -> None:
    """Or it would be published before the one in front, should that not be cancelled after all."""
    numbers = [delay(outbox_dsn, b"%d" % number, due_in_s=-9 + number) for number in range(3)]
    with kept_session(outbox_dsn) as connection:
        outbox.cancel_delayed(connection, numbers[1])
        assert release_delayed(database) == 1
        assert committed.bodies() == [b"0"]
        connection.commit() if commits else connection.rollback()
    assert release_delayed(database) == (1 if commits else 2)
    assert [body for _, _, body in committed.messages()] == ([b"0", b"2"] if commits else [b"0", b"1", b"2"])


def test_operators_list_and_cancel(run: Commands, outbox_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", outbox_dsn)
    assert run.text("outbox", "delayed", "list") == "nothing is delayed\n"
    number = delay(outbox_dsn, b"secret", due_in_s=60)
    (line,) = run.lines("outbox", "delayed", "list", "orders")
    assert (line["delayed_id"], line["key"], line["size"]) == (number, "k", 6)
    assert run.text("outbox", "delayed", "cancel", str(number)) == f"{number} is cancelled\n"
    assert "published or cancelled before" in run.failure("outbox", "delayed", "cancel", str(number))


def test_a_copy_drops_its_delayed_messages_and_a_successor_keeps_them(outbox_dsn: str, database: Database) -> None:
    delay(outbox_dsn, b"1", due_in_s=60)
    outbox.adopt(database)
    assert len(list_delayed(database)) == 1
    outbox.renew(database)
    assert list_delayed(database) == []


# Relays, and who dies when


def test_a_relay_publishes_what_is_due_within_a_moment(world: World) -> None:
    with world.relay():
        for number in range(40):
            delay(world.dsn, b"%d" % number, key=f"key-{number % 4}", due_in_s=0.01 * number)
        wait_until(lambda: sum(map(len, world.relayed().values())) == 40, what="all relayed")
        late = world.rows("SELECT count(*) FROM mqlayer_app.delayed")
        assert late == [(0,)]
        world.wait_until_whole()
    of_key: dict[str, list[int]] = {}
    for chain in world.relayed().values():
        for _, key, body in chain:
            of_key.setdefault(str(key), []).append(int(body))
    assert all(numbers == sorted(numbers) for numbers in of_key.values())


@pytest.mark.parametrize("name", some_of(["delayed.before_release", "delayed.after_release"], 2))
def test_a_relay_killed_around_a_release_leaves_each_message_published_once(world: World, name: str) -> None:
    for number in range(20):
        delay(world.dsn, b"%d" % number, key=f"key-{number % 4}", due_in_s=-60 + number)
    with world.relay_process(failpoints=f"{name}=kill") as process:
        wait_until(lambda: process.poll() is not None, timeout_s=30, what=f"{name} to be reached")
        assert process.returncode == -signal.SIGKILL
    with world.relay():
        wait_until(lambda: sum(map(len, world.relayed().values())) == 20, what="all relayed")
        world.wait_until_whole()
    bodies = [body for chain in world.relayed().values() for _, _, body in chain]
    assert sorted(bodies, key=int) == [str(number) for number in range(20)]


def test_a_release_that_is_cut_off_in_the_middle_moves_nothing(
    outbox_dsn: str, committed: CommittedOutbox, database: Database
) -> None:
    """The server ends its session while it has moved one LP and waits for the other."""
    delay(outbox_dsn, b"1", due_in_s=-9, key="other")
    delay(outbox_dsn, b"2", due_in_s=-8)
    failed: list[BaseException] = []

    def release() -> None:
        try:
            with kept_session(outbox_dsn, autocommit=True) as connection:
                connection.execute("SELECT mqlayer_app.delayed_release_v1(100, 20000)")
        except psycopg.Error as error:
            failed.append(error)

    with busy(outbox_dsn) as holder, psycopg.connect(outbox_dsn, autocommit=True) as watcher:
        releasing = threading.Thread(target=release)
        releasing.start()
        ends = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
        wait_until(lambda: watcher.execute(ends, [holder.info.backend_pid]).fetchone() == (1,), what="the wait")
        releasing.join()
    assert failed
    assert committed.bodies() == []
    assert len(list_delayed(database)) == 2
    assert release_delayed(database) == 2
    assert committed.bodies() == [b"1", b"2"]
