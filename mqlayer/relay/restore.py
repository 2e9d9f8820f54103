"""Refill of messages that nodes lost, under their old numbers, before a recovery ends these.

See `docs/design/lost-commits.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mqlayer.domain.routing import NodeId
from mqlayer.errors import NodeOutOfMemory, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import AS_BEFORE_UNLESS_CLOSED, append_command, check_appended
from mqlayer.topics.outbox_resend import BorrowedOutbox, lost_runs

Fallen = dict[int, tuple[int, int]]
"""Per LP: last seq that Redis has in full, last seq it had."""


@dataclass(slots=True)
class Serving:
    """An open partition. `fallen`: its lost seqs. `missing`: per LP whose rows are gone too, the last seq present."""

    partition: int
    node_id: NodeId
    fallen: Fallen = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)


def restore(
    borrowed: BorrowedOutbox,
    connections: Callable[[NodeId], NodeConnection],
    prefix: str,
    topic_id: int,
    serving: Serving,
) -> None:
    """Append a partition's lost messages, and note missing ones.

    Raises StoreUnavailable, also if the partition is not open, as during a route change.
    """
    if not serving.fallen:
        return
    connection = connections(serving.node_id)
    try:
        _restore(borrowed, connection, prefix, topic_id, serving)
    except NodeOutOfMemory as error:
        reason = "it has no memory for what it lost, which comes again before its outbox goes on"
        raise StoreUnavailable(connection.node.address, reason) from error


def _restore(
    borrowed: BorrowedOutbox, connection: NodeConnection, prefix: str, topic_id: int, serving: Serving
) -> None:
    def is_gone(lp: int, after: int, _: int) -> bool:
        serving.missing[lp] = after
        return False

    for runs in lost_runs(borrowed, topic_id, serving.fallen, is_gone, address=connection.node.address):
        if runs:
            append = append_command(
                connection, prefix, serving.partition, borrowed.source, runs, backlog=AS_BEFORE_UNLESS_CLOSED
            )
            check_appended(connection.call([append])[0], connection.node.address)
            failpoint("recover.after_refill")
