"""Forgetting what the fence noted for messages that can't come again."""

from __future__ import annotations

import logging
from typing import Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

HORIZON_S: Final = 7 * 86_400
"""How old an applied message must be before a repetition of it is ruled out."""
ROWS_AT_ONCE: Final = 10_000
ROUNDS: Final = 100


def clean_fence(application: Database, *, horizon_s: float = HORIZON_S) -> int:
    """Forget applied messages older than the redelivery horizon, in bounded steps; return how many rows went."""
    gone = 0
    with application.connection() as connection:
        for _ in range(ROUNDS):
            row = connection.execute(query("fence_clean"), {"horizon_s": horizon_s, "limit": ROWS_AT_ONCE}).fetchone()
            count = int(row[0]) if row is not None else 0
            gone += count
            if count < ROWS_AT_ONCE:
                break
    if gone:
        log.info("fence_cleaned", extra={"rows": gone})
    return gone
