"""One relay session: it ends with its connection to the outbox."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mqlayer.errors import MqlayerError, StoreUnavailable, VersionRefused
from mqlayer.logs import event_logger
from mqlayer.metrics import meters_of
from mqlayer.postgres.database import Connection, connect_at_best, driver_errors
from mqlayer.postgres.delayed_release import release_on
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.protocol import refuse_unserved
from mqlayer.postgres.rights import Right, require
from mqlayer.relay.attachments import Attachments
from mqlayer.relay.backoff import Interval
from mqlayer.relay.catch_up import CatchUp
from mqlayer.relay.commit_check import CommitChecker
from mqlayer.relay.confirmations import Confirmations
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursors, Row, plan
from mqlayer.relay.lp_leases import LpSets
from mqlayer.relay.outbox_reader import LateIds, OutboxReader
from mqlayer.relay.outbox_source import OutboxSource, open_source, refuse_other_term
from mqlayer.relay.progress_writer import ProgressWriter
from mqlayer.relay.recovery import SourceEnded, armed_connections, recover_outbox
from mqlayer.relay.relay_nodes import RelayNodes
from mqlayer.relay.relay_spans import RelaySpans
from mqlayer.relay.sender import Sender
from mqlayer.relay.targets import Targets, retarget
from mqlayer.runtime.presence import LEASE_S, Presence
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.outbox_access import is_replaced
from mqlayer.traces import tracing_of

log = event_logger(__name__)

DELAYED_WAIT_MS: Final = 20
"""How long a release waits for an overdue message's busy LP; all else waits too."""
FIRST_CONNECT_S: Final = 2.0
"""How long the first scan waits for nodes: cursors of unready targets fall behind."""


