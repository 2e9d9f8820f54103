"""Zones of nodes, topics and members: where partitions are placed, and who gets them."""

from __future__ import annotations

import pytest

from mqlayer.errors import Conflict, InvalidName, NotFound
from mqlayer.groups.members import join, leave
from mqlayer.postgres.database import Database
from mqlayer.routes import plan_drain, planned_move
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, find_node, register_node, set_home_zone, set_node_zone
from tests.fixtures.commands import Commands
from tests.fixtures.dead_nodes import consuming, known_group
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2, partitions=4)


def test_partitions_are_placed_at_home(world: World, database: Database, start_redis: StartRedis) -> None:
    runtime = world.runtime()
    assert set_node_zone(runtime, "node-2", "west")
    assert not set_node_zone(runtime, "node-2", "west")
    url = start_redis().url
    third = register_node(runtime, name="node-3", url=url, zone="west")
    assert find_node(database, "node-3").zone == "west"
    assert register_node(runtime, name="node-3", url=url) == register_node(runtime, name="node-3", url=url, zone="west")
    with pytest.raises(Conflict, match="in zone west: change that: mqlayer node set node-3 --zone east"):
        register_node(runtime, name="node-3", url=url, zone="east")
    assert {r.node for r in create_topic(runtime, "mails", home_zone="west").ranges} == {2, third.node_id}
    assert {r.node for r in create_topic(runtime, "bills", home_zone="north").ranges} == {1, 2, third.node_id}
    # The fewest partitions are on node-3, but it is not at home.
    set_node_zone(runtime, "node-3", "east")
    set_home_zone(runtime, "orders", "west")
    assert planned_move(database, "orders", 1).successors[0].node == 2
    moves = plan_drain(runtime, "node-2").moves
    assert {one.at_home for one in moves if one.topic == "orders"} == {False}
    set_node_zone(runtime, "node-3", "west")
    moves = plan_drain(runtime, "node-2").moves
    assert {one.target_name for one in moves if one.topic in ("orders", "mails")} == {"node-3"}
    with pytest.raises(InvalidName, match="zone"):
        set_node_zone(runtime, "node-2", "West 1")
    with pytest.raises(NotFound):
        set_home_zone(runtime, "nothing", "west")


def test_members_get_the_partitions_of_their_zone(world: World, database: Database) -> None:
    for number, zone in ((1, "east"), (2, "west")):
        set_node_zone(world.runtime(), f"node-{number}", zone)
    known_group(world, database)
    ((group_id,),) = world.rows("SELECT group_id FROM mqlayer.consumer_group")

    def homes() -> set[tuple[str, str]]:
        return set(
            world.rows(
                "SELECT coalesce(a.target, a.member_id), n.zone FROM mqlayer.assignment a "
                "JOIN mqlayer.partition p USING (partition_id) JOIN mqlayer.node n USING (node_id)"
            )
        )

    west = join(database, group_id=group_id, member_id="w", lease_s=60, zone="west")
    assert homes() == {("w", "east"), ("w", "west")}
    join(database, group_id=group_id, member_id="e", lease_s=60, zone="east")
    assert homes() == {("e", "east"), ("w", "west")}
    leave(database, west)
    assert homes() == {("e", "east"), ("e", "west")}


def test_an_application_joins_in_the_zone_of_its_settings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_ZONE", "west")
    assert Settings().zone == "west"
    with consuming(world):
        wait_until(lambda: world.rows("SELECT zone FROM mqlayer.member") == [("west",)], what="a member in the zone")


@pytest.mark.world(nodes=1, by_commands=True)
def test_commands_set_and_show_zones(world: World, run: Commands) -> None:
    assert "node-1 is in zone eu-1a\n" in run.text("node", "set", "node-1", "--zone", "eu-1a")
    assert "as before" in run.text("node", "set", "node-1", "--zone", "eu-1a")
    assert "eu-1a" in run.text("node", "list")
    assert "topic orders is at home in eu-1a" in run.text("topic", "set", "orders", "--home-zone", "eu-1a")
    assert "topic orders is at home in no zone" in run.text("topic", "set", "orders", "--home-zone", "")
    assert "say what to set" in run.failure("node", "set", "node-1")
