"""The relay's connection to each node. Slow work runs in the background, so no node delays others for long."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger, is_reported
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import TermToken, end_sources
from mqlayer.redis.roles import RedisRole
from mqlayer.relay.backoff import backoff_s
from mqlayer.relay.commit_check import CheckedNodeTerm, CommitChecker
from mqlayer.relay.lp_cursors import LpCursor, Target
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import RouteCache, cluster_partitions
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.nodes import rearm_node

log = event_logger(__name__)

REFRESH_TIMEOUT_S: Final = 5.0
"""A lease may be shorter than a query."""

SentRun = tuple[LpCursor, int, int]
"""Cursor, first seq, count."""


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """One unanswered append call."""

    target: Target
    runs: list[SentRun]
    traced: Sequence[bytes] = ()
    """The facts of messages with a trace."""


@dataclass(frozen=True, slots=True)
class MarksRequest:
    """One unanswered query for marks."""

    target: Target
    cursors: list[LpCursor]


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """One write to a node."""

    number: int
    sent_at: float
    requests: Sequence[AppendRequest | MarksRequest]


class ConnectedNode(NamedTuple):
    """A connection whose node knows our term."""

    connection: NodeConnection
    compared: CheckedNodeTerm


@dataclass(slots=True, eq=False)
class RelayNode:
    """One node. `synced`: its marks were read since it connected. `token`: names our term in appends.

    Appends go to `compared` partitions; `missing` ones await comparison.
    """

    node_id: NodeId
    address: str = ""
    connection: NodeConnection | None = None
    pending_writes: deque[PendingWrite] = field(default_factory=deque)
    synced: bool = False
    stalled: bool = False
    # It answered `absent` for a partition that Postgres places on it.
    suspect: bool = False
    failures: int = 0
    last_error: str = ""
    try_at: float = float("-inf")
    connecting: Future[ConnectedNode] | None = None
    token: TermToken = ""
    compared: frozenset[int] = frozenset()
    missing: set[int] = field(default_factory=set)
    comparing: tuple[frozenset[int], Future[frozenset[int]]] | None = None
    compare_failures: int = 0
    compare_at: float = float("-inf")

    def takes(self, partition: int) -> bool:
        """Whether messages may go to a partition; else its comparison becomes due."""
        if not self.usable:
            return False
        if partition not in self.compared:
            self.missing.add(partition)
            return False
        return True

    @property
    def undecided(self) -> bool:
        """Whether it, or a comparison of its partitions, neither succeeded nor failed yet."""
        if self.connection is None or not self.synced:
            return not self.failures
        return bool(self.missing or self.comparing) and not self.compare_failures

    @property
    def usable(self) -> bool:
        """Whether messages may go to this node."""
        return self.connection is not None and self.synced and not self.stalled


class RelayNodes:
    """A relay's nodes. Set `comparer` and `former` before the first `tend`."""

    comparer: CommitChecker

    def __init__(self, runtime: Runtime, routes: RouteCache, background: ThreadPoolExecutor) -> None:
        self._runtime, self._settings = runtime, runtime.settings
        self._routes, self._background = routes, background
        self._nodes: dict[int, RelayNode] = {}
        self.former: tuple[int, ...] = ()
        """The outbox's former sources. Nodes learn them before they get appends."""
        self._rng = random.Random()
        self._write_number = 0
        self._refreshing: Future[dict[NodeId, Node]] | None = None
        self._refreshed_at = self._refresh_began = time.monotonic()

    def __iter__(self) -> Iterator[RelayNode]:
        return iter(list(self._nodes.values()))

    @property
    def write_number(self) -> int:
        """The number of the last write."""
        return self._write_number

    @property
    def errors(self) -> tuple[str, ...]:
        """Why nodes are unusable. Thread-safe."""
        return tuple(node.last_error for node in self if node.failures and not node.synced)

    def node(self, node_id: int) -> RelayNode:
        """Return a node; `tend` connects a new one."""
        if node_id not in self._nodes:
            self._nodes[node_id] = RelayNode(NodeId(node_id))
        return self._nodes[node_id]

    def tend(self, now: float) -> list[RelayNode]:
        """Connect due nodes in the background; return the newly connected."""
        fresh = []
        for node in self:
            if node.connection is not None:
                continue
            if node.connecting is None and now >= node.try_at:
                node.connecting = self._background.submit(self._connect, node.node_id, node.suspect)
            elif node.connecting is not None and node.connecting.done() and self._take_connected(node, node.connecting):
                fresh.append(node)
        return fresh

    def compare(self, now: float) -> None:
        """Compare due partitions in the background."""
        for node in self:
            if node.comparing is not None and node.comparing[1].done():
                self._take_compared(node, *node.comparing, now)
            if node.connection is not None and node.missing and node.comparing is None and now >= node.compare_at:
                requests = frozenset(node.missing)
                work = self._background.submit(self._compare_more, node.node_id, requests, node.token)
                node.comparing = requests, work
                node.missing.clear()

    def _take_compared(
        self, node: RelayNode, requests: frozenset[int], comparing: Future[frozenset[int]], now: float
    ) -> None:
        node.comparing, reason = None, "the records are on a node that is away"
        try:
            node.compared |= comparing.result()
        except MqlayerError as error:
            reason = str(error)
        if requests <= node.compared:
            node.compare_failures = 0
            return
        node.compare_failures += 1
        node.compare_at = now + backoff_s(node.compare_failures, self._rng)
        shown = log.warning if is_reported(node.compare_failures) else log.debug
        waiting = sorted(requests - node.compared)
        shown("relay_not_compared", extra={"node": node.address, "partitions": waiting, "reason": reason})

    def _compare_more(self, node_id: NodeId, partitions: frozenset[int], token: TermToken) -> frozenset[int]:
        with self._others() as others:
            connection = others.to(node_id)
            if connection.is_cluster:
                self._end_former(connection, sorted(partitions))
            return self.comparer.compare_more(connection, partitions, others.to, token)

    def _end_former(self, connection: NodeConnection, partitions: Sequence[int]) -> None:
        end_sources(connection, self._runtime.prefix, self.former, closed=True, partitions=partitions)

    def refresh(self, now: float) -> list[tuple[RelayNode, MqlayerError]]:
        """Query runs and addresses in the background; return nodes to drop.

        A replaced primary may still accept appends, so without answers for a lease all are dropped.
        """
        refreshing, void = self._refreshing, list[tuple[RelayNode, MqlayerError]]()
        if refreshing is not None and refreshing.done():
            self._refreshing = None
            if refreshing.exception() is None:
                self._refreshed_at = self._refresh_began
                nodes = refreshing.result()
                void = [
                    (node, NodeNotArmed(node.address, "another run or address of it counts since"))
                    for node in self
                    if node.connection is not None and nodes.get(node.node_id) not in (None, node.connection.node)
                ]
            else:
                log.debug("relay_nodes_unknown", extra={"reason": str(refreshing.exception())})
        if self._refreshing is None:
            self._refresh_began = now
            self._refreshing = self._background.submit(self._routes.refresh_nodes)
        if now - self._refreshed_at <= max(self._settings.lease_s, REFRESH_TIMEOUT_S):
            return void
        error = StoreUnavailable(
            self._runtime.control.address, "nobody can say whether the nodes' runs are still armed"
        )
        return [(node, error) for node in self if node.connection is not None]

    def send(self, node: RelayNode, packets: Sequence[bytes], requests: Sequence[AppendRequest | MarksRequest]) -> bool:
        """Send requests in one write. False if the connection broke."""
        self._write_number += 1
        node.pending_writes.append(PendingWrite(self._write_number, time.monotonic(), requests))
        try:
            if node.connection is None:
                raise StoreUnavailable(node.address, "not connected")
            node.connection.send_packet(*packets)
        except StoreUnavailable as error:
            self.drop(node, error)
            return False
        failpoint("relay.after_send")
        return True

    def answered(self, node: RelayNode, *, wait_s: float) -> tuple[PendingWrite, list[Any]] | None:
        """Return the oldest write and its replies; None if late.

        Raises StoreUnavailable after the socket timeout, or if the connection broke.
        """
        if not node.pending_writes or node.connection is None:
            return None
        oldest = node.pending_writes[0]
        if not node.connection.ready(wait_s):
            if time.monotonic() - oldest.sent_at > self._settings.socket_timeout_s:
                raise StoreUnavailable(node.address, f"no answer within {self._settings.socket_timeout_s:g} s")
            return None
        replies = node.connection.receive(len(oldest.requests))
        node.pending_writes.popleft()
        node.stalled = False
        return oldest, replies

    def drop(self, node: RelayNode, error: MqlayerError) -> None:
        """Close a connection and back off; the caller rewinds its writes."""
        if node.connection is not None:
            node.connection.close()
        node.connection, node.connecting = None, None
        # A comparison under way belongs to the former connection.
        node.comparing, node.compared = None, frozenset()
        node.missing.clear()
        node.synced = node.stalled = False
        node.failures += 1
        node.last_error = str(error)
        wait_s = backoff_s(node.failures, self._rng)
        node.try_at = time.monotonic() + wait_s
        shown = log.warning if is_reported(node.failures) else log.debug
        shown("relay_node_away", extra={"reason": str(error), "failures": node.failures, "retry_s": round(wait_s, 3)})

    def close(self) -> None:
        """Close all connections."""
        for node in self:
            if node.connection is not None:
                node.connection.close()
                node.connection = None
            if node.connecting is not None:
                node.connecting.add_done_callback(_close_unused)

    def _take_connected(self, node: RelayNode, connecting: Future[ConnectedNode]) -> bool:
        try:
            node.connection, (node.token, node.compared) = connecting.result()
        except MqlayerError as error:
            self.drop(node, error)
            return False
        except Exception as error:  # noqa: BLE001 - a fault about one node must not end the relay for all others
            kind = type(error).__name__
            log.error("relay_connect_failed", extra={"node_id": node.node_id, "error": kind})
            self.drop(node, StoreUnavailable(f"node {node.node_id}", kind))
            return False
        node.connecting = None
        node.address = node.connection.node.address
        node.suspect = False
        if node.failures:
            log.warning("relay_node_back", extra={"node": node.connection.node.name, "failures": node.failures})
        return True

    def _connect(self, node_id: NodeId, suspect: bool) -> ConnectedNode:  # noqa: FBT001
        # Runs in the background.
        node = self._routes.refresh_nodes().get(node_id)
        if node is None:
            raise NotFound("node", node_id, "it was removed while partitions of a route are on it")
        if not suspect:
            try:
                return self._connected(node)
            except NodeNotArmed as error:
                # Show this reason while arming waits; arming reports its own only when it gives up.
                self._nodes[node_id].last_error = str(error)
                log.info("relay_node_not_armed", extra={"node": node.name})
        node, _ = rearm_node(self._runtime, node.name)
        return self._connected(node)

    def _connected(self, node: Node) -> ConnectedNode:
        connection = self._open(node)
        try:
            self._end_former(connection, cluster_partitions(self._runtime.control, node) if self.former else ())
            with self._others() as others:
                return ConnectedNode(connection, self.comparer.compare_node(connection, others.to))
        except BaseException:
            connection.close()
            raise

    def _open(self, node: Node) -> NodeConnection:
        connection = self._runtime.connection(node, RedisRole.RELAY)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def _find(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed") from None

    def _others(self) -> NodePool:
        return NodePool(self._runtime, self._find, RedisRole.RELAY)


def _close_unused(connecting: Future[ConnectedNode]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().connection.close()
