"""Which deployment's members may have a partition: pure rules (docs/design/deployments.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from mqlayer.domain.routing import LP_COUNT, PartitionId
from mqlayer.errors import Conflict, InvalidInput

MAIN: Final = "main"

Assign = Callable[[Collection[PartitionId], Collection[str], Mapping[PartitionId, str]], dict[PartitionId, str]]


@dataclass(frozen=True, slots=True)
class Deployments:
    """A group's deployments. LPs below `canary_lps` are the canary's, the others the one's in force.

    `fallback`: without a living member, the newer one gives its partitions back.
    """

    in_force: str = MAIN
    canary: str | None = None
    canary_lps: int | None = None
    previous: str | None = None
    fallback: bool = False

    def switched(self, to: str, *, fallback: bool = False) -> Deployments:
        """Return the state with `to` in force everywhere."""
        if to == self.in_force:
            # A canary is taken back; where there is none, only the fallback may change.
            return replace(self, canary=None, canary_lps=None, fallback=fallback)
        return Deployments(to, previous=self.in_force, fallback=fallback)

    def with_canary(self, canary: str, lps: int, *, fallback: bool = False) -> Deployments:
        """Return the state with LPs below `lps` for the canary. Raises Conflict, InvalidInput."""
        if canary == self.in_force:
            raise Conflict(
                f"deployment {canary!r} is in force, so it can't get a part",
                "name the other one, or leave the part out",
            )
        if lps >= LP_COUNT:
            return self.switched(canary, fallback=fallback)
        if lps < 1:
            raise InvalidInput("a part of no partition: say a larger one, or --back")
        return replace(self, canary=canary, canary_lps=lps, fallback=fallback)

    def back(self) -> Deployments:
        """Return the state before the last switch, or without the canary. Raises Conflict without either."""
        if self.canary is not None:
            return replace(self, canary=None, canary_lps=None, fallback=False)
        if self.previous is None:
            raise Conflict("no deployment was in force before this one", "name one: --to DEPLOYMENT")
        return Deployments(self.previous)

    def of(self, lp_from: int) -> str:
        """Return the deployment of the partition that begins there."""
        return self.canary if self.canary is not None and lp_from < (self.canary_lps or 0) else self.in_force

    def fallen_back(self, living: Collection[str]) -> Deployments | None:
        """Return the state to go back to by itself, or None."""
        newer = self.canary or self.in_force
        older = self.in_force if self.canary is not None else self.previous
        if not self.fallback or older is None or newer in living or older not in living:
            return None
        return self.back()


def assign_each(
    partitions: Mapping[PartitionId, str | None],
    members: Mapping[str, str],
    owners: Mapping[PartitionId, str],
    targets: Mapping[PartitionId, str],
    assign: Assign,
) -> dict[PartitionId, str]:
    """Return each partition's member, of the partition's deployment; None: of any.

    A partition stays with its target, else its owner, where that may have it.
    """
    found: dict[PartitionId, str] = {}
    for deployment in dict.fromkeys(partitions.values()):
        able = {member for member, of in members.items() if deployment is None or of == deployment}
        mine = [partition for partition, of in partitions.items() if of == deployment]
        current = {
            partition: member
            for partition in mine
            for member in (owners.get(partition), targets.get(partition))
            if member is not None and member in able
        }
        found |= assign(mine, able, current)
    return found
