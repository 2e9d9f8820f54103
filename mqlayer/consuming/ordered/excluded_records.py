"""Records that no handler here gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mqlayer.domain.message import Identity, Record
from mqlayer.domain.offsets import first_unsettled, is_settled
from mqlayer.redis.partition_scripts import LockTaken


class ExcludedRecords:
    """Records settled, out of the group, or of the successors."""

    __slots__ = ("_cut", "_dead", "_settled")

    def __init__(self, cut: Mapping[str, int]) -> None:
        # Marks beyond which the successors have the messages too; mostly empty.
        self._cut = cut
        # Left the group, and may be read again.
        self._dead: set[Identity] = set()
        # Base and bits of the former owner's ack bitmap.
        self._settled: tuple[int, bytes] | None = None

    def open(self, lock: LockTaken) -> int:
        """Follow the former owner; return the first offset."""
        self._settled = (lock.base, lock.bits) if lock.bits else None
        return first_unsettled(lock.committed, lock.base, lock.bits)

    def add_dead(self, dead: set[Identity]) -> None:
        """Exclude messages that left the group."""
        self._dead |= dead

    def unsettled(self, records: list[Record], last: int) -> tuple[list[Record], int]:
        """Return unsettled records, and the offset behind `last`."""
        if self._settled is None:
            return records, last + 1
        base, bits = self._settled
        following = first_unsettled(last + 1, base, bits)
        if following >= base + 8 * len(bits):
            self._settled = None
        return [record for record in records if not is_settled(record.offset, base, bits)], following

    def split(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """Return those to handle, those to settle."""
        excluded: list[Record] = []
        if self._cut:
            records = _without(records, self._is_cut_off, excluded)
        if self._dead:
            records = _without(records, self._is_dead, excluded)
        return records, excluded

    def split_dead(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """Return live and dead ones."""
        if not self._dead:
            return records, []
        dead: list[Record] = []
        return _without(records, self._is_dead, dead), dead

    def _is_cut_off(self, record: Record) -> bool:
        source, lp, seq = record.identity
        return seq > self._cut.get(f"{source}:{lp}", seq)

    def _is_dead(self, record: Record) -> bool:
        return record.identity in self._dead


def _without(records: list[Record], passed_over: Callable[[Record], bool], excluded: list[Record]) -> list[Record]:
    remaining: list[Record] = []
    for record in records:
        (excluded if passed_over(record) else remaining).append(record)
    return remaining
