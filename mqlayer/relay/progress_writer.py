"""Write a session's results to its outbox: progress, quarantined and voided rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.relay.confirmations import Confirmations
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, Unsendable, chain_of
from mqlayer.relay.outbox_reader import OutboxReader
from mqlayer.relay.sender import Sender

log = event_logger(__name__)


class ProgressWriter:
    """Empties the sender's lists. `refuse_other_term`: called before progress is recorded.

    That runs in the background: rows would wait for its commit.
    """

    def __init__(
        self,
        reader: OutboxReader,
        sender: Sender,
        cursors: LpCursors,
        confirmations: Confirmations,
        application: Database,
        refuse_other_term: Callable[[Connection], None],
    ) -> None:
        self._reader, self._sender, self._cursors, self._confirmations = reader, sender, cursors, confirmations
        self._application, self._refuse_other_term = application, refuse_other_term
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mqlayer-relay-progress")
        self._recording: Future[None] | None = None

    def record(self) -> None:
        """Begin to record acknowledged seqs as relayed; those of topics with a durability class once confirmed.

        Raises the last record's error.
        """
        if self._recording is not None and not self._recording.done():
            return
        self._await_recording()
        moved = {cursor: cursor.acked for cursor in self._sender.moved.values() if cursor.acked > cursor.recorded}
        self._sender.moved = {}
        confirmed = self._confirmations.take()
        moved |= {
            cursor: seq for cursor, seq in confirmed.items() if seq > cursor.recorded and self._cursors.holds(cursor)
        }
        if moved:
            # Set already: a mark that falls below it meanwhile must lower it, see `lower_fallen`.
            for cursor, seq in moved.items():
                cursor.recorded = seq
            self._recording = self._background.submit(self._put, moved)

    def record_all(self) -> None:
        """Record, and wait."""
        self._await_recording()
        self.record()
        self._await_recording()

    def close(self) -> None:
        """Await a record under way: behind a later session, it could raise a lowered number."""
        self._background.shutdown(cancel_futures=True)

    def lower_fallen(self) -> None:
        """Lower recorded seqs of cursors whose marks fell."""
        fallen, self._sender.fallen = list(self._sender.fallen.values()), {}
        if fallen:
            # What is under way is higher, and must not come after it.
            self._await_recording()
            self._refuse_other_term(self._reader.connection)
            self._reader.lower_relayed(fallen)

    def _await_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.result()

    def _put(self, moved: Mapping[LpCursor, int]) -> None:
        with self._application.connection() as connection:
            self._refuse_other_term(connection)
            self._reader.put_relayed(moved, connection)

    def quarantine(self, unsendable: list[Unsendable] | None = None) -> None:
        """Quarantine rows, and those missing in both stores."""
        rows = (unsendable or []) + self._sender.missing
        self._sender.missing = []
        for cursor, seq, reason in rows:
            if self._reader.quarantine(cursor, seq, reason):
                facts = {"topic_id": cursor.topic_id, "lp": cursor.lp, "seq": seq, "reason": reason}
                log.warning("relay_row_quarantined", extra=facts)

    def keep_voided(self, rows: list[Unsendable]) -> None:
        """Keep voided rows under numbers."""
        # First keep the rows, then send their void records: rotation empties the outbox behind these.
        for cursor, seq, reason in rows:
            self._reader.put_voided(cursor, seq, reason)
            facts = {"topic_id": cursor.topic_id, "lp": cursor.lp, "seq": seq, "reason": reason}
            log.warning("relay_row_voided", extra=facts)

    def check_quarantine(self, lp_sets: Sequence[int]) -> None:
        """Block cursors of quarantined rows; release others."""
        blocked = set()
        for topic_id, lp in self._reader.quarantined():
            if lp >> 6 in lp_sets:
                cursor = self._cursors.get(chain_of(topic_id, lp))
                self._cursors.block(cursor)
                blocked.add(cursor.chain)
        for chain, cursor in list(self._cursors.blocked.items()):
            if chain not in blocked:
                self._cursors.release(cursor)
