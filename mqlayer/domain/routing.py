"""Key -> LP -> partition. A key's LP never depends on the route version (invariant 1)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Final, NewType

from mqlayer.domain.durability import Durability
from mqlayer.errors import InvalidInput

Lp = NewType("Lp", int)
PartitionId = NewType("PartitionId", int)
NodeId = NewType("NodeId", int)
RouteVersion = NewType("RouteVersion", int)

LP_COUNT: Final = 1024


@lru_cache(maxsize=65_536)
def lp_of(key: bytes) -> Lp:
    """Return a UTF-8 key's LP: first two bytes of SHA-256, big-endian, mod 1024."""
    digest = sha256(key).digest()
    return Lp((digest[0] & 3) << 8 | digest[1])


def random_lp(source: random.Random) -> Lp:
    """Return a keyless message's LP."""
    return Lp(source.randrange(LP_COUNT))


@dataclass(frozen=True, slots=True)
class LpRange:
    """LPs in [lp_from, lp_to) of a partition."""

    lp_from: int
    lp_to: int
    partition: PartitionId
    node: NodeId


@dataclass(frozen=True, slots=True)
class Route:
    """A topic's route version. Its ranges tile [0, 1024)."""

    topic_id: int
    topic: str
    version: RouteVersion
    ranges: tuple[LpRange, ...]
    body_limit: int
    backlog_limit: int
    best_effort: bool = False
    """Messages may go to other partitions if theirs refuses."""
    durability: Durability = "node"
    since: float = 0.0
    """When its Postgres was first met: a later one may assign lost versions again."""

    def __post_init__(self) -> None:
        check_tiling((r.lp_from, r.lp_to) for r in self.ranges)

    @property
    def age(self) -> tuple[float, int]:
        """Grows with each later route."""
        return self.since, self.version


def check_tiling(ranges: Iterable[tuple[int, int]]) -> None:
    """Raise InvalidInput unless the ranges tile [0, 1024) in order (invariant 7)."""
    at = 0
    for lp_from, lp_to in ranges:
        if lp_from != at or lp_to <= lp_from:
            raise InvalidInput(f"ranges must tile [0, {LP_COUNT}): [{lp_from}, {lp_to}) does not follow {at}")
        at = lp_to
    if at != LP_COUNT:
        raise InvalidInput(f"ranges must tile [0, {LP_COUNT}): they end at {at}")


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Return `count` ranges that tile [0, 1024), sizes within one."""
    if not 1 <= count <= LP_COUNT:
        raise InvalidInput(f"a topic has 1 to {LP_COUNT} partitions, not {count}")
    bounds = [i * LP_COUNT // count for i in range(count + 1)]
    return list(pairwise(bounds))


def spread(count: int, over: Sequence[NodeId]) -> list[NodeId]:
    """Return `count` nodes, round-robin."""
    return [over[i % len(over)] for i in range(count)]
