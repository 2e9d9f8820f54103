"""Processes that are killed in the middle of a batch, after a part of its effects: each effect is there once, in order.

Cases 34, 50 to 53, 59, 77.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.fixtures.kill_scenes import COUNT, KEYS, KillScene, judge
from tests.fixtures.variants import some_of
from tests.proof.history import Deliver, read_histories
from tests.proof.seller_shop import SellerShop, attempts_of, restart_until
from tests.proof.zombies import wake_a_zombie

PLACES: Final = [
    ("batch.after_handler@4", "distinct"), ("batch.after_handler@4", "key"),
    ("fence.after@6", "distinct"), ("fence.after@6", "key"),
    ("fence.before@6", "key"), ("ack.before_send@2", "key"), ("ack.after_send@2", "distinct"),
]  # fmt: skip


def batching(scene: KillScene, kind: str, **rules: object) -> SellerShop:
    """Return a shop whose consumers take batches."""
    scene.environment["MQLAYER_TEST_BATCH"] = kind
    backoff: dict[str, Any] = {} if rules.get("attempt_limit") == 1 else {"backoff_s": [0.01]}
    shop = SellerShop(scene, **backoff, **rules)
    shop.fail()
    return shop


@pytest.mark.parametrize(("place", "kind"), some_of(PLACES, 7))
def test_a_kill_in_a_batch_loses_repeats_and_reverses_nothing(kill_scene: KillScene, place: str, kind: str) -> None:
    """Case 77: what a part of the batch had committed is left out by the fence, the rest is applied."""
    shop = batching(kill_scene, kind)
    kill_scene.publish()
    name, _, nth = place.partition("@")
    shop.killed(f"{name}=kill@{nth}")
    shop.start("second")
    kill_scene.wait_until_drained()
    judge(kill_scene)


def test_a_consumer_stopped_in_a_batch_past_its_lease_wakes_up_and_changes_nothing(kill_scene: KillScene) -> None:
    """Case 34: what it has in hand is another one's, its transaction comes to nothing."""
    kill_scene.environment["MQLAYER_TEST_BATCH"] = "key"
    wake_a_zombie(kill_scene, "fence.after@6", in_hand=8)


@pytest.mark.parametrize("kind", some_of(["distinct", "key"], 2))
def test_a_message_that_kills_its_consumer_every_time_dies_alone(kill_scene: KillScene, kind: str) -> None:
    """Case 59: suspects are not handled in a batch with others, and no attempt of these is counted."""
    kill_scene.environment["MQLAYER_TEST_FAILING"] = "0"
    shop = batching(kill_scene, kind, policy="dead_letter", attempt_limit=1)
    shop.fail(deadly=["47"])
    kill_scene.publish()
    restart_until(shop, lambda: shop.in_place(dead_message=1, sink=COUNT - 1))
    [(cause, attempts, reason)] = shop.rows("SELECT cause, attempts, reason FROM mqlayer.dead_message")
    assert (cause, attempts, reason) == ("exhausted", 1, "nobody answered")
    assert attempts_of(kill_scene, "47") == {1}
    judge(kill_scene)


@pytest.mark.parametrize("kind", some_of(["distinct", "key"], 2))
def test_keys_that_fail_are_parked_and_come_back_in_order(kill_scene: KillScene, kind: str) -> None:
    """Cases 64, 65: an exception of a batch parks the keys that fail by themselves, and no other."""
    kill_scene.environment["MQLAYER_TEST_FAILING"] = "0"
    shop = batching(kill_scene, kind, policy="park", attempt_limit=1)
    shop.fail(always=["key-3", "key-7"])
    kill_scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=2 * (COUNT // KEYS), sink=COUNT - 2 * (COUNT // KEYS))
    shop.fail()
    shop.try_now()
    shop.wait_places(parked_message=0, sink=COUNT)
    shop.stop(first)
    others = {
        r.event.attempt
        for r in read_histories(kill_scene.directory)
        if isinstance(r.event, Deliver) and r.event.key not in ("key-3", "key-7")
    }
    assert others == {1}
    judge(kill_scene)
