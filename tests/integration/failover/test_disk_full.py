"""Case 42, TRAPS 2c: a node's disk is full. Nothing answered is lost, all say so, and go on when there is room.

With `appendfsync always` Redis ends at the first write that does not fit; with `everysec` it runs on and refuses every
write, PING too, until a write to its file works again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from mqlayer import App, MemberOptions, Producer
from mqlayer.errors import PublishError
from mqlayer.health import Health
from mqlayer.stack import RedisServer
from tests.fixtures.consumers import Recorder
from tests.fixtures.full_disks import SmallDisk, small_disk
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.world import World

DIRECT = "direct"

pytestmark = pytest.mark.world(own_node=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of the test's own."""
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place) as disk:
        if disk is None:
            pytest.skip("needs the right to mount")
        yield disk


@pytest.fixture(params=some_of(["always", "everysec"], 2))
def node(request: pytest.FixtureRequest, disk: SmallDisk, tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that has its data on that disk."""
    server = RedisServer(tmp_path / "node", options={"appendfsync": request.param, "dir": str(disk.place)})
    server.start()
    yield server
    server.kill()


def test_while_a_disk_is_full_nothing_is_lost_and_with_room_all_goes_on(
    world: World, node: RedisServer, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    world.add_topic(DIRECT, partitions=2)
    settings = world.settings(connect_timeout_s=1.0, socket_timeout_s=2.0, lease_s=3.0)
    address = node.url.removeprefix("redis://").removesuffix("/0")
    handled, app = Recorder(), App(settings)
    app.consumer("orders", group="g", start="earliest", options=MemberOptions(concurrency=2))(handled)
    caplog.set_level(logging.WARNING)
    with world.relay(lease_s=3.0) as relay, Producer(settings, name="direct") as producer:
        app.start()
        try:
            world.publish(40)
            stored = [producer.send(DIRECT, key="k", body=b"before", timeout_s=20)]
            wait_until(lambda: handled.count() == 40, timeout_s=30, what="all handled")

            disk.fill()
            world.publish(200, tag="no-room")
            wait_until(lambda: refuses(node), timeout_s=30, what="the node to refuse writes, or to end")
            # What filled it may all have been taken: with `everysec` the write that fails is of what was answered.
            world.publish(40, tag="refused")
            with pytest.raises(PublishError):
                producer.send(DIRECT, key="k", body=b"no room", timeout_s=1)
            wait_until(lambda: unready(relay.health(), address), timeout_s=30, what="the relay to say so")
            wait_until(lambda: unready(app.health(), address), timeout_s=30, what="the member to say so")

            disk.free()
            node.start()
            wait_until(lambda: handled.count() >= 280, timeout_s=60, what="all handled")
            stored.append(producer.send(DIRECT, key="k", body=b"after", timeout_s=30))
            wait_until(lambda: relay.health().ready and app.health().ready, timeout_s=30, what="all ready")
        finally:
            app.stop()
    assert in_order(handled) == {key: [value for _, _, value in rows] for key, rows in of_keys(world).items()}
    orders = {place: chain for place, chain in world.relayed().items() if place[0] == "orders"}
    assert orders == world.published()
    assert stored_on(node, world) >= {receipt.identity.seq for receipt in stored}


def in_order(handled: Recorder) -> dict[str, list[str]]:
    """Return the bodies that were handled of each key, each where it came first."""
    found: dict[str, dict[str, None]] = {}
    for one in handled.ended:
        found.setdefault(one.key or "", {}).setdefault(one.body.decode())
    return {key: list(bodies) for key, bodies in found.items()}


def of_keys(world: World) -> dict[str, list[tuple[int, str | None, str]]]:
    """Return what the outbox holds of each key, in order."""
    found: dict[str, list[tuple[int, str | None, str]]] = {}
    for chain in world.published().values():
        for entry in chain:
            found.setdefault(entry[1] or "", []).append(entry)
    return found


def unready(health: Health, address: str) -> bool:
    """Say whether somebody serves no more, and names the node."""
    return not health.ready and address in f"{health.waits}"


def refuses(node: RedisServer) -> bool:
    """Say whether a node has ended, or refuses to write."""
    if not node.running:
        return True
    try:
        redis.Redis.from_url(node.url).ping()
    except redis.RedisError as error:
        return "MISCONF" in str(error) or not node.running
    return False


def stored_on(node: RedisServer, world: World) -> set[int]:
    """Return the seqs of the direct producer's messages that the node has."""
    return {record.seq for record in world.records() if record.topic == DIRECT}
