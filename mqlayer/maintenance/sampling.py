"""Samples for curves without a metrics server: a row per minute and thing, for a week.

At most OBJECTS_LIMIT * KEPT_S / 60 rows: old ones go before new ones come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.inspect import group_facts
from mqlayer.inspect.group_facts import partition_facts
from mqlayer.logs import event_logger
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

KEPT_S: Final = 7 * 86_400.0
OBJECTS_LIMIT: Final = 500
"""Nodes, topics and groups of one run; the first of them in this order, each by age."""
DEAD_LIMIT: Final = 100_000
"""Dead messages that are counted per group."""


class Sample(NamedTuple):
    """A row. `busy`: partitions with unsettled messages; `committed`, `relayed`, `stored`: since ever."""

    kind: Literal["group", "topic", "node"]
    object_id: int
    lag: int | None = None
    oldest_s: float | None = None
    parked: int | None = None
    dead: int | None = None
    members: int | None = None
    busy: int | None = None
    committed: int | None = None
    relayed: int | None = None
    stored: int | None = None
    memory_bytes: int | None = None
    memory_limit: int | None = None
    cpu_s: float | None = None
    ops_per_s: float | None = None


def take_samples(runtime: Runtime, *, kept_s: float = KEPT_S, objects_limit: int = OBJECTS_LIMIT) -> int:
    """Forget old samples, and take those of this minute; return how many. A thing without an answer has none."""
    forget_rows(runtime.control, query("samples_clean"), {"kept_s": kept_s})
    nodes = load_nodes(runtime.control)
    ends: dict[int, int] = {}
    samples = [*_of_nodes(runtime, nodes), *_of_topics(runtime, nodes, ends), *_of_groups(runtime, nodes)]
    if len(samples) > objects_limit:
        log.warning("samples_left_out", extra={"objects": len(samples), "limit": objects_limit})
    kept = samples[:objects_limit]
    failpoint("sample.before_put")
    if kept:
        facts = {name: [getattr(one, name) for one in kept] for name in Sample._fields}
        runtime.control.transaction(lambda connection: connection.execute(query("samples_put"), facts))
        failpoint("sample.after_put")
    _note_rates(runtime, ends)
    return len(kept)


def _note_rates(runtime: Runtime, ends: Mapping[int, int]) -> None:
    """Note where partitions end, for their rates: they tell a hot one from a slow group."""
    measured = {"partitions": list(ends), "offsets": list(ends.values())}
    try:
        runtime.control.transaction(lambda connection: connection.execute(query("sampled_rates_put"), measured))
    except MqlayerError as error:
        log.warning("rates_not_noted", extra={"reason": str(error)})


def _of_nodes(runtime: Runtime, nodes: Iterable[Node]) -> Iterator[Sample]:
    for node in nodes:
        try:
            with runtime.connection(node) as connection:
                replies = connection.call([("INFO", section) for section in ("memory", "stats", "cpu")])
                texts = [raise_for_reply(reply, node.address).decode() for reply in replies]
        except MqlayerError as error:
            log.warning("node_not_sampled", extra={"node": node.name, "reason": str(error)})
            continue
        info = dict(line.split(":", 1) for text in texts for line in text.splitlines() if ":" in line)
        memory, ops = int(info["used_memory"]), float(info["instantaneous_ops_per_sec"])
        limit, cpu_s = int(info.get("maxmemory", 0)), float(info["used_cpu_sys"]) + float(info["used_cpu_user"])
        node_id = int(node.node_id)
        yield Sample("node", node_id, memory_bytes=memory, memory_limit=limit, cpu_s=cpu_s, ops_per_s=ops)


def _of_topics(runtime: Runtime, nodes: Iterable[Node], ends: dict[int, int]) -> Iterator[Sample]:
    """Yield samples, and note the ends of partitions."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("sampled_topics")).fetchall()
    ends |= _ends(runtime, nodes, [(NodeId(node), one) for _, _, one, node, _ in rows if one is not None])
    stored: dict[int, int | None] = {}
    for topic_id, deleted, partition, _, sealed_end in rows:
        before = stored.get(topic_id, deleted)
        end = 1 if partition is None else sealed_end or ends.get(partition)
        # A silent node, or a partition that was split and is gone, would look as if messages were.
        stored[topic_id] = None if before is None or end is None else before + max(0, end - 1)
    outbox = _of_outbox(runtime)
    for topic_id, count in stored.items():
        committed, relayed = outbox.get(topic_id, (None, None))
        yield Sample("topic", topic_id, committed=committed, relayed=relayed, stored=count)


def _ends(runtime: Runtime, nodes: Iterable[Node], partitions: Iterable[tuple[NodeId, int]]) -> dict[int, int]:
    by_node: dict[NodeId, list[int]] = {}
    for node_id, partition in partitions:
        by_node.setdefault(node_id, []).append(partition)
    found: dict[int, int] = {}
    for node in nodes:
        wanted = by_node.get(node.node_id, [])
        try:
            with runtime.connection(node) as connection:
                asked = [("HMGET", partition_keys(runtime.prefix, one).meta, "next") for one in wanted]
                for partition, reply in zip(wanted, connection.call(asked) if asked else [], strict=True):
                    (end,) = raise_for_reply(reply, node.address)
                    if end is not None:
                        found[partition] = int(end)
        except MqlayerError:
            continue
    return found


def _of_outbox(runtime: Runtime) -> Mapping[int, tuple[int, int]]:
    if runtime.application is None:
        return {}
    try:
        with runtime.outbox.connection() as connection:
            rows = connection.execute(query("sampled_outbox")).fetchall()
    except MqlayerError as error:
        log.warning("outbox_not_sampled", extra={"reason": str(error)})
        return {}
    return {topic_id: (committed, relayed) for topic_id, committed, relayed in rows}


def _of_groups(runtime: Runtime, nodes: Iterable[Node]) -> Iterator[Sample]:
    groups = [one for one in group_facts(runtime.control) if one.state == "live" and one.mode != "broadcast"]
    facts = [one for one in partition_facts(runtime.control, groups) if not one.drained]
    positions = read_positions(
        runtime, nodes, (GroupPartition(f.node, f.partition, f.group_id, start=f.start, seek=f.seek) for f in facts)
    )
    lags: dict[int, int | None] = {one.group_id: 0 for one in groups}
    ages: dict[int, float] = {}
    busy: Counter[int] = Counter()
    for one in facts:
        position, before = positions.at(one.partition, one.group_id), lags[one.group_id]
        lags[one.group_id] = None if position is None or before is None else before + position.unsettled
        busy[one.group_id] += position is not None and position.unsettled > 0
        if position is not None and position.head is not None:
            head = Record(position.head.offset, position.head.m, position.head.key, b"")
            age_s = max(0.0, (position.now_ms - head.at_ms) / 1000)
            ages[one.group_id] = max(age_s, ages.get(one.group_id, 0.0))
    with runtime.control.connection() as connection:
        wanted: dict[str, Any] = {"group_ids": list(lags), "dead_limit": DEAD_LIMIT}
        counts = connection.execute(query("sampled_groups"), wanted).fetchall()
    for group_id, parked, dead, members in counts:
        lag = lags[group_id]
        oldest_s = None if lag is None else ages.get(group_id, 0.0)
        yield Sample("group", group_id, lag, oldest_s, parked, dead, members, busy[group_id])
