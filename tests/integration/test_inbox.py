"""The inbox: each message has its effect once, whoever delivers it how often, and whatever is redelivered when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from mqlayer import AsyncReceiver, Context, Receiver
from mqlayer.domain.message import Identity
from mqlayer.errors import AlreadyApplied, Conflict, InvalidInput, Reject, TransactionConflict
from mqlayer.groups.seek import apply_seek, planned_seek
from mqlayer.idempotency import InboxEntry, arecord_effect, find_effect, inbox_stats, record_effect
from mqlayer.maintenance import clean_inbox, inbox_cleanup
from mqlayer.postgres.database import Database
from mqlayer.redelivery import skip_head
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

DAY_S = 86_400.0
Connection = psycopg.Connection[Any]


def entry(seq: int = 1, *, group: int = 1, **more: Any) -> InboxEntry:
    return InboxEntry(group, "g", "orders", Identity(3, 512, seq), **more)


def waits_for_lock(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%inbox_put%' "
            "AND datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    return row is not None and row[0] > 0


@pytest.fixture
def connection(database_dsn: str) -> Iterator[Connection]:
    with kept_session(database_dsn) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, body text)")
        connection.commit()
        yield connection


@pytest.fixture
def late(database_dsn: str, connection: Connection) -> Iterator[Future[None]]:
    """What becomes of a delivery that comes while the connection's transaction has noted the same message."""

    def deliver() -> None:
        with kept_session(database_dsn) as other:
            record_effect(other, entry())
            other.execute("INSERT INTO sink (body) VALUES ('late')")

    record_effect(connection, entry())
    connection.execute("INSERT INTO sink (body) VALUES ('first')")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(deliver)
        wait_until(lambda: waits_for_lock(database_dsn), what="the second delivery to wait")
        assert not late.done()
        yield late
        connection.rollback()


def sink(connection: Connection) -> list[str]:
    return [body for (body,) in connection.execute("SELECT body FROM sink ORDER BY position").fetchall()]


def test_a_second_delivery_waits_for_the_first_and_finds_its_effect(late: Future[None], connection: Connection) -> None:
    """Case 77."""
    connection.commit()
    with pytest.raises(AlreadyApplied, match="orders/512/1"):
        late.result(10)
    assert sink(connection) == ["first"]


def test_a_second_delivery_takes_over_where_the_first_rolled_back(late: Future[None], connection: Connection) -> None:
    """Case 77."""
    connection.rollback()
    late.result(10)
    assert sink(connection) == ["late"]


def test_what_is_rolled_back_was_never_noted(connection: Connection) -> None:
    record_effect(connection, entry())
    connection.rollback()
    record_effect(connection, entry())
    connection.commit()
    with pytest.raises(AlreadyApplied):
        record_effect(connection, entry())


def test_groups_messages_names_seeks_and_replays_stand_apart(connection: Connection) -> None:
    """A name may look like a message or a replay, and is neither."""
    apart = [
        entry(), entry(2), entry(group=2), entry(name="3:512:1"), entry(name="@7/3:512:1"), entry(replay=7),
        entry(replay=8), entry(replay=7, name="a"), entry(name="a"),
    ]  # fmt: skip
    for one in apart:
        record_effect(connection, one)
    for one in [*apart, entry(99, name="a")]:
        with pytest.raises(AlreadyApplied):
            record_effect(connection, one)
    record_effect(connection, entry(seek=2))
    with pytest.raises(AlreadyApplied):
        record_effect(connection, entry(seek=1))


@pytest.mark.parametrize("name", ["", "x" * 513, "a\0b", "\ud800"])
def test_a_name_that_can_not_be_kept_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="1 to 512 bytes"):
        entry(name=name).facts()


def test_without_a_transaction_it_is_refused(database_dsn: str) -> None:
    """It would be noted, and the effect might never come."""
    with kept_session(database_dsn, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="no transaction is open"):
            record_effect(connection, entry())
        with connection.transaction():
            record_effect(connection, entry())


def test_a_conflict_under_a_snapshot_asks_for_the_whole_transaction(connection: Connection, database_dsn: str) -> None:
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("SELECT 1 FROM sink")
    with kept_session(database_dsn) as other:
        record_effect(other, entry())
    with pytest.raises(TransactionConflict):
        record_effect(connection, entry())
    connection.rollback()
    with pytest.raises(AlreadyApplied):
        record_effect(connection, entry())


