"""Who shall consume what: pure, deterministic, sticky and balanced choices, by count or by rate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from mqlayer.domain.routing import PartitionId

SLACK: Final = 0.2
"""Part of a member's fair share by which loads may differ: rates move all the time, partitions must not."""
IDLE: Final = 0.1
"""Part of the mean rate that a partition counts with besides its own: idle ones are to be spread too."""


def assign(
    partitions: Collection[PartitionId], members: Collection[str], current: Mapping[PartitionId, str]
) -> dict[PartitionId, str]:
    """Return the member for each partition, or an empty mapping where there is no member.

    Counts differ by one at the most; a partition stays where it is unless its member has too many or is gone, so one
    more member moves at most ceil(P / (n + 1)) of P partitions.
    """
    ordered = sorted(members)
    if not ordered:
        return {}
    held: dict[str, list[PartitionId]] = {member: [] for member in ordered}
    for partition in sorted(partitions):
        member = current.get(partition)
        if member in held:
            held[member].append(partition)
    quota = _quotas(len(partitions), held)
    free = [p for p in sorted(partitions) if current.get(p) not in held]
    for member in ordered:
        free += held[member][quota[member] :]
        del held[member][quota[member] :]
    free.sort()
    for member in ordered:
        while len(held[member]) < quota[member]:
            held[member].append(free.pop(0))
    return {partition: member for member in ordered for partition in held[member]}


def _quotas(count: int, held: Mapping[str, list[PartitionId]]) -> dict[str, int]:
    """Return how many partitions each member gets; those that hold the most keep the larger shares."""
    share, rest = divmod(count, len(held))
    by_load = sorted(held, key=lambda member: (-len(held[member]), member))
    return {member: share + (1 if i < rest else 0) for i, member in enumerate(by_load)}


def assign_by_rate(
    partitions: Collection[PartitionId],
    members: Collection[str],
    current: Mapping[PartitionId, str],
    rates: Mapping[PartitionId, float],
) -> dict[PartitionId, str]:
    """Return the member for each partition, or an empty mapping where there is no member.

    A partition stays where it is unless its member is gone, or moving it brings the most and the least loaded member
    nearer to each other by a tenth of a fair share at the least.
    """
    ordered = sorted(members)
    if not ordered or not partitions:
        return {}
    mean = sum(rates.get(p, 0.0) for p in partitions) / len(partitions)
    weights = {p: rates.get(p, 0.0) + (IDLE * mean or 1.0) for p in partitions}
    held: dict[str, set[PartitionId]] = {member: set() for member in ordered}
    for partition in partitions:
        member = current.get(partition)
        if member in held:
            held[member].add(partition)
    loads = {member: sum(weights[p] for p in sorted(held[member])) for member in ordered}
    free = [p for p in partitions if current.get(p) not in held]
    for partition in sorted(free, key=lambda p: (-weights[p], p)):
        lightest = min(ordered, key=lambda member: (loads[member], member))
        held[lightest].add(partition)
        loads[lightest] += weights[partition]
    slack = SLACK * sum(weights.values()) / len(ordered)
    while (step := _next_move(held, loads, weights, slack)) is not None:
        partition, heavy, light = step
        held[heavy].remove(partition)
        held[light].add(partition)
        loads[heavy] -= weights[partition]
        loads[light] += weights[partition]
    return {partition: member for member in ordered for partition in sorted(held[member])}


def _next_move(
    held: Mapping[str, Collection[PartitionId]],
    loads: Mapping[str, float],
    weights: Mapping[PartitionId, float],
    slack: float,
) -> tuple[PartitionId, str, str] | None:
    """Return the move that helps the most loaded member that can be helped, or None where none is worth it."""
    light = min(loads, key=lambda member: (loads[member], member))
    for heavy in sorted(loads, key=lambda member: (-loads[member], member)):
        gap = loads[heavy] - loads[light]
        if gap <= slack:
            return None
        best = min(held[heavy], key=lambda p: (abs(gap - 2 * weights[p]), p), default=None)
        if best is not None and abs(gap - 2 * weights[best]) <= gap - slack / 2:
            return best, heavy, light
    return None
