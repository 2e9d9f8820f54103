"""Dividing a snapshot among parallel readers: ranges of LPs of about the same number of records."""

from __future__ import annotations

from collections.abc import Mapping

from mqlayer.domain.routing import LP_COUNT


def lp_ranges(weights: Mapping[int, int], count: int) -> list[tuple[int, int]]:
    """Return at most `count` ranges [from, to) that tile all LPs, cut where about as many records lie before as after.

    `weights`: records per LP. An LP is never divided, so that the order of its records is in one range.
    """
    total, seen = sum(weights.values()), 0
    ends: list[int] = []
    for lp in sorted(weights):
        seen += weights[lp]
        if len(ends) < count - 1 and seen * count >= total * (len(ends) + 1):
            ends.append(lp + 1)
    inner = sorted({end for end in ends if end < LP_COUNT})
    return list(zip([0, *inner], [*inner, LP_COUNT], strict=True))