def test_a_transaction_that_noted_something_ends_after_a_minute_of_idleness(connection: Connection) -> None:
    """A stopped process must not keep the next delivery waiting for ever."""
    record_effect(connection, entry())
    assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("1min",)
    connection.commit()
    assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("0",)


def test_sqlalchemy_and_async_connections_will_do(database_dsn: str) -> None:
    url = sqlalchemy.make_url(database_dsn).set(drivername="postgresql+psycopg")
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as core:
        record_effect(core, entry())
    with sqlalchemy.orm.Session(engine) as session, pytest.raises(AlreadyApplied):
        record_effect(session, entry())
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    with sqlalchemy.orm.Session(alone) as session, pytest.raises(InvalidInput, match="no transaction"):
        record_effect(session, entry(2))
    with alone.begin() as core, pytest.raises(InvalidInput, match="no transaction"):
        record_effect(core, entry(2))
    engine.dispose()

    async def deliver() -> None:
        async with await psycopg.AsyncConnection.connect(database_dsn) as connection:
            await arecord_effect(connection, entry(2))
        async with await psycopg.AsyncConnection.connect(database_dsn, autocommit=True) as connection:
            with pytest.raises(InvalidInput, match="no transaction"):
                await arecord_effect(connection, entry(2))
        engine = create_async_engine(url)
        async with engine.begin() as core:
            with pytest.raises(AlreadyApplied):
                await arecord_effect(core, entry(2))
        async with engine.execution_options(isolation_level="AUTOCOMMIT").begin() as core:
            with pytest.raises(InvalidInput, match="no transaction"):
                await arecord_effect(core, entry(3))
        await engine.dispose()

    asyncio.run(deliver())


# -- in consumers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    stage = start_stage(redis_url, partitions=1)
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, body text)")
    return stage


class Booking(Recorder):
    """A handler with one effect for each message, by the inbox; `then`: what it does after the commit."""

    def __init__(self, dsn: str, then: Any = lambda body, ctx: None, **noted: Any) -> None:
        super().__init__(self._book)
        self._dsn, self._then, self._noted = dsn, then, noted

    def _book(self, body: bytes, ctx: Context) -> None:
        with kept_session(self._dsn) as connection:
            ctx.inbox(connection, **self._noted)
            connection.execute("INSERT INTO sink (body) VALUES (%s)", (body.decode(),))
        self._then(body, ctx)


