"""Remove marks of closed direct producers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Command, Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import drop_marks_command
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

Item = TypeVar("Item")

CLOSED_FOR_S: Final = 86_400.0
"""By then, nothing sent is under way."""
SOURCES_PER_PASS: Final = 20
FIELDS_PER_COMMAND: Final = 2_000
COMMANDS_PER_WRITE: Final = 16


class PartitionLps(NamedTuple):
    """A partition and its LP range."""

    partition: int
    lp_from: int
    lp_to: int


def drop_closed_marks(runtime: Runtime, *, closed_for_s: float = CLOSED_FOR_S) -> int:
    """Remove marks of some closed sources; return of how many.

    Safe to run concurrently and to kill; later passes retry.
    """
    with runtime.control.connection() as connection:
        facts = {"closed_for_s": closed_for_s, "limit": SOURCES_PER_PASS}
        sources = [row[0] for row in connection.execute(query("source_try_closed"), facts)]
        if not sources:
            return 0
        by_node: dict[NodeId, list[PartitionLps]] = {}
        for partition, node_id, lp_from, lp_to in connection.execute(query("partition_places")):
            by_node.setdefault(NodeId(node_id), []).append(PartitionLps(partition, lp_from, lp_to))
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    # One unavailable node must not stop the others.
    took = [_drop(runtime, nodes[node_id], sources, places) for node_id, places in by_node.items()]
    if not all(took):
        return 0
    failpoint("marks.before_record")
    with runtime.control.connection() as connection:
        connection.execute(query("source_marks_dropped"), {"source_ids": sources})
    log.info("closed_marks_dropped", extra={"sources": len(sources)})
    return len(sources)


def drop_commands(
    connection: NodeConnection, prefix: str, sources: Sequence[int], places: Iterable[PartitionLps]
) -> Iterator[Command]:
    """Yield bounded commands."""
    for place in places:
        names = (b"%d:%d" % (source, lp) for source in sources for lp in range(place.lp_from, place.lp_to))
        for some in _slices(names, FIELDS_PER_COMMAND):
            yield drop_marks_command(connection, prefix, place.partition, some)


def _drop(runtime: Runtime, node: Node, sources: Sequence[int], places: Iterable[PartitionLps]) -> bool:
    try:
        with runtime.connection(node) as connection:
            for some in _slices(drop_commands(connection, runtime.prefix, sources, places), COMMANDS_PER_WRITE):
                replies = connection.call(some)
                for reply in replies:
                    raise_for_reply(reply, node.address)
    except MqlayerError as error:
        log.warning("marks_node_skipped", extra={"node": node.name, "reason": str(error)})
        return False
    return True


def _slices(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while some := list(islice(items, size)):
        yield some
