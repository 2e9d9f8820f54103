"""What nodes lost of an outbox is there again, under its own numbers, before these are given up.

As a rule a relay does that by itself: it goes back to the mark. But of an outbox whose Postgres may have lost commits
nothing is relayed before it is numbered anew, and then what is recorded as relayed would be forgotten. What is recorded
was committed before the loss, so its row is that very message; so is what is proven.
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
"""Of LPs: up to which seq Redis has all, and up to which it had."""


@dataclass(slots=True)
class Serving:
    """A partition that serves LPs now.

    `fallen`: what it lacks; `missing`: where that can't be had, since the outbox lacks it too, up to which seq it has
    all.
    """

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
    """Append what a partition lacks, and note what can't be had.

    Raises StoreUnavailable, also where it is not open, as while a route changes.
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
