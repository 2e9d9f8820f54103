"""Messages per LP, by marks: a mark grows by one per message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mqlayer.domain.routing import NodeId, Route
from mqlayer.errors import InvalidInput, MqlayerError, NotFound
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

LONGEST_S: Final = 3_600.0


class PartitionLoad(NamedTuple):
    """Messages per LP. `over_s`: how long they were counted; 0: all time."""

    per_lp: dict[int, int]
    over_s: float


def measured_load(runtime: Runtime, route: Route, partition: int, *, over_s: float = 0.0) -> PartitionLoad:
    """Count a partition's messages over the next `over_s` seconds; with 0, or if none arrive, over all time.

    Raises NotFound for a partition not in force, InvalidInput above one hour, StoreUnavailable.
    """
    if not 0 <= over_s <= LONGEST_S:
        raise InvalidInput(f"the load is measured for 0 to {LONGEST_S:g} seconds, not {over_s:g}")
    node_id = next((r.node for r in route.ranges if r.partition == partition), None)
    if node_id is None:
        raise NotFound("partition", partition, f"version {route.version} of topic {route.topic!r} does not have it")
    with runtime.connection(_node(runtime.control, node_id)) as connection:
        before = _marks(connection, runtime.prefix, partition)
        if over_s == 0:
            return PartitionLoad(dict(before), 0.0)
        time.sleep(over_s)
        grown = _marks(connection, runtime.prefix, partition) - before
    return PartitionLoad(dict(grown), over_s) if grown else PartitionLoad(dict(before), 0.0)


def sampled_loads(
    runtime: Runtime, partitions: Sequence[tuple[NodeId, int]], *, over_s: float
) -> dict[int, dict[int, int]]:
    """Count the messages per LP of partitions over the same `over_s` seconds.

    Partitions of unavailable nodes are left out.
    """
    with NodePool.of_registered(runtime) as pool:
        before = dict(_all_marks(runtime, pool, partitions))
        time.sleep(over_s)
        after = dict(_all_marks(runtime, pool, partitions))
    return {one: dict(marks - before[one]) for one, marks in after.items() if one in before}


def _all_marks(
    runtime: Runtime, pool: NodePool, partitions: Sequence[tuple[NodeId, int]]
) -> Iterator[tuple[int, Counter[int]]]:
    for node_id, partition in partitions:
        try:
            yield partition, _marks(pool.to(node_id), runtime.prefix, partition)
        except MqlayerError as error:
            log.warning("lp_load_not_sampled", extra={"partition": partition, "reason": str(error)})


def _marks(connection: NodeConnection, prefix: str, partition: int) -> Counter[int]:
    (reply,) = connection.call([("HGETALL", partition_keys(prefix, partition).marks)])
    flat = raise_for_reply(reply, connection.node.address)
    loads: Counter[int] = Counter()
    for name, seq in zip(flat[::2], flat[1::2], strict=True):
        loads[int(name.split(b":")[1])] += int(seq)
    return loads


def _node(database: Database, node_id: NodeId) -> Node:
    for node in load_nodes(database):
        if node.node_id == node_id:
            return node
    raise NotFound("node", node_id, "its row is gone from the control database")
