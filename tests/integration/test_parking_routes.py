"""Parked keys while routes change and members come and go: cases 24, 30, 64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mqlayer import App, Context
from mqlayer.domain.routing import lp_of
from mqlayer.groups.admin import set_group
from mqlayer.groups.group import find_group
from mqlayer.groups.seek import apply_seek, planned_seek
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder
from tests.fixtures.due_keys import try_now
from tests.fixtures.gate_scenes import KEYS, GateScene
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, Fault
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.world(nodes=2)

GROUP = "ledger"
BROKEN = "key-1"
SETTINGS: dict[str, Any] = {"lease_s": 2.0, "connect_timeout_s": 1.0, "socket_timeout_s": 2.0}


class RouteShop:
    """Consumers that fail for one key until they are repaired, and what the stores say of them."""

    def __init__(self, scene: GateScene) -> None:
        self.scene, self.broken = scene, True
        self.go_on = threading.Event()
        self.go_on.set()
        self.recorder = Recorder(self.act)
        self._apps: list[App] = []

    def act(self, _body: bytes, ctx: Context) -> None:
        if ctx.key == BROKEN:
            if self.broken:
                raise Fault("no stock")
            assert self.go_on.wait(30)

    def start(self, **rules: Any) -> App:
        """Start one more member."""
        app = App(self.scene.world.settings(**SETTINGS))
        app.consumer("orders", group=GROUP, start="earliest", **({"backoff_s": (LATER_S,)} | rules))(self.recorder)
        self._apps.append(app)
        app.start()
        return app

    def close(self) -> None:
        """Stop all members."""
        self.go_on.set()
        for app in self._apps:
            app.stop(5.0)

    def release(self) -> None:
        """Repair the fault, and have parked keys tried now, as an operator does."""
        self.broken = False
        group_id = find_group(self.scene.database, "orders", GROUP).group_id
        try_now(self.scene.database, group_id)

    def version(self) -> int:
        """Return the group's route version."""
        return find_group(self.scene.database, "orders", GROUP).version

    def parked(self) -> list[str]:
        """Return the bodies that are parked, in their order."""
        found = self.scene.world.rows(
            "SELECT convert_from(body, 'UTF8') FROM mqlayer.parked_message ORDER BY position, seq"
        )
        return [body for (body,) in found]

    def bodies(self, key: str) -> list[str]:
        """Return what was handled of a key."""
        return [body.decode() for body in self.recorder.bodies(key)]

    def begun(self, key: str) -> int:
        """Return how often a key's handler was begun."""
        return sum(handled.key == key for handled in list(self.recorder.begun))

    def wait_handled(self, *, but: str | None = None) -> None:
        """Wait until everything that was published is handled, in order, but that of one key."""
        expected = self.scene.expected()
        expected.pop(but or "", None)
        wait_until(
            lambda: {key: self.bodies(key) for key in expected} == expected, timeout_s=30, what="all of them handled"
        )


@pytest.fixture
def shop(gate_scene: GateScene) -> Iterator[RouteShop]:
    shop = RouteShop(gate_scene)
    yield shop
    shop.close()


def change(scene: GateScene, kind: str) -> set[int]:
    """Split, merge or move what holds the broken key; return the successors."""
    parent = 1 if lp_of(BROKEN.encode()) < 512 else 2
    match kind:
        case "split":
            return set(scene.split(parent, 256 if parent == 1 else 768))
        case "merge":
            return set(scene.merge(1, 2))
        case _:
            return set(scene.move(parent))


@pytest.mark.parametrize("kind", some_of(["split", "merge", "move"], 9))
def test_a_parked_key_follows_its_route(gate_scene: GateScene, shop: RouteShop, kind: str) -> None:
    """Case 64: its parent drains though it waits; the successor's owner goes on with it, before anything newer."""
    shop.start()
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    wait_until(lambda: shop.parked() == gate_scene.expected()[BROKEN], what="the key is parked")
    successors = change(gate_scene, kind)
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    wait_until(lambda: shop.version() == 2, what="the group followed")
    wait_until(lambda: shop.parked() == gate_scene.expected()[BROKEN], what="what came later is parked behind it")
    shop.release()
    gate_scene.publish()
    shop.wait_handled()
    wait_until(lambda: not gate_scene.world.rows("SELECT lp FROM mqlayer.parked_key"), what="nothing parked")
    assert {handled.partition for handled in shop.recorder.ended if handled.key == BROKEN} <= successors
    assert shop.recorder.overlaps == []


