"""Read rows that the scan can't show, by LP."""

from __future__ import annotations

from collections.abc import Callable

from mqlayer.relay.backoff import Interval
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, Row
from mqlayer.relay.outbox_reader import OutboxReader, Sweep
from mqlayer.relay.sender import Sender


class CatchUp:
    """Moves cursors behind. `compare`: interval of comparing marks. `sweep`: counters to judge."""

    def __init__(
        self, reader: OutboxReader, cursors: LpCursors, sender: Sender, limits: RelayLimits, compare: Interval
    ) -> None:
        self._reader, self._cursors, self._sender = reader, cursors, sender
        self._limits, self._compare = limits, compare
        self.sweep: Sweep | None = None

    def read(self, send: Callable[[list[Row]], None]) -> int:
        """Read and `send` next rows; return how many."""
        cursors = self.readable()
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
        send(rows)
        for cursor, found in read:
            self._after_reading(cursor, found, ended=whole and len(found) < each)
        return len(rows)

    def judge_sweep(self, *, end: bool) -> None:
        """Let cursors fall behind that the scan has passed; `end`: it read all."""
        # The scan must first pass all that the sweep counted.
        sweep = self.sweep
        if sweep is None or not (end or self._reader.after >= sweep.last_id):
            return
        self.sweep = None
        for chain, seq in sweep.counters.items():
            cursor = self._cursors.get(chain)
            cursor.counted = max(cursor.counted, seq)
            if cursor.sent < seq and cursor.state == "open":
                self._cursors.fall_behind(cursor)

    def readable(self) -> list[LpCursor]:
        """Return the next cursors behind whose targets answer."""
        found: list[LpCursor] = []
        for cursor in self._cursors.behind.values():
            if cursor.target.ready or cursor.target.refusal:
                found.append(cursor)
                if len(found) == self._limits.lps_at_once:
                    break
        return found

    def _continues(self, cursor: LpCursor, seqs: list[int], *, whole: bool) -> bool:
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
