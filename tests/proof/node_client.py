"""A plain client of a node, whatever its address names."""

from __future__ import annotations

from typing import Any, cast

import redis

from mqlayer.redis.access import access_here
from mqlayer.redis.addresses import is_cluster_url, parse_address, shard_url


def client_at(url: str, **options: Any) -> redis.Redis:
    """Return a client of a node's server, or of all shards of a cluster, with this process's certificates."""
    if url.startswith(("rediss", "clusters")):
        # The driver takes a cluster's localhost for its address.
        options |= access_here().tls() | {"ssl_check_hostname": False}
    if not is_cluster_url(url):
        return redis.Redis.from_url(url, protocol=2, **options)
    last = parse_address(url).seeds[-1]
    found: Any = redis.RedisCluster.from_url(shard_url(url, last), protocol=2, **options)
    return cast("redis.Redis", found)
