"""A node and its lines as a model in this process: it works only when a test says so.

Requests wait on their line until the node works them off, replies until they are received. A line that is closed leaves
what waits on it in the network, where it may still arrive.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import redis

from mqlayer.errors import StoreUnavailable

ADDRESS = "redis://node:1/0"
BACKLOG_LIMIT = 6

Record = tuple[int, int, int, str]
"""Source, LP, seq, body."""


@dataclass
class Partition:
    """A partition in the node; `base` records were trimmed."""

    state: str = "open"
    log: list[Record] = field(default_factory=list)
    marks: dict[tuple[int, int], int] = field(default_factory=dict)
    trimmed: int = 0

    def append(self, source: int, runs: list[tuple[int, int, list[str]]]) -> list[Any]:
        offset, outcomes = len(self.log) + 1, []
        for lp, first, bodies in runs:
            mark = self.marks.get((source, lp), 0)
            if first > mark + 1:
                outcomes.append([b"gap", 0, mark])
                continue
            new = bodies[mark + 1 - first :]
            for body in new:
                mark += 1
                self.log.append((source, lp, mark, body))
            self.marks[source, lp] = mark
            outcomes.append([b"ok" if len(new) == len(bodies) else b"dup", len(new), mark])
        if all(word == b"ok" for word, _, _ in outcomes):
            return [b"ok", offset]
        return [b"mixed", offset, *itertools.chain.from_iterable(outcomes)]


class ModelNode:
    """What a Redis does with the requests of its lines."""

    def __init__(self) -> None:
        self.partitions = {1: Partition()}
        self.cut_off = False
        self.ghosts: deque[bytes] = deque()
        self.out_of_memory = self.scripts_missing = False
        self.limited = False
        self.next_refusals: deque[Any] = deque()
        self.named: dict[tuple[int, int, int], str] = {}

    def work(self, packet: bytes) -> Any:
        args = packet_args(packet)
        if self.next_refusals:
            return self.next_refusals.popleft()
        if self.scripts_missing:
            return redis.exceptions.NoScriptError("No matching script")
        if self.out_of_memory:
            return redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        partition = self.partitions[int(args[3].split(b"{")[1].split(b"}")[0])]
        if partition.state != "open":
            return [partition.state.encode(), b"7"]
        if self.limited and len(partition.log) - partition.trimmed >= BACKLOG_LIMIT:
            return [b"full", len(partition.log)]
        # EVALSHA, digest, count of keys, keys; then source, backlog, term, count of runs.
        numbers = 3 + int(args[2])
        heads = numbers + 4
        source, runs, at = int(args[numbers]), [], heads + 3 * int(args[numbers + 3])
        for head in range(heads, at, 3):
            lp, first, count = (int(part) for part in args[head : head + 3])
            runs.append((lp, first, [body.decode() for body in args[at + 2 : at + 3 * count : 3]]))
            at += 3 * count
        assert at == len(args)
        before = len(partition.log)
        reply = partition.append(source, runs)
        for record_source, lp, seq, body in partition.log[before:]:
            # Whoever handled the first one would take the other for a repetition.
            assert self.named.setdefault((record_source, lp, seq), body) == body, "two messages of one identity"
        return reply


def packet_args(packet: bytes) -> list[bytes]:
    """Take a request apart."""
    args, at = [], packet.index(b"\r\n") + 2
    while at < len(packet):
        end = packet.index(b"\r\n", at)
        size = int(packet[at + 1 : end])
        args.append(packet[end + 2 : end + 2 + size])
        at = end + 4 + size
    return args


class ModelConnection:
    """A connection: requests wait in `inbox` until the node works, replies in `outbox` until they are received."""

    is_cluster = False

    def __init__(self, node: ModelNode) -> None:
        self._node = node
        self.facts: object | None = None
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[Any] = deque()

    def connect(self) -> None:
        if self._node.cut_off:
            raise StoreUnavailable(ADDRESS, "refused")
        if self.facts is None:
            self.inbox, self.outbox, self.facts = deque(), deque(), object()

    def send_packet(self, *packets: bytes) -> None:
        packet = b"".join(packets)
        if self._node.cut_off:
            # How much of it arrived, nobody knows; here it did.
            self.inbox.append(packet)
            raise StoreUnavailable(ADDRESS, "reset")
        self.inbox.append(packet)

    def receive(self, count: int) -> list[Any]:
        if self._node.cut_off or not self.outbox:
            raise StoreUnavailable(ADDRESS, "reset")
        return [self.outbox.popleft() for _ in range(count)]

    def digest(self, name: str) -> bytes:
        return name.encode()

    def reload_scripts(self) -> None:
        self._node.scripts_missing = False

    def close(self) -> None:
        if self.facts is not None:
            self.facts = None
            self._node.ghosts.extend(self.inbox)
