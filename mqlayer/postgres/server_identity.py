"""Detect a replaced Postgres, which may lack commits."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query

NOT_REPORTED: Final = 0
SUSPECT: Final = -1
"""Instead of timelines: unreported; commits missing."""

log = event_logger(__name__)


def meet_server(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    """Compare the server with the control schema's record; return whether it was replaced.

    If so, numbers skip possible losses, and all nodes wait for arming (`server_seen_v1`). Does nothing without schema
    or rights. Raises the driver's error for a standby.
    """
    known = connection.execute(query("server_known")).fetchone()
    if known is None or not known[0]:
        return False
    row = connection.execute(query("server_seen")).fetchone()
    if row is None or not row[0]:
        return False
    log.warning("postgres_replaced", extra={"reason": "another timeline: all nodes are armed again"})
    return True
