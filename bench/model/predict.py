"""Predicts throughput, lag and the first bottleneck of a layout: each part has units and a time per message.

Throughput is the least capacity, units over time. Lag adds a queue in front of the busiest part (M/M/1, of batches).
Nothing is fitted per configuration; the constants are in `costs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from bench.model import costs

MANY: Final = 1_000_000_000
P99_OF_MEAN: Final = 4.6
"""The p99 of an exponential time, ln 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A system and its load.

    `members`: processes of each group, each with `groups_per_process` groups. `producers`: direct ones; with
    `outboxes`, these databases and `relays` of each publish instead. `transaction`: messages of one transaction.
    `effects`: "none", "fence" or "batch". `cores`: of one machine that does everything; 0: each process and node has
    its own core, and Postgres `postgres_cores`. `call`: messages published at once.
    """

    rate: float = 0.0
    body_bytes: int = 256
    keys: int = MANY
    nodes: int = 1
    partitions: int = 16
    groups: int = 1
    members: int = 1
    groups_per_process: int = 1
    concurrency: int = 8
    handler_ms: float = 0.0
    producers: int = 1
    outboxes: int = 0
    relays: int = 1
    transaction: int = 1
    effects: str = "none"
    postgres_cores: int = 8
    cores: int = 0
    call: int = costs.PUBLISHED_AT_ONCE

    @property
    def partitions_each(self) -> float:
        """Partitions that a process reads, over its groups."""
        return self.partitions / min(self.members, self.partitions) * self.groups_per_process


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the system: its time per published message, and how many units share that."""

    name: str
    us: float
    units: float

    @property
    def capacity(self) -> float:
        """Published messages per second at most."""
        return self.units * 1e6 / self.us if self.us else float("inf")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Messages per second, and milliseconds from publishing to the handler at the layout's rate.

    `growth`: how many more messages wait each second; then latencies grow for ever, and are those without a queue."""

    throughput: float
    bottleneck: str
    p50_ms: float
    p99_ms: float
    growth: float
    control: float
    """Processors of the control database for heartbeats."""
    parts: tuple[Part, ...]


def predict(layout: Layout) -> Prediction:
    """Predict all that publishes and consumes at once."""
    parts = (*publishing(layout), *consuming(layout), *together(layout))
    least = min(parts, key=lambda part: part.capacity)
    p50, p99 = latencies(layout, layout.rate / least.capacity)
    growth = max(0.0, layout.rate - least.capacity)
    return Prediction(least.capacity, least.name, p50, p99, growth, heartbeats(layout), parts)


def published(layout: Layout) -> Part:
    """Return the first bottleneck of publishing while nothing is consumed."""
    machine = shared(layout, ((part.name, cpu(part, layout)) for part in publishing(layout)))
    return min((*publishing(layout), *machine), key=lambda part: part.capacity)


def consumed(layout: Layout) -> Part:
    """Return the first bottleneck of consuming a backlog; its capacity is in published messages."""
    parts = (*consuming(layout), Part("nodes", node_reads_us(layout), layout.nodes))
    used = [(part.name, cpu(part, layout)) for part in parts if part.name in ("consumers", "nodes")]
    return min((*parts, *shared(layout, iter(used))), key=lambda part: part.capacity)


def publishing(layout: Layout) -> Iterator[Part]:
    """Yield the parts between a publisher and the nodes."""
    size = append_size(layout)
    append = append_us(layout, size)
    if layout.outboxes:
        insert = costs.INSERT_US / layout.transaction + costs.INSERT_MANY_US * (1 - 1 / layout.transaction)
        yield Part("outbox Postgres", insert + costs.RELAY_POSTGRES_US, layout.outboxes * layout.postgres_cores)
        relay = costs.RELAY_US + costs.PRODUCE_BYTE_US * layout.body_bytes + costs.PRODUCER_CALL_US / size
        yield Part("relays", relay, layout.outboxes * layout.relays)
    else:
        own = costs.PRODUCE_US + costs.PRODUCE_BYTE_US * layout.body_bytes + costs.PRODUCER_CALL_US / size
        # A call waits for the nodes' answers.
        yield Part("producers", own + append / min(layout.nodes, layout.partitions), layout.producers)
    yield Part("nodes, appends", append + costs.SYNC_US / costs.APPEND_MOST, layout.nodes)


def append_size(layout: Layout) -> float:
    """Return the messages of one append at the highest rate; relays of an outbox share its partitions."""
    partitions = layout.partitions / (layout.relays if layout.outboxes else 1)
    return max(1.0, min(costs.APPEND_MOST, layout.call / partitions))


def append_us(layout: Layout, size: float) -> float:
    """Return a node's time to append a message."""
    return costs.APPEND_US + costs.APPEND_BYTE_US * layout.body_bytes + costs.NODE_CALL_US / size


