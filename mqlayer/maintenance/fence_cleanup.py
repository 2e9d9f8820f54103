"""Forget fence rows of messages that cannot return."""

from __future__ import annotations

from typing import Final

from mqlayer.logs import event_logger
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)

HORIZON_S: Final = 7 * 86_400
"""No redelivery is older."""


def clean_fence(application: Database, *, horizon_s: float = HORIZON_S, at_most_s: float = 0.0) -> int:
    """Forget messages past the horizon; return how many: a million, and more until `at_most_s`."""
    gone = forget_rows(application, query("fence_clean"), {"horizon_s": horizon_s}, at_most_s=at_most_s)
    if gone:
        log.info("fence_cleaned", extra={"rows": gone})
    return gone
