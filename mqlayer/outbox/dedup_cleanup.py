"""Delete expired dedup ids."""

from __future__ import annotations

from mqlayer.logs import event_logger
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)


def clean_dedup(application: Database, *, window_s: float) -> int:
    """Delete expired dedup ids in bounded steps; return their number."""
    gone = forget_rows(application, query("dedup_clean"), {"window_s": window_s})
    if gone:
        log.info("dedup_cleaned", extra={"rows": gone})
    return gone
