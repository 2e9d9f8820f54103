"""Handing dedup ids over to the successors of a route change: from node to node, while nobody publishes there.

A parent is sealed, so its ids don't change; a successor is importing, so nobody else writes there; loading is
idempotent, so whoever finds the change unfinished does it again. Best effort where a parent's node is away: whether a
change goes on must not hang on it, and what is forgotten may be stored twice, never lost or reordered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from mqlayer.errors import StoreUnavailable
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import dedup_load_command

log = logging.getLogger(__name__)

PAGE: Final = 2_000


class KnownId(NamedTuple):
    """An id as a parent knows it: its token, its first place as text, and how long ago it came, by its node's clock."""

    token: bytes
    place: bytes
    age_ms: int


def hand_over_ids(
    parent: tuple[NodeConnection, int], successor: tuple[NodeConnection, int], *, prefix: str, change: int,
    lp_from: int, lp_to: int,
) -> int:  # fmt: skip
    """Load into a successor what a sealed parent knows of ids of the successor's LPs; return how many.

    Each is given as a connection and the number of the partition. Raises StoreUnavailable of the successor's node; of
    the parent's it is logged.
    """
    count = 0
    try:
        for page, left_ms in _pages(*parent, prefix):
            ours = [known for known in page if lp_from <= int(known.place.split(b":", 1)[0]) < lp_to]
            if ours:
                _load(*successor, ours, left_ms, prefix=prefix, change=change)
                count += len(ours)
    except StoreUnavailable as error:
        if error.args[0] != parent[0].node.address or parent[0].node == successor[0].node:
            raise
        log.warning("ids_not_handed_over", extra={"partition": parent[1], "reason": str(error)})
    return count


def _pages(connection: NodeConnection, partition: int, prefix: str) -> Iterator[tuple[list[KnownId], int]]:
    """Yield what a sealed partition knows, with how long it is kept from now on."""
    keys, start = partition_keys(prefix, partition), 0
    while True:
        replies = connection.call(
            [("ZRANGE", keys.ages, start, start + PAGE - 1, "WITHSCORES"), ("TIME",), ("PTTL", keys.ages)]
        )
        ages, (seconds, micros), left_ms = (raise_for_reply(reply, connection.node.address) for reply in replies)
        if not ages:
            return
        tokens, now_ms = ages[::2], int(seconds) * 1_000 + int(micros) // 1_000
        places = raise_for_reply(connection.call([("HMGET", keys.ids, *tokens)])[0], connection.node.address)
        yield (
            [
                KnownId(token, _with_partition(place, partition), max(0, now_ms - int(float(came_ms))))
                for token, place, came_ms in zip(tokens, places, ages[1::2], strict=True)
                if place is not None
            ],
            max(1, left_ms),
        )
        start += PAGE


def _with_partition(place: bytes, partition: int) -> bytes:
    """Return a place that names its partition."""
    return place if place.count(b":") == 4 else b"%b:%d" % (place, partition)


def _load(
    connection: NodeConnection, partition: int, ids: list[KnownId], left_ms: int, *, prefix: str, change: int
) -> None:
    command = dedup_load_command(connection, prefix, partition, change, left_ms, ids)
    raise_for_reply(connection.call([command])[0], connection.node.address)
