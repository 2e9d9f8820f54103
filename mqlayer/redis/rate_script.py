"""Typed call of rate_acquire."""

from __future__ import annotations

from typing import Any, NamedTuple

from mqlayer.domain.rates import RateShare
from mqlayer.redis.keys import rate_key
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply


class RateGrant(NamedTuple):
    """Messages that may start (fractions too), and the bucket's rest."""

    granted: float
    remaining: float


def rate_command(
    connection: NodeConnection, prefix: str, partition: int, group_id: int, share: RateShare, *, wanted: float
) -> Command:
    """Take up to `wanted` messages of a partition's share."""
    return bucket_command(connection, rate_key(prefix, partition, group_id), share, wanted=wanted)


def bucket_command(connection: NodeConnection, key: bytes, share: RateShare, *, wanted: float) -> Command:
    """Take up to `wanted` messages of a bucket."""
    return connection.script("rate_acquire", (key,), *(repr(float(number)) for number in (*share, wanted)))


def rate_reply(reply: Any, address: str) -> RateGrant:
    """Parse rate_acquire's reply."""
    given, left = raise_for_reply(reply, address)
    return RateGrant(float(given), float(left))
