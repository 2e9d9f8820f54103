"""A shared member's ready messages, whose key classes take turns: docs/design/key-class-limits.md."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mqlayer.consuming.engine.class_limits import ClassLimits, ClassTurn
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.fair_queue import FairQueue
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import Record


class WorkSlice(NamedTuple):
    """Records for one worker; `turn`: where they count, with key classes."""

    batch: FetchedBatch
    records: Sequence[Record]
    turn: ClassTurn | None = None


class ReadySlice:
    """Records of one batch; with key classes, of one class."""

    __slots__ = ("batch", "class_turn", "records")

    def __init__(self, batch: FetchedBatch, records: Sequence[Record]) -> None:
        self.batch, self.records = batch, records
        self.class_turn: ClassTurn | None = None


class ReadySlices:
    """Messages that may begin next. Needs the prefetch's lock. `fresh_s`: beyond it, a node must confirm a batch."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._slices: deque[ReadySlice] | FairQueue[ReadySlice] = deque()
        self.waiting: Counter[bytes] = Counter()
        """Messages by class."""

    def __bool__(self) -> bool:
        return bool(self._slices)

    @property
    def fair(self) -> FairQueue[ReadySlice] | None:
        """The classes, where the group has some."""
        return self._slices if isinstance(self._slices, FairQueue) else None

    def follow(self, rule: KeyClassRule | None, limits: ClassLimits) -> None:
        """Have classes take turns within limits, or not."""
        fair = self.fair
        if fair is not None and fair.rule == rule:
            fair.limit(limits)
        elif (None if fair is None else fair.rule) != rule:
            former = list(self._slices)
            self._slices = deque() if rule is None else FairQueue(rule, limits=limits)
            self.waiting.clear()
            for one in former:
                self.put(one.batch, one.records)

    def put(self, batch: FetchedBatch, records: Sequence[Record]) -> None:
        """Add records."""
        for one in self._split(batch, records):
            self._slices.append(one)

    def put_first(self, work: WorkSlice, records: Sequence[Record]) -> None:
        """Take back records of a slice that did not begin."""
        if work.turn is not None:
            work.turn.returned(len(records))
        for one in self._split(work.batch, records):
            self._restore(one)

    def ended(self, turn: ClassTurn | None) -> None:
        """Count a class's message less at once."""
        if turn is not None:
            if self.fair is not None:
                self.fair.ended(turn)
            else:
                turn.ended()

    def next(self, count: int) -> WorkSlice | None:
        """Take up to `count` messages that may begin."""
        fair = self.fair
        one = self._next_fair(fair) if fair is not None else self._next_plain()
        if one is None:
            return None
        turn = one.class_turn
        if fair is not None and turn is not None:
            count = turn.most(count, fair.limits)
        records = one.records
        if len(records) > count:
            one.records = records[count:]
            self._restore(one)
            records = records[:count]
        if turn is not None:
            turn.began(len(records))
            self._count(turn.name, -len(records))
        return WorkSlice(one.batch, records, turn)

    def begin_beside(self, batch: FetchedBatch) -> WorkSlice | None:
        """Begin a message that waits elsewhere, if its class may have one more at once."""
        fair = self.fair
        if fair is None:
            return WorkSlice(batch, batch.records)
        turn, most = fair.class_named(fair.rule.of(batch.records[0])), fair.limits.concurrency
        if most is not None and turn.running >= most:
            return None
        turn.take()
        return WorkSlice(batch, batch.records, turn)

    def take(self, of: Callable[[FetchedBatch], bool]) -> list[WorkSlice]:
        """Take matching batches' records out."""
        found = [WorkSlice(one.batch, one.records) for one in self._slices if of(one.batch)]
        if found:
            self._keep(lambda one: not of(one.batch))
        return found

    def forget_dropped(self) -> None:
        """Take lost batches' records out."""
        self._keep(lambda one: not one.batch.dropped)

    def _is_fresh(self, batch: FetchedBatch) -> bool:
        return clock() - batch.extended_at <= self._fresh_s

    def _split(self, batch: FetchedBatch, records: Sequence[Record]) -> Iterable[ReadySlice]:
        fair = self.fair
        if fair is None:
            return [ReadySlice(batch, records)]
        by_class: dict[bytes, list[Record]] = {}
        for record in records:
            if record.offset not in batch.lost:
                by_class.setdefault(fair.rule.of(record), []).append(record)
        for name, of_class in by_class.items():
            self.waiting[name] += len(of_class)
        return [ReadySlice(batch, of_class) for of_class in by_class.values()]

    def _next_plain(self) -> ReadySlice | None:
        slices = self._slices
        for _ in range(len(slices)):
            one = slices.popleft()
            if self._is_fresh(one.batch):
                return one
            slices.append(one)
        return None

    def _next_fair(self, fair: FairQueue[ReadySlice]) -> ReadySlice | None:
        if not fair:
            return None
        one = fair.popleft()
        if self._is_fresh(one.batch):
            return one
        fair.appendleft(one)
        return fair.take_first(lambda other: self._is_fresh(other.batch))

    def _restore(self, one: ReadySlice) -> None:
        if isinstance(self._slices, FairQueue):
            self._slices.restore(one)
        else:
            self._slices.appendleft(one)

    def _keep(self, wanted: Callable[[ReadySlice], bool]) -> None:
        if isinstance(self._slices, FairQueue):
            self._slices.keep(wanted)
            self.waiting.clear()
            for one in self._slices:
                self.waiting[self._slices.rule.of(one.records[0])] += len(one.records)
        else:
            self._slices = deque(one for one in self._slices if wanted(one))

    def _count(self, name: bytes, change: int) -> None:
        self.waiting[name] += change
        if self.waiting[name] <= 0:
            del self.waiting[name]
