"""What to do with the outbox of a database that was restored or copied: its numbers belong to the original."""

from __future__ import annotations

from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


def adopt(application: Database) -> int:
    """Let a database that took its original's place go on: a new source, and what waits is sent by it.

    For a restored or moved database whose original is gone. What the database does not know to be relayed is numbered
    anew and sent, so what the original had relayed since the copy arrives twice, and nothing is lost. Publishing waits
    meanwhile. The next relay ends the original's source. Returns how many messages wait. Raises InvalidInput while a
    relay works on the outbox.
    """
    return application.transaction(lambda connection: _renew(connection, keep=True))


def renew(application: Database) -> None:
    """Give a copy whose original lives on an identity of its own, and empty its outbox.

    What waits in it, delayed messages too, is the original's to send; what was published in the copy since is lost, so
    do this first. The original's source goes on.
    Raises InvalidInput while a relay works on the outbox.
    """
    application.transaction(lambda connection: _renew(connection, keep=False))


def _renew(connection: Connection, *, keep: bool) -> int:
    row = connection.execute(query("outbox_renew"), {"keep": keep}).fetchone()
    if not keep:
        connection.execute(query("delayed_drop"))
        connection.execute(query("voided_drop"))
    return int(row[0]) if row is not None else 0
