"""A partition's messages by class: one class's flood is kept as offsets, so that others' messages are read.

See docs/design/key-class-limits.md. All but `bound` needs the dispatcher's lock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from mqlayer.consuming.engine.class_limits import class_has_room, class_load
from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import NO_KEY, Record

BUCKETS: Final = 4096


class ClassShare:
    """A class in one partition. `waiting`: messages in memory that have not begun; `backlog`: offsets behind them."""

    __slots__ = ("_first", "_offsets", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._offsets, self._first = array("q"), 0

    def count(self, change: int) -> None:
        """Count waiting messages."""
        self.waiting += change

    def __len__(self) -> int:
        return len(self._offsets) - self._first

    def append(self, offset: int) -> None:
        """Add an offset."""
        self._offsets.append(offset)

    def first(self, count: int) -> list[int]:
        """Return the first offsets."""
        return list(self._offsets[self._first : self._first + count])

    def drop(self, count: int) -> None:
        """Forget the first offsets."""
        self._first += count
        if self._first > len(self._offsets) // 2:
            del self._offsets[: self._first]
            self._first = 0


class ClassBacklogs:
    """One partition's classes. `bound`: how many messages, and bytes, wait in memory."""

    def __init__(self, rule: KeyClassRule) -> None:
        self.rule = rule
        self._shares: dict[bytes, ClassShare] = {}
        self._backlogs: dict[bytes, ClassShare] = {}
        # Of a class by header: whose backlog has messages of a bucket of keys, and how many.
        self._buckets: dict[int, bytes] = {}
        self._in_bucket: Counter[int] = Counter()
        self._bucket_at: dict[int, int] = {}
        self._limit, self._bytes_limit = 1, 1
        self._by_header = not rule.separator
        self._class_of = self._class_behind if self._by_header else rule.of

    def __bool__(self) -> bool:
        return bool(self._backlogs)

    def bound(self, count: int, size: int) -> None:
        """Set the partition's bounds."""
        self._limit, self._bytes_limit = count, size

    def admit(self, records: list[Record], count: int, size: int) -> list[Record]:
        """Return the records to keep in memory beside `count` there, of `size` bytes; the others join backlogs."""
        taken: list[Record] = []
        coming: dict[bytes, int] = {}
        backlogs, shares, class_of = self._backlogs, self._shares, self._class_of
        for record in records:
            name = class_of(record)
            share = backlogs.get(name)
            if share is None:
                share = shares.get(name) or self._share(name)
                expected = coming.get(name, 0)
                if self._has_room(share.waiting + expected, count + len(taken), size):
                    coming[name] = expected + 1
                    size += len(record.body)
                    taken.append(record)
                    continue
                backlogs[name] = share
            share.append(record.offset)
            if self._by_header:
                self._note_bucket(record, name)
        return taken

    def share_of(self, record: Record) -> ClassShare:
        """Return the share of a message's class."""
        name = self.rule.of(record)
        return self._shares.get(name) or self._share(name)

    def to_load(self, count: int, size: int, record_bytes: float, most: int) -> tuple[bytes, list[int]] | None:
        """Return the offsets to read again, of the class with the fewest waiting messages, beside `count` there."""
        if not self._backlogs:
            return None
        name, share = min(self._backlogs.items(), key=lambda entry: entry[1].waiting)
        size_room = int((self._bytes_limit - size) / record_bytes)
        room = class_load(share.waiting, count, self._limit, size_room=size_room, most=most)
        return (name, share.first(room)) if room else None

    def loaded(self, name: bytes, offsets: Sequence[int]) -> None:
        """Forget offsets that were read again."""
        share = self._shares[name]
        share.drop(len(offsets))
        if not len(share):
            self._backlogs.pop(name, None)
        for offset in offsets if self._bucket_at else ():
            bucket = self._bucket_at.pop(offset, None)
            if bucket is None:
                continue
            self._in_bucket[bucket] -= 1
            if not self._in_bucket[bucket]:
                del self._in_bucket[bucket], self._buckets[bucket]

    def _has_room(self, waiting: int, count: int, size: int) -> bool:
        return class_has_room(waiting, count, self._limit) and not (waiting and size >= self._bytes_limit)

    def _class_behind(self, record: Record) -> bytes:
        """Return the class whose backlog has messages of the key, else the message's."""
        name = self.rule.of(record)
        return name if record.key == NO_KEY else self._buckets.get(hash(record.key) % BUCKETS, name)

    def _note_bucket(self, record: Record, name: bytes) -> None:
        if record.key != NO_KEY:
            bucket = hash(record.key) % BUCKETS
            self._buckets[bucket] = name
            self._in_bucket[bucket] += 1
            self._bucket_at[record.offset] = bucket

    def _share(self, name: bytes) -> ClassShare:
        if len(self._shares) > 2 * BUCKETS:
            self._shares = {n: one for n, one in self._shares.items() if one.waiting or len(one)}
        self._shares[name] = share = ClassShare()
        return share
