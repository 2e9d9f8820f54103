"""The script that gives out a group's rate: one typed call, as in `partition_scripts`.

Whoever consumes takes from the buckets of partitions before it begins messages: members ask for several at a time and
put them together (`consuming/engine/rate_limiter.py`), `pop_receive` takes from the same bucket as it gives messages
out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mqlayer.domain.rates import RateShare
from mqlayer.redis.keys import rate_key
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply


class RateGrant(NamedTuple):
    """How many messages may be begun now, perhaps a part of one, and what its bucket still holds."""

    granted: float
    remaining: float


def rate_command(
    connection: NodeConnection, prefix: str, partition: int, group_id: int, share: RateShare, *, wanted: float
) -> Command:
    """Return the command that takes up to so many messages from a partition's share of a group's rate."""
    key = rate_key(prefix, partition, group_id)
    return connection.script("rate_acquire", (key,), *(repr(float(number)) for number in (*share, wanted)))


def rate_reply(reply: Any, address: str) -> RateGrant:
    """Return what rate_acquire says."""
    given, left = raise_for_reply(reply, address)
    return RateGrant(float(given), float(left))
