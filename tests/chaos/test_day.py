"""A day in less than a minute: a load that grows, moves its hot spot and falls, under faults, with automatic routes.

`python -m tests.chaos.day --minutes 10` is the long form, beside the best fixed route.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.day_actors import GROWTH, load_at
from tests.chaos.harness.day import play_day
from tests.chaos.harness.run import shown
from tests.chaos.harness.scene import Scene

DAY_S = 45.0


@pytest.mark.full
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(0)
def test_routes_follow_the_load_of_a_day_and_nothing_is_lost_or_reversed(
    order_audit: Callable[[Scene], Iterator[str]],
) -> None:
    seed = random.randrange(1, 10**6)
    print(f"{seed=}")  # noqa: T201
    report = play_day(seed, DAY_S, automatic=True, audits=[order_audit])
    told = json.dumps(shown(report))
    print(told)  # noqa: T201
    assert report["clean"], told
    assert report["route_changes"].get("split", 0) >= 2, told
    assert report["partitions_most"] <= 24, "the bound of its policy"
    assert report["changes"] <= report["seconds"] / 5 + 1, "the cool-down of its policy"


def test_the_load_of_a_day_grows_and_falls() -> None:
    assert load_at(0.5) == 1
    assert load_at(0.5) / load_at(0.0) == pytest.approx(GROWTH)
    assert load_at(1.0) == pytest.approx(load_at(0.0))
