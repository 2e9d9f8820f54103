"""Nodes restart, are emptied and lose their groups' places while keys are parked: these stay parked, and in order.

DESIGN 9 has an arming rebuild the parked sets. Here a partition keeps none: Postgres has what is parked, and whoever
holds the partition puts behind it what comes to a parked key, also what comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from mqlayer.stack import RedisServer
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, ParkingShop, parked, release, rows


def restart(stage: Stage, server: RedisServer) -> None:
    server.kill()
    server.start()


def empty(stage: Stage, server: RedisServer) -> None:
    """Take everything; what was there is sent again, as relays do it from the outbox."""
    stage.redis.flushall()
    stage.wait_made_again()
    stage.forget_numbers()
    stage.send_numbers(3, 5)


def forget_places(stage: Stage, server: RedisServer) -> None:
    """Take the group's part: it begins anew in all that is there."""
    for partition in stage.partitions:
        keys = stage.group_keys(partition)
        stage.redis.delete(keys.lock, keys.acks, keys.attempts)


LOSSES: Mapping[str, Callable[[Stage, RedisServer], None]] = {
    "restarted": restart, "emptied": empty, "without_places": forget_places,
}  # fmt: skip


@pytest.mark.parametrize("loss", some_of(LOSSES, 9))
@pytest.mark.parametrize("who", some_of(["same_owner", "next_owner"], 2))
def test_a_parked_key_stays_parked_and_in_order(
    start_stage: StartStage, start_redis: StartRedis, loss: str, who: str
) -> None:
    server = start_redis()
    stage = start_stage(server.url)
    shop = ParkingShop("key-1")
    stage.send_numbers(3, 5)
    app = stage.consume(shop.recorder, backoff_s=(LATER_S,))
    stage.wait_settled()
    before = parked(stage)["key-1"]
    assert len(before) == 5
    LOSSES[loss](stage, server)
    if who == "next_owner":
        app.stop()
        stage.consume(shop.recorder, backoff_s=(LATER_S,))
    stage.send_numbers(3, 5, first=6)
    wait_until(lambda: shop.recorder.count() == 20, timeout_s=20, what="other keys handled")
    wait_until(lambda: len(parked(stage)["key-1"]) == 10, what="the parked key's messages behind the others")
    assert parked(stage)["key-1"][:5] == before
    shop.broken.clear()
    release(stage)
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), timeout_s=20, what="nothing parked")
    stage.wait_settled()
    assert numbers(shop.recorder, "key-1") == list(range(1, 11))
    shop.recorder.assert_in_order()


def numbers(recorder: Recorder, key: str) -> list[int]:
    return [int(body) for body in recorder.bodies(key)]
