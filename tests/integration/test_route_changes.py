"""Split, merge and move, step by step, on live servers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from mqlayer import App, Context
from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.postgres.database import Database
from mqlayer.routes import (
    ChangePlan,
    apply_change,
    drop_change,
    finish_change,
    finish_changes,
    plan_merge,
    plan_move,
    plan_split,
)
from mqlayer.runtime.route_cache import load_route
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import merge, move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2)


@pytest.fixture
def database(world: World) -> Iterator[Database]:
    """The control database."""
    with Database(world.dsn) as database:
        yield database


def ranges(route: Route) -> list[tuple[int, int, int, int]]:
    return [(r.lp_from, r.lp_to, r.partition, r.node) for r in route.ranges]


def meta(world: World, partition: int) -> dict[Any, Any]:
    for url in world.urls:
        found = redis.Redis.from_url(url, decode_responses=True).hgetall(f"{world.key_prefix}:{{{partition}}}:meta")
        if found:
            return dict(found)
    return {}


def test_a_split_gives_its_lps_to_two_new_partitions(world: World, database: Database) -> None:
    route = split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
    assert ranges(route) == [(0, 100, 3, 1), (100, 512, 4, 1), (512, 1024, 2, 2)]
    assert route.version == 2
    assert meta(world, 1)["state"] == "sealed"
    assert [meta(world, p)["state"] for p in (3, 4)] == ["open", "open"]


def test_consumers_keep_every_keys_order_over_split_merge_and_move(world: World, database: Database) -> None:
    app = App(world.settings(lease_s=10.0))
    seen: dict[str, list[int]] = defaultdict(list)

    @app.consumer("orders", group="ledger")
    def book(body: bytes, ctx: Context) -> None:
        assert ctx.key is not None
        seen[ctx.key].append(int(body.split(b"-")[1]))

    def publish_more() -> None:
        world.publish(400, keys=40, tag=f"{next(rounds)}")

    rounds = itertools.count(1)
    app.start()
    try:
        with world.relay():
            publish_more()
            route = split(runtime_of(database, world.key_prefix), "orders", 1, at=[100])
            publish_more()
            one, two, three = (r.partition for r in route.ranges)
            route = move(runtime_of(database, world.key_prefix), "orders", three)
            publish_more()
            route = merge(runtime_of(database, world.key_prefix), "orders", [one, two])
            publish_more()
            wait_until(lambda: sum(map(len, seen.values())) >= 1600, what="everything to be handled", timeout_s=30)
    finally:
        app.stop()
    assert all(numbers == [n for _ in range(4) for n in numbers[: len(numbers) // 4]] for numbers in seen.values())
    assert all(len(numbers) == 40 for numbers in seen.values())
    assert route.version == 4


def test_a_plan_that_somebody_elses_change_overtook_changes_nothing(world: World, database: Database) -> None:
    """Case 12: of two operators one gets the next version, the other a conflict; no version is skipped."""
    route = load_route(database, "orders")
    mine, theirs = plan_split(route, 1, [100]), plan_split(route, 2, [600])
    assert apply_change(runtime_of(database, world.key_prefix), theirs).version == 2
    with pytest.raises(Conflict, match="plan again"):
        apply_change(runtime_of(database, world.key_prefix), mine)
    assert load_route(database, "orders").version == 2
    assert meta(world, 1)["state"] == "open"


def test_a_change_that_sealed_nothing_may_be_dropped(world: World, database: Database) -> None:
    plan = plan_move(load_route(database, "orders"), 1, NodeId(2))
    with broken_off_at("change.before_sealing_commit"):
        apply_change(runtime_of(database, world.key_prefix), plan)
    assert drop_change(runtime_of(database), "orders") == 1
    with pytest.raises(NotFound, match="open route change"):
        drop_change(runtime_of(database), "orders")
    assert finish_change(runtime_of(database, world.key_prefix), 1) == "dropped"
    assert meta(world, 1)["state"] == "open"
    assert move(runtime_of(database, world.key_prefix), "orders", 1).version == 2


def test_a_change_that_may_have_sealed_something_only_goes_forward(world: World, database: Database) -> None:
    plan = plan_move(load_route(database, "orders"), 1, NodeId(2))
    with broken_off_at("change.after_seal"):
        apply_change(runtime_of(database, world.key_prefix), plan)
    with pytest.raises(Conflict, match="only goes forward"):
        drop_change(runtime_of(database), "orders")
    assert finish_changes(runtime_of(database, world.key_prefix)) == {1: "done"}
    assert finish_changes(runtime_of(database, world.key_prefix)) == {}
    assert load_route(database, "orders").version == 2


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (lambda route: plan_merge(route, [1, 3]), "not adjacent"),
        (lambda route: plan_merge(route, [1]), "two different"),
        (lambda route: plan_merge(route, [1, 9]), "unknown partition 9"),
        (lambda route: plan_split(route, 1, [0]), "empty"),
        (lambda route: plan_split(route, 1, [512]), "empty"),
        (lambda route: plan_split(route, 1, [5, 5]), "different"),
        (lambda route: plan_split(route, 9, [5]), "unknown partition 9"),
        (lambda route: plan_move(route, 1, NodeId(1)), "already"),
    ],
)
def test_what_can_not_be_done_is_refused(plan: Callable[[Route], ChangePlan], error: str) -> None:
    """Cases 13 to 15."""
    quarters = [(0, 300, 1), (300, 512, 2), (512, 1024, 3)]
    ranges = tuple(LpRange(lo, hi, PartitionId(p), NodeId(1)) for lo, hi, p in quarters)
    route = Route(1, "orders", RouteVersion(1), ranges, 1000, 0)
    with pytest.raises((InvalidInput, NotFound), match=error):
        plan(route)
