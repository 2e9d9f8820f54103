"""Which partitions a group with ordered pop may be given now: read from Postgres once a second, or when told to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import GroupRetired, MqlayerError
from mqlayer.groups.group import Group
from mqlayer.groups.pop_partitions import PopPartition, pop_partitions
from mqlayer.postgres.database import Database
from mqlayer.receiving.partition_view import PartitionView, view_of
from mqlayer.runtime.route_cache import RouteCache

log = logging.getLogger(__name__)

LIST_AGE_S: Final = 1.0
"""How old the list may get; a notification has it read at once."""


class PartitionCache:
    """The partitions of a group, each with what it said last. Raises StoreUnavailable where the first look fails."""

    def __init__(self, database: Database, group: Group, routes: RouteCache, *, prefix: str) -> None:
        self._database, self._group, self._routes, self._prefix = database, group, routes, prefix
        self._views: dict[int, PartitionView] = {}
        # Also those that are not readable now: what is out of them can be settled.
        self._nodes: dict[int, NodeId] = {}
        self.archived = False
        self.changed = threading.Event()
        """Set when it was read; whoever waits for it clears it."""
        # Set for good where the group is retired: nothing is given out any more.
        self.retired: GroupRetired | None = None
        self._read_at = -LIST_AGE_S
        self._reading: threading.Thread | None = None
        self._starting = threading.Lock()
        # One after the other, or what was asked for first could be noted last.
        self._one_reading = threading.Lock()
        self._read()

    @property
    def views(self) -> Sequence[PartitionView]:
        """What may be given out now."""
        return list(self._views.values())

    def expire(self) -> None:
        """Have it read at the next look. For any thread."""
        self._read_at = -LIST_AGE_S

    def refresh(self) -> None:
        """Have it read again if it is old, beside what the caller does: a Postgres that is away must not hold it up.

        What is known serves on meanwhile: nodes refuse what is void. For any thread.
        """
        with self._starting:
            reading = self._reading is not None and self._reading.is_alive()
            if not reading and time.monotonic() - self._read_at >= LIST_AGE_S:
                self._reading = threading.Thread(target=self._try_read, name="mqlayer-lists-partitions", daemon=True)
                self._reading.start()

    def reload(self) -> None:
        """Read it here and now: for whoever changed it, over a Postgres that has just answered. Raises nothing."""
        self._try_read()

    def close(self) -> None:
        """Wait for a reading that is under way."""
        if self._reading is not None:
            self._reading.join(timeout=1)

    def _try_read(self) -> None:
        try:
            self._read()
        except GroupRetired as error:
            self.retired, self._views = error, {}
        except MqlayerError as error:
            log.warning("partitions_not_listed", extra={"reason": str(error)})

    def node_of(self, partition: int) -> NodeId | None:
        """Return where a partition is; None for one that is retired, in which everything is settled."""
        if partition not in self._nodes:
            self._note(pop_partitions(self._database, self._group.group_id))
        return self._nodes.get(partition)

    def _read(self) -> None:
        with self._one_reading:
            # Before the query: what is said to be new while it runs is read again.
            self._read_at = time.monotonic()
            found = pop_partitions(self._database, self._group.group_id)
            # With them, which run and address of each node count: connections to others are not used any more.
            self._routes.refresh_nodes()
            self._note(found)
            self._views = {one.partition: self._view(one) for one in found if one.readable}
        self.changed.set()

    def _note(self, found: Sequence[PopPartition]) -> None:
        self._nodes = {**self._nodes, **{one.partition: one.node for one in found}}
        # Whether what becomes of messages is told to an archiver: said of the topic, so of all alike.
        self.archived = any(one.archived for one in found)

    def _view(self, one: PopPartition) -> PartitionView:
        """Return a partition as it is known, or anew where anything about it changed."""
        known = self._views.get(one.partition)
        if known is not None and known.info == one:
            return known
        view = view_of(one, prefix=self._prefix, group_id=self._group.group_id, scope=self._group.scope or "key")
        if known is not None:
            view.refused, view.unanswered, view.paused_until = known.refused, known.unanswered, known.paused_until
        return view
