"""Move due delayed messages to the outbox."""

from __future__ import annotations

from typing import Final, NamedTuple

from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

log = event_logger(__name__)

ROWS_AT_ONCE: Final = 500


class DelayedRelease(NamedTuple):
    """Moved messages; seconds until the next, or None."""

    moved: int
    next_s: float | None


def release_on(connection: Connection, *, wait_ms: int) -> DelayedRelease:
    """Move up to 500 due messages, each once, on an autocommit connection. Waits up to `wait_ms` for a busy, overdue
    LP."""
    failpoint("delayed.before_release")
    row = connection.execute(query("delayed_release"), {"limit": ROWS_AT_ONCE, "wait_ms": wait_ms}).fetchone()
    moved, next_s = row or (0, None)
    if moved:
        failpoint("delayed.after_release")
        log.debug("delayed_released", extra={"moved": moved})
    return DelayedRelease(moved, next_s)
