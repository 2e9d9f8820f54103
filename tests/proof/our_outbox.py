"""Our outbox in the form of the planted ones, so that the same writers race on it and the same judge reads it."""

from __future__ import annotations

from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from tests.proof.history import MessageEvent, Publish

TOPIC = "orders"
TOPIC_ID = 1


class OurOutbox:
    """Our SQL function, read by the rule of our relay: per LP, `seq > cursor` in the order of seq."""

    topic = TOPIC

    def __init__(self, *, source: int = 1) -> None:
        self._source = source

    def prepare(self, connection: Connection) -> None:
        facts = {"topic_id": TOPIC_ID, "name": TOPIC, "body_limit": 1_000}
        connection.execute(query("outbox_topic_put"), facts)
        connection.execute(query("outbox_counters_put"), facts)

    def publish(self, connection: Connection, key: str, value: str) -> MessageEvent:
        row = connection.execute("SELECT mqlayer_app.publish_v2(%s, %s, %s)", (TOPIC, key, value.encode())).fetchone()
        assert row is not None
        return Publish(topic=TOPIC, key=key, source=self._source, lp=lp_of(key.encode()), seq=row[0], value=value)

    def reader(self) -> OurReader:
        return OurReader()


class OurReader:
    def __init__(self) -> None:
        self._cursors: dict[int, int] = {}

    def read(self, connection: Connection) -> list[MessageEvent]:
        lps = connection.execute("SELECT lp FROM mqlayer_app.counter WHERE seq > 0 ORDER BY lp").fetchall()
        return [message for (lp,) in lps for message in self._read_lp(connection, lp)]

    def _read_lp(self, connection: Connection, lp: int) -> list[MessageEvent]:
        rows = connection.execute(
            "SELECT seq, key, body FROM mqlayer_app.outbox WHERE topic_id = %s AND lp = %s AND seq > %s ORDER BY seq",
            (TOPIC_ID, lp, self._cursors.get(lp, 0)),
        ).fetchall()
        if rows:
            self._cursors[lp] = rows[-1][0]
        return [Publish(topic=TOPIC, key=key, source=1, lp=lp, seq=seq, value=body.decode()) for seq, key, body in rows]
