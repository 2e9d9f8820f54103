"""Access to the outbox that this process reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.postgres.server_identity import NOT_REPORTED, SUSPECT


@contextmanager
def borrow_outbox(application: Database | None, outbox_uuid: UUID) -> Iterator[Connection | None]:
    """Lend a connection to this outbox; None if this process reads another."""
    if application is None:
        yield None
        return
    with application.connection() as outbox:
        identity = outbox.execute(query("outbox_identity")).fetchone()
        yield outbox if identity is not None and identity[0] == outbox_uuid else None


def is_replaced(outbox: Connection) -> bool:
    """Whether the outbox's timeline differs from the recorded one; record the first."""
    row = outbox.execute(query("outbox_server")).fetchone()
    if row is None:
        return False
    _, known, now, _ = row
    if known == SUSPECT:
        return True
    if now == NOT_REPORTED:
        return False
    if known is None or known == NOT_REPORTED:
        outbox.execute(query("outbox_server_put"), {"timeline": now})
        return False
    return bool(known != now)


def may_lack_commits_of(outbox: Connection, control: Connection) -> bool:
    """Whether an outbox may lack commits that the control database has.

    Schemas in one server lose commits together; without a new timeline, only those in one database.
    """
    if not is_replaced(outbox):
        return False
    identity = outbox.execute(query("outbox_identity")).fetchone()
    server = outbox.execute(query("outbox_server")).fetchone()
    known = control.execute(query("server_of_schema")).fetchone()
    if identity is None or server is None or known is None:
        return True
    system_id, _, database = identity[2].partition("/")
    same_server = (system_id, server[2]) == known[:2]
    return not same_server or (server[1] == SUSPECT and database != known[2])
