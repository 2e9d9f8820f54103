"""What the stores of a run hold, for its histories."""

from __future__ import annotations

import psycopg
import redis

from mqlayer.postgres.database import Connection, Database
from mqlayer.topics import list_nodes
from tests.chaos.actors import GROUP, TOPIC
from tests.proof.history import Effect, History
from tests.proof.streams import read_records


def drained(connection: Connection) -> bool:
    """Say whether the sink holds as many messages as were committed to the outbox."""
    row = connection.execute(
        "SELECT (SELECT count(*) FROM sink), (SELECT sum(seq) FROM mqlayer_app.counter)"
    ).fetchone()
    return row is not None and row[0] == row[1]


def note_streams(history: History, dsn: str, prefix: str, partitions: list[int]) -> None:
    """Write down what the partitions hold."""
    with Database(dsn) as database:
        clients = [redis.Redis.from_url(node.url) for node in list_nodes(database)]
    for partition in partitions:
        for client in clients:
            for event in read_records(client, prefix, partition, TOPIC):
                history.note(event)


def note_sink(history: History, dsn: str) -> None:
    """Write down the effects, in the order in which the sink got them."""
    with psycopg.connect(dsn) as connection:
        for effect in effects_in(connection):
            history.note(effect)


def effects_in(connection: Connection) -> list[Effect]:
    """Return the effects, in the order in which the sink got them."""
    rows = connection.execute(
        "SELECT position, key, source, lp, seq, epoch, partition, value FROM sink ORDER BY position"
    ).fetchall()
    return [
        Effect(
            topic=TOPIC, key=key, source=source, lp=lp, seq=seq, value=value,
            group=GROUP, partition=partition, epoch=epoch, place=place,
        )
        for place, key, source, lp, seq, epoch, partition, value in rows
    ]  # fmt: skip
