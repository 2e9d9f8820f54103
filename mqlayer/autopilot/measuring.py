"""Measure partitions of topics with automatic routes, and read what rules see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mqlayer.autopilot.auto_topics import AutoCluster, AutoNode, AutoPartition, AutoTopic, HotKey, LpLoads, PastChange
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.loads import LoadSample, Times, load_figures
from mqlayer.autopilot.policy import PolicyState
from mqlayer.autopilot.rules import MOST_OF_ONE
from mqlayer.autopilot.stored_policy import policy_from
from mqlayer.domain.routing import NodeId, lp_of
from mqlayer.errors import MqlayerError
from mqlayer.groups.positions import GroupPartition
from mqlayer.inspect.busiest_keys import busiest_keys_at
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.read_scripts import position_command, position_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.routes.lp_load import sampled_loads
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.durability import durable_topics, unfit_nodes

log = event_logger(__name__)


def read_auto_topics(runtime: Runtime, times: Times, topic: str | None = None) -> tuple[list[AutoTopic], AutoCluster]:
    """Return topics with automatic routes by their last samples; with `topic`, that one, if it has a policy."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("auto_topics"), {"topic": topic}).fetchall()
        if not rows:
            return [], AutoCluster()
        wanted = {"topics": [row[0] for row in rows]}
        (clock,) = connection.execute(query("auto_clock")).fetchall()
        partitions = _partitions(connection, wanted, times)
        changes = _changes(connection, wanted)
        nodes = connection.execute(query("auto_nodes"), {"actor": ACTOR}).fetchall()
    topics = [_topic(row, clock, partitions.get(row[0], ()), changes.get(row[0], ())) for row in rows]
    durable = durable_topics(runtime)
    return [replace(one, unfit=unfit_nodes(durable, one.topic)) for one in topics], _cluster(nodes, topics)


def _topic(
    row: Sequence[Any], clock: Sequence[Any], partitions: Sequence[AutoPartition], changes: Sequence[PastChange]
) -> AutoTopic:
    topic_id, name, version, paused = row[:4]
    policy, state = policy_from(row[4:13]), PolicyState(*row[13:18])
    return AutoTopic(
        topic_id, name, version, policy, state, tuple(partitions), tuple(changes), clock[0], clock[2], paused, row[18]
    )


def _partitions(connection: Connection, wanted: Mapping[str, Any], times: Times) -> dict[int, list[AutoPartition]]:
    found: dict[int, list[AutoPartition]] = {}
    for topic_id, partition, node, lp_from, lp_to, age_s, draining, sampled_ago_s, *arrays in connection.execute(
        query("auto_partitions"), wanted
    ):
        samples = [] if arrays[0] is None else [LoadSample(*facts) for facts in zip(*arrays, strict=True)]
        figures = load_figures(samples, times)
        one = AutoPartition(partition, NodeId(node), lp_from, lp_to, age_s, draining, sampled_ago_s, figures)
        found.setdefault(topic_id, []).append(one)
    return found


def _changes(connection: Connection, wanted: Mapping[str, Any]) -> dict[int, list[PastChange]]:
    found: dict[int, list[PastChange]] = {}
    for topic_id, change_id, kind, state, actor, ago_s, successors in connection.execute(query("auto_changes"), wanted):
        found.setdefault(topic_id, []).append(PastChange(change_id, kind, state, actor, ago_s, tuple(successors)))
    return found


def _cluster(rows: Sequence[Sequence[Any]], topics: Iterable[AutoTopic]) -> AutoCluster:
    """Return nodes with the rates of these topics, and the sampled ones of others."""
    parts = [one for topic in topics for one in topic.partitions]
    nodes = [
        AutoNode(
            NodeId(node), name, armed and not draining,
            others_per_s + sum(one.per_s for one in parts if one.node == node), partitions, cpu, memory, zone, draining,
        )
        for node, name, armed, draining, zone, others_per_s, partitions, cpu, memory, _ in rows
    ]  # fmt: skip
    moved_s = [row[-1] for row in rows if row[-1] is not None]
    return AutoCluster(nodes, min(moved_s, default=float("inf")))


