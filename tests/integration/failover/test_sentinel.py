"""A node whose address names Sentinels: whoever connects is led to the primary, and nobody to an unarmed one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from mqlayer.errors import AcknowledgedLoss, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.producing import Message, Producer
from mqlayer.routes import rearm_lost_nodes
from mqlayer.topics import find_node, register_node, set_node_address
from tests.fixtures.consumers import Recorder, StartStage
from tests.fixtures.replicas import pair_of, sentinel_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.world import World


def test_a_relay_follows_what_sentinels_promote(
    start_redis: StartRedis, tmp_path: Path, database_dsn: str, key_prefix: str
) -> None:
    with pair_of(start_redis) as pair, sentinel_of(pair.primary, tmp_path / "sentinel") as port:
        url = f"sentinel://127.0.0.1:1,127.0.0.1:{port}/orders/0"
        world = World(database_dsn, key_prefix, [url])
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


@pytest.mark.full
def test_members_and_producers_follow_a_replica_that_lagged(
    start_redis: StartRedis, tmp_path: Path, start_stage: StartStage
) -> None:
    """What it lacks is an AcknowledgedLoss, named; nothing else is lost, and a worker finds nothing left to arm."""
    with pair_of(start_redis) as pair, sentinel_of(pair.primary, tmp_path / "sentinel") as port:
        stage = start_stage(pair.primary.url)
        url = f"sentinel://127.0.0.1:{port}/orders/0"
        node, _ = set_node_address(runtime_of(stage.database, stage.prefix, application=stage.database), "node-1", url)
        recorder = Recorder()
        stage.consume(recorder)
        with closing(Producer(stage.settings(), name="p")) as producer:
            producer.send_many("orders", [Message("k", b"%d" % number) for number in range(1, 11)])
            wait_until(lambda: recorder.count() == 10, timeout_s=20, what="the first ones handled")
            pair.wait_in_step()
            pair.cut_connection()
            producer.send_many("orders", [Message("k", b"%d" % number) for number in range(11, 16)])
            wait_until(lambda: recorder.count() == 15, timeout_s=20, what="those that will be lost handled")
            pair.primary.kill()
            pair.wait_promoted()
            with pytest.raises(AcknowledgedLoss) as caught:
                wait_until(lambda: producer.send("orders", key="k", body=b"16", timeout_s=30), what="the loss told")
            assert (caught.value.first_lost, caught.value.last_lost) == (11, 15)
            sent = producer.send("orders", key="k", body=b"17", timeout_s=30)
            wait_until(lambda: recorder.bodies()[-1] == b"17", timeout_s=30, what="what comes after it handled")
        assert sent.identity.seq in (1, 2)
        assert find_node(stage.database, "node-1").armed_run_id not in (None, node.armed_run_id)
        assert rearm_lost_nodes(runtime_of(stage.database, stage.prefix, application=stage.database)) == {}
        recorder.assert_in_order()


def test_an_address_without_a_sentinel_is_said_to_be_away(database_dsn: str, start_redis: StartRedis) -> None:
    server = start_redis()
    with (
        Database(database_dsn) as database,
        pytest.raises(StoreUnavailable, match=r"unknown command .SENTINEL"),
    ):
        register_node(runtime_of(database), name="n1", url=f"sentinel://127.0.0.1:{server.port}/orders")
