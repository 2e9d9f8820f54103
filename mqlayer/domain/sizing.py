"""Needs of a planned load, by figures that `scripts/bench node_memory process_memory` measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput

DAY_S: Final = 86_400
WEEK_S: Final = 604_800


class Figures:
    """On two shared cores, Redis 7.0 and Postgres 15."""

    # Redis: a stream keeps records in blocks, 100 in one at most.
    block_bytes = 4_096
    block_records = 100
    block_overhead = 60
    record_overhead = 45
    """Facts and lengths of a record, without its key and body."""
    key_bytes = 12
    empty_node = 1_500_000
    partition = 4_600
    """With its first block of records."""
    group = 700
    """On a partition."""
    attempt = 80
    """A message that failed and waits in place."""
    mark = 80
    """Of a source in an LP, where a partition has many."""
    packed_mark = 10
    packed_marks = 512
    """How many of a partition lie packed: `hash-max-listpack-entries`."""
    kept_records = 100
    """Settled records of a partition that trimming leaves."""
    trim_s = 10

    # Postgres rows with their indexes, without the body.
    outbox_row = 210
    archived_record = 160
    fenced_key = 190
    inbox_row = 170
    parked_message = 430
    parked_key = 410
    outbox_s = 1_800
    """How long a relayed row may stay."""

    # Messages per second, in one run each.
    node_appends = 15_300
    node_reads = 67_800
    process = 2_700
    handlers_busy = 0.9
    """3,600 of the 4,000 messages that 8 handlers of 2 ms could do."""

    # Processes.
    process_bytes = 72_000_000
    """With OpenTelemetry's SDK, which redis-py imports where it is installed."""
    prefetch_bytes = 33_554_432
    process_consumer = 340_000
    """Each further one of a process."""
    process_partition = 13_500
    process_parked_key = 1_100
    process_record = 290
    relay_bytes = 72_000_000
    busy_relay_bytes = 78_000_000
    """With a backlog of any length."""
    relay_partition = 1_900
    relay_lp = 470
    producer_bytes = 72_000_000
    producer_partition = 1_000
    producer_lp = 1_800
    pending_send = 2_000
    """With its future."""
    pending_messages = 100_000
    pending_bytes = 64_000_000

    # The most connections that pools hold.
    of_relay = 26
    of_worker = 20
    of_consumer_process = 17
    of_consumer = 2
    of_producer = 6

    # Counted of one node.
    node_of_relay = 1
    node_of_consumer_process = 1
    node_of_consumer = 2
    node_of_producer = 1

    memory_share = 0.5
    """The rest is for pages that change while a node writes its file anew."""
    disk_share = 3
    """The file, its growth to twice of that, and the next file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """Rates per second over all topics. `sources`: outboxes and direct producers."""

    rate: float
    body_bytes: int = 256
    stop_s: float = 14_400.0
    handler_ms: float = 10.0
    concurrency: int = 8
    groups: int = 1
    consumers_per_process: int = 1
    relays: int = 2
    workers: int = 2
    producers: int = 0
    keys_per_week: int = 0
    inbox: bool = False
    archive_days: int = 0
    parked_messages: int = 0
    failing_messages: int = 0
    partitions: int = 0
    process_rate: float = Figures.process
    node_rate: float = Figures.node_appends
    node_bytes: int = 8_000_000_000

    @property
    def sources(self) -> int:
        """One for the outbox, one per producer."""
        return self.producers + (1 if self.relays else 0)


class Requirement(NamedTuple):
    """A need; `figures`: their origin."""

    name: str
    value: int
    computed: str
    figures: str


def requirements(load: PlannedLoad) -> Iterator[Requirement]:
    """Yield the needs. Raises InvalidInput for more partitions than a topic has."""
    yield from _of_consumers(load)
    yield from _of_publishers(load)
    yield from _of_nodes(load)
    yield from _of_disk(load)
    yield from _connections(load)


def record_bytes(body_bytes: int, key_bytes: int = Figures.key_bytes) -> float:
    """Of one that waits on a node."""
    entry = Figures.record_overhead + key_bytes + body_bytes
    fit = max(1, min(Figures.block_records, Figures.block_bytes // entry))
    return (_allocated(fit * entry) + Figures.block_overhead) / fit


def _allocated(size: int) -> int:
    """Round up as the allocator: four classes between powers of two."""
    step = max(16, 1 << (size - 1).bit_length() - 3)
    return ceil(size / step) * step


def waiting_records(load: PlannedLoad) -> int:
    """At the end of the longest stop."""
    return ceil(load.rate * (load.stop_s + Figures.trim_s)) + Figures.kept_records * partitions_at_least(load)


def process_count(load: PlannedLoad) -> int:
    """Of all groups."""
    at_once = load.concurrency * load.consumers_per_process
    by_handlers = Figures.handlers_busy * at_once / load.handler_ms * 1_000 if load.handler_ms else load.process_rate
    wanted = load.rate * load.groups / min(load.process_rate, by_handlers)
    return max(1, ceil(load.groups / load.consumers_per_process), ceil(wanted))


def partitions_at_least(load: PlannedLoad) -> int:
    """Two for each consumer of a group. Raises InvalidInput."""
    consumers = ceil(process_count(load) * load.consumers_per_process / load.groups)
    if consumers > LP_COUNT:
        raise InvalidInput(
            f"a group needs {consumers:,} consumers, and a topic has at most {LP_COUNT:,} partitions: "
            "use several topics, or a higher concurrency"
        )
    return load.partitions or min(LP_COUNT, 2 * consumers)


def mark_bytes(marks: int) -> int:
    """Of one, where a partition has so many."""
    return Figures.packed_mark if marks <= Figures.packed_marks else Figures.mark


def node_memory(load: PlannedLoad) -> dict[str, int]:
    """Of all nodes, by kind."""
    partitions = partitions_at_least(load)
    marks = load.sources * LP_COUNT
    return {
        "records": ceil(waiting_records(load) * record_bytes(load.body_bytes)),
        "partitions": partitions * Figures.partition,
        "groups": partitions * load.groups * Figures.group,
        "marks": marks * mark_bytes(ceil(marks / partitions)),
        "attempts": load.failing_messages * Figures.attempt,
    }


def _of_consumers(load: PlannedLoad) -> Iterator[Requirement]:
    processes, each = process_count(load), load.consumers_per_process
    yield Requirement(
        "consumer_processes",
        processes,
        f"{load.groups} x {load.rate:,.10g} messages/s, by at most {load.process_rate:,.10g}/s a process "
        f"and {load.concurrency * each} handlers of {load.handler_ms:g} ms at {Figures.handlers_busy}",
        "scale_members, consume_batch",
    )
    yield Requirement(
        "partitions",
        partitions_at_least(load),
        f"two for each of a group's {ceil(processes * each / load.groups)} consumers",
        "a partition has one consumer of a group",
    )
    held = partitions_at_least(load) * load.groups * Figures.process_partition
    held += load.parked_messages * Figures.process_parked_key
    held += processes * (each - 1) * Figures.process_consumer
    yield Requirement(
        "consumer_memory_bytes",
        processes * (Figures.process_bytes + each * Figures.prefetch_bytes) + held,
        f"{processes} x (72 MB + {each} x 32 MiB read ahead), and {held:,} B of further consumers, partitions "
        "and parked keys",
        "process_memory, prefetch_bytes",
    )


def _of_publishers(load: PlannedLoad) -> Iterator[Requirement]:
    partitions = partitions_at_least(load)
    if load.relays:
        held = load.relays * partitions * Figures.relay_partition + LP_COUNT * Figures.relay_lp
        yield Requirement(
            "relay_memory_bytes",
            load.relays * Figures.busy_relay_bytes + held,
            f"{load.relays} x 78 MB, and {held:,} B of partitions and LPs",
            "process_memory",
        )
    if load.producers:
        held = partitions * Figures.producer_partition + LP_COUNT * Figures.producer_lp
        bodies = min(Figures.pending_bytes, Figures.pending_messages * load.body_bytes)
        waiting = Figures.pending_messages * Figures.pending_send + bodies
        yield Requirement(
            "producer_memory_bytes",
            load.producers * (Figures.producer_bytes + held + waiting),
            f"{load.producers} x (72 MB + {held:,} B of partitions and LPs + at most {waiting:,} B waiting for a node)",
            "process_memory, max_pending_messages",
        )


def _of_nodes(load: PlannedLoad) -> Iterator[Requirement]:
    memory = node_memory(load)
    total = sum(memory.values())
    by_rate = ceil(load.rate / load.node_rate + load.rate * load.groups / Figures.node_reads)
    room = load.node_bytes * Figures.memory_share - Figures.empty_node
    by_memory = ceil(total / room)
    records = waiting_records(load)
    yield Requirement(
        "node_memory_bytes",
        total,
        f"{records:,} records x {record_bytes(load.body_bytes):,.0f} B, and {total - memory['records']:,} B "
        "of partitions, groups, marks and attempts",
        "node_memory",
    )
    yield Requirement(
        "nodes_by_memory",
        by_memory,
        f"half of {load.node_bytes:,} B each: the other half is for a rewrite of the append-only file",
        "node_memory",
    )
    yield Requirement(
        "nodes_by_rate",
        max(1, by_rate),
        f"{load.rate:,.10g} / {load.node_rate:,.10g} appends/s + {load.groups} x {load.rate:,.10g} / "
        f"{Figures.node_reads:,} reads/s",
        "bloat[outbox], consume_partitions[512]",
    )
    yield Requirement("nodes", max(1, by_rate, by_memory), "the higher one of both", "see above")
    yield Requirement(
        "node_disk_bytes",
        Figures.disk_share * total,
        f"{Figures.disk_share} x memory: the append-only file, its growth, the next one",
        "auto-aof-rewrite-percentage 100",
    )


def _of_disk(load: PlannedLoad) -> Iterator[Requirement]:
    kinds = [
        ("outbox", load.rate * Figures.outbox_s if load.relays else 0, load.body_bytes + Figures.outbox_row),
        ("archive", load.rate * DAY_S * load.archive_days, load.body_bytes + Figures.archived_record),
        ("fence", load.keys_per_week * load.groups, Figures.fenced_key),
        ("inbox", load.rate * WEEK_S * load.groups if load.inbox else 0, Figures.inbox_row),
        ("parked", load.parked_messages, load.body_bytes + Figures.parked_message + Figures.parked_key),
    ]
    for name, rows, each in kinds:
        if rows:
            yield Requirement(f"{name}_bytes", ceil(rows * each), f"{ceil(rows):,} rows x {each:,} B", "node_memory")
    total = sum(ceil(rows * each) for _, rows, each in kinds)
    yield Requirement("postgres_bytes", total, "their sum, without the WAL", "see above")


def _connections(load: PlannedLoad) -> Iterator[Requirement]:
    processes = process_count(load)
    each = Figures.of_consumer_process + Figures.of_consumer * load.consumers_per_process
    parts = ((load.relays, Figures.of_relay), (load.workers, Figures.of_worker), (processes, each),
             (load.producers, Figures.of_producer))  # fmt: skip
    yield Requirement(
        "postgres_connections",
        sum(count * most for count, most in parts),
        f"relays {load.relays} x {Figures.of_relay} + workers {load.workers} x {Figures.of_worker} + consumer "
        f"processes {processes} x {each} + producers {load.producers} x {Figures.of_producer}, at most",
        "the pools' sizes",
    )
    of_process = Figures.node_of_consumer_process + Figures.node_of_consumer * load.consumers_per_process
    yield Requirement(
        "node_connections",
        load.relays * Figures.node_of_relay + processes * of_process + load.producers * Figures.node_of_producer,
        f"of each: relays {load.relays} x {Figures.node_of_relay} + consumer processes {processes} x {of_process} + "
        f"producers {load.producers} x {Figures.node_of_producer}, as counted",
        "the page's table",
    )
