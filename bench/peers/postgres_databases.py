"""The databases that systems get in the run's Postgres."""

from __future__ import annotations

from typing import Final

STORED_IN_POSTGRES: Final = "committed and synced in one Postgres"


def analyzed(dsn: str) -> None:
    """Let the planner know the tables, as autovacuum does within a minute."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
