"""Pages of topics and groups stay quick with a partition per LP; `python -m bench console_pages` has the full size."""

from __future__ import annotations

import time

import pytest

from bench.console import PAGES, fill_system
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR
from tests.fixtures.wait import within
from tests.proof.world import World

LIMIT_S = 0.3
BYTES = 300_000


@pytest.mark.slow
@pytest.mark.world(partitions=0)
def test_pages_of_a_topic_with_a_partition_for_each_lp_are_quick_and_short(world: World) -> None:
    partition = fill_system(world.dsn, world.urls[0], world.key_prefix, topics=2, groups=3, minutes=1500)
    with console_client(world, OPERATOR) as browser:

        def taken(path: str) -> float:
            # Others on the machine don't count; the bench has times by the clock.
            began = time.process_time()
            answer = browser.get(path)
            assert answer.status_code == 200, answer.text
            assert len(answer.content) < BYTES
            return time.process_time() - began

        for name, path in PAGES.items():
            where = path.format(partition=partition)
            within(lambda where=where: taken(where), LIMIT_S, what=f"the page {name}")  # type: ignore[misc]
