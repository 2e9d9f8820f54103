"""What the tests of the scripts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.stack import RedisServer


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    """A connection to a Redis of each version."""
    with NodeConnection(Node(NodeId(1), "n1", every_redis.url, None), any_run=True) as connection:
        yield connection
