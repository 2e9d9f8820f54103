"""Copy dedup ids from sealed parents to importing successors.

Loading is idempotent. Best effort without the parent's node: forgotten ids may let duplicates in, never loss or
reordering.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mqlayer.errors import StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import dedup_load_command

log = event_logger(__name__)

PAGE: Final = 2_000


class KnownId(NamedTuple):
    """A dedup id: token, first place as text, age by its node's clock."""

    token: bytes
    place: bytes
    age_ms: int


def hand_over_ids(
    parent: tuple[NodeConnection, int], successor: tuple[NodeConnection, int], *, prefix: str, change: int,
    lp_from: int, lp_to: int,
) -> int:  # fmt: skip
    """Copy a sealed parent's ids of the LPs to a successor; return how many.

    `parent` and `successor`: connection and partition. Raises StoreUnavailable of the successor's node; the parent's is
    logged.
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
    return place if place.count(b":") == 4 else b"%b:%d" % (place, partition)


def _load(
    connection: NodeConnection, partition: int, ids: list[KnownId], left_ms: int, *, prefix: str, change: int
) -> None:
    command = dedup_load_command(connection, prefix, partition, change, left_ms, ids)
    raise_for_reply(connection.call([command])[0], connection.node.address)
