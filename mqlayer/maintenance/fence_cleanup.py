"""Forget fence rows of messages that cannot return: docs/design/decisions/0094-fence-walked-by-blocks.md."""

from __future__ import annotations

import time
from typing import Final

from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)

HORIZON_S: Final = 7 * 86_400
"""No redelivery is older."""
PARTS: Final = 12
"""Of the table."""
BLOCKS_AT_ONCE: Final = 128
"""1 MB, about 10,000 rows."""
ROWS: Final = 1_000_000


def clean_fence(
    application: Database, *, horizon_s: float = HORIZON_S, at_most_s: float = 0.0, every_s: float | None = None
) -> int:
    """Forget messages past the horizon; return how many: a million, and more until `at_most_s`.

    `every_s`: read the next of a large table's `PARTS` parts.
    """
    gone, until = 0, time.monotonic() + at_most_s
    with application.connection() as connection:

        def walk(block: int, blocks: int) -> tuple[int, int, float]:
            facts = {"horizon_s": horizon_s, "block": block, "blocks": blocks}
            ((forgotten, size, now),) = connection.execute(query("fence_clean"), facts).fetchall()
            return forgotten, size, now

        # From here on, the table's new blocks have new rows.
        _, size, now = walk(0, 0)
        first, end = _part(size, None if every_s is None else int(now // every_s))
        for block in range(first, end, BLOCKS_AT_ONCE):
            gone += walk(block, min(BLOCKS_AT_ONCE, end - block))[0]
            if gone >= ROWS and time.monotonic() >= until:
                break
    if gone:
        log.info("fence_cleaned", extra={"rows": gone})
    return gone


def _part(size: int, turn: int | None) -> tuple[int, int]:
    """Return the blocks to read."""
    if turn is None or size <= PARTS * BLOCKS_AT_ONCE:
        return 0, size
    part = turn % PARTS
    return size * part // PARTS, size * (part + 1) // PARTS
