"""Forgetting dedup ids whose window is over."""

from __future__ import annotations

import logging
from typing import Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

ROWS_AT_ONCE: Final = 10_000
ROUNDS: Final = 100


def clean_dedup(application: Database, *, window_s: float) -> int:
    """Forget the outbox's dedup ids that are older than the window, in bounded steps; return how many."""
    gone = 0
    with application.connection() as connection:
        for _ in range(ROUNDS):
            row = connection.execute(query("dedup_clean"), {"window_s": window_s, "limit": ROWS_AT_ONCE}).fetchone()
            count = int(row[0]) if row is not None else 0
            gone += count
            if count < ROWS_AT_ONCE:
                break
    if gone:
        log.info("dedup_cleaned", extra={"rows": gone})
    return gone