def read_size(layout: Layout) -> float:
    """Return the messages of one read of a partition, of a backlog."""
    share = costs.READ_ROOM / (layout.partitions_each / layout.groups_per_process)
    return min(costs.READ_MOST, max(costs.READ_TURN, share))


def node_reads_us(layout: Layout) -> float:
    """Return a node's time for a message of all groups: reads and settlements."""
    waits = costs.WAITING_READ_US if layout.handler_ms else costs.READ_US
    passes = costs.NODE_PASS_US * layout.partitions_each / layout.groups_per_process / costs.PASS
    return layout.groups * (waits + costs.READ_BYTE_US * layout.body_bytes + passes)


def consumer_us(layout: Layout) -> float:
    """Return a process's processor time for a message of one group."""
    passes = costs.CONSUMER_PASS_US * layout.partitions_each / layout.groups_per_process / costs.PASS
    base = costs.WAITING_US if layout.handler_ms else costs.CONSUME_US
    effect = {"none": 0.0, "fence": costs.FENCE_US, "batch": costs.FENCE_MANY_US}[layout.effects]
    return base + costs.CONSUME_BYTE_US * layout.body_bytes + passes + effect


def consuming(layout: Layout) -> Iterator[Part]:
    """Yield the parts that handle messages; a message has a delivery to each group."""
    busy = min(layout.members, layout.partitions)
    own = consumer_us(layout)
    # A process waits for its node's answer, once per read.
    waits = costs.SYNC_US / read_size(layout) + node_reads_us(layout) / layout.groups
    yield Part("consumers", (own + (0.0 if layout.handler_ms else waits)) * layout.groups_per_process, busy)
    if layout.handler_ms:
        yield Part("handlers", layout.handler_ms * 1_000, busy * layout.concurrency * costs.HANDLERS_BUSY)
        if layout.keys < MANY:
            yield Part("keys", layout.handler_ms * 1_000, layout.keys)
    effect = {"none": 0.0, "fence": costs.FENCE_POSTGRES_US, "batch": costs.FENCE_MANY_POSTGRES_US}[layout.effects]
    if effect:
        yield Part("effects Postgres", effect * layout.groups, layout.postgres_cores)


def together(layout: Layout) -> Iterator[Part]:
    """Yield the parts that publishing and consuming share."""
    append = append_us(layout, append_size(layout)) + costs.SYNC_US / costs.APPEND_MOST
    yield Part("nodes", append + node_reads_us(layout), layout.nodes)
    parts = (*publishing(layout), *consuming(layout), Part("nodes", node_reads_us(layout), layout.nodes))
    yield from shared(layout, ((part.name, cpu(part, layout)) for part in parts))


def shared(layout: Layout, used: Iterator[tuple[str, float]]) -> Iterator[Part]:
    """Yield the one machine, where everything runs on it."""
    if layout.cores:
        yield Part("machine", sum(us for _, us in used), layout.cores)


def cpu(part: Part, layout: Layout) -> float:
    """Return a part's processor time per message, without its waiting."""
    match part.name:
        case "producers":
            return part.us - append_us(layout, append_size(layout)) / min(layout.nodes, layout.partitions)
        case "consumers":
            return consumer_us(layout) * layout.groups
        case "handlers" | "keys":
            return 0.0
        case _:
            return part.us


def latencies(layout: Layout, busy: float) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds. `busy`: the share of its time in which the busiest part works."""
    each, threads = layout.partitions_each / layout.groups_per_process, layout.groups_per_process - 1
    p50 = costs.P50_MS + costs.PARTITION_P50_MS * each + costs.THREADS_MS * threads**2 + layout.handler_ms
    p99 = costs.P99_MS + costs.PARTITION_P99_MS * each + P99_OF_MEAN * costs.THREADS_MS * threads**2 + layout.handler_ms
    if layout.outboxes:
        p50, p99 = p50 + costs.OUTBOX_P50_MS, p99 + costs.OUTBOX_P99_MS
    queue = costs.BATCH_MS * busy / (1 - busy) if busy < 1 else 0.0
    return p50 + queue, p99 + P99_OF_MEAN * queue


def heartbeats(layout: Layout) -> float:
    """Return the processors of Postgres that heartbeats take."""
    calm = layout.members > costs.CALM_MEMBERS
    rate = 3 / costs.LEASE_S if calm else costs.HEARTBEATS_PER_S
    return layout.members * layout.groups * rate * costs.HEARTBEAT_US / 1e6


def needed(layout: Layout, share: float = 0.7) -> dict[str, int]:
    """Return how many units of each part a rate needs, where each works for a share of its time."""
    found: dict[str, float] = {}
    for part in predict(layout).parts:
        if part.name not in ("machine", "keys"):
            found[part.name] = max(found.get(part.name, 0.0), layout.rate * part.us / 1e6 / share)
    return {name: ceil(units) for name, units in found.items()}
