"""An outbox, nodes and a topic for tests of the relay, and the question that decides them: is every chain whole?"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import redis
from pydantic import SecretStr

from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.redis.keys import PartitionKeys, partition_keys
from mqlayer.relay import Relay, RelayLimits, relay_once
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.roles import role_dsn
from tests.fixtures.wait import wait_until
from tests.proof.history import Append
from tests.proof.runtimes import runtime_of
from tests.proof.streams import read_partition

QUICK = RelayLimits(sweep_s=0.05, compare_s=0.1, progress_s=0.05, heartbeat_s=0.05, late_s=0.5)
"""Limits with which what a relay does at times is done often."""
LEASE_S = 0.5

Snapshot = list[tuple[str, PartitionKeys, dict[bytes, bytes | None]]]
"""Per partition: its node's address, its keys, and the value of each."""
Chains = dict[tuple[str, int], list[tuple[int, str | None, str]]]
"""Per topic and LP: seq, key and value of each message, in order."""


@dataclass
class OutboxWorld:
    """One outbox whose control schema is in the same database, and the nodes at the URLs given."""

    dsn: str
    key_prefix: str
    urls: Sequence[str]
    topics: list[str] = field(default_factory=list)
    app_dsn: str | None = None
    control_dsn: str | None = None
    """Other ways to the same database, such as through a proxy."""
    right: Right | None = None
    """The one right of the Postgres role that its processes log in as; None: they are superusers."""

    def __post_init__(self) -> None:
        with Database(self.dsn) as database:
            for number, url in enumerate(self.urls, start=1):
                register_node(runtime_of(database), name=f"node-{number}", url=url)

    def add_topic(self, name: str, **options: Any) -> None:
        """Create a topic that the outbox may publish to."""
        with Database(self.dsn) as database:
            create_topic(runtime_of(database, self.key_prefix, application=database), name, **options)
        self.topics.append(name)

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of a relay of this world."""
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
        with psycopg.connect(self.dsn, autocommit=True) as connection, connection.cursor() as cursor:
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

    def snapshot(self) -> Snapshot:
        """Return what the partitions hold now."""
        found: Snapshot = []
        for url, keys in self._partition_keys():
            with redis.Redis.from_url(url) as client:
                found.append((url, keys, {key: client.dump(key) for key in (keys.log, keys.meta, keys.marks)}))
        return found

    def fall_back(self, before: Snapshot, *, state: str = "open") -> None:
        """Let the partitions hold again what they held, as after an append-only file that was cut, in a state."""
        for url, keys, values in before:
            with redis.Redis.from_url(url) as client, client.pipeline(transaction=True) as pipeline:
                pipeline.delete(*values)
                for key, value in values.items():
                    if value is not None:
                        pipeline.restore(key, 0, value)
                pipeline.hset(keys.meta, "state", state)
                pipeline.execute()

    def remove(self) -> None:
        """Remove the partitions from their nodes, whose runs go on."""
        for url, keys in self._partition_keys():
            with redis.Redis.from_url(url) as client:
                client.delete(keys.log, keys.meta, keys.marks)

    def set_state(self, state: str) -> None:
        """Let every partition say that it is `open` or `sealed`, whatever Postgres says."""
        for url, keys in self._partition_keys():
            with redis.Redis.from_url(url) as client:
                client.hset(keys.meta, "state", state)

    def _partition_keys(self) -> list[tuple[str, PartitionKeys]]:
        places = self.rows("SELECT node_id, partition_id FROM mqlayer.partition ORDER BY partition_id")
        return [(self.urls[node_id - 1], partition_keys(self.key_prefix, partition)) for node_id, partition in places]

    def records(self) -> Iterator[Append]:
        """Return every record of every partition."""
        places = self.rows(
            "SELECT t.name, p.partition_id, p.node_id FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id) "
            "ORDER BY p.partition_id"
        )
        for topic, partition, node_id in places:
            with redis.Redis.from_url(self.urls[node_id - 1]) as client:
                yield from read_partition(client, self.key_prefix, partition, topic)

    def whole(self) -> bool:
        """Say whether the partitions hold what the outbox holds: per LP nothing lost, repeated or reversed."""
        return self.relayed() == self.published()

    def wait_until_whole(self, *, timeout_s: float = 60.0) -> None:
        """Wait until it is."""
        wait_until(self.whole, timeout_s=timeout_s, what="every chain to be whole")
        numbers = [seq for chain in self.relayed().values() for seq in [entry[0] for entry in chain]]
        assert all([e[0] for e in chain] == list(range(1, len(chain) + 1)) for chain in self.relayed().values()), (
            numbers
        )

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


def counts_by_key(chains: Chains, keys: Iterable[str]) -> dict[str, int]:
    """Return how many messages each key has in all chains."""
    counts = dict.fromkeys(keys, 0)
    for chain in chains.values():
        for _, key, _ in chain:
            if key in counts:
                counts[key] += 1
    return counts


def relayed_world(dsn: str, key_prefix: str, url: str, *, count: int, keys: int) -> OutboxWorld:
    """Return a world of one node and the topic orders of one partition, with so many messages that were relayed."""
    world = OutboxWorld(dsn, key_prefix, [url])
    world.add_topic("orders", partitions=1)
    world.publish(count, keys=keys)
    relay_once(world.settings(), limits=QUICK)
    return world
