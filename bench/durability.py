"""Durability classes against the default, in one run: a primary with one replica, on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg
import redis

from bench.registry import Line, bench, compared, in_turn, note
from bench.stage import BODY, FSYNCS, KEYS, Fsync, Stage, System, line_name
from mqlayer import outbox
from mqlayer.domain.durability import DURABILITIES, Durability
from mqlayer.errors import ConfigurationRefused
from mqlayer.producing import Message, Producer
from mqlayer.redis.keys import partition_keys
from mqlayer.relay import Relay
from mqlayer.topics import create_topic, set_durability, set_node_replicas

MANY = 20_000
MANY_SYNCS = 2_000
FEW = 300
FEW_SYNCS = 5
"""With `everysec`, class disk waits up to a second for each."""
BACKLOG = 20_000
ROUNDS = 3
REPLICA = 9
POLL_S = 0.001


@bench("durability")
def durability(stage: Stage) -> Iterator[Line]:
    """Batches, single messages and the relay until all is recorded, by class, against class `node`."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync)
        follow(stage, system, fsync)
        topics = classes(system)
        yield from _lines("durability[publish]", fsync, system, topics, _batches)
        yield from _lines("durability[publish_one]", fsync, system, topics, _singles)
        yield from _lines("durability[relay]", fsync, system, topics, _relayed)


def follow(stage: Stage, system: System, fsync: Fsync) -> None:
    """Give the node a replica, and declare it."""
    primary, replica = stage.redis(fsync), stage.redis(fsync, REPLICA)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(primary.port))
        while client.info("replication")["master_link_status"] != "up":
            time.sleep(POLL_S)
    set_node_replicas(system.runtime, "n1", 1)


def classes(system: System) -> dict[Durability, str]:
    """Make a topic of each class that the node can hold."""
    topics = dict[Durability, str]()
    for one in DURABILITIES:
        name = f"bench-{one}"
        create_topic(system.runtime, name, partitions=1)
        try:
            set_durability(system.runtime, name, one)
        except ConfigurationRefused as error:
            note(f"  without {one}: {error}")
        else:
            topics[one] = name
    return topics


def _lines(
    name: str,
    fsync: Fsync,
    system: System,
    topics: dict[Durability, str],
    run: Callable[[System, Durability, str, Fsync], float],
) -> Iterator[Line]:
    figures = in_turn(ROUNDS, {one: partial(run, system, one, topic, fsync) for one, topic in topics.items()})
    for one in topics:
        if one != "node":
            ours, default = figures[one], figures["node"]
            yield compared(f"{line_name(name, fsync)}: {one}", ours, default, unit="msg/s", target=None)


def _batches(system: System, durability: Durability, topic: str, fsync: Fsync) -> float:
    count = MANY_SYNCS if durability == "disk" and fsync == "everysec" else MANY
    with Producer(system.settings, name="bench") as producer:
        producer.send(topic, key="warm", body=BODY)
        messages = [Message(KEYS[number % 1_000], BODY) for number in range(count)]
        return _rate(system, count, lambda: producer.send_many(topic, messages, timeout_s=300))


def _singles(system: System, durability: Durability, topic: str, fsync: Fsync) -> float:
    count = FEW_SYNCS if durability == "disk" and fsync == "everysec" else FEW
    with Producer(system.settings, name="bench") as producer:
        producer.send(topic, key="warm", body=BODY)

        def send() -> None:
            for number in range(count):
                producer.send(topic, key=KEYS[number], body=BODY)

        return _rate(system, count, send)


def _relayed(system: System, _: Durability, topic: str, __: Fsync) -> float:
    """Relay a backlog until all of it is recorded, so that rows may go."""
    with psycopg.connect(system.dsn) as connection:
        with outbox.transaction(connection) as tx:
            for number in range(BACKLOG):
                tx.publish(topic, key=KEYS[number % 1_000], body=BODY)
        waiting = (
            "SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0) FROM mqlayer_app.counter c "
            "LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp)"
        )
        relay = Relay(system.settings)
        running = threading.Thread(target=relay.run)

        def work() -> None:
            running.start()
            while True:
                row = connection.execute(waiting).fetchone()
                connection.commit()
                if row == (0,):
                    return
                time.sleep(POLL_S * 20)

        rate = _rate(system, BACKLOG, work)
        relay.stop()
        running.join()
        connection.execute("TRUNCATE mqlayer_app.outbox")
    return rate


def _rate(system: System, count: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    with system.client() as client, system.database.connection() as connection:
        for (partition,) in connection.execute("SELECT partition_id FROM mqlayer.partition").fetchall():
            client.xtrim(partition_keys(system.settings.key_prefix, partition).log, maxlen=0, approximate=False)
    return count / seconds
