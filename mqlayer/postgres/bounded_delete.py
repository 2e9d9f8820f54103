"""Delete rows in bounded steps, to hold locks briefly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, LiteralString

from mqlayer.postgres.database import Database

ROWS_AT_ONCE: Final = 10_000
ROUNDS: Final = 100


def forget_rows(database: Database, statement: LiteralString, facts: Mapping[str, Any]) -> int:
    """Repeat a statement that deletes up to `limit` rows; return the sum, at most a million."""
    gone = 0
    with database.connection() as connection:
        for _ in range(ROUNDS):
            row = connection.execute(statement, {**facts, "limit": ROWS_AT_ONCE}).fetchone()
            count = int(row[0]) if row is not None else 0
            gone += count
            if count < ROWS_AT_ONCE:
                break
    return gone
