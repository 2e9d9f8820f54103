"""Every way out of a transaction, and who may publish: what is collected is written or rolled back, never forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from mqlayer import outbox
from mqlayer.domain.routing import lp_of
from mqlayer.errors import BodyTooLarge, InvalidInput, KeyTooLarge, NotFound, StoreUnavailable, TransactionConflict
from mqlayer.postgres.caller_connections import Statement, run_one_async
from mqlayer.postgres.database import translate
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.outboxes import BODY_LIMIT, CommittedOutbox
from tests.fixtures.roles import grant_application
from tests.fixtures.sqlalchemy_engines import url_of

ROLE = "shop_of_outbox_tests"


@pytest.fixture
def url(outbox_dsn: str) -> sqlalchemy.URL:
    """The outbox's database as SQLAlchemy names it."""
    return url_of(outbox_dsn)


@pytest.fixture
def engine(url: sqlalchemy.URL) -> Iterator[sqlalchemy.Engine]:
    """An engine on it."""
    engine = sqlalchemy.create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def shop_dsn(outbox_dsn: str) -> Iterator[str]:
    """The outbox's database for an application's role, with the rights to publish and to consume."""
    role = sql.Identifier(ROLE)
    with psycopg.connect(outbox_dsn, autocommit=True) as connection:
        if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (ROLE,)).rowcount:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        grant_application(outbox_dsn, ROLE)
        yield make_conninfo(outbox_dsn, user=ROLE)
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))


def test_a_two_phase_transaction_that_rolls_back_sends_nothing_later(
    engine: sqlalchemy.Engine, committed: CommittedOutbox
) -> None:
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        outbox.publish(connection, "orders", key="a", body=b"rolled back")
        transaction.rollback()
        with connection.begin():
            outbox.publish(connection, "orders", key="a", body=b"kept")
    assert committed.bodies() == [b"kept"]


def test_a_two_phase_transaction_that_is_not_prepared_sends_at_its_commit(
    engine: sqlalchemy.Engine, committed: CommittedOutbox
) -> None:
    with engine.connect() as connection, connection.begin_twophase():
        outbox.publish(connection, "orders", key="a", body=b"1")
    assert committed.bodies() == [b"1"]


def test_a_core_connection_is_usable_after_a_refusal_at_commit(
    engine: sqlalchemy.Engine, committed: CommittedOutbox
) -> None:
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE written (n int)"))
        outbox.publish(connection, "nowhere", key="a", body=b"1")
        with pytest.raises(NotFound):
            connection.commit()
        connection.rollback()
        outbox.publish(connection, "orders", key="a", body=b"2")
        connection.commit()
        assert connection.execute(sqlalchemy.text("SELECT to_regclass('written')")).scalar() is None
    assert committed.bodies() == [b"2"]


def test_a_session_that_joins_a_rolled_back_outer_transaction_sends_nothing(
    engine: sqlalchemy.Engine, committed: CommittedOutbox
) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.publish(session, "orders", key="a", body=b"1")
            session.commit()
        outer.rollback()
    assert committed.messages() == []


def test_a_session_may_publish_while_it_commits(engine: sqlalchemy.Engine, committed: CommittedOutbox) -> None:
    with Session(engine) as session:
        sqlalchemy.event.listen(
            session, "before_commit", lambda each: outbox.publish(each, "orders", key="a", body=b"late")
        )
        session.execute(sqlalchemy.text("SELECT 1"))
        session.commit()
    assert committed.bodies() == [b"late"]


def test_an_aborted_transaction_whose_error_was_swallowed_says_so(outbox_dsn: str, committed: CommittedOutbox) -> None:
    with kept_session(outbox_dsn) as connection:
        with pytest.raises(InvalidInput, match="aborted"), outbox.transaction(connection) as tx:  # noqa: PT012
            tx.publish("orders", key="a", body=b"1")
            with pytest.raises(psycopg.errors.DivisionByZero):
                connection.execute("SELECT 1 / 0")
        outbox.publish(connection, "orders", key="a", body=b"2")
    assert committed.bodies() == [b"2"]


def give_up() -> None:
    raise psycopg.Rollback


def test_an_explicit_rollback_out_of_the_block_sends_nothing(outbox_dsn: str, committed: CommittedOutbox) -> None:
    with kept_session(outbox_dsn) as connection:
        with outbox.transaction(connection) as tx:
            tx.publish("orders", key="a", body=b"1")
            give_up()
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert committed.messages() == []


def test_a_connection_that_dies_before_the_commit_raises(outbox_dsn: str, committed: CommittedOutbox) -> None:
    def publish_and_end(other: psycopg.Connection[tuple[object, ...]]) -> None:
        with psycopg.connect(outbox_dsn) as connection, outbox.transaction(connection) as tx:
            tx.publish("orders", key="a", body=b"1")
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))

    with kept_session(outbox_dsn, autocommit=True) as other, pytest.raises(StoreUnavailable):
        publish_and_end(other)
    assert committed.messages() == []