class RelaySession:
    """Moves rows to partitions, and reads every store's state anew at its start.

    Errors of nodes stay inside. Discard it after an error of Postgres.
    """

    def __init__(self, runtime: Runtime, *, limits: RelayLimits, leases: LpSets) -> None:
        self._runtime, self._limits, self._leases = runtime, limits, leases
        self._control, self._application = runtime.control, runtime.outbox
        self._connection = connect_at_best(self._application.dsn, application="mqlayer relay")
        self._background = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mqlayer-relay")
        # Of their own: waits for replicas must not delay the question which runs count.
        self._waiting = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mqlayer-relay-wait")
        self._routes = RouteCache(self._control)
        self._routes_changed = threading.Event()
        self._nodes = RelayNodes(runtime, self._routes, self._background)
        self._reader = OutboxReader(self._connection, limits)
        self._targets = Targets(self._routes, self._nodes, self._reader.topics)
        self._cursors = LpCursors(self._targets.find)
        self._sender = Sender(
            prefix=runtime.prefix, cursors=self._cursors, nodes=self._nodes, targets=self._targets, limits=limits
        )
        self._meters = self._sender.meters = meters_of(runtime.settings)
        tracing = tracing_of(runtime.settings)
        self._spans = self._sender.spans = None if tracing is None else RelaySpans(tracing)
        self._confirmations = Confirmations(
            runtime, self._nodes, self._sender.unconfirmed, lambda: self._routes.nodes, self._waiting
        )
        self._end_counts = (
            None
            if self._meters is None
            else self._meters.add_confirmations(self._confirmations.failed_waits, self._confirmations.delays)
        )
        self._writer = ProgressWriter(
            self._reader,
            self._sender,
            self._cursors,
            self._confirmations,
            self._application,
            self._refuse_other_term,
        )
        self._late = LateIds(limits)
        self._source: OutboxSource | None = None
        # Four beats per lease, so that a dead relay is replaced soon after its lease.
        self._heartbeat = Interval(min(limits.heartbeat_s, runtime.settings.lease_s / 4))
        self._compare = Interval(limits.compare_s)
        self._catch_up = CatchUp(self._reader, self._cursors, self._sender, limits, self._compare)
        self._presence = Presence(self._control, "relay", leases.relay_id, runtime.in_force)
        self._reporting = Interval(LEASE_S / 3)
        self._attachments = Attachments(runtime, limits, self._background, self._retarget_all)
        self._progress, self._sweeping = Interval(limits.progress_s), Interval(limits.sweep_s)
        self._release_at = 0.0
        self.drained = False
        self.refused: VersionRefused | None = None
        """Why this code may not relay any more."""
        # When the leases were extended last; whether `open` is complete.
        self._leased_at, self._opened = 0.0, False

    @property
    def appended_count(self) -> int:
        """Messages appended."""
        return self._sender.appended_count

    @property
    def lease_age_s(self) -> float | None:
        """Seconds since the last lease beat; None before `open` returns."""
        return time.monotonic() - self._leased_at if self._opened else None

    @property
    def errors(self) -> tuple[str, ...]:
        """Why nodes are unusable. Thread-safe."""
        return self._nodes.errors

    @property
    def lp_sets(self) -> list[int]:
        """Owned LP sets."""
        return self._leases.owned

    def wake(self) -> None:
        """Have the next step look for free LP sets. Thread-safe."""
        self._heartbeat.hasten()

    def open(self) -> None:
        """Check schemas, recover the outbox if needed, take leases.

        Raises SchemaMismatch, StoreUnavailable, or ConfigurationRefused for a copied or former outbox.
        """
        with driver_errors(self._application.address):
            self._open()
        self._opened = True

    def _open(self) -> None:
        require(self._connection, "application", Right.RELAY, "", Right.WORK, Right.OPERATE)
        served = check_schema(self._connection, "application", self._application.address)
        self._leases.in_force.note(served.in_force)
        self._reader.prepare()
        with self._control.connection() as connection:
            require(connection, "control", Right.RELAY, "", Right.WORK, Right.OPERATE)
            served = check_schema(connection, "control", self._control.address)
        self._runtime.in_force.note(served.in_force)
        self._presence.beat()
        self._recover()
        source = open_source(self._connection, self._control, self._application.address)
        self._source, self._sender.source_id = source, source.source_id
        self._reader.outbox_uuid, self._reader.term = source.outbox_uuid, source.term
        self._nodes.former = source.former
        self._nodes.comparer = CommitChecker(self._runtime, source)
        now = time.monotonic()
        self._attachments.begin_topics(now)
        self._heartbeat.due(now)
        self._hold_leases()
        if self._leases.helper and not self._leases.owned:
            return
        self._attachments.attach_first(now)
        self._routes.listen(self._routes_changed.set)
        self._connect_nodes()
        waiting, first_id = self._reader.backlog(self._leases.owned)
        last_id = self._reader.last_id()
        # A dense backlog is read by id, in disk order; a sparse one by LP.
        dense = first_id is not None and waiting * 4 >= last_id - first_id
        self._reader.after = first_id - 1 if first_id is not None and dense else last_id
        log.info("relay_started", extra={"lp_sets": self._leases.owned, "waiting": waiting})

    def _recover(self) -> None:
        if is_replaced(self._connection):
            with armed_connections(self._runtime) as connections:
                recover_outbox(self._connection, self._runtime, connections, address=self._application.address)

    def _refuse_other_term(self, connection: Connection) -> None:
        # Called after reads that don't prove it themselves, and before progress is recorded.
        if self._source is not None:
            refuse_other_term(connection, self._source, self._application.address)

    def step(self) -> int:
        """Move up to two chunks; return rows read. Raises StoreUnavailable."""
        with driver_errors(self._application.address):
            return self._step()

    def _step(self) -> int:
        now = time.monotonic()
        self._housekeeping(now)
        self._targets.set_ready(now)
        # Asked with the targets: a node that is decided later has targets that are ready in the next step.
        undecided = any(node.undecided for node in self._nodes)
        self._nodes.compare(now)
        rows, late = self._read(now)
        self._sender.collect(allowed=self._limits.max_in_flight - 1)
        self._send(late + rows)
        self._catch_up.judge_sweep(end=not rows)
        seen = len(rows) + len(late) + self._catch_up.read(self._send_checked)
        self._writer.quarantine()
        self._writer.lower_fallen()
        self._end_with_source()
        waits = undecided or self._sender.has_pending
        self.drained = not seen and not waits and self._catch_up.sweep is None and not self._catch_up.readable()
        return seen

    def await_answers(self, wait_s: float) -> None:
        """Take answers, for this time at most."""
        with driver_errors(self._application.address):
            self._sender.await_answers(wait_s)

    def close(self, *, leave: bool) -> None:
        """Close all. `leave`: first take answers and release leases, if Postgres answers."""
        try:
            if leave:
                with driver_errors(self._application.address):
                    self._finish()
        except StoreUnavailable as error:
            log.warning("relay_leases_left", extra={"reason": str(error)})
        finally:
            if self._end_counts is not None:
                self._end_counts()
            self._writer.close()
            self._confirmations.close()
            self._nodes.close()
            self._routes.close()
            self._connection.close()
            for pool in (self._background, self._waiting):
                pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self) -> None:
        deadline = time.monotonic() + FIRST_CONNECT_S
        while self._sender.has_pending and time.monotonic() < deadline:
            self._sender.collect(allowed=0)
        self._writer.record_all()
        while self._confirmations.is_asking and time.monotonic() < deadline:
            time.sleep(self._limits.poll_min_s)
            self._writer.record_all()
        self._leases.leave(self._connection)
        self._presence.end()

    def _connect_nodes(self) -> None:
        for node_id in self._routes.refresh_nodes():
            self._nodes.node(node_id)
        deadline = time.monotonic() + FIRST_CONNECT_S
        while time.monotonic() < deadline:
            self._sender.ask_marks(self._nodes.tend(time.monotonic()))
            self._sender.collect(allowed=0)
            if all(node.synced or node.failures for node in self._nodes):
                return
            time.sleep(self._limits.poll_min_s)

    def _read(self, now: float) -> tuple[list[Row], list[Row]]:
        # Redis works meanwhile.
        lp_sets = self._leases.owned
        if not lp_sets:
            return [], []
        due, after = self._late.due(now), self._reader.after
        rows = self._reader.scan(lp_sets)
        # Queried after the scan and sent before its rows: a scanned row may need a late one before it.
        late = self._reader.late(due, lp_sets) if due else []
        self._late.found(late)
        self._late.note(after, rows, now)
        return rows, late

    def _send_checked(self, rows: list[Row]) -> None:
        if rows:
            self._refuse_other_term(self._connection)
        self._send(rows)

    def _send(self, rows: list[Row]) -> None:
        if not rows:
            return
        if self._meters is not None:
            # Rows begin with their publisher's time.
            self._meters.relay_delay(time.time() - int(rows[0][3].partition(b":")[0]) / 1000)
        if self._spans is not None:
            self._spans.note(rows)
        planned = plan(rows, self._cursors)
        self._writer.keep_voided(planned.voided)
        self._sender.send(planned.batches)
        self._writer.quarantine(planned.unsendable)

    def _end_with_source(self) -> None:
        if self._sender.ended:
            raise SourceEnded(self._application.address)

    def _housekeeping(self, now: float) -> None:
        if self._heartbeat.due(now):
            self._hold_leases()
            for node, error in self._nodes.refresh(now):
                self._sender.drop_connection(node, error)
        if self._reporting.due(now):
            self._background.submit(self._report)
        if self._routes_changed.is_set():
            self._routes_changed.clear()
            self._retarget_all()
        fresh = self._nodes.tend(now)
        if self._compare.due(now):
            fresh = [node for node in self._nodes if node.connection is not None]
        self._sender.ask_marks(fresh)
        if self._progress.due(now):
            self._writer.record()
        self._attachments.attach(now)
        if now >= self._release_at:
            self._release_delayed(now)
        if self._catch_up.sweep is None and self._sweeping.due(now):
            self._catch_up.sweep = self._reader.sweep(self._leases.owned)
            self._writer.check_quarantine(self._leases.owned)
            retarget(self._cursors, self._targets, self._targets.retry_unrouted(now))

    def _report(self) -> None:
        try:
            self._presence.beat()
        except VersionRefused as error:
            self.refused = error
        except MqlayerError as error:
            log.info("presence_waits", extra={"reason": str(error)})

    def _retarget_all(self) -> None:
        self._cursors.forget_topics(self._targets.forget_deleted())
        retarget(self._cursors, self._targets, self._targets.refresh_all())

    def _release_delayed(self, now: float) -> None:
        moved, next_s = release_on(self._connection, wait_ms=DELAYED_WAIT_MS)
        longest = self._limits.delayed_s
        # An overdue message waits for a locked LP.
        wait_s = 0.0 if moved else longest if next_s is None else max(self._limits.poll_min_s, min(next_s, longest))
        self._release_at = now + wait_s

    def _hold_leases(self) -> None:
        began = time.monotonic()
        self._refuse_other_term(self._connection)
        gained, lost = self._leases.heartbeat(self._connection, sent=self._sender.appended_count)
        self._leased_at = began
        if self._leases.served is not None:
            try:
                refuse_unserved(self._leases.served, "application", self._application.address)
            except VersionRefused as error:
                self.refused = error
        self._cursors.forget(lost)
        if gained:
            for chain, seq in self._reader.relayed(gained):
                self._cursors.start(chain, seq)
            self._writer.check_quarantine(self._leases.owned)
            self._sweeping.hasten()
        if gained or lost:
            log.info("relay_lp_sets", extra={"gained": gained, "lost": lost})
