"""Forgetting what the fence noted for messages that can't come again."""

from __future__ import annotations

import logging
from typing import Final

from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

HORIZON_S: Final = 7 * 86_400
"""How old an applied message must be before a repetition of it is ruled out."""


def clean_fence(application: Database, *, horizon_s: float = HORIZON_S) -> int:
    """Forget applied messages older than the redelivery horizon, in bounded steps; return how many rows went."""
    gone = forget_rows(application, query("fence_clean"), {"horizon_s": horizon_s})
    if gone:
        log.info("fence_cleaned", extra={"rows": gone})
    return gone
