"""One relay session: it ends with its connection to the outbox."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from mqlayer.errors import MqlayerError, StoreUnavailable
from mqlayer.postgres.database import connect_at_best, driver_errors
from mqlayer.postgres.delayed_release import release_on
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.rights import Right, require
from mqlayer.relay.backoff import Interval
from mqlayer.relay.commit_check import CommitChecker
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, Row, Unsendable, chain_of, plan
from mqlayer.relay.lp_leases import LpSets
from mqlayer.relay.outbox_reader import LateIds, OutboxReader, Sweep
from mqlayer.relay.outbox_source import OutboxSource, open_source, refuse_other_term
from mqlayer.relay.recovery import SourceEnded, armed_connections, recover_outbox
from mqlayer.relay.relay_nodes import RelayNodes
from mqlayer.relay.sender import Sender
from mqlayer.relay.targets import Targets, retarget
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.outbox_access import is_replaced
from mqlayer.topics.topics import attach_groups, attach_topics

log = logging.getLogger(__name__)

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
        self._routes = RouteCache(self._control)
        self._routes_changed = threading.Event()
        self._nodes = RelayNodes(runtime, self._routes, self._background)
        self._reader = OutboxReader(self._connection, limits)
        self._targets = Targets(self._routes, self._nodes, self._reader.topics)
        self._cursors = LpCursors(self._targets.find)
        self._sender = Sender(
            prefix=runtime.prefix, cursors=self._cursors, nodes=self._nodes, targets=self._targets, limits=limits
        )
        self._late = LateIds(limits)
        self._sweep: Sweep | None = None
        self._source: OutboxSource | None = None
        self._attaching: Future[int] | None = None
        self._naming: Future[None] | None = None
        # Four beats per lease, so that a dead relay is replaced soon after its lease.
        self._heartbeat = Interval(min(limits.heartbeat_s, runtime.settings.lease_s / 4))
        self._compare = Interval(limits.compare_s)
        self._progress, self._sweeping = Interval(limits.progress_s), Interval(limits.sweep_s)
        self._topics, self._groups = Interval(limits.topics_s), Interval(limits.groups_s)
        self._release_at = 0.0
        self.drained = False
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

    def open(self) -> None:
        """Check schemas, recover the outbox if needed, take leases.

        Raises SchemaMismatch, StoreUnavailable, or ConfigurationRefused for a copied or former outbox.
        """
        with driver_errors(self._application.address):
            self._open()
        self._opened = True

    def _open(self) -> None:
        require(self._connection, "application", Right.RELAY, "", Right.WORK, Right.OPERATE)
        check_schema(self._connection, "application", self._application.address)
        self._reader.prepare()
        with self._control.connection() as connection:
            require(connection, "control", Right.RELAY, "", Right.WORK, Right.OPERATE)
            check_schema(connection, "control", self._control.address)
        self._recover()
        source = open_source(self._connection, self._control, self._application.address)
        self._source, self._sender.source_id = source, source.source_id
        self._reader.outbox_uuid, self._reader.term = source.outbox_uuid, source.term
        self._nodes.former = source.former
        self._nodes.comparer = CommitChecker(self._runtime, source)
        now = time.monotonic()
        self._topics.due(now)
        self._heartbeat.due(now)
        self._hold_leases()
        if self._leases.helper and not self._leases.owned:
            return
        attach_topics(self._runtime)
        # `attach_topics` also names groups.
        self._groups.due(now)
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

    def _refuse_other_term(self) -> None:
        # Called after each read and before progress is recorded: rows must be of our source and term.
        if self._source is not None:
            refuse_other_term(self._connection, self._source, self._application.address)

    def step(self) -> int:
        """Move up to two chunks; return rows read. Raises StoreUnavailable."""
        with driver_errors(self._application.address):
            return self._step()

    def _step(self) -> int:
        now = time.monotonic()
        self._housekeeping(now)
        self._targets.set_ready(now)
        self._nodes.compare(now)
        rows, late = self._read(now)
        self._pump(late + rows)
        self._judge_sweep(end=not rows)
        seen = len(rows) + len(late) + self._catch_up()
        if len(rows) < self._limits.chunk_rows // 2:
            self._sender.collect(allowed=0)
        self._quarantine()
        self._lower_fallen()
        self._end_with_source()
        self.drained = not seen and self._sweep is None and not self._readable() and not self._sender.has_pending
        return seen

    def close(self, *, leave: bool) -> None:
        """Close all. `leave`: first take answers and release leases, if Postgres answers."""
        try:
            if leave:
                with driver_errors(self._application.address):
                    self._finish()
        except StoreUnavailable as error:
            log.warning("relay_leases_left", extra={"reason": str(error)})
        finally:
            self._nodes.close()
            self._routes.close()
            self._connection.close()
            self._background.shutdown(wait=False, cancel_futures=True)

    def _finish(self) -> None:
        deadline = time.monotonic() + FIRST_CONNECT_S
        while self._sender.has_pending and time.monotonic() < deadline:
            self._sender.collect(allowed=0)
        self._record_progress()
        self._leases.leave(self._connection)

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

    def _pump(self, rows: list[Row]) -> None:
        self._sender.collect(allowed=self._limits.max_in_flight - 1)
        self._send(rows)

    def _send(self, rows: list[Row]) -> None:
        if not rows:
            return
        self._refuse_other_term()
        planned = plan(rows, self._cursors)
        self._keep_voided(planned.voided)
        self._sender.send(planned.batches)
        self._quarantine(planned.unsendable)

    def _catch_up(self) -> int:
        cursors = self._readable()
        if not cursors:
            return 0
        afters = [cursor.sent for cursor in cursors]
        rows, each = self._reader.of_lps(cursors)
        self._sender.collect(allowed=self._limits.max_in_flight - 1)
        seqs: dict[int, list[int]] = {cursor.chain: [] for cursor in cursors}
        for row in rows:
            seqs[row[1]].append(row[2])
        # If bytes cut the chunk, no rows of a cursor means nothing.
        whole = sum(len(row[5] or b"") for row in rows) < self._limits.chunk_bytes
        read = [
            (cursor, seqs[cursor.chain])
            for cursor, after in zip(cursors, afters, strict=True)
            # An answer meanwhile may have moved the cursor past these rows.
            if cursor.state == "behind"
            and cursor.sent == after
            and self._continues(cursor, seqs[cursor.chain], whole=whole)
        ]
        for cursor, _ in read:
            cursor.expected = cursor.sent + 1
        self._send(rows)
        for cursor, found in read:
            self._after_reading(cursor, found, ended=whole and len(found) < each)
        return len(rows)

    def _continues(self, cursor: LpCursor, seqs: list[int], *, whole: bool) -> bool:
        """Whether rows continue a cursor; if not, compare its mark soon."""
        missing = seqs[0] != cursor.sent + 1 if seqs else whole and cursor.counted > cursor.sent
        if missing:
            self._sender.suspect(cursor)
            self._compare.hasten()
        return not missing

    def _after_reading(self, cursor: LpCursor, seqs: list[int], *, ended: bool) -> None:
        if cursor.state != "behind":
            return
        if ended and (not seqs or cursor.sent == seqs[-1]):
            self._cursors.follow(cursor)
        else:
            self._cursors.fall_behind(cursor)
            # Move it to the end: no cursor waits for another's whole backlog.
            self._cursors.behind[cursor.chain] = self._cursors.behind.pop(cursor.chain)

    def _readable(self) -> list[LpCursor]:
        found: list[LpCursor] = []
        for cursor in self._cursors.behind.values():
            if cursor.target.ready or cursor.target.refusal:
                found.append(cursor)
                if len(found) == self._limits.lps_at_once:
                    break
        return found

    def _judge_sweep(self, *, end: bool) -> None:
        # The scan must first pass all that the sweep counted.
        sweep = self._sweep
        if sweep is None or not (end or self._reader.after >= sweep.last_id):
            return
        self._sweep = None
        for chain, seq in sweep.counters.items():
            cursor = self._cursors.get(chain)
            cursor.counted = max(cursor.counted, seq)
            if cursor.sent < seq and cursor.state == "open":
                self._cursors.fall_behind(cursor)

    def _end_with_source(self) -> None:
        if self._sender.ended:
            raise SourceEnded(self._application.address)

    def _housekeeping(self, now: float) -> None:
        if self._heartbeat.due(now):
            self._hold_leases()
            for node, error in self._nodes.refresh(now):
                self._sender.drop_connection(node, error)
        if self._routes_changed.is_set():
            self._routes_changed.clear()
            retarget(self._cursors, self._targets, self._targets.refresh_all())
        fresh = self._nodes.tend(now)
        if self._compare.due(now):
            fresh = [node for node in self._nodes if node.connection is not None]
        self._sender.ask_marks(fresh)
        if self._progress.due(now):
            self._record_progress()
        self._attach(now)
        if now >= self._release_at:
            self._release_delayed(now)
        if self._sweep is None and self._sweeping.due(now):
            self._sweep = self._reader.sweep(self._leases.owned)
            self._check_quarantine()
            retarget(self._cursors, self._targets, self._targets.retry_unrouted(now))

    def _release_delayed(self, now: float) -> None:
        moved, next_s = release_on(self._connection, wait_ms=DELAYED_WAIT_MS)
        longest = self._limits.delayed_s
        # An overdue message waits for a locked LP.
        wait_s = 0.0 if moved else longest if next_s is None else max(self._limits.poll_min_s, min(next_s, longest))
        self._release_at = now + wait_s

    def _hold_leases(self) -> None:
        began = time.monotonic()
        self._refuse_other_term()
        gained, lost = self._leases.heartbeat(self._connection)
        self._leased_at = began
        self._cursors.forget(lost)
        if gained:
            for chain, seq in self._reader.relayed(gained):
                self._cursors.start(chain, seq)
            self._check_quarantine()
            self._sweeping.hasten()
        if gained or lost:
            log.info("relay_lp_sets", extra={"gained": gained, "lost": lost})

    def _attach(self, now: float) -> None:
        if self._attaching is not None and self._attaching.done():
            error, self._attaching = self._attaching.exception(), None
            if error is None:
                retarget(self._cursors, self._targets, self._targets.refresh_all())
            else:
                log.warning("relay_attach_failed", extra={"reason": str(error)})
        if self._attaching is None and self._topics.due(now):
            self._attaching = self._background.submit(attach_topics, self._runtime)
        if (self._naming is None or self._naming.done()) and self._groups.due(now):
            self._naming = self._background.submit(self._name_groups)

    def _name_groups(self) -> None:
        # The fence refuses members of groups that the application database does not know.
        try:
            attach_groups(self._runtime)
        except MqlayerError as error:
            log.warning("relay_attach_failed", extra={"reason": str(error)})

    def _check_quarantine(self) -> None:
        blocked = set()
        for topic_id, lp in self._reader.quarantined():
            if lp >> 6 in self._leases.owned:
                cursor = self._cursors.get(chain_of(topic_id, lp))
                self._cursors.block(cursor)
                blocked.add(cursor.chain)
        for chain, cursor in list(self._cursors.blocked.items()):
            if chain not in blocked:
                self._cursors.release(cursor)

    def _quarantine(self, unsendable: list[Unsendable] | None = None) -> None:
        rows = (unsendable or []) + self._sender.missing
        self._sender.missing = []
        for cursor, seq, reason in rows:
            self._reader.quarantine(cursor, seq, reason)
            facts = {"topic_id": cursor.topic_id, "lp": cursor.lp, "seq": seq, "reason": reason}
            log.warning("relay_row_quarantined", extra=facts)

    def _keep_voided(self, rows: list[Unsendable]) -> None:
        # First keep the rows, then send their void records: rotation empties the outbox behind these.
        for cursor, seq, reason in rows:
            self._reader.put_voided(cursor, seq, reason)
            facts = {"topic_id": cursor.topic_id, "lp": cursor.lp, "seq": seq, "reason": reason}
            log.warning("relay_row_voided", extra=facts)

    def _record_progress(self) -> None:
        moved = [cursor for cursor in self._sender.moved.values() if cursor.acked > cursor.recorded]
        self._sender.moved = {}
        if moved:
            self._refuse_other_term()
            self._reader.put_relayed(moved)

    def _lower_fallen(self) -> None:
        fallen, self._sender.fallen = list(self._sender.fallen.values()), {}
        if fallen:
            self._refuse_other_term()
            self._reader.lower_relayed(fallen)
