"""Cases 59, 64, 65, 67: consumers killed at each step of parking, resuming and dead-lettering, and by a message itself.

Whatever step it was: each message is in exactly one place afterwards (unsettled in its stream, parked, dead, or
handled), no key is reversed, each fenced effect is there once, and each message that left has its reason.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from mqlayer.domain.routing import lp_of
from mqlayer.runtime.route_cache import load_route
from tests.chaos.actors import TOPIC
from tests.fixtures.kill_scenes import COUNT, KEYS, KillScene, judge
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.seller_shop import SellerShop, attempts_of, restart_until

BROKEN: Final = tuple(f"key-{number}" for number in range(1, 7))
OF_BROKEN: Final = len(BROKEN) * COUNT // KEYS
LATER_S: Final = 3600.0
LIMIT: Final = 5
"""How many messages of a key may be parked where that is limited."""


def test_kills_while_keys_are_parked(kill_scene: KillScene) -> None:
    """Cases 64, 65: the key and all that follows it is parked, and released later; nothing else waits for it."""
    shop = SellerShop(kill_scene, policy="park", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    kill_scene.publish()
    for failpoint in (
        "parking.before_commit=kill", "parking.after_commit=kill", "ack.after_send=kill@2",
        "parking.after_commit=kill@2", "ack.before_send=kill@3",
    ):  # fmt: skip
        shop.killed(failpoint)
    shop.start("last")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    assert shop.rows("SELECT DISTINCT cause, due_at FROM mqlayer.parked_key") == [("exhausted", None)]
    shop.fail()
    shop.try_now()
    shop.wait_places(sink=COUNT)
    shop.wait_unparked()
    judge(kill_scene)


@pytest.mark.slow
def test_kills_while_keys_are_resumed(kill_scene: KillScene) -> None:
    """Case 64: what is parked comes before what came meanwhile, whoever goes on with it."""
    shop = SellerShop(kill_scene, policy="park", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    kill_scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    shop.fail()
    kill_scene.publish()
    for failpoint in (
        "parking.before_commit=kill", "parking.after_commit=kill", "parking.before_resume=kill@2",
        "handler.after_success=kill@20", "parking.before_commit=kill@4", "parking.after_commit=kill@5",
        "parking.before_resume=kill@6",
    ):  # fmt: skip
        # Who died of chance in the middle of a key may be counted against it: here that is not the question.
        shop.try_now()
        shop.killed(failpoint)
    shop.try_now()
    shop.start("last")
    shop.wait_places(sink=2 * COUNT)
    shop.wait_unparked()
    judge(kill_scene)


@pytest.mark.full
def test_kills_while_a_key_at_its_limit_holds_a_route_change_up(kill_scene: KillScene) -> None:
    """Cases 24, 64: its parent drains when there is room, whoever dies over it; no successor goes on before."""
    shop = SellerShop(kill_scene, policy="park", attempt_limit=9, backoff_s=[LATER_S], key_messages_limit=LIMIT)
    shop.fail(always=["key-7"])
    kill_scene.publish()
    of_key = COUNT // KEYS
    first = shop.start("first")
    wait_until(
        lambda: shop.counts() == {"parked_message": LIMIT, "dead_message": 0, "sink": COUNT - of_key},
        timeout_s=40, what="the key is parked as far as there is room, the others are handled",
    )  # fmt: skip
    prefix = kill_scene.settings.key_prefix
    database = kill_scene.database
    parent = range_of(load_route(database, TOPIC), lp_of(b"key-7")).partition
    split(runtime_of(database, prefix), TOPIC, parent)
    first.kill()
    kill_scene.publish()
    for failpoint in ("acquire.after_send=kill", "parking.before_commit=kill", "parking.after_commit=kill"):
        shop.killed(failpoint)
    shop.start("waiting")
    others = "SELECT count(*) FROM sink WHERE partition > 4 OR key = 'key-7'"
    elsewhere = "SELECT count(*) FROM sink WHERE value::int >= %s"
    wait_until(lambda: shop.rows(elsewhere, COUNT)[0][0] > 0, timeout_s=40, what="other partitions go on")
    assert shop.rows(others) == [(0,)]
    # Others may be blamed for a death, and wait.
    of_broken = "SELECT count(*) FROM mqlayer.parked_message WHERE key = 'key-7'"
    assert shop.rows(of_broken) == [(LIMIT,)]
    kill_scene.running[-1].kill()
    shop.fail()
    for failpoint in (
        "parking.before_resume=kill", "handler.after_success=kill@2", "parking.after_commit=kill@2",
        "drained.before_commit=kill",
    ):  # fmt: skip
        shop.killed_trying(failpoint)
    shop.start("last")
    wait_until(
        lambda: shop.trying(lambda: shop.counts()["sink"] == 2 * COUNT),
        timeout_s=40, what="every message has its effect",
    )  # fmt: skip
    shop.wait_unparked()
    judge(kill_scene, partitions=6)


@pytest.mark.full
def test_a_consumer_that_died_by_chance_costs_a_parked_message_no_attempt(kill_scene: KillScene) -> None:
    """Case 59: it is to blame from the second death on; here its last attempt would have been that of a healthy one."""
    shop = SellerShop(kill_scene, policy="dead_letter", attempt_limit=2, backoff_s=[LATER_S])
    shop.fail(always=BROKEN)
    kill_scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    shop.fail()
    shop.try_now(keep_attempts=True)
    shop.killed("parking.before_resume=kill@3")
    shop.start("last")
    shop.wait_places(sink=COUNT)
    judge(kill_scene)


def test_kills_while_messages_are_dead_lettered(kill_scene: KillScene) -> None:
    """Case 67: a message that leaves is dead and settled, or neither; nobody handles it after that."""
    shop = SellerShop(kill_scene, policy="dead_letter", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    kill_scene.publish()
    for failpoint in ("parking.before_commit=kill", "parking.after_commit=kill", "ack.before_send=kill@5"):
        shop.killed(failpoint)
    shop.start("last")
    shop.wait_places(dead_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    judge(kill_scene)


@pytest.mark.full
def test_kills_while_messages_are_dead_lettered_that_were_parked(kill_scene: KillScene) -> None:
    """Case 67: from parked to dead in one step, and its key goes on behind it."""
    shop = SellerShop(kill_scene, policy="dead_letter", attempt_limit=3, backoff_s=[0.01, LATER_S])
    shop.fail(always=BROKEN)
    kill_scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    for failpoint in ("parking.before_commit=kill@6", "parking.after_commit=kill@6", "parking.before_resume=kill@8"):
        shop.try_now(keep_attempts=True)
        shop.killed(failpoint)
    shop.try_now(keep_attempts=True)
    shop.start("last")
    waiting = "SELECT count(*) FROM mqlayer.parked_key WHERE due_at > now() + interval '1 minute'"
    wait_until(
        lambda: shop.counts()["dead_message"] >= len(BROKEN) and shop.rows(waiting) == [(len(BROKEN),)],
        timeout_s=40, what="each key's first message is dead, and its next one waits",
    )  # fmt: skip
    shop.fail()
    shop.try_now()
    shop.wait_unparked()
    dead = shop.places()["dead_message"]
    shop.wait_places(dead_message=dead, sink=COUNT - dead)
    judge(kill_scene)


@pytest.mark.slow
@pytest.mark.parametrize(("in_loop", "limit"), some_of([(False, 2), (True, 1)], 2))
def test_a_message_that_kills_its_consumer_every_time_comes_to_its_end(
    kill_scene: KillScene, in_loop: bool, limit: int
) -> None:
    """Cases 58, 59: nobody ever answers for it; its neighbours are handled, and no attempt of theirs is counted."""
    backoff: dict[str, Any] = {"backoff_s": [0.01]} if limit > 1 else {}
    shop = SellerShop(kill_scene, policy="dead_letter", attempt_limit=limit, **backoff)
    if in_loop:
        kill_scene.environment["MQLAYER_TEST_ASYNC"] = "1"
    shop.fail(deadly=["47"])
    kill_scene.publish()
    deaths = restart_until(shop, lambda: shop.in_place(dead_message=1, sink=COUNT - 1))
    [(cause, attempts, reason)] = shop.rows("SELECT cause, attempts, reason FROM mqlayer.dead_message")
    assert (cause, attempts, reason) == ("exhausted", limit, "nobody answered")
    assert deaths >= 3 + limit
    assert attempts_of(kill_scene, "47") == {1}
    judge(kill_scene)


@pytest.mark.full
def test_a_message_that_kills_its_consumer_in_the_middle_of_a_parked_key_comes_to_its_end(
    kill_scene: KillScene,
) -> None:
    """Case 59: what is before it in its key's line has its effects once, what is behind it goes on."""
    shop = SellerShop(kill_scene, policy="park", attempt_limit=1, backoff_s=[0.01])
    shop.fail(always=["key-7"])
    kill_scene.publish()
    each = COUNT // KEYS
    first = shop.start("first")
    shop.wait_places(parked_message=each, sink=COUNT - each)
    shop.stop(first)
    shop.fail(deadly=[str(7 + 5 * KEYS)])
    shop.try_now()
    held = [("exhausted", 1, None)]
    restart_until(shop, lambda: shop.rows("SELECT cause, attempts, due_at FROM mqlayer.parked_key") == held)
    shop.wait_places(parked_message=each - 5, sink=COUNT - each + 5)
    assert shop.rows(
        "SELECT convert_from(body, 'UTF8') FROM mqlayer.parked_message ORDER BY position, seq LIMIT 1"
    ) == [(str(7 + 5 * KEYS),)]
    shop.fail()
    shop.try_now()
    shop.wait_places(sink=COUNT)
    judge(kill_scene)
