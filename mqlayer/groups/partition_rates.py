"""Publish rates of partitions, for groups balanced by rate."""

from __future__ import annotations

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.groups.rebalance import rebalance_each
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


def balance_by_rate(runtime: Runtime) -> int:
    """Measure partitions' growth since the last call, rebalance groups by it; return how many changed.

    Unavailable nodes keep their last rates; groups whose lock is held wait for the next call.
    """
    ends = _ends(runtime)
    if not ends:
        return 0
    measured = {"partitions": list(ends), "offsets": list(ends.values())}
    runtime.control.transaction(lambda connection: connection.execute(query("rate_put"), measured))
    with runtime.control.connection() as connection:
        groups = [row[0] for row in connection.execute(query("groups_by_rate")).fetchall()]
    return rebalance_each(runtime.control, groups)


def _ends(runtime: Runtime) -> dict[int, int]:
    with runtime.control.connection() as connection:
        rows = connection.execute(query("rates_wanted")).fetchall()
    by_node: dict[NodeId, list[int]] = {}
    for partition, node_id in rows:
        by_node.setdefault(NodeId(node_id), []).append(partition)
    nodes = {node.node_id: node for node in load_nodes(runtime.control)} if by_node else {}
    ends: dict[int, int] = {}
    for node_id, partitions in by_node.items():
        try:
            with runtime.connection(nodes[node_id]) as node_connection:
                asked = [("HGET", partition_keys(runtime.prefix, partition).meta, "next") for partition in partitions]
                for partition, reply in zip(partitions, node_connection.call(asked), strict=True):
                    ends[partition] = int(raise_for_reply(reply, node_connection.node.address) or 0)
        except MqlayerError as error:
            log.warning("rates_not_measured", extra={"node": nodes[node_id].name, "reason": str(error)})
    return {partition: end for partition, end in ends.items() if end}
