"""Move outbox rows to partitions, in order, without loss."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_when_event_set,
)
from tenacity.nap import sleep_using_event

from mqlayer.errors import PermissionDenied, StoreUnavailable, TransactionConflict, VersionRefused
from mqlayer.health import Health, Liveness, stuck_after_s
from mqlayer.logs import event_logger, is_reported
from mqlayer.metrics import meters_of
from mqlayer.randomness import FullJitter
from mqlayer.redis.access import use_access
from mqlayer.relay.backoff import backoff_s
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_leases import LpSets
from mqlayer.relay.recovery import SourceEnded
from mqlayer.relay.relay_session import RelaySession
from mqlayer.runtime.runtime import Runtime, open_runtime
from mqlayer.settings import Settings

log = event_logger(__name__)

MOST_CONNECTIONS: Final = 12
"""Per schema: one for each background thread, and some more."""
_UNREACHABLE: Final = (StoreUnavailable, TransactionConflict)


class Relay:
    """Moves one outbox's rows to their partitions until stopped.

    A message is in its partition exactly once, in commit order per key. Relays share LPs; a kill at any line is
    safe. Unavailable stores are retried. Raises VersionRefused once drained, SchemaMismatch, ConfigurationRefused,
    PermissionDenied, InvalidInput or Conflict (a broken database constraint) if waiting can't help.
    """

    def __init__(self, settings: Settings, *, limits: RelayLimits | None = None, relay_id: str | None = None) -> None:
        use_access(settings)
        self._settings = settings
        self._limits = limits or RelayLimits(
            chunk_rows=settings.relay_chunk_rows, chunk_bytes=settings.relay_chunk_bytes
        )
        self.relay_id = relay_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._stopping = threading.Event()
        self._session: RelaySession | None = None
        self._liveness, self._unreachable = Liveness(), "it has not begun"
        self._moved_before = 0
        self._refused: VersionRefused | None = None

    @property
    def appended_count(self) -> int:
        """Messages that this relay appended."""
        return self._moved_before + (self._session.appended_count if self._session is not None else 0)

    def health(self) -> Health:
        """Whether it progresses, keeps its lease (or stands by) and reaches its nodes. Thread-safe."""
        stuck = self._liveness.stuck("the relay", stuck_after_s(self._settings))
        if self._stopping.is_set():
            return Health(stuck, ("it is stopping",))
        session = self._session
        age_s = session.lease_age_s if session is not None else None
        if age_s is None:
            return Health(stuck, (self._unreachable,))
        if age_s > self._settings.lease_s:
            return Health(stuck, (f"its lease ran out: the last beat was {age_s:.0f} s ago",))
        return Health(stuck, session.errors if session is not None else ())

    def run(self) -> None:
        """Work until `stop`."""
        meters = meters_of(self._settings)
        end_counts = None if meters is None else meters.add_relay(self._lp_sets)
        try:
            self._serve(self._work, helper=False)
        finally:
            if end_counts is not None:
                end_counts()
        if self._refused is not None:
            raise self._refused

    def _lp_sets(self) -> int:
        session = self._session
        return 0 if session is None else len(session.lp_sets)

    def run_once(self, *, at_most_s: float) -> int:
        """Drain unowned LP sets; return messages appended."""
        deadline = time.monotonic() + at_most_s
        # Also ends the wait for an unavailable Postgres.
        limit = threading.Timer(at_most_s, self._stopping.set)
        limit.daemon = True
        limit.start()
        try:
            self._serve(lambda session: self._drain(session, deadline), helper=True)
        finally:
            limit.cancel()
        return self.appended_count

    def stop(self) -> None:
        """Make `run` release its LPs and return. For signal handlers and threads."""
        self._stopping.set()

    def wake(self) -> None:
        """Look for free LP sets soon. For any thread."""
        session = self._session
        if session is not None:
            session.wake()

    def _serve(self, work: Callable[[RelaySession], None], *, helper: bool) -> None:
        ended, rng = 0, random.Random()
        with self._runtime() as runtime:
            while not self._stopping.is_set():
                try:
                    with self._session_on(runtime, helper=helper) as session:
                        if session is not None:
                            work(session)
                        return
                except PermissionDenied:
                    raise
                except _UNREACHABLE as error:
                    self._unreachable = str(error)
                    log.warning("relay_postgres_lost", extra={"reason": str(error)})
                    # The next session may open and end at once with the same error.
                    ended = ended + 1 if isinstance(error, SourceEnded) else 0
                    if ended:
                        self._stopping.wait(backoff_s(ended, rng))

    def _work(self, session: RelaySession) -> None:
        limits, wait_s = self._limits, self._limits.poll_min_s
        while not self._stopping.is_set():
            began = time.monotonic()
            self._liveness.note_turn()
            seen = session.step()
            if session.refused is not None:
                self._refused = session.refused
                log.error("code_too_old", extra={"reason": str(session.refused)})
                return
            if seen >= limits.chunk_rows // 2:
                continue
            wait_s = limits.poll_min_s if seen else min(limits.poll_max_s, wait_s * 2)
            self._pause(session, began + wait_s)

    def _drain(self, session: RelaySession, deadline: float) -> None:
        while session.lp_sets and not self._stopping.is_set() and time.monotonic() < deadline:
            self._liveness.note_turn()
            if not session.step():
                if session.drained:
                    return
                self._pause(session, time.monotonic() + self._limits.poll_min_s)

    def _pause(self, session: RelaySession, until: float) -> None:
        # Rows that come meanwhile need not wait for a node's answers.
        session.await_answers(max(0.0, until - time.monotonic()))
        self._stopping.wait(max(0.0, until - time.monotonic()))

    def _runtime(self) -> AbstractContextManager[Runtime]:
        return open_runtime(self._settings, name="mqlayer relay", actor="relay", max_size=MOST_CONNECTIONS)

    @contextmanager
    def _session_on(self, runtime: Runtime, *, helper: bool) -> Iterator[RelaySession | None]:
        retrying = Retrying(
            retry=retry_if_exception_type(_UNREACHABLE) & retry_if_not_exception_type(PermissionDenied),
            wait=FullJitter(multiplier=0.1, max=2),
            sleep=sleep_using_event(self._stopping),
            stop=stop_when_event_set(self._stopping),
            before_sleep=self._note_outage,
            retry_error_callback=lambda _: None,
        )
        session: RelaySession | None = retrying(self._open, runtime, helper)
        clean = False
        try:
            yield session
            clean = True
        finally:
            if session is not None:
                self._end(session, leave=clean)

    def _open(self, runtime: Runtime, helper: bool) -> RelaySession:  # noqa: FBT001
        leases = LpSets(self.relay_id, lease_s=self._settings.lease_s, helper=helper)
        session = RelaySession(runtime, limits=self._limits, leases=leases)
        self._session = session
        try:
            session.open()
        except BaseException:
            self._end(session, leave=False)
            raise
        return session

    def _note_outage(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._unreachable = str(error)
        self._liveness.note_turn()
        if is_reported(state.attempt_number):
            log.warning("relay_postgres_unreachable", extra={"reason": str(error), "failures": state.attempt_number})

    def _end(self, session: RelaySession, *, leave: bool) -> None:
        session.close(leave=leave)
        self._moved_before += session.appended_count
        self._session = None


def relay_once(settings: Settings, *, at_most_s: float = 50.0, limits: RelayLimits | None = None) -> int:
    """Drain LP sets that no living relay owns; return messages appended. Safe beside living relays, and in parallel."""
    return Relay(settings, limits=limits).run_once(at_most_s=at_most_s)
