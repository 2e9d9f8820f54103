"""One Redis is one node: a second name for it is refused, at registration and when a node is armed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqlayer.errors import Conflict
from mqlayer.postgres.database import Database
from mqlayer.stack import RedisServer
from mqlayer.topics import list_nodes, rearm_node, register_node, remove_node, set_node_address
from tests.fixtures.node_locks import lock_of_nodes
from tests.fixtures.servers import StartRedis
from tests.proof.world import World

pytestmark = pytest.mark.world(own_node=True)


def outcome(work: Callable[[], object]) -> str:
    """Return the text of a conflict, "" without one."""
    try:
        work()
    except Conflict as error:
        return str(error)
    return ""


def names(database: Database) -> list[str]:
    return [node.name for node in list_nodes(database)]


@pytest.mark.world(own_node=True, partitions=0)
def test_a_redis_has_one_name_until_that_is_removed(world: World, database: Database) -> None:
    runtime, (url,) = world.runtime(), world.urls
    for address in (url, url.replace("127.0.0.1", "localhost"), url.replace("/0", "/1")):
        with pytest.raises(Conflict, match="is the Redis of node 'node-1' already: one Redis is one node"):
            register_node(runtime, name="second", url=address)
    assert names(database) == ["node-1"]
    assert register_node(runtime, name="node-1", url=url).name == "node-1"
    # A Postgres that was replaced arms no node, and knows the last run of each.
    world.rows("UPDATE mqlayer.node SET armed_run_id = NULL RETURNING 1")
    with pytest.raises(Conflict, match="remove the old name first: mqlayer node remove node-1"):
        register_node(runtime, name="second", url=url)
    remove_node(runtime, "node-1")
    assert register_node(runtime, name="second", url=url).name == "second"


def test_a_restarted_redis_is_known_by_its_partitions(
    world: World, database: Database, node: RedisServer, start_redis: StartRedis
) -> None:
    """Its run is new, and not armed yet."""
    runtime = world.runtime()
    node.kill()
    node.start()
    with pytest.raises(Conflict, match=r"holds partition 1 of node 'node-1'.* mqlayer node set node-1 --url URL"):
        register_node(runtime, name="second", url=node.url)
    rearm_node(runtime, "node-1")
    assert register_node(runtime, name="second", url=start_redis().url).name == "second"


def test_a_node_is_not_armed_on_the_redis_of_another(world: World, start_redis: StartRedis) -> None:
    """Its address leads there by mistake; its own Redis is armed as before."""
    runtime, other = world.runtime(), start_redis()
    armed = register_node(runtime, name="second", url=other.url)
    with pytest.raises(Conflict, match=r"the address of node 'second', leads to the Redis of node 'node-1': one Redis"):
        set_node_address(runtime, "second", world.urls[0], empty=True)
    world.rows("UPDATE mqlayer.node SET url = %s WHERE name = 'second' RETURNING 1", world.urls[0])
    with pytest.raises(Conflict, match="mqlayer node set second --url URL"):
        rearm_node(runtime, "second")
    set_node_address(runtime, "second", other.url)
    assert [node for node in list_nodes(world.database) if node.name == "second"] == [armed]


def test_of_two_names_at_once_one_is_taken(world: World, database: Database, start_redis: StartRedis) -> None:
    """Neither sees the other's row before it commits; so do two nodes that are armed at once."""
    runtime, url = world.runtime(), start_redis().url
    with ThreadPoolExecutor(2) as pool, lock_of_nodes(world.dsn, waiting=2):
        tries = [
            pool.submit(outcome, lambda name=name: register_node(runtime, name=name, url=url))  # type: ignore[misc]
            for name in ("second", "third")
        ]
    said = sorted(one.result() for one in tries)
    assert said[0] == ""
    assert "is the Redis of node" in said[1]
    (taken,) = set(names(database)) - {"node-1"}
    empty = start_redis()
    register_node(runtime, name="fourth", url=empty.url)
    third = start_redis()
    with ThreadPoolExecutor(2) as pool, lock_of_nodes(world.dsn, waiting=2):
        tries = [pool.submit(outcome, lambda name=name: set_node_address(runtime, name, third.url))  # type: ignore[misc]
                 for name in (taken, "fourth")]  # fmt: skip
    said = sorted(one.result() for one in tries)
    assert said[0] == ""
    assert "leads to the Redis of node" in said[1]
