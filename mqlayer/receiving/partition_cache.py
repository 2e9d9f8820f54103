"""A pop group's partitions, read from Postgres."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import GroupRetired
from mqlayer.groups.group import Group
from mqlayer.groups.pop_partitions import PopPartition, pop_partitions
from mqlayer.receiving.partition_view import PartitionView, view_of
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.runtime.service import Service

LIST_AGE_S: Final = 1.0
IDLE_S: Final = 60.0


class PartitionCache(Service):
    """A group's partitions, read again in the background. Raises StoreUnavailable if the first read fails."""

    def __init__(self, runtime: Runtime, group: Group, routes: RouteCache) -> None:
        super().__init__("mqlayer-lists-partitions", title="the reader of partitions", event="partitions_list")
        self._database, self._prefix, self._group, self._routes = runtime.control, runtime.prefix, group, routes
        self._deployment = runtime.settings.deployment
        self._views: dict[int, PartitionView] = {}
        # Unreadable ones too: their messages that are out can be settled.
        self._nodes: dict[int, NodeId] = {}
        self.archived = False
        self.changed = threading.Event()
        """Set after each read; waiters clear it."""
        # Set for good once the group is retired.
        self.retired: GroupRetired | None = None
        self._read_at = -LIST_AGE_S
        # Serializes reads: an older result must not replace a newer one.
        self._one_reading = threading.Lock()
        self._read()

    @property
    def views(self) -> Sequence[PartitionView]:
        """The readable partitions."""
        return list(self._views.values())

    def expire(self) -> None:
        """Make the next `refresh` read. For any thread."""
        self._read_at = -LIST_AGE_S

    def refresh(self) -> None:
        """Read an old list again in the background. For any thread."""
        if self._is_old():
            self.wake.set()

    def reload(self) -> None:
        """Read now. Raises nothing."""
        self._try_pass()

    def _is_old(self) -> bool:
        return time.monotonic() - self._read_at >= LIST_AGE_S

    def _wait_s(self) -> float:
        return IDLE_S

    def _pass(self) -> None:
        try:
            self._read()
        except GroupRetired as error:
            self.retired, self._views = error, {}

    def node_of(self, partition: int) -> NodeId | None:
        """Return a partition's node; None: retired, all settled."""
        if partition not in self._nodes:
            self._note(pop_partitions(self._database, self._group.group_id))
        return self._nodes.get(partition)

    def _read(self) -> None:
        with self._one_reading:
            # Before the query: an `expire` while it runs must cause another read.
            self._read_at = time.monotonic()
            found = pop_partitions(self._database, self._group.group_id, deployment=self._deployment)
            # Also armed runs and addresses, which void connections to others.
            self._routes.refresh_nodes()
            self._note(found)
            self._views = {one.partition: self._view(one) for one in found if one.readable}
        self.changed.set()

    def _note(self, found: Sequence[PopPartition]) -> None:
        self._nodes = {**self._nodes, **{one.partition: one.node for one in found}}
        # A setting of the topic, so equal for all.
        self.archived = any(one.archived for one in found)

    def _view(self, one: PopPartition) -> PartitionView:
        known = self._views.get(one.partition)
        if known is not None and known.info == one:
            return known
        view = view_of(one, prefix=self._prefix, group_id=self._group.group_id, scope=self._group.scope or "key")
        if known is not None:
            view.refused, view.unanswered, view.paused_until = known.refused, known.unanswered, known.paused_until
        return view
