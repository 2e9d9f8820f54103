"""Reclaim messages from silent members of shared groups, also where no member lives. Safe to run concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.members import MemberSession
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.shared_scripts import AT_ONCE, SharedGroupPartition, shared_count_reply, shared_reclaim_command
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

Places = list[tuple[SharedGroupPartition, float]]
"""With each group's visibility timeout in seconds."""


def reclaim_shared(runtime: Runtime) -> int:
    """Make silent members' messages due; return how many.

    Takes a bounded number per partition; skips unavailable nodes.
    """
    return _on_each_node(runtime, None, _reclaim)


def reclaim_dead(runtime: Runtime, session: MemberSession, died_at: float) -> int:
    """Make the messages of a member due whose process ended then, by the monotonic clock; return how many.

    Only those of before: the same id may have joined again. Skips unavailable nodes.
    """

    def reclaim(connection: NodeConnection, places: Places) -> int:
        # It connects: a message given meanwhile must not look older than the death.
        connection.call([("PING",)])
        count, taken = 0, AT_ONCE
        while taken >= AT_ONCE:
            silent_s = time.monotonic() - died_at
            taken = _reclaim(connection, [(place, silent_s) for place, _ in places], session.member_id)
            count += taken
        return count

    return _on_each_node(runtime, session.group_id, reclaim)


def _on_each_node(runtime: Runtime, group_id: int | None, work: Callable[[NodeConnection, Places], int]) -> int:
    with runtime.control.connection() as connection:
        rows = connection.execute(query("shared_places"), {"group_id": group_id}).fetchall()
    by_node: dict[NodeId, Places] = {}
    for of_group, partition, node_id, epoch, visibility_timeout_s in rows:
        by_node.setdefault(NodeId(node_id), []).append(
            (SharedGroupPartition(runtime.prefix, partition, of_group, epoch), visibility_timeout_s)
        )
    count = 0
    for node in load_nodes(runtime.control) if by_node else ():
        if node.node_id in by_node:
            try:
                with runtime.connection(node) as node_connection:
                    count += work(node_connection, by_node[node.node_id])
            except MqlayerError as error:
                log.warning("reclaim_node_skipped", extra={"node": node.name, "reason": str(error)})
    if count:
        log.info("messages_reclaimed", extra={"count": count})
    return count


def _reclaim(connection: NodeConnection, places: Places, member: str = "") -> int:
    replies = connection.call(
        [
            shared_reclaim_command(connection, place, max(0, int(seconds * 1000) - 1), member)
            for place, seconds in places
        ]
    )
    failpoint("shared.after_reclaim")
    answers = [shared_count_reply(reply, connection.node.address) for reply in replies]
    # Other answers: another epoch, or no member yet; members handle both.
    return sum(answer for answer in answers if isinstance(answer, int))
