"""What nodes lost of an outbox is there again, under its own numbers, before these are given up.

As a rule a relay does that by itself: it goes back to the mark. But of an outbox whose Postgres may have lost commits
nothing is relayed before it is numbered anew, and then what is recorded as relayed would be forgotten. What is recorded
was committed before the loss, so its row is that very message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mqlayer.domain.routing import NodeId
from mqlayer.errors import StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.partitions import AS_BEFORE, append_command, check_appended
from mqlayer.topics.resending import Lent, lost_runs

Fallen = dict[int, tuple[int, int]]
"""Of LPs: up to which seq Redis has all, and up to which it had."""


def refill(
    lent: Lent,
    lines: Callable[[NodeId], NodeConnection],
    prefix: str,
    topic_id: int,
    partitions: Sequence[tuple[Any, ...]],
    fallen: Mapping[int, tuple[int, int]],
) -> Fallen:
    """Append what a topic's LPs lost, in the partitions that serve them now; return what the outbox holds no more.

    Raises StoreUnavailable where one is not open, as while a route changes: whoever sees to that makes it so.
    """
    left = dict(fallen)
    gone: Fallen = {}
    for partition, node_id, lp_from, lp_to, state, *_ in partitions:
        if state != "open":
            continue
        lps = {lp: left.pop(lp) for lp in [*left] if lp_from <= lp < lp_to}
        if lps:
            gone |= _refill(lent, lines(NodeId(node_id)), prefix, topic_id, partition, lps)
    if left:
        raise StoreUnavailable(f"topic {topic_id}", f"the route of LP {min(left)} changes: what was lost comes later")
    return gone


def _refill(
    lent: Lent, line: NodeConnection, prefix: str, topic_id: int, partition: int, lps: Mapping[int, tuple[int, int]]
) -> Fallen:
    gone: Fallen = {}

    def is_gone(lp: int, after: int, _: int) -> bool:
        gone[lp] = (after, lps[lp][1])
        return False

    for runs in lost_runs(lent, topic_id, lps, is_gone, address=line.node.address):
        if runs:
            append = append_command(line, prefix, partition, lent.source, runs, backlog=AS_BEFORE)
            check_appended(line.call([append])[0], line.node.address)
            failpoint("recover.after_refill")
    return gone