@pytest.mark.full
def test_nobody_follows_while_a_parked_key_is_handled(gate_scene: GateScene, shop: RouteShop) -> None:
    """Case 20: what a parked key's handler does at its parent's end is done before the successor's owner goes on."""
    shop.start()
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    wait_until(lambda: shop.parked() == gate_scene.expected()[BROKEN], what="the key is parked")
    shop.go_on.clear()
    shop.release()
    wait_until(lambda: shop.begun(BROKEN) == 2, what="it is handled")
    [parent] = {handled.partition for handled in shop.recorder.begun if handled.key == BROKEN}
    inside = {handled.key for handled in shop.recorder.ended if handled.partition == parent}
    change(gate_scene, "split")
    gate_scene.publish()
    others = {key: bodies for key, bodies in gate_scene.expected().items() if key not in inside | {BROKEN}}
    wait_until(lambda: {key: shop.bodies(key) for key in others} == others, what="the other partition goes on")
    assert shop.version() == 1
    shop.go_on.set()
    shop.wait_handled()
    assert shop.version() == 2
    assert shop.recorder.overlaps == []


@pytest.mark.full
def test_what_successors_parked_comes_after_what_a_seek_brings_back_of_both(
    gate_scene: GateScene, shop: RouteShop
) -> None:
    """Cases 31, 64: else the parent's owner would handle it before what the successor has yet to give again."""
    shop.broken = False
    shop.start()
    gate_scene.publish()
    shop.wait_handled()
    change(gate_scene, "move")
    gate_scene.publish()
    shop.wait_handled()
    before = len(shop.bodies(BROKEN))
    shop.broken = True
    gate_scene.publish()
    everything = gate_scene.expected()[BROKEN]
    wait_until(lambda: shop.parked() == everything[before:], what="the key is parked")
    shop.wait_handled(but=BROKEN)
    prefix = gate_scene.world.key_prefix
    with closing(RouteCache(gate_scene.database)) as routes:
        plan = planned_seek(runtime_of(gate_scene.database, prefix), routes, topic="orders", name=GROUP, to="earliest")
    shop.broken = False
    # Due, without a word to its present owner: the parent's next one finds it so.
    gate_scene.world.rows("UPDATE mqlayer.parked_key SET due_at = now()")
    apply_seek(runtime_of(gate_scene.database, prefix, actor="test"), plan)
    wait_until(
        lambda: set(shop.bodies(BROKEN)[before:]) >= set(everything), timeout_s=30, what="all of it handled again"
    )
    assert shop.bodies(BROKEN)[before:] == everything
    assert shop.recorder.overlaps == []


def test_a_parked_key_goes_on_with_its_next_owner(gate_scene: GateScene, shop: RouteShop) -> None:
    """Case 64: members that join and leave hand it over as it is."""
    first = shop.start()
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    wait_until(lambda: shop.parked() == gate_scene.expected()[BROKEN], what="the key is parked")
    second = shop.start()
    wait_until(lambda: all(len(app.members[0].owned()) == 1 for app in (first, second)), what="each has its half")
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    assert first.stop()
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    wait_until(lambda: shop.parked() == gate_scene.expected()[BROKEN], what="what came later is parked behind it")
    before = len(shop.recorder.begun)
    shop.release()
    shop.wait_handled()
    again = [handled.attempt for handled in shop.recorder.begun[before:] if handled.key == BROKEN]
    assert again == [1] * len(gate_scene.expected()[BROKEN])


@pytest.mark.full
def test_a_key_that_blocks_holds_its_successors_back_until_the_policy_is_another(
    gate_scene: GateScene, shop: RouteShop
) -> None:
    """Cases 30, 65: and its dead letters let them go."""
    shop.start(policy="block", attempt_limit=1, backoff_s=(0.05,))
    gate_scene.publish()
    shop.wait_handled(but=BROKEN)
    children = change(gate_scene, "split")
    gate_scene.publish()
    wait_until(lambda: shop.begun(BROKEN) > 10, what="tried again and again")
    assert shop.version() == 1
    assert not {handled.partition for handled in shop.recorder.begun} & children
    assert shop.parked() == []
    set_group(runtime_of(gate_scene.database, actor="test"), "orders", GROUP, policy="dead_letter")
    shop.wait_handled(but=BROKEN)
    dead = "SELECT convert_from(body, 'UTF8') FROM mqlayer.dead_message ORDER BY seq"
    wait_until(
        lambda: [body for (body,) in gate_scene.world.rows(dead)] == gate_scene.expected()[BROKEN],
        what="all of the key is dead",
    )
    assert shop.version() == 2
    assert len(gate_scene.expected()) == KEYS
