"""One partition's failed attempts and recorded starts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from mqlayer.consuming.engine.clock import clock
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, covers
from mqlayer.redis.partition_scripts import LockTaken

FailedCount = tuple[int, int, bool]


class GuardedStart:
    """A message whose start is recorded before its handler runs."""

    __slots__ = ("alone", "offset", "recorded")

    def __init__(self, offset: int, *, alone: bool) -> None:
        self.offset, self.alone = offset, alone
        self.recorded = threading.Event()


class Attempts:
    """By offset. Workers add, the settler takes and forgets."""

    __slots__ = ("_counts", "_died", "_failed", "_failing_since", "_recorded", "_starts", "_suspects")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._failing_since: dict[int, float] = {}  # offset -> first failure in this process
        # (offset, failed attempts, whether some are given back) to record
        self._failed: deque[FailedCount] = deque()
        self._starts: deque[GuardedStart] = deque()  # to record before workers begin
        self._recorded: set[int] = set()  # starts recorded on the node, and not failed since
        self._suspects: set[int] = set()  # offsets that start alone
        self._died: set[int] = set()  # lone starts that never ended

    def open(self, lock: LockTaken) -> None:
        """Take over the former owner's."""
        self._counts = lock.attempts
        self._suspects, self._died = set(lock.suspects), set(lock.died)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, offset: int) -> bool:
        return offset in self._counts

    def get(self, offset: int, default: int = 0) -> int:
        """Return a message's failed attempts."""
        return self._counts.get(offset, default)

    # -- workers -----------------------------------------------------------------------------------------------------

    def failing_s(self, offset: int) -> float:
        """Return seconds since its first failure here."""
        now = clock()
        return now - self._failing_since.setdefault(offset, now)

    def forget_time(self, offset: int) -> None:
        """Forget since when it fails."""
        self._failing_since.pop(offset, None)

    def count(self, offset: int, attempts: int) -> None:
        """Count a failed attempt."""
        self._counts[offset] = attempts
        self._failed.append((offset, attempts, False))
        # Counting removes the note of the start from the node.
        self._recorded.discard(offset)

    def give_back(self, offset: int, attempts: int) -> None:
        """Lower a count to `attempts`, unless the message is settled."""
        if self._counts.get(offset, 0) > attempts:
            self._counts[offset] = attempts
            self._failed.append((offset, attempts, True))
            self._failing_since.pop(offset, None)

    def blame(self, offset: int) -> bool:
        """Say, once, whether its lone start never ended."""
        if offset not in self._died:
            return False
        self._died.discard(offset)
        self._suspects.add(offset)
        return True

    def is_suspect(self, offset: int) -> bool:
        """Whether it starts alone."""
        return offset in self._suspects

    def is_recorded(self, offset: int) -> bool:
        """Whether the node knows its start."""
        return offset in self._recorded

    def is_new(self, offset: int) -> bool:
        """Whether its start is unknown."""
        return offset not in self._recorded and offset not in self._suspects and offset not in self._died

    def request_starts(self, starts: Iterable[GuardedStart]) -> None:
        """Have the settler record starts."""
        self._starts.extend(starts)

    def started(self, start: GuardedStart) -> None:
        """Note a recorded start."""
        # Makes the settler delete the count with the settlement.
        self._counts.setdefault(start.offset, 0)
        if not start.alone:
            self._recorded.add(start.offset)

    # -- the settler -------------------------------------------------------------------------------------------------

    @property
    def has_starts(self) -> bool:
        """Whether starts await recording."""
        return bool(self._starts)

    @property
    def unsent(self) -> bool:
        """Whether failed attempts wait."""
        return bool(self._failed)

    def take(self) -> tuple[list[FailedCount], list[GuardedStart]]:
        """Take both, to record them."""
        failed = [self._failed.popleft() for _ in range(len(self._failed))]
        return failed, [self._starts.popleft() for _ in range(len(self._starts))]

    def put_back(self, failed: list[FailedCount], starts: list[GuardedStart]) -> None:
        """Take both back."""
        self._failed.extendleft(reversed(failed))
        self._starts.extendleft(reversed(starts))

    def counted(self, records: Sequence[Record], unmatched: list[OffsetRange]) -> list[int]:
        """Return settled offsets that have counts."""
        if not self._counts:
            return []
        found = [record.offset for record in records if record.offset in self._counts]
        if unmatched:
            found += [offset for offset in list(self._counts) if covers(unmatched, offset)]
        return found

    def forget(self, records: Iterable[Record], counted: Iterable[int]) -> None:
        """Forget settled messages."""
        if not self._counts and not self._failing_since:
            return
        for record in records:
            self._counts.pop(record.offset, None)
            self._failing_since.pop(record.offset, None)
            self._recorded.discard(record.offset)
        for offset in counted:
            self._counts.pop(offset, None)
