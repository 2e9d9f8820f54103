"""Nodes and topics for tests of direct publishing, and the question that decides them: what do the partitions hold?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import redis
from pydantic import SecretStr

from mqlayer.domain.routing import Route
from mqlayer.errors import PublishUnknown
from mqlayer.postgres.database import Database
from mqlayer.producing import Producer, ProducerOptions
from mqlayer.redis.keys import PartitionKeys, partition_keys
from mqlayer.redis.node_connection import Node
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, rearm_node, register_node
from tests.fixtures.kept_connections import ask_postgres
from tests.proof.history import Append
from tests.proof.runtimes import runtime_of
from tests.proof.streams import read_partition


@dataclass
class ProducerWorld:
    """A control database and nodes. `urls` are what producers use, `direct_urls` lead to the servers themselves."""

    dsn: str
    prefix: str
    urls: list[str]
    direct_urls: list[str] = field(default_factory=list)
    routes: dict[str, Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.direct_urls = self.direct_urls or list(self.urls)
        for number, url in enumerate(self.urls, start=1):
            self._register(number, url)

    def add_node(self, url: str) -> None:
        """Register one more node."""
        self.urls.append(url)
        self.direct_urls.append(url)
        self._register(len(self.urls), url)

    def _register(self, number: int, url: str) -> None:
        with Database(self.dsn) as database:
            register_node(runtime_of(database), name=f"node-{number}", url=url)

    def add_topic(self, name: str = "orders", **options: Any) -> Route:
        """Create a topic."""
        with Database(self.dsn) as database:
            self.routes[name] = create_topic(runtime_of(database, self.prefix), name, **options)
        return self.routes[name]

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of a producer of this world."""
        return Settings(dsn=SecretStr(self.dsn), key_prefix=self.prefix, **changes)

    @contextmanager
    def producer(
        self, *, close_within_s: float = 20.0, options: dict[str, Any] | None = None, **changes: Any
    ) -> Iterator[Producer]:
        """Lend a producer; `changes` are settings, `options` the producer's own."""
        producer = Producer(self.settings(**changes), name="test", options=ProducerOptions(**(options or {})))
        try:
            yield producer
        finally:
            producer.close(close_within_s)

    def client(self, node: int = 1) -> redis.Redis:
        """Return a plain client of a node's server."""
        return redis.Redis.from_url(self.direct_urls[node - 1], protocol=2)

    def rearm(self, node: int = 1) -> tuple[Node, int]:
        """Arm a node's present run, as an operator or a worker does."""
        with Database(self.dsn) as database:
            return rearm_node(runtime_of(database, self.prefix), f"node-{node}")

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Return what a query of the control database says."""
        return ask_postgres(self.dsn, sql, arguments)

    def partitions(self, topic: str = "orders") -> list[tuple[int, int]]:
        """Return a topic's partitions with their nodes, in the order of their making."""
        return [
            (partition, node)
            for partition, node in self.rows(
                "SELECT p.partition_id, p.node_id FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id) "
                "WHERE t.name = %s ORDER BY p.partition_id",
                topic,
            )
        ]

    def keys(self, partition: int) -> PartitionKeys:
        """Return the names of a partition's keys."""
        return partition_keys(self.prefix, partition)

    def records(self, topic: str = "orders") -> list[Append]:
        """Return every record of a topic's partitions."""
        found: list[Append] = []
        for partition, node in self.partitions(topic):
            with self.client(node) as client:
                found += read_partition(client, self.prefix, partition, topic)
        return found

    def chains(self, topic: str = "orders") -> dict[tuple[int, int], list[str]]:
        """Return the values of each source's LP in order, after checking that every chain is dense from 1 on."""
        chains: dict[tuple[int, int], list[Append]] = defaultdict(list)
        for record in self.records(topic):
            chains[record.source, record.lp].append(record)
        for name, chain in chains.items():
            assert [record.seq for record in chain] == list(range(1, len(chain) + 1)), f"chain of {name}"
        return {name: [record.value for record in chain] for name, chain in chains.items()}

    def by_key(self, topic: str = "orders") -> dict[str | None, list[str]]:
        """Return the values of each key in order; every chain must be dense."""
        self.chains(topic)
        found: dict[str | None, list[str]] = defaultdict(list)
        for record in self.records(topic):
            found[record.key].append(record.value)
        return dict(found)

    def state(self, partition: int, node: int = 1, **facts: object) -> None:
        """Change a partition's meta by hand."""
        with self.client(node) as client:
            client.hset(self.keys(partition).meta, mapping={name: str(value) for name, value in facts.items()})

    def successor(self, parent: int, *, topic: str = "orders", node: int = 1, state: str = "importing") -> int:
        """Make another partition for a partition's range, as a move does: its row, and its meta in a state."""
        rows = self.rows(
            "INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, state) "
            "SELECT topic_id, %s, lp_from, lp_to, 'importing' FROM mqlayer.partition WHERE partition_id = %s "
            "RETURNING partition_id, lp_from, lp_to",
            node,
            parent,
        )
        partition, lp_from, lp_to = rows[0]
        facts = {"topic": topic, "lp_from": lp_from, "lp_to": lp_to, "change": "7", "next": 1, "first": 1}
        self.state(partition, node, state=state, **facts)
        return int(partition)

    def hand_over(self, parent: int, successor: int, *, parent_node: int = 1, node: int = 1) -> None:
        """Load the parent's marks into the successor and open it."""
        with self.client(parent_node) as old, self.client(node) as new:
            marks: Any = old.hgetall(self.keys(parent).marks)
            if marks:
                new.hset(self.keys(successor).marks, mapping=marks)
        self.state(successor, node, state="open")

    def switch(self, parent: int, successor: int, *, topic: str = "orders") -> None:
        """Put the next route version in force: the successor in the parent's place."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute(
                "INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id) "
                "SELECT r.topic_id, r.version + 1, r.lp_from, r.lp_to, "
                "CASE WHEN r.partition_id = %s THEN %s ELSE r.partition_id END "
                "FROM mqlayer.route r JOIN mqlayer.topic t ON t.topic_id = r.topic_id AND t.version = r.version "
                "WHERE t.name = %s",
                (parent, successor, topic),
            )
            connection.execute("UPDATE mqlayer.topic SET version = version + 1 WHERE name = %s", (topic,))


def send_to_the_end(producer: Producer, topic: str, *, timeout_s: float, **facts: Any) -> None:
    """Send a message that is to be refused; where its time ends while a try is under way, its future tells that."""
    try:
        producer.send(topic, timeout_s=timeout_s, **facts)
    except PublishUnknown as error:
        if error.future is None:
            raise
        error.future.result(20)
