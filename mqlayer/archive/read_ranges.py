"""Dividing a snapshot among parallel readers: stretches of batches, or ranges of LPs, with about as many records each.

Records that were archived together lie together: a stretch of batches is one part of the tables, and all stretches take
no longer for the server than the whole. A range of LPs is everywhere in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class BatchRange(NamedTuple):
    """Batches of a topic; `after` is not among them, `upto` is."""

    topic_id: int
    after: int
    upto: int


def batch_shares(
    lasts: Mapping[int, int], seen: Sequence[tuple[int, int, int]], count: int
) -> list[tuple[BatchRange, ...]]:
    """Return at most `count` shares that together are all batches of these topics up to the last one of each, once.

    `lasts`: that batch per topic. `seen`: topic, batch and weight, as far as known, in this order; a share ends where
    about as much weight lies before as after it.
    """
    total, before = sum(weight for *_, weight in seen), 0
    ends: list[tuple[int, int]] = []
    for topic, batch, weight in seen:
        before += weight
        if len(ends) < count - 1 and before * count >= total * (len(ends) + 1):
            ends.append((topic, batch))
    shares: list[tuple[BatchRange, ...]] = []
    begun: list[BatchRange] = []
    for topic, last in sorted(lasts.items()):
        after = 0
        for end in [batch for one, batch in ends if one == topic]:
            shares.append((*begun, BatchRange(topic, after, end)))
            begun, after = [], end
        if after < last:
            begun.append(BatchRange(topic, after, last))
    return [*shares, tuple(begun)] if begun else shares


def batches_condition(share: Sequence[BatchRange]) -> str:
    """Return the condition of a share, in SQL."""
    each = (f"(topic_id = {int(t)} AND batch > {int(after)} AND batch <= {int(upto)})" for t, after, upto in share)
    return " OR ".join(each) or "false"
