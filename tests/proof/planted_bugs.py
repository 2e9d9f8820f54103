"""Well-known ways to lose the order of a key, kept to prove that the tests would notice.

Two outbox recipes. Both number messages by a sequence and take no lock, so a number drawn earlier may become visible
later.

by id           `WHERE id > cursor ORDER BY id`: passes over a message that becomes visible late. It loses.
by transaction  `WHERE xid < pg_snapshot_xmin(…) ORDER BY xid, id`: blocked_by until no older transaction is open, so it
                loses nothing. But a transaction gets its number at its first write, not at its message: one that wrote
                something else first sorts before another whose message was committed before. It reverses.
"""

from __future__ import annotations

from typing import Final, Protocol

from mqlayer.postgres.database import Connection
from tests.proof.history import MessageEvent, Publish

SOURCE: Final = 1
TOPIC: Final = "planted"
CHUNK_ROWS: Final = 500


class Reader(Protocol):
    """Reads an outbox from its beginning on, as a relay would."""

    def read(self, connection: Connection) -> list[MessageEvent]:
        """Return the next messages, in the order in which a relay would send them; nothing if there are none."""


class Outbox(Protocol):
    """A way to publish to one topic inside a transaction, and to read what was published."""

    topic: str

    def prepare(self, connection: Connection) -> None:
        """Make what it needs, empty."""

    def publish(self, connection: Connection, key: str, value: str) -> MessageEvent:
        """Publish in the connection's transaction; return the message with its identity."""

    def reader(self) -> Reader:
        """Return a reader that has read nothing."""


class PlantedOutbox:
    """A table with a number and a transaction id per message, as the recipes have it; publishing takes no lock."""

    topic: str = TOPIC

    def prepare(self, connection: Connection) -> None:
        """Make the table anew."""
        connection.execute("DROP TABLE IF EXISTS planted_outbox")
        connection.execute(
            "CREATE TABLE planted_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
            " xid xid8 NOT NULL DEFAULT pg_current_xact_id(), key text NOT NULL, value text NOT NULL)"
        )
        connection.execute("CREATE INDEX ON planted_outbox (xid, id)")

    def publish(self, connection: Connection, key: str, value: str) -> MessageEvent:
        """Insert a row; its id is the seq."""
        row = connection.execute(
            "INSERT INTO planted_outbox (key, value) VALUES (%s, %s) RETURNING id", (key, value)
        ).fetchone()
        assert row is not None
        return _message(key, row[0], value)


class OutboxById(PlantedOutbox):
    """The recipe that loses."""

    def reader(self) -> Reader:
        """Return a reader by `id > cursor`."""
        return _ReaderById()


class OutboxByTransaction(PlantedOutbox):
    """The recipe that reverses."""

    def reader(self) -> Reader:
        """Return a reader by transaction and id, below the oldest open transaction."""
        return _ReaderByTransaction()


class _ReaderById:
    def __init__(self) -> None:
        self._rows_cursor = 0

    def read(self, connection: Connection) -> list[MessageEvent]:
        rows = connection.execute(
            "SELECT id, key, value FROM planted_outbox WHERE id > %s ORDER BY id LIMIT %s",
            (self._rows_cursor, CHUNK_ROWS),
        ).fetchall()
        if rows:
            self._rows_cursor = rows[-1][0]
        return [_message(key, number, value) for number, key, value in rows]


class _ReaderByTransaction:
    def __init__(self) -> None:
        self._transaction, self._rows_cursor = "0", 0

    def read(self, connection: Connection) -> list[MessageEvent]:
        rows = connection.execute(
            "SELECT xid::text, id, key, value FROM planted_outbox"
            " WHERE (xid, id) > (%s::xid8, %s) AND xid < pg_snapshot_xmin(pg_current_snapshot())"
            " ORDER BY planted_outbox.xid, id LIMIT %s",
            (self._transaction, self._rows_cursor, CHUNK_ROWS),
        ).fetchall()
        if rows:
            self._transaction, self._rows_cursor = rows[-1][:2]
        return [_message(key, number, value) for _, number, key, value in rows]


def _message(key: str, number: int, value: str) -> MessageEvent:
    return Publish(topic=TOPIC, key=key, source=SOURCE, seq=number, value=value)


def read_successors_at_once(connection: Connection) -> None:
    """Take the gates away: give a group every partition that is open or sealed, wherever it is in their parents."""
    connection.execute(
        "CREATE OR REPLACE VIEW mqlayer.readable AS SELECT g.group_id, p.partition_id, g.deployment"
        " FROM mqlayer.consumer_group g"
        " JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')"
        " WHERE NOT EXISTS (SELECT FROM mqlayer.drained d"
        "                   WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)"
    )
