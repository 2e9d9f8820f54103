"""One partition's results, and its room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, joined


class Unsettled(NamedTuple):
    """Results that were taken to be sent."""

    handled: list[Record]
    settle_only: list[Record]
    unmatched: list[OffsetRange]
    expired: list[Record]

    @property
    def records(self) -> list[Record]:
        """All records."""
        return [*self.handled, *self.settle_only, *self.expired]


class Results:
    """One partition's results to settle. Any thread adds, its settler takes.

    Workers append to `handled` themselves, once per message.
    """

    __slots__ = ("_expired", "_settle_only", "_unmatched", "handled")

    def __init__(self) -> None:
        self.handled: deque[Record] = deque()
        # Settled without a handler here: parked, dead, or another partition's.
        self._settle_only: deque[Record] = deque()
        # Filtered offsets.
        self._unmatched: deque[OffsetRange] = deque()
        # Their time to live ended.
        self._expired: deque[Record] = deque()

    def __bool__(self) -> bool:
        return bool(self.handled or self._settle_only or self._unmatched or self._expired)

    def __len__(self) -> int:
        return len(self.handled) + len(self._settle_only) + len(self._unmatched) + len(self._expired)

    def settle(self, records: Iterable[Record]) -> None:
        """Settle records that no handler gets."""
        self._settle_only.extend(records)

    def settle_expired(self, records: Iterable[Record]) -> None:
        """Settle expired records."""
        self._expired.extend(records)

    def settle_unmatched(self, unmatched: Sequence[OffsetRange]) -> None:
        """Settle filtered offsets."""
        self._unmatched.extend(unmatched)

    def take(self) -> Unsettled:
        """Take everything."""
        handled = [self.handled.popleft() for _ in range(len(self.handled))]
        settle_only = [self._settle_only.popleft() for _ in range(len(self._settle_only))]
        unmatched = [self._unmatched.popleft() for _ in range(len(self._unmatched))]
        expired = [self._expired.popleft() for _ in range(len(self._expired))]
        return Unsettled(handled, settle_only, joined(unmatched), expired)

    def put_back(self, unsettled: Unsettled) -> None:
        """Take back what could not be sent."""
        self._unmatched.extendleft(reversed(unsettled.unmatched))
        self.handled.extendleft(reversed(unsettled.handled))
        self._settle_only.extendleft(reversed(unsettled.settle_only))
        self._expired.extendleft(reversed(unsettled.expired))


class Room:
    """A partition's records in memory. All but `full` needs the dispatcher's lock."""

    __slots__ = ("backing_off", "bytes", "count", "full", "record_bytes", "spilled")

    def __init__(self) -> None:
        self.count = self.bytes = 0
        """Read and not settled."""
        self.spilled = 0
        """Key queues that are spilled."""
        self.backing_off = 0
        """Spilled key queues that wait for their backoff."""
        self.full = False
        """No room for reads."""
        self.record_bytes = 1024.0

    def admit(self, count: int, size: int) -> None:
        """Count read records."""
        self.count += count
        self.bytes += size
        if count:
            self.record_bytes = max(size / count, 0.9 * self.record_bytes)

    def keep(self, records: Sequence[Record]) -> None:
        """Count excluded or reloaded records."""
        self.count += len(records)
        self.bytes += _size_of_all(records)

    def release(self, records: Sequence[Record]) -> None:
        """Free the records' room."""
        self.count -= len(records)
        self.bytes -= _size_of_all(records)

    def spill(self, records: Sequence[Record], *, first: bool) -> None:
        """Free a queue's room but one place."""
        self.spilled += first
        self.release(records)
        self.count += 1

    def unspill(self) -> None:
        """Count a spilled key queue less."""
        self.spilled -= 1

    def take_place(self, count: int = 1) -> None:
        """Count places of spilled queues."""
        self.count += count

    def back_off(self, change: int) -> None:
        """Count spilled key queues that wait."""
        self.backing_off += change

    def note_full(self, *, full: bool) -> None:
        """Note whether room lacks."""
        self.full = full

    def capacity(self, count_share: int, bytes_share: int, read_count: int, reach: int) -> int:
        """Return how many records to read; 0 where a read is not worthwhile."""
        by_bytes = int((bytes_share - self.bytes) / self.record_bytes)
        capacity = min(count_share - self.count, by_bytes, reach)
        others = count_share - self.spilled
        if self.count <= self.spilled:
            # An empty partition may always read one record, however large.
            capacity = max(capacity, min(1, reach, others))
        # At least a quarter of the bound: no reads of single records.
        enough = min(others, int(bytes_share / self.record_bytes)) // 4
        return capacity if capacity >= min(max(1, enough), read_count) else 0


def _size_of_all(records: Sequence[Record]) -> int:
    return sum([len(m) + len(key) + len(body) for _, m, key, body in records])


def size_of(record: Record) -> int:
    """Return a record's bytes."""
    _, m, key, body = record
    return len(m) + len(key) + len(body)
