"""A route change made by hand, step by step, for tests of what producers do at each."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.proof.world import World


def set_meta(world: World, partition: int, node: int = 1, **facts: object) -> None:
    """Change a partition's meta."""
    with world.client(node) as client:
        client.hset(world.keys(partition).meta, mapping={name: str(value) for name, value in facts.items()})


def make_successor(world: World, parent: int, *, topic: str = "orders", node: int = 1, state: str = "importing") -> int:
    """Make another partition for a partition's range, as a move does: its row, and its meta in a state."""
    rows = world.rows(
        "INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, state) "
        "SELECT topic_id, %s, lp_from, lp_to, 'importing' FROM mqlayer.partition WHERE partition_id = %s "
        "RETURNING partition_id, lp_from, lp_to",
        node,
        parent,
    )
    partition, lp_from, lp_to = rows[0]
    facts = {"topic": topic, "lp_from": lp_from, "lp_to": lp_to, "change": "7", "next": 1, "first": 1}
    set_meta(world, partition, node, state=state, **facts)
    return int(partition)


def hand_over(world: World, parent: int, successor: int, *, parent_node: int = 1, node: int = 1) -> None:
    """Load the parent's marks into the successor and open it."""
    with world.client(parent_node) as old, world.client(node) as new:
        marks: Any = old.hgetall(world.keys(parent).marks)
        if marks:
            new.hset(world.keys(successor).marks, mapping=marks)
    set_meta(world, successor, node, state="open")


def switch_route(world: World, parent: int, successor: int, *, topic: str = "orders") -> None:
    """Put the next route version in force: the successor in the parent's place."""
    with psycopg.connect(world.dsn) as connection:
        connection.execute(
            "INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id) "
            "SELECT r.topic_id, r.version + 1, r.lp_from, r.lp_to, "
            "CASE WHEN r.partition_id = %s THEN %s ELSE r.partition_id END "
            "FROM mqlayer.route r JOIN mqlayer.topic t ON t.topic_id = r.topic_id AND t.version = r.version "
            "WHERE t.name = %s",
            (parent, successor, topic),
        )
        connection.execute("UPDATE mqlayer.topic SET version = version + 1 WHERE name = %s", (topic,))
