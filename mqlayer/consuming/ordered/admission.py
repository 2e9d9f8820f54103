"""The circuit breaker's side of the dispatcher."""

from __future__ import annotations

from mqlayer.consuming.ordered.owned_partitions import OwnershipState
from mqlayer.consuming.ordered.ready_queues import ReadyQueues


class Admission:
    """Looks for a probe, and wakes workers. Thread-safe."""

    def __init__(self, queues: ReadyQueues) -> None:
        self._queues = queues

    def has_ready(self) -> bool:
        """Whether a message could begin."""
        with self._queues.lock:
            self._queues.collect_finished()
            return any(key_queue.owned.state is OwnershipState.OPEN for key_queue in self._queues.ready)

    def wake_workers(self) -> None:
        """Have workers look again."""
        with self._queues.lock:
            self._queues.changed.notify_all()
        if self._queues.on_ready is not None:
            self._queues.on_ready()
