"""Assign partitions to members: pure, deterministic, sticky, balanced."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import islice
from typing import Final

from mqlayer.domain.routing import PartitionId

SLACK: Final = 0.2
"""Tolerated load difference, as part of a fair share."""
IDLE: Final = 0.1
"""Weight added per partition, as part of the mean rate: spreads idle ones."""
NO_PARTITION: Final = PartitionId(0)

Share = tuple[float, PartitionId]


class Zones:
    """Where partitions and members are, by name; "" or missing: nowhere."""

    def __init__(self, partitions: Mapping[PartitionId, str], members: Mapping[str, str]) -> None:
        staffed = {zone for zone in members.values() if zone}
        self._partitions = {partition: zone for partition, zone in partitions.items() if zone in staffed}
        self._members = members

    def is_home(self, partition: PartitionId, member: str) -> bool:
        """Return whether a partition is in its member's zone."""
        zone = self._partitions.get(partition)
        return zone is not None and zone == self._members.get(member)

    def is_away(self, partition: PartitionId, member: str) -> bool:
        """Return whether another member would be in the partition's zone."""
        return partition in self._partitions and not self.is_home(partition, member)

    def of(self, member: str) -> str:
        """Return a member's zone."""
        return self._members.get(member, "")

    def homes(self, partitions: Sequence[PartitionId]) -> dict[str, deque[PartitionId]]:
        """Return partitions in members' zones, by zone."""
        found: dict[str, deque[PartitionId]] = {}
        for partition in partitions:
            if partition in self._partitions:
                found.setdefault(self._partitions[partition], deque()).append(partition)
        return found

    def rank(self, partition: PartitionId, member: str) -> int:
        """Return 0 at home, 1 where that is nowhere, 2 away."""
        return self.is_away(partition, member) + (not self.is_home(partition, member))


NO_ZONES: Final = Zones({}, {})


def assign(
    partitions: Collection[PartitionId],
    members: Collection[str],
    current: Mapping[PartitionId, str],
    zones: Zones = NO_ZONES,
) -> dict[PartitionId, str]:
    """Return each partition's member; empty without members.

    Counts differ by at most one. Partitions leave only members that are gone or overloaded: one more member moves at
    most ceil(P / (n + 1)) of P partitions. With zones, they also move where that, or a swap, brings one home.
    """
    ordered = sorted(members)
    if not ordered:
        return {}
    owned: dict[str, list[PartitionId]] = {member: [] for member in ordered}
    for partition in sorted(partitions):
        member = current.get(partition)
        if member in owned:
            owned[member].append(partition)
    quota = _quotas(len(partitions), owned)
    free = [p for p in sorted(partitions) if current.get(p) not in owned]
    for member in ordered:
        owned[member].sort(key=lambda p, member=member: (zones.rank(p, member), p))  # type: ignore[misc]
        free += owned[member][quota[member] :]
        del owned[member][quota[member] :]
    free.sort()
    homes = zones.homes(free)
    for member in ordered:
        at_home = homes.get(zones.of(member), deque())
        while at_home and len(owned[member]) < quota[member]:
            owned[member].append(at_home.popleft())
    # Once through the partitions: members times partitions are too many.
    at_home_now = set().union(*owned.values())
    rest = (p for p in free if p not in at_home_now)
    for member in ordered:
        owned[member] += islice(rest, quota[member] - len(owned[member]))
    _bring_home(owned, zones)
    return {partition: member for member in ordered for partition in owned[member]}


def _bring_home(owned: Mapping[str, list[PartitionId]], zones: Zones) -> None:
    """Move and swap partitions into their zones, where counts stay within one and none leaves home for it."""
    loose = {member: {p for p in ps if not zones.is_home(p, member)} for member, ps in owned.items()}
    done = False
    while not done:
        done = True
        for member in owned:
            for partition in sorted(p for p in loose[member] if zones.is_away(p, member)):
                other, given = _home_for(partition, member, owned, loose, zones)
                if other:
                    _give(partition, member, other, owned, loose)
                    for one in given:
                        _give(one, other, member, owned, loose)
                    # It went home, and is given to none again.
                    loose[other].discard(partition)
                    loose[member] -= {p for p in given if zones.is_home(p, member)}
                    done = False


