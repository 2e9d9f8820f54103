"""Divide a snapshot among readers.

A range of batches is one part of the tables; a range of LPs is spread over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mqlayer.domain.routing import LP_COUNT


def lp_ranges(weights: Mapping[int, int], count: int) -> list[tuple[int, int]]:
    """Return at most `count` ranges [from, to) that tile all LPs, about equal in `weights` (records per LP)."""
    total, seen = sum(weights.values()), 0
    ends: list[int] = []
    for lp in sorted(weights):
        seen += weights[lp]
        if len(ends) < count - 1 and seen * count >= total * (len(ends) + 1):
            ends.append(lp + 1)
    inner = sorted({end for end in ends if end < LP_COUNT})
    return list(zip([0, *inner], [*inner, LP_COUNT], strict=True))


class BatchRange(NamedTuple):
    """A topic's batches, `after` excluded, `upto` included."""

    topic_id: int
    after: int
    upto: int


def batch_shares(
    lasts: Mapping[int, int], seen: Sequence[tuple[int, int, int]], count: int
) -> list[tuple[BatchRange, ...]]:
    """Return at most `count` shares, about equal, that cover all batches once.

    `lasts`: last batch per topic. `seen`: sampled (topic, batch, weight), sorted.
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


def common_batches(some: Sequence[BatchRange], others: Sequence[BatchRange]) -> tuple[BatchRange, ...]:
    """Return the batches that both have."""
    both = (
        BatchRange(one.topic_id, max(one.after, other.after), min(one.upto, other.upto))
        for one in some
        for other in others
        if one.topic_id == other.topic_id
    )
    return tuple(one for one in both if one.after < one.upto)


def batches_condition(share: Sequence[BatchRange]) -> str:
    """Return a share's SQL condition."""
    each = (f"(topic_id = {int(t)} AND batch > {int(after)} AND batch <= {int(upto)})" for t, after, upto in share)
    return " OR ".join(each) or "false"
