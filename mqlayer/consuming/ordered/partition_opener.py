"""Open partitions whose pull locks were taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.parked_keys import parked_key_of
from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger
from mqlayer.parking import ParkingStore, Span
from mqlayer.postgres.database import Connection, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.redis.partition_scripts import LockTaken

log = event_logger(__name__)

FENCE_RAISE_S: Final = 2.0
"""Time limit for raising fences."""


class PartitionOpener:
    """Raises fences, loads parked keys, opens."""

    def __init__(self, core: MemberCore, store: ParkingStore, dispatcher: Dispatcher, events: OrderedEvents) -> None:
        self._application, self._group = core.runtime.application, core.group
        self._store, self._dispatcher, self._events = store, dispatcher, events

    def open(self, pairs: Sequence[tuple[OwnedPartition, LockTaken]]) -> None:
        """Open partitions, or none. Raises StoreUnavailable."""
        self._raise_fences([owned for owned, _ in pairs])
        self._load(pairs)
        for owned, taken in pairs:
            self._dispatcher.open(owned, taken)
            self._events.acquired(owned, taken.committed)

    def _load(self, pairs: Sequence[tuple[OwnedPartition, LockTaken]]) -> None:
        found = self._store.load([span_of(owned, taken.committed) for owned, taken in pairs])
        now = clock()
        for owned, taken in pairs:
            loaded = found[owned.partition]
            owned.to_park.synced(loaded.parking_version)
            self._dispatcher.parking.load(owned, loaded, [parked_key_of(state, now) for state in loaded.keys], taken)

    def _raise_fences(self, partitions: list[OwnedPartition]) -> None:
        """Refuse earlier owners' effects early."""
        if self._application is None or not partitions:
            return
        until = clock() + FENCE_RAISE_S
        try:
            with self._application.connection() as connection:
                if self._raise_fence(connection, partitions):
                    return
                # One key's open transaction must not keep the others' fences down.
                for owned in partitions:
                    if clock() < until and not connection.closed:
                        self._raise_fence(connection, [owned])
        except MqlayerError as error:
            log.warning("fence_not_raised", extra={"group": self._group.name, "reason": str(error)})

    def _raise_fence(self, connection: Connection, partitions: list[OwnedPartition]) -> bool:
        facts = {
            "group_id": self._group.group_id,
            "lp_from": [owned.assignment.lp_from for owned in partitions],
            "lp_to": [owned.assignment.lp_to for owned in partitions],
            "epochs": [owned.epoch for owned in partitions],
        }
        try:
            with driver_errors("the application database"), connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '200ms'")
                connection.execute(query("fences_raise"), facts)
        except MqlayerError as error:
            if len(partitions) == 1:
                log.warning("fence_not_raised", extra=self._events.facts(partitions[0]) | {"reason": str(error)})
            return False
        return True


def span_of(owned: OwnedPartition, committed: int) -> Span:
    """Return a partition's span."""
    return Span(owned.partition, owned.assignment.lp_from, owned.assignment.lp_to, committed)
