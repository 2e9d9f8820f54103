"""Measure one system: publish, then consume, then latencies at a steady rate, then order with slow handlers."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from bench.peers.ground import Ground
from bench.peers.load import KEYS
from bench.peers.peer import Peer, PeerMissing, PeerServers
from bench.peers.postgres_databases import analyzed
from bench.peers.processor_time import used_by
from bench.peers.report import PeerRow
from bench.registry import note

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 240.0
MOST_PACED: Final = 2_500
MOST_ORDERED: Final = 1_000
# Fewer keys than handlers, which take 0 to 20 ms: without order, messages of a key run beside each other.
ORDER_KEYS: Final = 4
ORDER_PAUSE_MS: Final = 20.0


def measure(peer: Peer, ground: Ground, messages: int) -> PeerRow:
    """Return the figures of a system, or why there are none."""
    try:
        if peer.packages:
            ground.packages(peer).ensure()
        with peer.serve(ground) as servers:
            return figures(SystemClients(peer, ground, servers), messages)
    except (PeerMissing, ClientFailed, OSError, psycopg.Error) as error:
        # The others' rows are worth having without this one's.
        return PeerRow(name=peer.name, skipped=str(error))


def figures(clients: SystemClients, messages: int) -> PeerRow:
    """Return a system's figures."""
    peer, servers = clients.peer, clients.servers
    messages = min(messages, peer.most_messages or messages)
    before_s = used_by(servers.pids)
    published = clients.publish("rates", messages, KEYS)
    consumed = clients.result(clients.consume("rates", messages))
    cpu_s = used_by(servers.pids) - before_s + published["cpu_s"] + consumed["cpu_s"]
    note(f"  {peer.name}: publish {published['per_s']:,.0f}/s, consume {consumed['per_s']:,.0f}/s")
    paced = clients.paced(max(100, min(MOST_PACED, messages // 4)))
    note(f"  {peer.name}: p50 {paced['p50_ms']:.1f} ms, p99 {paced['p99_ms']:.1f} ms")
    count = max(100, min(MOST_ORDERED, messages // 10))
    clients.publish("order", count, ORDER_KEYS)
    ordered = clients.result(clients.consume("order", count, pause_ms=ORDER_PAUSE_MS))
    note(f"  {peer.name}: {ordered['out_of_order']} of {count} out of order")
    return PeerRow(
        name=peer.name,
        messages=messages,
        publish_per_s=published["per_s"],
        consume_per_s=consumed["per_s"],
        p50_ms=paced["p50_ms"],
        p99_ms=paced["p99_ms"],
        worst_ms=paced["worst_ms"],
        ordered=ordered["handled"],
        out_of_order=ordered["out_of_order"],
        promises_order=peer.promises_order,
        cpu_s_per_million=cpu_s / messages * 1e6,
        stored=peer.stored,
        shape=peer.shape,
        versions=servers.versions,
        sources=peer.sources,
    )


class ClientFailed(Exception):
    """A client's process ended without figures."""


class SystemClients:
    """Starts the clients of a system and reads their figures."""

    def __init__(self, peer: Peer, ground: Ground, servers: PeerServers) -> None:
        self.peer, self.servers = peer, servers
        self._command = peer.client(ground)
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "MQLAYER_LOG_LEVEL": "ERROR"}

    def publish(self, queue: str, count: int, keys: int) -> dict[str, Any]:
        """Publish; return the figures."""
        figures = self.result(self._start("publish", queue, count, keys))
        if self.peer.in_postgres:
            analyzed(self.servers.url)
        return figures

    def consume(self, queue: str, count: int, *, pause_ms: float = 0.0) -> subprocess.Popen[str]:
        """Start a consumer."""
        return self._start("consume", queue, count, 0, pause_ms)

    def paced(self, count: int) -> dict[str, Any]:
        """Publish at a steady rate beside a consumer that has its first message behind it; return its figures.

        `pace` begins anew, so that the first message comes twice.
        """
        with self.consume("latency", count) as consumer:
            try:
                self.publish("latency", 1, KEYS)
                with ended_by(PATIENCE_S, consumer):
                    # A library may print a banner before.
                    if "began" not in (line.strip() for line in consumer.stdout or ()):
                        raise ClientFailed(f"its consumer got no message: {last_words(consumer)}")
                self.result(self._start("pace", "latency", count, KEYS))
                return self.result(consumer)
            finally:
                consumer.kill()

    def result(self, client: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for a client's figures. Raises ClientFailed."""
        with ended_by(PATIENCE_S, client):
            told, errors = client.communicate()
        last = told.strip().splitlines()[-1:] or [""]
        if client.returncode or not last[0].startswith("{"):
            raise ClientFailed(f"a client ended with {client.returncode} within {PATIENCE_S:g} s: {shortened(errors)}")
        found: dict[str, Any] = json.loads(last[0])
        return found

    def _start(self, role: str, queue: str, count: int, keys: int, pause_ms: float = 0.0) -> subprocess.Popen[str]:
        facts = (self.peer.name, role, self.servers.url, queue, count, keys, pause_ms)
        return subprocess.Popen(
            [*self._command, *map(str, facts)],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def last_words(client: subprocess.Popen[str]) -> str:
    """Return the end of what a client wrote to its standard error."""
    client.kill()
    return shortened(client.communicate()[1])


def shortened(text: str) -> str:
    """Return the end of a text in one line."""
    return " ".join(text.split())[-300:]


@contextmanager
def ended_by(within_s: float, client: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a client that is not done in time."""
    timer = threading.Timer(within_s, client.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