def _home_for(
    partition: PartitionId,
    member: str,
    owned: Mapping[str, list[PartitionId]],
    loose: Mapping[str, set[PartitionId]],
    zones: Zones,
) -> tuple[str, list[PartitionId]]:
    """Return a member in the partition's zone, and a partition to take in exchange; "" for none."""
    for other in (one for one in owned if zones.is_home(partition, one)):
        if len(owned[other]) < len(owned[member]):
            return other, []
        for one in sorted(loose[other]):
            if zones.rank(one, member) <= zones.rank(one, other):
                return other, [one]
    return "", []


def _give(
    partition: PartitionId,
    giver: str,
    taker: str,
    owned: Mapping[str, list[PartitionId]],
    loose: Mapping[str, set[PartitionId]],
) -> None:
    owned[giver].remove(partition)
    owned[taker].append(partition)
    loose[giver].discard(partition)
    loose[taker].add(partition)


def _quotas(count: int, owned: Mapping[str, list[PartitionId]]) -> dict[str, int]:
    share, rest = divmod(count, len(owned))
    by_load = sorted(owned, key=lambda member: (-len(owned[member]), member))
    return {member: share + (1 if i < rest else 0) for i, member in enumerate(by_load)}


def assign_by_rate(
    partitions: Collection[PartitionId],
    members: Collection[str],
    current: Mapping[PartitionId, str],
    rates: Mapping[PartitionId, float],
) -> dict[PartitionId, str]:
    """Return each partition's member; empty without members.

    A partition moves if its member is gone, or if that evens two members' loads by a tenth of a fair share.
    """
    ordered = sorted(members)
    if not ordered or not partitions:
        return {}
    mean = sum(rates.get(p, 0.0) for p in partitions) / len(partitions)
    weights = {p: rates.get(p, 0.0) + (IDLE * mean or 1.0) for p in partitions}
    owned: dict[str, list[Share]] = {member: [] for member in ordered}
    for partition in sorted(partitions):
        member = current.get(partition)
        if member in owned:
            owned[member].append((weights[partition], partition))
    lightest = [(sum(weight for weight, _ in owned[member]), member) for member in ordered]
    heapify(lightest)
    free = [p for p in partitions if current.get(p) not in owned]
    for partition in sorted(free, key=lambda p: (-weights[p], p)):
        load, member = lightest[0]
        owned[member].append((weights[partition], partition))
        heapreplace(lightest, (load + weights[partition], member))
    _even_out(owned, {member: load for load, member in lightest}, SLACK * sum(weights.values()) / len(ordered))
    return {partition: member for member in ordered for _, partition in owned[member]}


def _even_out(owned: Mapping[str, list[Share]], loads: dict[str, float], slack: float) -> None:
    for shares in owned.values():
        shares.sort()
    heaviest = sorted((-load, member) for member, load in loads.items())
    while (step := _next_move(owned, heaviest, slack)) is not None:
        share, heavy, light = step
        owned[heavy].remove(share)
        insort(owned[light], share)
        for member, change in ((heavy, -share[0]), (light, share[0])):
            del heaviest[bisect_left(heaviest, (-loads[member], member))]
            loads[member] += change
            insort(heaviest, (-loads[member], member))


def _next_move(
    owned: Mapping[str, Sequence[Share]], heaviest: Sequence[tuple[float, str]], slack: float
) -> tuple[Share, str, str] | None:
    least = heaviest[-1][0]
    light = heaviest[bisect_left(heaviest, (least, ""))][1]
    for load, heavy in heaviest:
        gap = least - load
        if gap <= slack:
            return None
        best = _nearest(owned[heavy], gap / 2)
        if best is not None and abs(gap - 2 * best[0]) <= gap - slack / 2:
            return best, heavy, light
    return None


def _nearest(shares: Sequence[Share], weight: float) -> Share | None:
    at = bisect_left(shares, (weight, NO_PARTITION))
    near = list(shares[at : at + 1])
    if at:
        near.append(shares[bisect_left(shares, (shares[at - 1][0], NO_PARTITION))])
    return min(near, key=lambda share: (abs(weight - share[0]), share[1]), default=None)
