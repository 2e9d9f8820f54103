"""The life of one member, ordered or shared. Threads: `docs/design/consuming.md`; crashes:
`docs/design/crash-matrix.md`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Generic

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.engine.executors import Executor
from mqlayer.consuming.engine.heartbeat import Heartbeat
from mqlayer.consuming.engine.nodes import MemberNodes, R, S
from mqlayer.consuming.engine.options import MemberStats
from mqlayer.consuming.engine.partitions import MemberPartitions
from mqlayer.errors import VersionRefused
from mqlayer.groups.group import Group
from mqlayer.health import Health, stuck_after_s
from mqlayer.logs import event_logger
from mqlayer.runtime.service import Service

log = event_logger(__name__)


class Member(ABC, Generic[R, S]):
    """Joins a group, consumes, stops and leaves. `writer` writes failures to Postgres.

    `rejoin` revives a retired broadcast instance.
    """

    def __init__(
        self,
        core: MemberCore,
        events: MemberEvents,
        *,
        partitions: MemberPartitions,
        executor: Executor,
        nodes: MemberNodes[R, S],
        writer: Service,
        rejoin: Callable[[], object] | None = None,
    ) -> None:
        self._core, self._events, self._executor, self._nodes, self._writer = core, events, executor, nodes, writer
        self._served = partitions
        self._heartbeat = Heartbeat(core, partitions, nodes.refresh, self._replace, rejoin, events, self._refuse)
        self._end_counts: Callable[[], None] | None = None
        self._stopping, self._replaced = False, ""
        self._stop_lock = threading.Lock()
        # Whether all handlers ended in a drain, once there was one.
        self._drained: bool | None = None
        self.refused: VersionRefused | None = None
        """Why this code may not consume any more: it drains, then ends."""

    def start(self) -> None:
        """Join the group and start consuming. Raises StoreUnavailable, SchemaMismatch; nothing runs then."""
        if self._core.meters is not None:
            self._end_counts = self._core.meters.count(lambda: asdict(self.stats), lambda: len(self.owned()))
        try:
            self._executor.start()
            self._writer.start()
            self._heartbeat.start()
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for handlers, settle, give back the rest; return whether every handler ended.

        Handlers that outlast `timeout_s` (default `drain_timeout_s`) can't settle: their messages are handled again.
        """
        with self._stop_lock:
            return self._stop(timeout_s) if self._drained is None else self._drained

    def _stop(self, timeout_s: float | None) -> bool:
        until = clock() + (self._core.options.drain_timeout_s if timeout_s is None else timeout_s)
        self._stopping = True
        self._stop_starting(until)
        self._heartbeat.start_leaving()
        self._wait_drained(until)
        ended = self._executor.join(max(0.2, until - clock()))
        self._end_threads(until)
        self._heartbeat.stop(10.0)
        if self._end_counts is not None:
            self._end_counts()
        return ended

    def go_silent(self, *, settle: bool) -> None:
        """Be as a stopped process, or without `settle` as a killed one, to its group: for tests of handlers.

        No heartbeat, no leaving, and no message begins; without `settle`, running ones are not settled either.
        """
        self._core.lease.until = 0.0
        self._heartbeat.end()
        self._heartbeat.join(10.0)
        # Its last pass may have extended it.
        self._core.lease.until = 0.0
        if not settle:
            self._served.lease_lost()

    def wake(self) -> None:
        """Fetch the assignments now."""
        self._core.beat.set()

    @property
    def running(self) -> bool:
        """Whether it consumes; False after `stop`, eviction, replacement, or refusal."""
        return not self._stopping and self.refused is None

    def health(self) -> Health:
        """Report whether threads respond and all partitions are served. Thread-safe."""
        if self._replaced:
            # Only a new process recovers from this, and other members here would hide it.
            return Health(stuck=(self._replaced,))
        if self._stopping:
            return Health(waits=("it is stopping",))
        ended = () if self._executor.alive else ("a worker's thread ended",)
        limit_s = stuck_after_s(self._core.runtime.settings)
        return Health.of_all(
            self._heartbeat.health(limit_s),
            self._nodes.health(limit_s),
            self._writer.health(limit_s),
            Health(ended, self._served.missing()),
        )

    def owned(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return self._served.served()

    @property
    def stats(self) -> MemberStats:
        """Its counts."""
        return self._events.stats

    @property
    def group(self) -> Group:
        """Its group."""
        return self._core.group

    @property
    def member_id(self) -> str:
        """Its id."""
        return self._core.member_id

    @abstractmethod
    def _stop_starting(self, until: float) -> None:
        """Start no more messages."""

    def _wait_drained(self, until: float) -> None:
        """Wait until nothing is owned; stop the workers."""

    @abstractmethod
    def _end_threads(self, until: float) -> None:
        """Send results; end nodes' threads and the writer."""

    @abstractmethod
    def _stop_workers(self) -> None:
        """Have workers take nothing more."""

    def _refuse(self, error: VersionRefused) -> None:
        """Drain in order, then end: the schema serves newer code only."""
        if self.refused is None:
            self.refused = error
            log.error("code_too_old", extra={"member": self.member_id, "reason": str(error)})
            # Not the heartbeat's thread, which goes on until all is handed over.
            threading.Thread(target=self._drain, args=(error,), name=f"{self._core.name}-drain", daemon=True).start()

    def _drain(self, error: VersionRefused) -> None:
        with self._stop_lock:
            if not self._stopping:
                self._drained = self._stop(None)
        self._replaced = str(error)

    def _replace(self, reason: str) -> None:
        """End: id taken, member evicted, or group retired."""
        self._stopping, self._replaced = True, reason
        self._served.close()
        self._stop_workers()
