"""How the load of a partition is measured, where that can't be."""

from __future__ import annotations

import pytest

from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import NotFound
from mqlayer.postgres.database import Database
from mqlayer.routes import measured_load
from tests.proof.runtimes import runtime_of


def test_a_node_that_nobody_registered_is_named(database_dsn: str, key_prefix: str) -> None:
    ranges = (LpRange(0, 1024, PartitionId(1), NodeId(99)),)
    route = Route(1, "orders", RouteVersion(1), ranges, body_limit=1_000, backlog_limit=0)
    with Database(database_dsn) as database, pytest.raises(NotFound, match="unknown node 99"):
        measured_load(runtime_of(database, key_prefix), route, 1)
