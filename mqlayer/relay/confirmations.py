"""Progress of topics with a durability class, held back until their nodes confirm it (docs/design/durability.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from mqlayer.domain.durability import NODE, Durability
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger, is_reported
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.durability import DurabilityWait
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.roles import RedisRole
from mqlayer.relay.lp_cursors import LpCursor, Target
from mqlayer.relay.relay_nodes import RelayNode, RelayNodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

Unconfirmed = dict[Target, dict[LpCursor, int]]
"""Highest acknowledged seq of each cursor, where it was acknowledged."""
_Key = tuple[int, Durability]


class _AskedNode(NamedTuple):
    """A wait under way. `connection`: the node's, over which the appends went. `seqs`: with each cursor's rewind."""

    node: RelayNode
    connection: NodeConnection
    seqs: dict[Target, dict[LpCursor, tuple[int, int]]]
    answer: Future[dict[int, str]]


class Confirmations:
    """Confirms what a sender notes in `unconfirmed`. `nodes_known`: runs and addresses as last read."""

    def __init__(
        self,
        runtime: Runtime,
        nodes: RelayNodes,
        unconfirmed: Unconfirmed,
        nodes_known: Callable[[], Mapping[NodeId, Node]],
        background: ThreadPoolExecutor,
    ) -> None:
        self._runtime, self._nodes, self._unconfirmed = runtime, nodes, unconfirmed
        self._nodes_known, self._background = nodes_known, background
        self._questions: dict[_Key, _AskedNode] = {}
        self._connections: dict[_Key, NodeConnection] = {}
        self._lacks: dict[_Key, int] = {}
        self._failed = Counter[str]()
        # When the oldest progress that still waits was asked about first.
        self._since: dict[_Key, float] = {}

    @property
    def is_asking(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._questions)

    def take(self) -> dict[LpCursor, int]:
        """Return seqs confirmed since the last call, then ask about the others."""
        confirmed: dict[LpCursor, int] = {}
        for key, question in list(self._questions.items()):
            if question.answer.done():
                del self._questions[key]
                lacking = self._lacking(key, question)
                # Another connection is to another run, maybe, or followed a loss.
                if question.node.connection is question.connection:
                    self._confirm(question, lacking, confirmed)
                    if not lacking:
                        self._since.pop(key, None)
        self._ask(confirmed)
        return confirmed

    def failed_waits(self) -> dict[str, int]:
        """Return waits that ended without their class. Thread-safe."""
        return dict(self._failed)

    def delays(self) -> dict[str, float]:
        """Return seconds that progress waits, by class. Thread-safe."""
        now, found = time.monotonic(), dict.fromkeys(self._failed.copy(), 0.0)
        for (_, durability), since in self._since.copy().items():
            found[durability] = max(found.get(durability, 0.0), now - since)
        return found

    def close(self) -> None:
        """Close connections; waits under way end by their time."""
        for key, connection in self._connections.items():
            question = self._questions.get(key)
            if question is None:
                connection.close()
            else:
                question.answer.add_done_callback(partial(_close, connection))

    def _lacking(self, key: _Key, question: _AskedNode) -> Collection[int]:
        """Return the partitions that are not confirmed, and log why."""
        error = question.answer.exception()
        if error is not None and not isinstance(error, MqlayerError):
            raise error
        lacks = question.answer.result() if error is None else {one.partition: str(error) for one in question.seqs}
        if not lacks:
            if self._lacks.pop(key, 0):
                log.warning("relay_progress_goes_on", extra={"node": question.node.address, "durability": key[1]})
            return lacks
        failures = self._lacks[key] = self._lacks.get(key, 0) + 1
        self._failed[key[1]] += 1
        shown = log.warning if is_reported(failures) else log.debug
        reason = next(iter(lacks.values()))
        facts = {"node": question.node.address, "durability": key[1], "reason": reason, "failures": failures}
        shown("relay_progress_waits", extra=facts)
        return lacks

    def _confirm(self, question: _AskedNode, lacking: Collection[int], confirmed: dict[LpCursor, int]) -> None:
        for target, seqs in question.seqs.items():
            if target.partition in lacking:
                continue
            waiting = self._unconfirmed.get(target, {})
            for cursor, (seq, rewound_at) in seqs.items():
                if cursor.rewound_at != rewound_at or self._waits_elsewhere(cursor, target, seq):
                    continue
                confirmed[cursor] = max(seq, confirmed.get(cursor, 0))
                if waiting.get(cursor, 0) <= seq:
                    waiting.pop(cursor, None)
            if not waiting:
                self._unconfirmed.pop(target, None)

    def _waits_elsewhere(self, cursor: LpCursor, target: Target, seq: int) -> bool:
        return any(
            cursor in seqs and seqs[cursor] < seq for other, seqs in self._unconfirmed.items() if other is not target
        )

    def _ask(self, confirmed: dict[LpCursor, int]) -> None:
        by_key: dict[_Key, list[Target]] = {}
        for target, seqs in list(self._unconfirmed.items()):
            if target.durability == NODE:
                # Its class was taken back.
                confirmed.update({cursor: max(seq, confirmed.get(cursor, 0)) for cursor, seq in seqs.items()})
                del self._unconfirmed[target]
                continue
            by_key.setdefault((target.node_id, target.durability), []).append(target)
        known, now = self._nodes_known(), time.monotonic()
        self._since = {key: self._since.get(key, now) for key in by_key}
        for key, targets in by_key.items():
            self._failed[key[1]] += 0
            node = self._nodes.node(key[0])
            if key not in self._questions:
                self._ask_node(key, node, known.get(node.node_id), targets)

    def _ask_node(self, key: _Key, node: RelayNode, known: Node | None, targets: list[Target]) -> None:
        connection = node.connection
        if connection is None:
            # A parent on a node that is away: its successors' marks go on behind it.
            for target in targets:
                self._forget_left(target)
            return
        if known != connection.node:
            return
        seqs = {
            target: {cursor: (seq, cursor.rewound_at) for cursor, seq in self._unconfirmed[target].items()}
            for target in targets
        }
        answer = self._background.submit(self._wait, key, known, [target.partition for target in targets])
        self._questions[key] = _AskedNode(node, connection, seqs, answer)

    def _forget_left(self, target: Target) -> None:
        seqs = self._unconfirmed[target]
        for cursor in [cursor for cursor in seqs if cursor.target is not target]:
            del seqs[cursor]
        if not seqs:
            del self._unconfirmed[target]

    def _wait(self, key: _Key, node: Node, partitions: Sequence[int]) -> dict[int, str]:
        """Return what partitions lack. Runs in the background, one at a time per key."""
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = self._runtime.connection(node, RedisRole.RELAY)
        if connection.node != node:
            connection.close()
        connection.node = node
        wait = DurabilityWait.of(key[1], node)
        lacks: dict[int, str] = {}
        servers = _by_server(connection, partitions)
        for asked in servers:
            connection.send_packet(*wait.shared_packets(connection, self._runtime.prefix, asked))
        for asked in servers:
            lacks |= wait.shared_lacks(connection.receive(len(asked) + wait.replies - 1), asked)
        if lacks:
            # A new connection loads missing scripts, and finds a promoted primary.
            connection.close()
        if connection.is_cluster or not lacks:
            return lacks
        (lack,) = lacks.values()
        return dict.fromkeys(partitions, lack)


def _by_server(connection: NodeConnection, partitions: Sequence[int]) -> list[list[int]]:
    """Return what to touch: one partition, of a cluster each one, by its shard."""
    if not isinstance(connection, ClusterConnection):
        # It covers all of a server's writes.
        return [list(partitions[:1])]
    # Each, since one may be at another server meanwhile.
    shards: dict[int, list[int]] = {}
    for partition in partitions:
        shards.setdefault(connection.shard_of(partition), []).append(partition)
    return list(shards.values())


def _close(connection: NodeConnection, _: Future[dict[int, str]]) -> None:
    connection.close()
