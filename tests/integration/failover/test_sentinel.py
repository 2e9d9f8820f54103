"""A node whose address names Sentinels: whoever connects is led to the primary, and nobody to an unarmed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.topics import find_node, register_node
from tests.fixtures.replicas import pair_of, sentinel_of
from tests.fixtures.servers import StartRedis
from tests.proof.outbox_world import OutboxWorld


def test_a_relay_follows_what_sentinels_promote(
    start_redis: StartRedis, tmp_path: Path, database_dsn: str, key_prefix: str
) -> None:
    with pair_of(start_redis) as pair, sentinel_of(pair.primary, tmp_path / "sentinel") as port:
        url = f"sentinel://127.0.0.1:1,127.0.0.1:{port}/orders/0"
        world = OutboxWorld(database_dsn, key_prefix, [url])
        world.add_topic("orders", partitions=2)
        with Database(database_dsn) as database:
            armed = find_node(database, "node-1").armed_run_id
        world.urls = [pair.primary.url]
        with world.relay():
            world.publish(40)
            world.wait_until_whole()
            pair.wait_in_step()
            pair.primary.kill()
            world.publish(40, tag="while")
            pair.wait_promoted()
            # The Sentinel knows the replica by its own address, not by the line's.
            world.urls = [pair.replica.url]
            world.wait_until_whole(timeout_s=40)
        with Database(database_dsn) as database:
            assert find_node(database, "node-1").armed_run_id not in (None, armed)


def test_an_address_without_a_sentinel_is_said_to_be_away(database_dsn: str, start_redis: StartRedis) -> None:
    server = start_redis()
    with (
        Database(database_dsn) as database,
        pytest.raises(StoreUnavailable, match="unknown command 'SENTINEL'") as caught,
    ):
        register_node(database, name="n1", url=f"sentinel://:s3cr3t@127.0.0.1:{server.port}/orders")
    assert "s3cr3t" not in str(caught.value)
