"""Lookup of messages that an earlier try stored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from mqlayer.domain.message import Identity
from mqlayer.errors import StoreUnavailable
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply

ENTRY_LIMIT: Final = 5_000
FIRST_PAGE: Final = 20
PAGE_BYTES: Final = 4_000_000

Connections = Callable[[int], NodeConnection]


def find_offsets(
    connection: NodeConnection, prefix: str, partition: int, wanted: Collection[Identity]
) -> dict[Identity, int]:
    """Return messages' offsets among a partition's newest 5,000 records, by identity. Raises StoreUnavailable."""
    names = {b"%d:%d:%d" % identity: identity for identity in wanted}
    found: dict[Identity, int] = {}
    key, before, page, left = partition_keys(prefix, partition).log, b"+", FIRST_PAGE, ENTRY_LIMIT
    while names and left > 0:
        count = min(page, left)
        entries = raise_for_reply(
            connection.call([(b"XREVRANGE", key, before, b"-", b"COUNT", count)])[0], connection.node.address
        )
        for entry_id, fields in entries:
            identity = names.pop(b":".join(fields[1].split(b":", 3)[:3]), None)
            if identity is not None:
                found[identity] = int(entry_id.split(b"-")[0])
        if len(entries) < count:
            break
        left -= count
        before = b"(" + entries[-1][0]
        page = _next_page(entries)
    return found


def _next_page(entries: list[tuple[bytes, list[bytes]]]) -> int:
    size = sum(len(part) for _, fields in entries for part in fields) // len(entries)
    return max(1, min(1_000, PAGE_BYTES // max(1, size)))


def find_on_nodes(
    connections: Connections, prefix: str, places: Collection[tuple[int, int]], wanted: Collection[Identity]
) -> tuple[dict[Identity, tuple[int, int]], bool]:
    """Search (partition, node) places in order. Return the places found, and whether all nodes answered."""
    found: dict[Identity, tuple[int, int]] = {}
    complete = True
    for partition, node_id in places:
        missing = [identity for identity in wanted if identity not in found]
        if not missing:
            break
        try:
            offsets = find_offsets(connections(node_id), prefix, partition, missing)
        except StoreUnavailable:
            complete = False
            continue
        found |= {identity: (partition, offset) for identity, offset in offsets.items()}
    return found, complete