def bodies(stage: Stage) -> list[str]:
    with kept_session(stage.dsn) as connection:
        return sink(connection)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_handler_that_fails_after_its_commit_repeats_no_effect(one: Stage, ordered: bool) -> None:
    """Case 77: what is delivered again is settled, and handled no more."""

    def fail_once(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RuntimeError

    one.send_numbers(keys=2, each=10)
    booking = Booking(one.dsn, fail_once)
    one.consume(booking, ordered=ordered)
    one.wait_settled()
    assert sorted(map(int, bodies(one))) == sorted([*range(1, 11)] * 2)


def test_a_member_that_is_stopped_in_its_transaction_has_no_second_effect(one: Stage) -> None:
    """Case 34: no epoch is asked; the key of the inbox has the new owner wait, and one of the two do it."""
    go_on, held = threading.Event(), threading.Event()

    def hold(body: bytes, ctx: Context) -> None:
        with kept_session(one.dsn) as connection:
            ctx.inbox(connection)
            # It may get the second message itself: it joins again.
            connection.execute("INSERT INTO sink (body) VALUES (%s)", ["old" if body == b"1" else body.decode()])
            held.set()
            go_on.wait(20)

    one.send([("k", b"1"), ("k", b"2")])
    old = one.consume(hold)
    assert held.wait(20)
    with one.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET lease_until = '-infinity'")
    booking = Booking(one.dsn)
    one.consume(booking)
    wait_until(
        lambda: waits_for_lock(one.dsn), timeout_s=30, what="the new owner to wait for the old one's transaction"
    )
    assert bodies(one) == []
    go_on.set()
    one.wait_settled()
    old.stop(5.0)
    assert bodies(one) == ["old", "2"]


def test_a_message_with_an_effect_is_not_passed_over(one: Stage) -> None:
    """Case 69: its head only has to be settled; dead it would be a lie."""
    after, end = threading.Event(), threading.Event()

    def wait(body: bytes, ctx: Context) -> None:
        after.set()
        end.wait(20)

    one.send([("k", b"1")])
    one.consume(Booking(one.dsn, wait))
    assert after.wait(20)
    with pytest.raises(Conflict, match="only has to be settled"):
        skip_head(
            runtime_of(one.database, one.prefix, application=one.database, actor="t"), one.topic, "g", "k", reason="r"
        )
    end.set()
    one.wait_settled()
    assert bodies(one) == ["1"]


def test_one_name_on_several_messages_is_one_effect(one: Stage) -> None:
    """A message that was published twice has two identities, and one id of the application's."""
    one.send([("k", b"a"), (None, b"b"), ("l", b"c")])
    one.consume(Booking(one.dsn, name="order-7:paid"), ordered=False)
    one.wait_settled()
    assert len(bodies(one)) == 1


def test_an_async_handler_notes_each_name_once(one: Stage) -> None:
    noted: list[str] = []

    async def handle(body: bytes, ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(one.dsn) as connection:
            for part in ("mail", "print", "mail"):
                await ctx.ainbox(connection, name=f"{ctx.identity}/{part}")
                noted.append(part)

    one.send([("k", b"1")])
    one.consume(handle, attempt_limit=1, policy="dead_letter", ordered=False)
    one.wait_settled()
    assert noted == ["mail", "print"]
    with kept_session(one.dsn) as connection:
        (reason,) = connection.execute("SELECT reason FROM mqlayer.dead_message").fetchone() or ("",)
    assert "noted twice" in reason


def test_receivers_need_neither_token_nor_turn_for_it(one: Stage) -> None:
    one.send([("k", b"1"), ("k", b"2")])
    with Receiver(one.topic, group="g", settings=one.settings()) as receiver, kept_session(one.dsn) as connection:
        first, second = receiver.receive(visibility_timeout_s=0.02)
        again = receiver.receive(wait_s=5)
        for message in (second, *again):
            try:
                with connection.transaction():
                    receiver.inbox(connection, message)
                    connection.execute("INSERT INTO sink (body) VALUES (%s)", (message.body.decode(),))
            except AlreadyApplied:
                continue
        receiver.ack(again)

        async def once_more() -> None:
            async with (
                AsyncReceiver(one.topic, group="g", settings=one.settings()) as receiver,
                await psycopg.AsyncConnection.connect(one.dsn) as connection,
            ):
                with pytest.raises(AlreadyApplied):
                    await receiver.inbox(connection, first)

        asyncio.run(once_more())
    assert bodies(one) == ["2", "1"]
    assert one.all_settled()


@pytest.mark.parametrize("replay", [True, False])
def test_a_seek_applies_effects_again_only_where_that_is_wanted(one: Stage, replay: bool) -> None:
    one.send([("k", b"1"), ("k", b"2")])
    booking = Booking(one.dsn)
    one.consume(booking)
    one.wait_settled()
    with closing(RouteCache(one.database)) as routes:
        plan = planned_seek(runtime_of(one.database, one.prefix), routes, topic=one.topic, name="g", to="earliest")
    apply_seek(runtime_of(one.database, one.prefix, actor="test"), plan, replay=replay)
    wait_until(lambda: len(booking.begun) == 4, what="both messages to come again")
    one.wait_settled()
    assert bodies(one) == (["1", "2"] * 2 if replay else ["1", "2"])


# -- cleaning ----------------------------------------------------------------------------------------------------------


def age(stage: Stage, days: float) -> None:
    with stage.database.connection() as connection:
        connection.execute(
            "UPDATE mqlayer_app.inbox SET applied_at = applied_at - %s * interval '1 day', "
            "kept_at = kept_at - %s * interval '1 day'",
            (days, days),
        )


def clean(stage: Stage, horizon_s: float = 7 * DAY_S) -> int:
    return clean_inbox(runtime_of(stage.database, stage.prefix, application=stage.database), horizon_s=horizon_s)


def test_rows_go_once_they_are_older_than_the_horizon(one: Stage) -> None:
    """Case 77."""
    one.send([("k", b"1"), ("l", b"2")])
    one.consume(Booking(one.dsn))
    one.wait_settled()
    assert clean(one) == 0
    age(one, 6.9)
    assert clean(one) == 0
    assert inbox_stats(one.database)[0].messages == 2
    age(one, 0.2)
    assert clean(one) == 2
    assert clean(one) == 0
    assert inbox_stats(one.database) == []


def test_what_is_not_settled_stays_however_old_it_is(one: Stage) -> None:
    """Case 77: its partition's oldest message holds all later ones, which may be delivered again with it."""
    once, twice = threading.Event(), threading.Event()

    def die(body: bytes, ctx: Context) -> None:
        if body == b"1":
            once.set()
            twice.wait(20)

    one.clock = lambda: time.time() - 30 * DAY_S
    one.send([("k", b"1"), ("l", b"2")])
    app = one.consume(Booking(one.dsn, die))
    assert once.wait(20)
    wait_until(lambda: len(bodies(one)) == 2, what="both effects")
    age(one, 29)
    assert clean(one) == 0
    # What was applied before the unsettled message was published is not of an unsettled one; by a day, for its clock.
    age(one, 1.5)
    assert clean(one) == 0
    twice.set()
    one.wait_settled()
    app.stop()
    assert clean(one) == 2


def test_what_was_applied_before_all_unsettled_messages_goes(one: Stage) -> None:
    one.send([("k", b"1")])
    app = one.consume(Booking(one.dsn))
    one.wait_settled()
    app.stop()
    age(one, 8)
    one.send([("k", b"2")])
    assert not one.all_settled()
    assert clean(one) == 1


@pytest.mark.parametrize("policy", some_of(["park", "dead_letter"], 2))
def test_what_is_parked_or_dead_stays_until_it_is_handled_or_gone(one: Stage, policy: str) -> None:
    """Case 77: both may be delivered again at any time."""
    done = threading.Event()

    def reject(body: bytes, ctx: Context) -> None:
        if body == b"1" and not done.is_set():
            raise Reject("not now")

    one.send([("k", b"1"), ("l", b"2")])
    booking = Booking(one.dsn, reject)
    one.consume(booking, policy=policy, attempt_limit=1)
    one.wait_settled()
    age(one, 8)
    assert clean(one) == 1
    age(one, 6)
    assert clean(one) == 0
    age(one, 2)
    assert clean(one) == 0, "kept again, for as long"
    assert bodies(one).count("1") == 1
    done.set()
    table = "parked_message" if policy == "park" else "dead_message"
    with one.database.connection() as connection:
        connection.execute(f"DELETE FROM mqlayer.{table}".encode())
    age(one, 8)
    assert clean(one) == 1


@pytest.mark.full
def test_nothing_of_a_group_goes_while_a_node_does_not_answer(one: Stage) -> None:
    one.send([("k", b"1")])
    app = one.consume(Booking(one.dsn))
    one.wait_settled()
    app.stop()
    age(one, 30)
    with one.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET armed_run_id = 'another'")
    assert clean(one) == 0
    with one.database.connection() as connection:
        run = one.redis.info("server")["run_id"]
        connection.execute("UPDATE mqlayer.node SET armed_run_id = %s", (run,))
    assert clean(one) == 1


def test_rows_of_groups_that_nobody_knows_go_by_age(database_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first a bounded number per group, and all with time for it."""
    monkeypatch.setattr(inbox_cleanup, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(inbox_cleanup, "ROUNDS", 1)
    with Database(database_dsn) as database:
        with kept_session(database_dsn) as connection:
            for group in (7, 8):
                for seq in range(1, 4):
                    record_effect(connection, entry(seq, group=group))
        assert [(row.group_id, row.messages) for row in inbox_stats(database)] == [(7, 3), (8, 3)]
        found = find_effect(database, 7, "3:512:2")
        assert found is not None
        assert (found.source, found.lp, found.seq) == (3, 512, 2)
        assert find_effect(database, 7, "3:512:9") is None
        runtime = runtime_of(database, "mq", application=database)
        assert clean_inbox(runtime, horizon_s=0.0) == 2
        assert clean_inbox(runtime, horizon_s=0.0, at_most_s=60.0) == 4
