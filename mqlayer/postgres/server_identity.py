"""Whether a Postgres is the one whose commits its schema is made of: a promoted standby, or a backup, may lack some."""

from __future__ import annotations

import logging
from typing import Any, Final

import psycopg

from mqlayer.postgres.queries import query

NOT_REPORTED: Final = 0
SUSPECT: Final = -1
"""In place of a timeline: of a Postgres that does not tell it, and where commits are known to be missing."""

log = logging.getLogger(__name__)


def meet_server(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    """Compare the server with what its control schema knows; say whether it is another one, and was seen to.

    Then every number goes on above what may have been lost, and all nodes wait to be armed, see `server_seen_v1`. Does
    nothing where there is no control schema, or this user has no business with it. Raises the driver's error for a
    standby.
    """
    known = connection.execute(query("server_known")).fetchone()
    if known is None or not known[0]:
        return False
    row = connection.execute(query("server_seen")).fetchone()
    if row is None or not row[0]:
        return False
    log.warning("postgres_replaced", extra={"reason": "another timeline: all nodes are armed again"})
    return True
