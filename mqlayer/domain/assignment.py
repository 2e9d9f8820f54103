"""Who shall consume what: a pure, deterministic, sticky and balanced choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mqlayer.domain.routing import PartitionId


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