def test_one_statement_runs_on_asynchronous_sessions_too(url: sqlalchemy.URL) -> None:
    """What the fence uses."""

    async def ask() -> list[tuple[object, ...]]:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session, engine.connect() as connection:
            seven = Statement("SELECT %(n)s::int", {"n": 7})
            answers = [await run_one_async(each, seven) for each in (session, connection)]
        await engine.dispose()
        return answers

    assert asyncio.run(ask()) == [(7,), (7,)]


def test_a_cancelled_task_sends_nothing(outbox_dsn: str, committed: CommittedOutbox) -> None:
    async def publish_and_wait(published: asyncio.Event) -> None:
        async with await psycopg.AsyncConnection.connect(outbox_dsn) as connection, outbox.atransaction(connection):
            await outbox.apublish(connection, "orders", key="a", body=b"1")
            published.set()
            await asyncio.Event().wait()

    async def cancel() -> None:
        published = asyncio.Event()
        task = asyncio.create_task(publish_and_wait(published))
        await published.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert committed.messages() == []


def test_large_batches_keep_each_keys_order_over_several_topics(outbox_dsn: str, committed: CommittedOutbox) -> None:
    calls = [(("orders", "invoices")[n % 2], f"key-{n % 50}", b"%d" % n) for n in range(20_000)]
    with kept_session(outbox_dsn) as connection, outbox.transaction(connection) as tx:
        for topic, key, body in calls:
            tx.publish(topic, key=key, body=body)
    sent = committed.messages()
    assert sorted(sent) == sorted(calls)
    places = [(topic, lp_of((key or "").encode())) for topic, key, _ in sent]
    assert places == sorted(places)
    for topic, key in {call[:2] for call in calls}:
        assert [m[2] for m in sent if m[:2] == (topic, key)] == [c[2] for c in calls if c[:2] == (topic, key)]


def test_serializable_transactions_on_one_lp_conflict_and_run_again(
    outbox_dsn: str, committed: CommittedOutbox
) -> None:
    with psycopg.connect(outbox_dsn) as one, psycopg.connect(outbox_dsn) as two:
        two.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        two.execute("SELECT 1")
        outbox.publish(one, "orders", key="a", body=b"1")
        one.commit()
        with pytest.raises(TransactionConflict) as caught:
            outbox.publish(two, "orders", key="a", body=b"2")
        assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
        two.rollback()
        outbox.publish(two, "orders", key="a", body=b"2")
    assert committed.messages() == [("orders", "a", b"1"), ("orders", "a", b"2")]


def test_refusals_carry_their_facts(outbox_dsn: str) -> None:
    with kept_session(outbox_dsn, autocommit=True) as connection:
        with pytest.raises(BodyTooLarge) as body:
            outbox.publish(connection, "orders", key="a", body=bytes(BODY_LIMIT + 1))
        with pytest.raises(psycopg.Error) as key:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', repeat('k', 513), '')")
        with pytest.raises(psycopg.Error) as null:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', NULL)")
    assert (body.value.topic, body.value.size, body.value.limit) == ("orders", BODY_LIMIT + 1, BODY_LIMIT)
    told = translate(key.value)
    assert isinstance(told, KeyTooLarge)
    assert (told.size, told.limit) == (513, 512)
    assert isinstance(translate(null.value), InvalidInput)


@pytest.mark.parametrize(
    "arrays",
    [
        "'[0:1]={orders,orders}', '{a,b}', '{1,2}'",
        "'{orders,orders}', '[0:1]={a,b}', '{1,2}'",
        "'{orders,orders}', '{a,b}', '[2:3]={1,2}'",
        "'{orders,orders}', '{a,b}', '{1,2}', ('[0:1]=' || ARRAY[NULL, NULL]::jsonb[]::text)::jsonb[]",
        "'{{orders},{orders}}', '{a,b}', '{1,2}'",
        "'{orders,orders}', '{{a},{b}}', '{1,2}'",
        "'{orders,orders}', '{a,b}', '{{1,2}}'",
        "'{orders,orders}', '{a,b}', '{1,2}', '{{NULL},{NULL}}'",
    ],
)
def test_arrays_whose_elements_are_not_numbered_from_one_are_refused(
    outbox_dsn: str, committed: CommittedOutbox, arrays: str
) -> None:
    """They would be published with other messages' keys or bodies, or with none."""
    with kept_session(outbox_dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.Error, match="one dimension") as refused:
            connection.execute(f"SELECT mqlayer_app.publish_many_v1({arrays})".encode())
        assert refused.value.sqlstate == "MQ005"
        assert "array_agg" in str(translate(refused.value))
        assert connection.execute("SELECT mqlayer_app.publish_many_v1('{}', '{}', '{}', '{}')").fetchone() == (0,)
        assert connection.execute("SELECT mqlayer_app.publish_many_v1('{}', NULL, NULL)").fetchone() == (0,)
    assert committed.messages() == []


