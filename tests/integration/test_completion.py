"""What a shell completes: commands, and names of topics and groups."""

from __future__ import annotations

import pytest

from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.forked_programs import ask_python
from tests.proof.world import World

pytestmark = pytest.mark.world(partitions=0)


def completed(world: World, typed: str, **variables: str) -> set[str]:
    """Return what a bash would offer behind the typed words."""
    shell = {"_MQLAYER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    answer = ask_python("mqlayer", env={**world.environment(), **shell, **variables})
    assert answer.stderr == ""
    return set(answer.stdout.split())


@pytest.fixture
def named(world: World) -> World:
    """A world with topics and groups."""
    for topic in ("orders", "order-lines", "payments"):
        world.add_topic(topic, partitions=1)
    runtime = world.runtime()
    for topic, group in (("orders", "ledger"), ("orders", "late"), ("payments", "lost")):
        ensure_group(runtime, RouteCache(runtime.control), topic=topic, name=group, settings=GroupSettings())
    return world


def test_names_of_topics_and_of_their_groups_are_completed(named: World) -> None:
    assert completed(named, "mqlayer topic set ord") == {"orders", "order-lines"}
    assert completed(named, "mqlayer group show orders l") == {"ledger", "late"}
    assert completed(named, "mqlayer parked list payments l") == {"lost"}
    assert completed(named, "mqlayer key explain orders k-1 --group le") == {"ledger"}
    assert completed(named, "mqlayer peek pay") == {"payments"}


def test_commands_are_completed_without_any_server(named: World) -> None:
    nowhere = {"MQLAYER_DSN": "postgresql://nobody@127.0.0.1:1/nothing"}
    assert completed(named, "mqlayer par", **nowhere) == {"parked"}
    assert completed(named, "mqlayer group se", **nowhere) == {"set", "seek"}


def test_without_an_answer_nothing_is_completed_and_nothing_said(named: World) -> None:
    assert completed(named, "mqlayer topic set ", MQLAYER_DSN="postgresql://nobody@127.0.0.1:1/nothing") == set()
    assert completed(named, "mqlayer topic set ", MQLAYER_LEESE_S="1") == set()
