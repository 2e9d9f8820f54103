"""What the partitions of a world hold, read and put back whole: as after an append-only file that was cut."""

from __future__ import annotations

from mqlayer.redis.keys import PartitionKeys
from tests.proof.world import World

Snapshot = list[tuple[int, PartitionKeys, dict[bytes, bytes | None]]]
"""Per partition: its node, its keys, and the value of each."""


def snapshot(world: World) -> Snapshot:
    """Return what the partitions hold now."""
    found: Snapshot = []
    for node, keys in _partition_keys(world):
        with world.client(node) as client:
            found.append((node, keys, {key: client.dump(key) for key in (keys.log, keys.meta, keys.marks)}))
    return found


def fall_back(world: World, before: Snapshot, *, state: str = "open") -> None:
    """Let the partitions hold again what they held, in a state."""
    for node, keys, values in before:
        with world.client(node) as client, client.pipeline(transaction=True) as pipeline:
            pipeline.delete(*values)
            for key, value in values.items():
                if value is not None:
                    pipeline.restore(key, 0, value)
            pipeline.hset(keys.meta, "state", state)
            pipeline.execute()


def remove_partitions(world: World) -> None:
    """Remove the partitions from their nodes, whose runs go on."""
    for node, keys in _partition_keys(world):
        with world.client(node) as client:
            client.delete(keys.log, keys.meta, keys.marks)


def set_states(world: World, state: str) -> None:
    """Let every partition say that it is `open` or `sealed`, whatever Postgres says."""
    for node, keys in _partition_keys(world):
        with world.client(node) as client:
            client.hset(keys.meta, "state", state)


def _partition_keys(world: World) -> list[tuple[int, PartitionKeys]]:
    return [(node, world.keys(partition)) for _, partition, node in world.partitions()]