def test_a_trigger_publishes_with_the_row(shop_dsn: str, outbox_dsn: str, committed: CommittedOutbox) -> None:
    with psycopg.connect(outbox_dsn) as owner:
        owner.execute(
            "CREATE TABLE sale (id int, customer text);"
            "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            "  PERFORM mqlayer_app.publish_v1('orders', NEW.customer, convert_to(row_to_json(NEW)::text, 'UTF8'));"
            "  RETURN NULL; END $$;"
            "CREATE TRIGGER tell AFTER INSERT ON sale FOR EACH ROW EXECUTE FUNCTION tell();"
        )
        owner.execute(sql.SQL("GRANT INSERT ON sale TO {}").format(sql.Identifier(ROLE)))
    with psycopg.connect(shop_dsn) as connection:
        connection.execute("INSERT INTO sale VALUES (1, 'ann'), (2, 'bob')")
        connection.commit()
        connection.execute("INSERT INTO sale VALUES (3, 'ann')")
        connection.rollback()
    assert committed.messages() == [
        ("orders", "ann", b'{"id":1,"customer":"ann"}'),
        ("orders", "bob", b'{"id":2,"customer":"bob"}'),
    ]


def test_an_applications_role_publishes_and_fences_and_can_do_nothing_else(
    shop_dsn: str, outbox_dsn: str, committed: CommittedOutbox
) -> None:
    with psycopg.connect(shop_dsn, autocommit=True) as connection:
        outbox.publish(connection, "orders", key="a", body=b"1", headers={"kind": "sale"})
        with outbox.transaction(connection) as tx:
            tx.publish("orders", key="a", body=b"2")
            with connection.transaction():
                tx.publish("invoices", body=b"3")
        answer = connection.execute("SELECT answer FROM mqlayer_app.fence_v1(1, 7::smallint, 1, 'a', 1, 1)")
        assert answer.fetchone() == ("current",)
        assert committed.bodies() == [b"1", b"2", b"3"]
        assert forbidden(connection, objects_of(outbox_dsn)) == []


def objects_of(dsn: str) -> list[str]:
    """Return a statement for each thing that an application must not do: use a table, a sequence, another function."""
    with kept_session(dsn) as connection:
        relations = connection.execute(
            "SELECT n.nspname || '.' || c.relname, c.relkind "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname IN ('mqlayer', 'mqlayer_app') AND c.relkind IN ('r', 'p', 'v', 'S')"
        ).fetchall()
    statements = []
    for name, kind in relations:
        # By the one a process knows whether its code fits; USAGE on the others says for all topics, or all groups.
        if name in (
            "mqlayer_app.protocol",
            "mqlayer_app.migration",
            "mqlayer_app.publish_any",
            "mqlayer_app.consume_any",
        ):
            continue
        if kind == "S":
            statements.append(f"SELECT nextval('{name}')")
        elif kind == "v":
            # Whether a view can be written to at all is looked at before who may.
            statements.append(f"SELECT FROM {name}")
        else:
            statements += [f"SELECT FROM {name}", f"DELETE FROM {name}", f"INSERT INTO {name} DEFAULT VALUES"]
    assert len(statements) > 30
    return [
        *statements,
        "SELECT mqlayer_app.outbox_rotate_v1(0::smallint)",
        "SELECT mqlayer_app.fence_clean_v1(interval '0', 1000)",
        "CREATE TABLE mqlayer_app.mine (n int)",
    ]


def forbidden(connection: psycopg.Connection[tuple[object, ...]], statements: list[str]) -> list[str]:
    """Return the statements that are not refused for want of privilege."""
    passed = []
    for statement in statements:
        try:
            connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege:
            continue
        except psycopg.Error as error:
            passed.append(f"{statement}: {error}")
        else:
            passed.append(statement)
    return passed


def test_a_search_path_of_the_callers_own_changes_nothing(shop_dsn: str, committed: CommittedOutbox) -> None:
    """A definer's function must not be led to somebody else's functions or operators."""
    with psycopg.connect(shop_dsn, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE counter (topic_id int, lp smallint, seq bigint)")
        connection.execute("SET search_path = pg_temp, public")
        outbox.publish(connection, "orders", key="a", body=b"1")
    assert committed.bodies() == [b"1"]


def by_one_call_each(connection: psycopg.Connection) -> None:
    connection.execute("SELECT mqlayer_app.publish_v1('orders', NULL, '') FROM generate_series(1, 10000)")


def by_collecting(connection: psycopg.Connection) -> None:
    with outbox.transaction(connection) as tx:
        for _ in range(10_000):
            tx.publish("orders", body=b"")


@pytest.mark.parametrize("publish", [by_one_call_each, by_collecting])
def test_10_000_messages_without_a_key_reach_every_partition_evenly(
    outbox_dsn: str, committed: CommittedOutbox, publish: Callable[[psycopg.Connection], None]
) -> None:
    """Case 3: whatever ranges of LPs partitions serve, here eight equal ones, give or take a sixth (6 deviations)."""
    with kept_session(outbox_dsn) as connection:
        publish(connection)
    counts = Counter(lp // 128 for lp in committed.lps())
    assert set(counts) == set(range(8))
    assert all(1_040 <= count <= 1_460 for count in counts.values()), counts
