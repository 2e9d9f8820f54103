"""A pool whose server restarted: the next who asks gets a connection, whatever the old ones were."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from psycopg_pool import ConnectionPool

from mqlayer.postgres.database import Database
from tests.fixtures.servers import StartPostgres


def test_connections_that_a_restart_broke_cost_no_waiting(start_postgres: StartPostgres) -> None:
    """By itself the pool waits a second for the first broken one, and twice as long for each further one."""
    postgres = start_postgres()
    with Database(postgres.create_database("pool"), max_size=4, timeout_s=2.0) as database:
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
