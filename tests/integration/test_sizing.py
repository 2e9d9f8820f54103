"""The memory that `mqlayer size` computes for a load, beside that of a node which holds it."""

from __future__ import annotations

import pytest

from mqlayer import Message
from mqlayer.domain.sizing import Figures, PlannedLoad, node_memory, waiting_records
from tests.proof.world import World

PARTITIONS = 4
COUNT = 10_000
BODIES = (256, 0, 1_024, 5_000)

pytestmark = pytest.mark.world(own_node=True, partitions=PARTITIONS)


@pytest.mark.parametrize("size", BODIES)
def test_a_node_holds_a_load_in_the_memory_that_was_computed(world: World, size: int) -> None:
    """Within 15 %: blocks of records and the allocator's classes differ by that much."""
    kept = PARTITIONS * Figures.kept_records
    load = PlannedLoad(
        rate=(COUNT - kept) / Figures.trim_s, body_bytes=size, stop_s=0, relays=0, producers=1, partitions=PARTITIONS
    )
    assert waiting_records(load) == COUNT
    before = memory(world)
    with world.producer() as producer:
        producer.send_many("orders", [Message(f"customer-{number % 1_000:03}", b"x" * size) for number in range(COUNT)])
    assert memory(world) - before == pytest.approx(sum(node_memory(load).values()), rel=0.15)


def memory(world: World) -> int:
    """Return the node's memory without what its clients and its file hold for a moment."""
    with world.client() as client:
        facts = client.info("memory")
    return int(facts["used_memory"]) - int(facts["mem_clients_normal"]) - int(facts["mem_aof_buffer"])
