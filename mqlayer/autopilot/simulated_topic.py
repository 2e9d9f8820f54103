"""Simulate a topic and a group, slot by slot: pure. Changes take no time, but successors wait for drained parents."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from mqlayer.autopilot.simulated_queues import Arrivals, SimulatedMembers, SimulatedPartition, shares
from mqlayer.domain.assignment import assign, assign_by_rate
from mqlayer.domain.routing import LP_COUNT, PartitionId
from mqlayer.errors import InvalidInput

BALANCE_S: Final = 10.0
"""As the job balance_by_rate."""
POINTS: Final = 360
"""Most points of a curve."""


class SimulatedTopic:
    """Raises InvalidInput unless `ranges` tile all LPs."""

    def __init__(self, arrivals: Arrivals, ranges: Sequence[tuple[int, int]], members: SimulatedMembers) -> None:
        ordered = sorted(ranges)
        if [lp for r in ordered for lp in range(*r)] != list(range(LP_COUNT)):
            raise InvalidInput(f"these partitions do not serve each of {LP_COUNT} LPs once: {ordered}")
        self.arrivals, self.members, self.slot = arrivals, members, 0
        self.waits: Counter[int] = Counter()
        """Handled messages by slots waited."""
        self.partitions: dict[int, SimulatedPartition] = {}
        """Open or undrained ones."""
        self._by_lp: list[SimulatedPartition] = []
        self._number = 0
        self._owners: dict[PartitionId, str] = {}
        self._names = [f"m{number:03}" for number in range(members.size)]
        self._spare = dict.fromkeys(self._names, 0.0)
        self._assigned: frozenset[int] = frozenset()
        self._rated = (-math.inf, Counter[PartitionId]())
        for r in ordered:
            self._by_lp += [self._make(*r, ())] * (r[1] - r[0])

    @property
    def open(self) -> list[SimulatedPartition]:
        """Open partitions by LPs."""
        return sorted((one for one in self.partitions.values() if one.is_open), key=lambda one: one.lp_from)

    @property
    def lag(self) -> int:
        """Messages left."""
        return sum(one.backlog for one in self.partitions.values())

    @property
    def now_s(self) -> float:
        """Seconds simulated."""
        return self.slot * self.arrivals.slot_s

    def advance(self) -> None:
        """Simulate one slot."""
        by_lp, slot = self._by_lp, self.slot
        for lp, key, messages in self.arrivals.at(slot):
            by_lp[lp].add(slot, key, messages)
        self._assign()
        owned: dict[str, list[SimulatedPartition]] = {}
        for number, member in self._owners.items():
            owned.setdefault(member, []).append(self.partitions[number])
        for member, partitions in owned.items():
            self._handle(member, partitions)
        self.slot += 1

    def split(self, number: int, points: Sequence[int]) -> list[int]:
        """Split a partition; return the new ones."""
        parent = self.partitions[number]
        return self._replace([parent], [*pairwise((parent.lp_from, *points, parent.lp_to))])

    def merge(self, numbers: Sequence[int]) -> list[int]:
        """Merge neighbours; return the new partition."""
        parents = [self.partitions[number] for number in numbers]
        return self._replace(parents, [(min(p.lp_from for p in parents), max(p.lp_to for p in parents))])

    def _replace(self, parents: Sequence[SimulatedPartition], ranges: Sequence[tuple[int, int]]) -> list[int]:
        made = []
        for parent in parents:
            parent.is_open = False
        for r in ranges:
            above = tuple(p for p in parents if p.lp_from < r[1] and r[0] < p.lp_to)
            successor = self._make(*r, above)
            self._by_lp[slice(*r)] = [successor] * (r[1] - r[0])
            made.append(successor.number)
        return made

    def _make(self, lp_from: int, lp_to: int, parents: tuple[SimulatedPartition, ...]) -> SimulatedPartition:
        self._number += 1
        per_key = self.members.per_key(self.arrivals.slot_s)
        made = SimulatedPartition(self._number, lp_from, lp_to, self.slot, per_key, parents)
        self.partitions[made.number] = made
        return made

    def _assign(self) -> None:
        for drained in [one for one in self.partitions.values() if one.is_drained]:
            del self.partitions[drained.number]
        for one in self.partitions.values():
            if one.parents:
                one.parents = tuple(parent for parent in one.parents if not parent.is_drained)
        readable = frozenset(one.number for one in self.partitions.values() if not one.parents)
        rebalance = self.members.by_rate and self.now_s >= self._rated[0] + BALANCE_S
        if readable == self._assigned and not rebalance:
            return
        self._assigned = readable
        numbers = [PartitionId(number) for number in sorted(readable)]
        if self.members.by_rate:
            self._owners = assign_by_rate(numbers, self._names, self._owners, self._rates(measure=rebalance))
        else:
            self._owners = assign(numbers, self._names, self._owners)

    def _rates(self, *, measure: bool) -> Counter[PartitionId]:
        before = self._rated[1]
        ends = Counter({PartitionId(one.number): one.arrived for one in self.partitions.values()})
        if measure:
            self._rated = (self.now_s, ends)
        return Counter({number: end - before[number] for number, end in ends.items()})

    def _handle(self, member: str, partitions: Sequence[SimulatedPartition]) -> None:
        spare = self._spare[member] + self.members.per_s * self.arrivals.slot_s
        wanted = [one.refresh() for one in partitions]
        for one, share in zip(partitions, shares(int(spare), wanted), strict=True):
            if share:
                one.take(share, self.slot, self.waits)
        # A part of a message goes on; time in which nothing was there does not.
        self._spare[member] = spare % 1.0


class SimulatedRun:
    """Lags and ages per slot, curves, waits."""

    def __init__(self, topic: SimulatedTopic, beside: Callable[[SimulatedTopic], None] | None = None) -> None:
        """Run; call `beside` after each slot."""
        self.arrivals = topic.arrivals
        self.lags, self.behind = array("q"), array("q")
        self.step = max(1, math.ceil(topic.arrivals.slots / POINTS))
        self.curves: dict[int, dict[int, int]] = {}
        """Highest lag per partition and point."""
        self.hottest: list[float] = []
        """The hottest partition's share of arrivals."""
        self.partitions: list[int] = []
        """Open ones."""
        self._arrived: Counter[int] = Counter()
        for _ in range(topic.arrivals.slots):
            topic.advance()
            self._look(topic)
            if beside is not None:
                beside(topic)
        self.left = topic.lag
        self.waits = topic.waits + Counter(_left(topic))

    def _look(self, topic: SimulatedTopic) -> None:
        lag, oldest = 0, topic.slot
        point = (topic.slot - 1) // self.step
        for one in topic.partitions.values():
            if one.backlog:
                lag += one.backlog
                oldest = min(oldest, one.oldest or 0)
                curve = self.curves.setdefault(one.number, {})
                curve[point] = max(one.backlog, curve.get(point, 0))
        self.lags.append(lag)
        self.behind.append(topic.slot - oldest)
        if topic.slot % self.step == 0 or topic.slot == topic.arrivals.slots:
            arrived = Counter({one.number: one.arrived for one in topic.partitions.values()})
            grown = [arrived[number] - self._arrived[number] for number in arrived]
            self.hottest.append(max(grown) / sum(grown) if sum(grown) else 0.0)
            self.partitions.append(len(topic.open))
            self._arrived = arrived

    @property
    def lag_p99(self) -> int:
        """99 % of slots do not exceed it."""
        return quantile(Counter(self.lags), 0.99)

    @property
    def behind_s(self) -> float:
        """The oldest message's greatest age."""
        return max(self.behind, default=0) * self.arrivals.slot_s

    @property
    def hottest_share(self) -> float:
        """Mean over points with messages."""
        with_any = [share for share in self.hottest if share]
        return sum(with_any) / len(with_any) if with_any else 0.0

    def wait_s(self, part: float) -> float:
        """Return the waiting time of this part of messages; for those left, so far."""
        return quantile(self.waits, part) * self.arrivals.slot_s


def quantile(counts: Counter[int], part: float) -> int:
    """Return the value that this part does not exceed; 0 of nothing."""
    rank, seen = math.ceil(part * counts.total()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= rank:
            return value
    return 0


def _left(topic: SimulatedTopic) -> dict[int, int]:
    found: Counter[int] = Counter()
    for one in topic.partitions.values():
        for queue in one.queues.values():
            for slot, messages in queue.chunks:
                found[topic.slot - slot] += messages
    return found
