"""New identities for outboxes of restored or copied databases."""

from __future__ import annotations

from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


def adopt(application: Database) -> int:
    """Continue an outbox whose original is gone, under a new source; return how many messages wait.

    Sends again all rows not recorded as relayed, so some arrive twice. Publishing waits meanwhile. Raises InvalidInput
    while a relay works on the outbox.
    """
    return application.transaction(lambda connection: _renew(connection, keep=True))


def renew(application: Database) -> None:
    """Give a copy, whose original continues, its own identity; empty its outbox, delayed messages included.

    Loses the copy's messages: call it first. Raises InvalidInput while a relay works on the outbox.
    """
    application.transaction(lambda connection: _renew(connection, keep=False))


def _renew(connection: Connection, *, keep: bool) -> int:
    row = connection.execute(query("outbox_renew"), {"keep": keep}).fetchone()
    if not keep:
        connection.execute(query("delayed_drop"))
        connection.execute(query("voided_drop"))
    return int(row[0]) if row is not None else 0
