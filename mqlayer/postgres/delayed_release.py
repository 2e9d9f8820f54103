"""Moving delayed messages that are due to the outbox, for relays and for the periodic job."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

ROWS_AT_ONCE: Final = 500


class DelayedRelease(NamedTuple):
    """How many messages moved, and in how many seconds the next one is due; None for none."""

    moved: int
    next_s: float | None


def release_on(connection: Connection, *, wait_ms: int) -> DelayedRelease:
    """Move what is due, up to some hundreds, in one transaction of its own: each moves once, whoever dies.

    One busy LP whose message is overdue is waited for, so long at the most. The connection is in autocommit mode.
    """
    failpoint("delayed.before_release")
    row = connection.execute(query("delayed_release"), {"limit": ROWS_AT_ONCE, "wait_ms": wait_ms}).fetchone()
    moved, next_s = row or (0, None)
    if moved:
        failpoint("delayed.after_release")
        log.debug("delayed_released", extra={"moved": moved})
    return DelayedRelease(moved, next_s)
