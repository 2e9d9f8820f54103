"""Reclaim messages from silent members of shared groups, also where no member lives. Safe to run concurrently."""

from __future__ import annotations

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.redis.shared_scripts import SharedGroupPartition, shared_count_reply, shared_reclaim_command
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

Places = list[tuple[SharedGroupPartition, float]]
"""With each group's visibility timeout in seconds."""


def reclaim_shared(runtime: Runtime) -> int:
    """Make silent members' messages due; return how many.

    Takes a bounded number per partition; skips unavailable nodes.
    """
    with runtime.control.connection() as connection:
        rows = connection.execute(query("shared_places")).fetchall()
    by_node: dict[NodeId, Places] = {}
    for group_id, partition, node_id, epoch, visibility_timeout_s in rows:
        by_node.setdefault(NodeId(node_id), []).append(
            (SharedGroupPartition(runtime.prefix, partition, group_id, epoch), visibility_timeout_s)
        )
    if not by_node:
        return 0
    count = 0
    for node in load_nodes(runtime.control):
        places = by_node.get(node.node_id)
        if places:
            count += _reclaim(runtime, node, places)
    if count:
        log.info("messages_reclaimed", extra={"count": count})
    return count


def _reclaim(runtime: Runtime, node: Node, places: Places) -> int:
    try:
        with runtime.connection(node) as connection:
            commands = [shared_reclaim_command(connection, place, round(seconds * 1000)) for place, seconds in places]
            replies = connection.call(commands)
            failpoint("shared.after_reclaim")
            answers = [shared_count_reply(reply, node.address) for reply in replies]
    except MqlayerError as error:
        log.warning("reclaim_node_skipped", extra={"node": node.name, "reason": str(error)})
        return 0
    # Other answers: another epoch, or no member yet; members handle both.
    return sum(answer for answer in answers if isinstance(answer, int))
