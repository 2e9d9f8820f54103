"""One relay at work on one connection to an outbox, from its first claim to the loss of the connection or the stop."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from mqlayer.errors import MqlayerError, StoreUnavailable
from mqlayer.postgres.database import Database, connect_at_best, driver_errors
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
from mqlayer.settings import Settings
from mqlayer.topics.outbox_access import is_replaced
from mqlayer.topics.topics import attach_groups, attach_topics

log = logging.getLogger(__name__)

DELAYED_WAIT_MS: Final = 20
"""How long a busy LP is waited for whose delayed message is overdue; everything else waits too."""
FIRST_CONNECT_S: Final = 2.0
"""How long the first scan waits for nodes, so that a backlog is not taken for cursors that fell behind."""


class RelaySession:
    """Moves rows to partitions until the connection fails. Every store's state is asked for anew at its start.

    Errors of nodes stay inside; errors of Postgres come out, and leave nothing but a session to throw away.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        limits: RelayLimits,
        control: Database,
        application: Database,
        leases: LpSets,
    ) -> None:
        self._settings, self._limits = settings, limits
        self._control, self._application, self._leases = control, application, leases
        self._connection = connect_at_best(application.dsn, application="mqlayer relay")
        self._background = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mqlayer-relay")
        self._routes = RouteCache(control)
        self._routes_changed = threading.Event()
        self._nodes = RelayNodes(settings, control, application, self._routes, self._background)
        self._reader = OutboxReader(self._connection, limits)
        self._targets = Targets(self._routes, self._nodes, self._reader.topics)
        self._cursors = LpCursors(self._targets.find)
        self._sender = Sender(
            prefix=settings.key_prefix, cursors=self._cursors, nodes=self._nodes, targets=self._targets, limits=limits
        )
        self._late = LateIds(limits)
        self._sweep: Sweep | None = None
        self._source: OutboxSource | None = None
        self._attaching: Future[int] | None = None
        self._naming: Future[None] | None = None
        # A short lease is looked at as often for its length: who died is followed within a quarter more.
        self._heartbeat = Interval(min(limits.heartbeat_s, settings.lease_s / 4))
        self._compare = Interval(limits.compare_s)
        self._progress, self._sweeping = Interval(limits.progress_s), Interval(limits.sweep_s)
        self._topics, self._groups = Interval(limits.topics_s), Interval(limits.groups_s)
        self._release_at = 0.0
        self.drained = False
        # When the leases were extended last, and whether all else that a start takes is done.
        self._leased_at, self._opened = 0.0, False

    @property
    def appended_count(self) -> int:
        """How many messages were appended."""
        return self._sender.appended_count

    @property
    def lease_age_s(self) -> float | None:
        """How long ago the leases were extended, or that none was to be had was seen; None before it is open."""
        return time.monotonic() - self._leased_at if self._opened else None

    @property
    def errors(self) -> tuple[str, ...]:
        """Why nodes can't be sent to. For any thread."""
        return self._nodes.errors

    @property
    def lp_sets(self) -> list[int]:
        """The LP sets worked on."""
        return self._leases.owned

    def open(self) -> None:
        """Check both schemas, claim LP sets, and find out where to begin.

        Raises SchemaMismatch, ConfigurationRefused for an outbox that is copied or a former one, StoreUnavailable.
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
        self._nodes.comparer = CommitChecker(self._control, self._application, self._settings.key_prefix, source)
        now = time.monotonic()
        self._topics.due(now)
        self._heartbeat.due(now)
        self._hold_leases()
        if self._leases.helper and not self._leases.owned:
            return
        attach_topics(self._control, self._application)
        # The groups were named with the topics.
        self._groups.due(now)
        self._routes.listen(self._routes_changed.set)
        self._connect_nodes()
        waiting, first_id = self._reader.backlog(self._leases.owned)
        last_id = self._reader.last_id()
        # A backlog that fills most of its range of ids is read in the order it lies on disk; a thin one by LP.
        dense = first_id is not None and waiting * 4 >= last_id - first_id
        self._reader.after = first_id - 1 if first_id is not None and dense else last_id
        log.info("relay_started", extra={"lp_sets": self._leases.owned, "waiting": waiting})

    def _recover(self) -> None:
        """Before anything is relayed: see to an outbox whose Postgres may have lost commits."""
        settings = self._settings
        if is_replaced(self._connection):
            with armed_connections(self._control, self._application, settings) as connections:
                where = self._application.address
                recover_outbox(
                    self._connection,
                    self._control,
                    connections,
                    prefix=settings.key_prefix,
                    address=where,
                    actor="relay",
                )

    def _refuse_other_term(self) -> None:
        """Behind each read whose rows are sent, and before progress is recorded: rows are of our source and term."""
        if self._source is not None:
            refuse_other_term(self._connection, self._source, self._application.address)

    def step(self) -> int:
        """Move what is there, up to a chunk or two; return how many rows were seen. Raises StoreUnavailable."""
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
        """Take outstanding answers and give the leases back, where Postgres still answers; close everything."""
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
        """Begin to connect to all nodes, and wait a moment for those that answer."""
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
        """Read a chunk by id, and rows that were not visible before. Redis works meanwhile."""
        lp_sets = self._leases.owned
        if not lp_sets:
            return [], []
        due, after = self._late.due(now), self._reader.after
        rows = self._reader.scan(lp_sets)
        # Asked after the scan and sent before its rows: what the scan shows of an LP may stand on a late row.
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
        """Read and send the next rows of cursors that fell behind; return how many."""
        cursors = self._readable()
        if not cursors:
            return 0
        afters = [cursor.sent for cursor in cursors]
        rows, each = self._reader.of_lps(cursors)
        self._sender.collect(allowed=self._limits.max_in_flight - 1)
        seqs: dict[int, list[int]] = {cursor.chain: [] for cursor in cursors}
        for row in rows:
            seqs[row[1]].append(row[2])
        # Where the chunk was cut by its size, an empty answer says nothing of the cursors at its end.
        whole = sum(len(row[5] or b"") for row in rows) < self._limits.chunk_bytes
        read = [
            (cursor, seqs[cursor.chain])
            for cursor, after in zip(cursors, afters, strict=True)
            # An answer that came meanwhile may have moved the cursor: then what was read is not what comes next.
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
        """Say whether what was read of a cursor continues it; where rows are missing, have that looked into."""
        missing = seqs[0] != cursor.sent + 1 if seqs else whole and cursor.counted > cursor.sent
        if missing:
            self._sender.suspect(cursor)
            self._compare.hasten()
        return not missing

    def _after_reading(self, cursor: LpCursor, seqs: list[int], *, ended: bool) -> None:
        """Decide how a cursor goes on that was read by seq."""
        if cursor.state != "behind":
            return
        if ended and (not seqs or cursor.sent == seqs[-1]):
            self._cursors.follow(cursor)
        else:
            self._cursors.fall_behind(cursor)
            # The others first: no cursor waits for the whole backlog of another.
            self._cursors.behind[cursor.chain] = self._cursors.behind.pop(cursor.chain)

    def _readable(self) -> list[LpCursor]:
        """Return cursors that are behind and can be sent."""
        found: list[LpCursor] = []
        for cursor in self._cursors.behind.values():
            if cursor.target.ready or cursor.target.refusal:
                found.append(cursor)
                if len(found) == self._limits.lps_at_once:
                    break
        return found

    def _judge_sweep(self, *, end: bool) -> None:
        """Hold a sweep of the counters against the cursors, once the scan has seen all that the sweep counted."""
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
        """Raise SourceEnded where nodes were told that the outbox goes on under another source.

        The next session finds that, or recovers the outbox itself where whoever began with it is gone.
        """
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
        """Publish what is due by now; its rows come by the scan, as all others."""
        moved, next_s = release_on(self._connection, wait_ms=DELAYED_WAIT_MS)
        longest = self._limits.delayed_s
        # What is overdue waits for an LP that somebody holds.
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
        """Let the outbox publish to new topics and take changed limits, every minute, in the background."""
        if self._attaching is not None and self._attaching.done():
            error, self._attaching = self._attaching.exception(), None
            if error is None:
                retarget(self._cursors, self._targets, self._targets.refresh_all())
            else:
                log.warning("relay_attach_failed", extra={"reason": str(error)})
        if self._attaching is None and self._topics.due(now):
            self._attaching = self._background.submit(attach_topics, self._control, self._application)
        if (self._naming is None or self._naming.done()) and self._groups.due(now):
            self._naming = self._background.submit(self._name_groups)

    def _name_groups(self) -> None:
        """Let the outbox's database know new groups by name: a member of one is refused by the fence before that."""
        try:
            attach_groups(self._control, self._application)
        except MqlayerError as error:
            log.warning("relay_attach_failed", extra={"reason": str(error)})

    def _check_quarantine(self) -> None:
        """Hold the cursors that have a row quarantined, and let go those whose row an operator wants to be tried
        again."""
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
        """Keep rows whose places void records take, before these can be anywhere: the outbox is emptied behind them."""
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
