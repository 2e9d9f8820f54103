"""Databases, nodes and topics of one test, its relays and producers, and what its partitions hold in the end."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from pydantic import SecretStr

from mqlayer.domain.routing import Route
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.producing import Producer, ProducerOptions
from mqlayer.redis.keys import PartitionKeys, partition_keys
from mqlayer.redis.node_connection import Node
from mqlayer.relay import Relay, RelayLimits
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, rearm_node, register_node
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres, kept_database, kept_session
from tests.fixtures.roles import role_dsn
from tests.fixtures.wait import wait_until
from tests.proof.history import Append
from tests.proof.node_client import client_at
from tests.proof.runtimes import runtime_of
from tests.proof.streams import read_partition, record_count

QUICK = RelayLimits(sweep_s=0.05, compare_s=0.1, progress_s=0.1, heartbeat_s=0.1, late_s=0.5)
"""Limits with which what a relay does at times is done often."""
LEASE_S = 0.5

Chains = dict[tuple[str, int], list[tuple[int, str | None, str]]]
"""Per topic and LP: seq, key and value of each message, in order."""


@dataclass
class World:
    """A control database with an outbox in it, or in another database, and the nodes at the URLs given."""

    dsn: str
    key_prefix: str
    urls: Sequence[str]
    server_urls: Sequence[str] = ()
    """Where a test reads the partitions, if `urls` lead through proxies."""
    app_dsn: str | None = None
    control_dsn: str | None = None
    """Other ways to the same database, such as through a proxy."""
    right: Right | None = None
    """The one right of the Postgres role that its processes log in as; None: they are superusers."""
    routes: dict[str, Route] = field(default_factory=dict)
    """The first route version of each topic."""

    def __post_init__(self) -> None:
        for number, url in enumerate(self.urls, start=1):
            self._register(number, url)

    @property
    def database(self) -> Database:
        """The control database, as an operator reaches it; closed after the test."""
        return kept_database(self.dsn)

    def runtime(self, *, actor: str = "api") -> Runtime:
        """Return an operator's runtime, with outbox, on the settings of this world's processes."""
        return runtime_of(self.database, settings=self.settings(), application=self.database, actor=actor)

    def add_node(self, url: str) -> None:
        """Register one more node."""
        self.server_urls = [*self.server_urls, url] if self.server_urls else ()
        self.urls = [*self.urls, url]
        self._register(len(self.urls), url)

    def _register(self, number: int, url: str) -> None:
        register_node(runtime_of(self.database), name=f"node-{number}", url=url)

    def add_topic(self, name: str = "orders", **options: Any) -> Route:
        """Create a topic that the outbox may publish to."""
        runtime = runtime_of(self.database, self.key_prefix, application=self.database)
        self.routes[name] = create_topic(runtime, name, **options)
        return self.routes[name]

    def arm_node(self, node: int = 1) -> tuple[Node, int]:
        """Arm a node's present run, as an operator or a worker does."""
        return rearm_node(runtime_of(self.database, self.key_prefix), f"node-{node}")

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of a process of this world."""
        return Settings(
            dsn=SecretStr(self._as_process(self.control_dsn or self.dsn)),
            app_dsn=SecretStr(self._as_process(self.app_dsn or self.dsn)),
            key_prefix=self.key_prefix,
            **({"lease_s": LEASE_S} | changes),
        )

    def _as_process(self, dsn: str) -> str:
        return role_dsn(dsn, self.right, made_at=self.dsn) if self.right else dsn

    def publish(self, count: int, *, topic: str = "orders", keys: int = 20, tag: str = "m") -> None:
        """Publish messages of a few keys, one transaction each."""
        with kept_session(self.dsn, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.executemany(
                "SELECT mqlayer_app.publish_v1(%s, %s, %s)",
                [(topic, f"key-{number % keys}", f"{tag}-{number}".encode()) for number in range(count)],
            )

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Run a statement in the outbox's database and return its rows."""
        return ask_postgres(self.dsn, sql, arguments)

    def published(self) -> Chains:
        """Return what the outbox holds."""
        chains: Chains = defaultdict(list)
        for topic, lp, seq, key, body in self.rows(
            "SELECT t.name, o.lp, o.seq, o.key, o.body "
            "FROM mqlayer_app.outbox o JOIN mqlayer_app.topic t USING (topic_id) ORDER BY t.name, o.lp, o.seq"
        ):
            chains[topic, lp].append((seq, key, bytes(body).decode()))
        return chains

    def relayed(self) -> Chains:
        """Return what the partitions hold, in the order of their offsets."""
        chains: Chains = defaultdict(list)
        for record in self.records():
            chains[record.topic, record.lp].append((record.seq, record.key, record.value))
        return chains

    def client(self, node: int = 1) -> redis.Redis:
        """Return a plain client of a node's server."""
        return client_at((self.server_urls or self.urls)[node - 1])

    def partitions(self, topic: str | None = None) -> list[tuple[str, int, int]]:
        """Return the topic, partition and node of each partition, or of those of one topic, in the order of making."""
        return [
            (name, partition, node)
            for name, partition, node in self.rows(
                "SELECT t.name, p.partition_id, p.node_id FROM mqlayer.partition p "
                "JOIN mqlayer.topic t USING (topic_id) ORDER BY p.partition_id"
            )
            if topic in (None, name)
        ]

    def keys(self, partition: int) -> PartitionKeys:
        """Return the names of a partition's keys."""
        return partition_keys(self.key_prefix, partition)

    def records(self, topic: str | None = None) -> list[Append]:
        """Return every record of every partition, or of those of one topic."""
        found: list[Append] = []
        with ExitStack() as cleanup:
            clients: dict[int, redis.Redis] = {}
            for name, partition, node in self.partitions(topic):
                if node not in clients:
                    clients[node] = cleanup.enter_context(self.client(node))
                found += read_partition(clients[node], self.key_prefix, partition, name)
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

    def whole(self) -> bool:
        """Say whether the partitions hold what the outbox holds: per LP nothing lost, repeated or reversed."""
        [(published,)] = self.rows(
            "SELECT count(*)::int FROM mqlayer_app.outbox JOIN mqlayer_app.topic USING (topic_id)"
        )
        # To count is cheaper than to read, and tests ask until it is so.
        return _record_count(self) >= published and self.relayed() == self.published()

    def wait_until_whole(self, *, timeout_s: float = 60.0) -> None:
        """Wait until it is."""
        wait_until(self.whole, timeout_s=timeout_s, what="every chain to be whole")
        for name, chain in self.relayed().items():
            assert [seq for seq, _, _ in chain] == list(range(1, len(chain) + 1)), f"chain of {name}"

    @contextmanager
    def relay(self, *, limits: RelayLimits = QUICK, **changes: Any) -> Iterator[Relay]:
        """Run a relay in a thread; its failure is raised at the end."""
        relay = Relay(self.settings(**changes), limits=limits)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                relay.run()
            except BaseException as error:  # noqa: BLE001  # handed to the test
                failures.append(error)

        thread = threading.Thread(target=run, name="relay", daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.stop()
            thread.join(timeout=30)
        assert not thread.is_alive(), "the relay does not stop"
        if failures:
            raise failures[0]

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

    def environment(self, failpoints: str = "", **more: str) -> Mapping[str, str]:
        """Return the environment of a process of this world."""
        return {
            **os.environ,
            "MQLAYER_DSN": self._as_process(self.control_dsn or self.dsn),
            "MQLAYER_APP_DSN": self._as_process(self.app_dsn or self.dsn),
            "MQLAYER_KEY_PREFIX": self.key_prefix,
            "MQLAYER_LEASE_S": str(LEASE_S),
            **armed(failpoints),
            **more,
        }

    @contextmanager
    def relay_process(
        self, *, failpoints: str = "", chunk_rows: int = 2_000, lease_s: float = LEASE_S
    ) -> Iterator[Process]:
        """Run `mqlayer relay` as a process; killed at the end where it still runs."""
        more = {"MQLAYER_RELAY_CHUNK_ROWS": str(chunk_rows), "MQLAYER_LEASE_S": str(lease_s)}
        process = start_python("mqlayer", "relay", env=self.environment(failpoints, **more))
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def _record_count(world: World) -> int:
    """Return how many records all partitions hold, commands included."""
    on_nodes: dict[int, list[int]] = defaultdict(list)
    for _, partition, node in world.partitions():
        on_nodes[node].append(partition)
    count = 0
    for node, partitions in on_nodes.items():
        with world.client(node) as client:
            count += record_count(client, world.key_prefix, partitions)
    return count
