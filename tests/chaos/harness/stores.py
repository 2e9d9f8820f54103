"""What the stores of a run hold, for its histories."""

from __future__ import annotations

from tests.chaos.actors import GROUP, TOPIC
from tests.fixtures.kept_connections import ask_postgres
from tests.proof.history import Effect, History
from tests.proof.node_client import client_at
from tests.proof.streams import read_records


def drained(dsn: str) -> bool:
    """Say whether the sink holds as many messages as were committed to the outbox."""
    statement = "SELECT (SELECT count(*) FROM sink), (SELECT sum(seq) FROM mqlayer_app.counter)"
    [(there, committed)] = ask_postgres(dsn, statement)
    return bool(there == committed)


def note_streams(history: History, dsn: str, prefix: str, partitions: list[int]) -> None:
    """Write down what the partitions hold."""
    clients = [client_at(url) for (url,) in ask_postgres(dsn, "SELECT url FROM mqlayer.node")]
    for partition in partitions:
        for client in clients:
            for event in read_records(client, prefix, partition, TOPIC):
                history.note(event)


def note_sink(history: History, dsn: str) -> None:
    """Write down the effects, in the order in which the sink got them."""
    for effect in effects_in(dsn):
        history.note(effect)


def effects_in(dsn: str) -> list[Effect]:
    """Return the effects, in the order in which the sink got them."""
    statement = "SELECT position, key, source, lp, seq, epoch, partition, value FROM sink ORDER BY position"
    return [
        Effect(
            topic=TOPIC, key=key, source=source, lp=lp, seq=seq, value=value,
            group=GROUP, partition=partition, epoch=epoch, place=place,
        )
        for place, key, source, lp, seq, epoch, partition, value in ask_postgres(dsn, statement)
    ]  # fmt: skip
