"""Look up messages stored by earlier tries."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from mqlayer.domain.message import Identity
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.producing.backoff import backoff_s
from mqlayer.producing.follow_ups import StoredLookup
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.scheduler import Scheduler
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

FIND_TRIES: Final = 5
ENTRY_LIMIT: Final = 5_000
FIRST_PAGE: Final = 20
PAGE_BYTES: Final = 4_000_000

Connections = Callable[[NodeId], NodeConnection]
FindNode = Callable[[NodeId], Node]


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
    connections: Connections, prefix: str, places: Collection[tuple[int, NodeId]], wanted: Collection[Identity]
) -> tuple[dict[Identity, tuple[int, int]], bool]:
    """Search (partition, node) places in order. Return findings, and whether all nodes answered."""
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


class RecordLookup:
    """Settles sends stored by earlier tries, with places."""

    def __init__(self, guarded: GuardedInFlight, scheduler: Scheduler, runtime: Runtime, find_node: FindNode) -> None:
        self._guarded, self._scheduler, self._runtime, self._find_node = guarded, scheduler, runtime, find_node

    def run(self, lookup: StoredLookup, tries: int = 1) -> None:
        """Search, and settle the send; repeated while nodes are silent."""
        try:
            found, complete = self._find(lookup)
        except MqlayerError as error:
            # The messages are stored; only their places may stay unknown.
            log.warning("position_not_found", extra={"reason": str(error)})
            found, complete = {}, False
        if len(found) < lookup.early and not complete and tries < FIND_TRIES:
            self._scheduler.schedule(lambda: self.run(lookup, tries + 1), after_s=backoff_s(tries))
            return
        with self._guarded as in_flight:
            in_flight.settlement.located(lookup.pending, lookup.outcome(found))

    def _find(self, lookup: StoredLookup) -> tuple[dict[Identity, tuple[int, int]], bool]:
        places = [
            (partition_queue.partition, partition_queue.node.node_id) for partition_queue in lookup.partition_queues
        ]
        with NodePool(self._runtime, self._find_node, RedisRole.PUBLISHER) as pool:
            return find_on_nodes(pool.to, self._runtime.prefix, places, lookup.wanted())