def take_load_samples(runtime: Runtime, times: Times) -> bool:
    """Ask each node once for ends and positions, and note them; False if no topic has automatic routes.

    Partitions of unavailable nodes get no sample.
    """
    with runtime.control.connection() as connection:
        rows = connection.execute(query("auto_measured")).fetchall()
    if not rows:
        return False
    measured = list(_measured(runtime, rows))
    facts = {
        "partitions": [one[0] for one in measured],
        "ends": [one[1] for one in measured],
        "settled": [one[2] for one in measured],
        "gap_s": times.gap_s,
    }

    def work(connection: Connection) -> None:
        connection.execute(query("route_loads_put"), facts)
        connection.execute(query("route_loads_clean"))

    runtime.control.transaction(work)
    return True


def _measured(runtime: Runtime, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield partitions, their ends, and the slowest group's settled offset."""
    for node in load_nodes(runtime.control):
        of_node = [row for row in rows if row[0] == node.node_id]
        partitions = list(dict.fromkeys(row[1] for row in of_node))
        groups = [GroupPartition(node.node_id, *row[1:]) for row in of_node if row[2] is not None]
        try:
            yield from _of_node(runtime, node, partitions, groups) if partitions else ()
        except MqlayerError as error:
            log.warning("route_loads_not_measured", extra={"node": node.name, "reason": str(error)})


def _of_node(
    runtime: Runtime, node: Node, partitions: Sequence[int], groups: Sequence[GroupPartition]
) -> list[tuple[int, int, int]]:
    with runtime.connection(node) as connection:
        commands: list[Any] = [("HGET", partition_keys(runtime.prefix, one).meta, "next") for one in partitions]
        commands += [
            position_command(
                connection, runtime.prefix, one.partition, one.group_id, start=one.start, seek=one.seek
            )
            for one in groups
        ]  # fmt: skip
        replies = connection.call(commands)
    ends: dict[int, int] = {}
    for partition, reply in zip(partitions, replies, strict=False):
        end = raise_for_reply(reply, node.address)
        if end is not None:
            ends[partition] = int(end)
    settled = dict(ends)
    for one, reply in zip(groups, replies[len(partitions) :], strict=True):
        position = position_reply(reply, node.address)
        if position is not None and one.partition in ends:
            settled[one.partition] = min(settled[one.partition], position.next_offset - position.unsettled)
    return [(partition, end, settled[partition]) for partition, end in ends.items()]


def note_capacities(database: Database, topics: Iterable[AutoTopic]) -> list[AutoTopic]:
    """Note the capacities that samples show; return the topics with them."""
    return [_with_capacity(database, topic) for topic in topics]


def _with_capacity(database: Database, topic: AutoTopic) -> AutoTopic:
    per_s = topic.limit_per_s
    if per_s is None:
        return topic
    if per_s != topic.state.measured_per_s:
        with database.connection() as connection:
            connection.execute(query("route_capacity_put"), {"topic_id": topic.topic_id, "per_s": per_s})
    return replace(topic, state=replace(topic.state, measured_per_s=per_s))


def with_lp_loads(runtime: Runtime, topic: AutoTopic, candidates: Sequence[AutoPartition], times: Times) -> AutoTopic:
    """Return the topic with the load per LP of candidates, sampled together, and with their hot keys."""
    with runtime.control.connection() as connection:
        connection.execute(query("route_loads_sampled"), {"partitions": [one.partition for one in candidates]})
    loads = sampled_loads(runtime, [(one.node, one.partition) for one in candidates], over_s=times.sample_s)

    def known(one: AutoPartition) -> LpLoads | None:
        per_lp = loads.get(one.partition)
        return None if per_lp is None else LpLoads(per_lp, _hot_key(runtime, one, per_lp))

    partitions = tuple(replace(one, loads=known(one)) for one in topic.partitions)
    return replace(topic, partitions=partitions)


def _hot_key(runtime: Runtime, one: AutoPartition, per_lp: Mapping[int, int]) -> HotKey | None:
    """Look for the key only where one LP has most of the load."""
    if max(per_lp.values(), default=0) <= MOST_OF_ONE * sum(per_lp.values()):
        return None
    try:
        with NodePool.of_registered(runtime, RedisRole.WORKER) as pool:
            found = busiest_keys_at(pool.to(one.node), runtime.prefix, one.partition).busiest
    except MqlayerError as error:
        log.warning("hot_key_not_found", extra={"partition": one.partition, "reason": str(error)})
        return None
    if not found or found[0].key is None:
        return None
    return HotKey(found[0].key, lp_of(found[0].key.encode()), found[0].share)
