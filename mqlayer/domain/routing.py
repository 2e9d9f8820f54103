"""Key -> LP -> partition: pure rules.

The LP of a key never depends on a version (invariant 1); a route version maps ranges of LPs to partitions.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Final, NewType

from mqlayer.errors import InvalidInput

Lp = NewType("Lp", int)
PartitionId = NewType("PartitionId", int)
NodeId = NewType("NodeId", int)
RouteVersion = NewType("RouteVersion", int)

LP_COUNT: Final = 1024


@lru_cache(maxsize=65_536)
def lp_of(key: bytes) -> Lp:
    """Return the LP of a key, given as UTF-8: the first two bytes of its SHA-256, big-endian, mod 1024."""
    digest = sha256(key).digest()
    return Lp((digest[0] & 3) << 8 | digest[1])


def random_lp(source: random.Random) -> Lp:
    """Return the LP for a message without a key."""
    return Lp(source.randrange(LP_COUNT))


@dataclass(frozen=True, slots=True)
class LpRange:
    """One line of a route: LPs in [lp_from, lp_to) are served by a partition on a node."""

    lp_from: int
    lp_to: int
    partition: PartitionId
    node: NodeId


@dataclass(frozen=True, slots=True)
class Route:
    """One version of a topic's route. Its ranges tile [0, 1024) exactly."""

    topic_id: int
    topic: str
    version: RouteVersion
    ranges: tuple[LpRange, ...]
    body_limit: int
    backlog_limit: int
    best_effort: bool = False
    """Order is kept where it costs nothing: a message whose partition refuses may go to another one."""
    since: float = 0.0
    """When the Postgres that says so was first met: a later one may have lost versions, and gives them out anew."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_tiling((r.lp_from, r.lp_to) for r in self.ranges)
        object.__setattr__(self, "_starts", tuple(r.lp_from for r in self.ranges))

    @property
    def age(self) -> tuple[float, int]:
        """What a later route of the topic has more of."""
        return self.since, self.version

    def range_of(self, lp: int) -> LpRange:
        """Return the range that serves an LP."""
        return self.ranges[bisect_right(self._starts, lp) - 1]


def check_tiling(ranges: Iterable[tuple[int, int]]) -> None:
    """Raise InvalidInput unless the ranges, in order, tile [0, 1024) without gap or overlap (invariant 7)."""
    at = 0
    for lp_from, lp_to in ranges:
        if lp_from != at or lp_to <= lp_from:
            raise InvalidInput(f"ranges must tile [0, {LP_COUNT}): [{lp_from}, {lp_to}) does not follow {at}")
        at = lp_to
    if at != LP_COUNT:
        raise InvalidInput(f"ranges must tile [0, {LP_COUNT}): they end at {at}")


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Return `count` ranges that tile [0, 1024), their sizes different by one at the most."""
    if not 1 <= count <= LP_COUNT:
        raise InvalidInput(f"a topic has 1 to {LP_COUNT} partitions, not {count}")
    bounds = [i * LP_COUNT // count for i in range(count + 1)]
    return list(pairwise(bounds))


def spread(count: int, over: Sequence[NodeId]) -> list[NodeId]:
    """Return a node for each of `count` partitions, in turn."""
    return [over[i % len(over)] for i in range(count)]
