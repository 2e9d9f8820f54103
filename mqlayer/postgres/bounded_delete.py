"""Delete rows in bounded steps, to hold locks briefly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any, Final, LiteralString

from mqlayer.postgres.database import Database

ROWS_AT_ONCE: Final = 10_000
ROUNDS: Final = 100


def forget_rows(
    database: Database, statement: LiteralString, facts: Mapping[str, Any], *, at_most_s: float = 0.0
) -> int:
    """Repeat a statement that deletes up to `limit` rows; return the sum: a million, and more until `at_most_s`."""
    gone, until = 0, time.monotonic() + at_most_s
    with database.connection() as connection:
        for tried in itertools.count(1):
            row = connection.execute(statement, {**facts, "limit": ROWS_AT_ONCE}).fetchone()
            count = int(row[0]) if row is not None else 0
            gone += count
            if count < ROWS_AT_ONCE or (tried >= ROUNDS and time.monotonic() >= until):
                break
    return gone
