"""A pool whose server restarted: the next who asks gets a connection, whatever the old ones were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from psycopg_pool import ConnectionPool

from mqlayer.errors import ConfigurationRefused, Conflict, InvalidInput, MqlayerError, StoreUnavailable
from mqlayer.postgres import session_setup
from mqlayer.postgres.database import Connection, Database
from tests.fixtures.servers import StartPostgres
from tests.fixtures.wait import wait_until


def test_connections_that_a_restart_broke_cost_no_waiting(start_postgres: StartPostgres) -> None:
    """By itself the pool waits a second for the first broken one, and twice as long for each further one."""
    postgres = start_postgres()
    with Database(postgres.create_database("pool"), max_size=4, timeout_s=5.0) as database:
        with ExitStack() as lent:
            pids = {
                lent.enter_context(database.connection()).execute("SELECT pg_backend_pid()").fetchone()
                for _ in range(4)
            }
        assert len(pids) == 4
        postgres.kill()
        postgres.start()
        for _ in range(5):
            with database.connection() as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_is_too_old_is_refused_by_its_name(database_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/matrix --only too-old` has a real one, which does not know all settings of a session."""
    monkeypatch.setattr(session_setup, "OLDEST_POSTGRES", 99)
    with (
        Database(database_dsn, timeout_s=5.0) as database,
        pytest.raises(ConfigurationRefused, match=r"this is Postgres \d+\.\d+: mqlayer needs Postgres 99 or later"),
    ):
        database.connection().__enter__()


def test_a_server_that_is_down_is_ours_to_report_and_no_lines_of_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "psycopg.pool")
    down = "postgresql://postgres@127.0.0.1:1/none"
    with Database(down, timeout_s=0.3) as database, pytest.raises(StoreUnavailable):
        database.connection().__enter__()
    assert [record for record in caplog.records if record.name == "psycopg.pool"] == []
    with ConnectionPool(down, open=True, reconnect_timeout=0, name="of a user"):
        wait_until(lambda: [record for record in caplog.records if record.name == "psycopg.pool"], what="its line")


def test_who_is_interrupted_while_a_connection_is_looked_at_gives_it_back(
    database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with Database(database_dsn, max_size=1, timeout_s=2.0) as database:
        with monkeypatch.context() as patch:
            patch.setattr(ConnectionPool, "check_connection", staticmethod(interrupt))
            with pytest.raises(KeyboardInterrupt):
                database.connection().__enter__()
        with database.connection() as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_who_asks_a_pool_whose_own_threads_are_late_is_connected_nevertheless(
    database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine they may begin after the time is over; the server has answered long since."""
    go_on, set_up = threading.Event(), Database._set_up

    def late(database: Database, connection: Connection) -> None:
        go_on.wait(30)
        set_up(database, connection)

    monkeypatch.setattr(Database, "_set_up", late)
    with Database(database_dsn, max_size=1, timeout_s=0.2) as database:
        try:
            with database.connection() as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
        finally:
            go_on.set()


def test_who_finds_all_connections_in_use_is_told_how_many_there_are(database_dsn: str) -> None:
    with Database(database_dsn, max_size=2, timeout_s=1.0) as database, ExitStack() as lent:
        for _ in range(2):
            lent.enter_context(database.connection())
        with pytest.raises(StoreUnavailable, match="all 2 connections of this process are in use"):
            lent.enter_context(database.connection())


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("SELECT 2147483647 + %s", InvalidInput),
        ("SELECT 'infinity'::timestamptz, %s", InvalidInput),
        ("INSERT INTO mqlayer.job (name) VALUES (repeat('x', 64 * %s))", Conflict),
    ],
)
def test_a_value_that_is_refused_or_that_no_program_can_hold_is_no_unavailable_store(
    database_dsn: str, statement: str, error: type[MqlayerError]
) -> None:
    with Database(database_dsn) as database, pytest.raises(error), database.connection() as connection:
        connection.execute(statement.encode(), [1]).fetchall()


@pytest.fixture
def noted(database_dsn: str) -> Iterator[Database]:
    """A database with an empty table, `note`."""
    with Database(database_dsn, max_size=2, timeout_s=10.0) as database:
        with database.connection() as connection:
            connection.execute("CREATE TABLE public.note (number int)")
        yield database


def numbers(database: Database) -> list[tuple[int]]:
    with database.connection() as connection:
        return connection.execute("SELECT number FROM public.note").fetchall()


def test_a_transaction_that_stood_still_runs_again(noted: Database) -> None:
    """Postgres ends the session of a process that stops under a lock; nothing of it is committed."""
    seen: list[int] = []

    def work(connection: Connection) -> None:
        seen.append(connection.info.backend_pid)
        connection.execute("INSERT INTO public.note VALUES (%s)", [len(seen)])
        if len(seen) == 1:
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = '10ms'")
            with noted.connection() as other:
                living = "SELECT FROM pg_stat_activity WHERE pid = %s"
                wait_until(lambda: not other.execute(living, seen).rowcount, what="its session to be ended")
        connection.execute("SELECT 1")

    noted.transaction(work)
    assert len(set(seen)) == 2
    assert numbers(noted) == [(2,)]
    with pytest.raises(StoreUnavailable):
        noted.transaction(lambda connection: connection.execute("SELECT pg_terminate_backend(pg_backend_pid())"))
    seen.clear()
    with pytest.raises(StoreUnavailable):
        noted.transaction(work, timeout_s=0)


def test_a_transaction_whose_commit_is_unknown_does_not_run_again(noted: Database) -> None:
    with noted.connection() as connection:
        connection.execute(
            "CREATE FUNCTION public.end_session() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON public.note "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.end_session()"
        )
    runs: list[int] = []

    def work(connection: Connection) -> None:
        runs.append(1)
        connection.execute("INSERT INTO public.note VALUES (1)")

    with pytest.raises(StoreUnavailable):
        noted.transaction(work)
    assert (runs, numbers(noted)) == ([1], [])
