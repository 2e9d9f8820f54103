"""Key classes: a tenant's flood holds up no other tenant, and keys stay in order."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mqlayer import BatchOf, Context
from mqlayer.errors import InvalidInput
from mqlayer.groups import find_group
from mqlayer.groups.admin import set_group
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.tenants import TenantRuns
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.runtimes import runtime_of

FLOOD = 6_000
BY_PREFIX = "prefix:/"
PATIENT_S = 20.0
"""A lease that does not run out under a flood: messages would be handled again."""


def flood(stage: Stage, *, keys: int, each: int, tenant: str = "big") -> None:
    """Append to each of a tenant's keys the bodies 1, 2, …, mixed."""
    stage.send((f"{tenant}/{key}", b"%d" % number) for number in range(1, each + 1) for key in range(keys))


def pace(_body: bytes, _ctx: Context) -> None:
    """Take a millisecond, so that a flood takes a while."""
    time.sleep(0.001)


def behind(recorder: Recorder, tenant: str) -> int:
    """Return how many messages of others were handled before a tenant's last one."""
    places = [place for place, run in enumerate(recorder.ended) if (run.key or "").startswith(tenant)]
    return places[-1] + 1 - len(places)


@pytest.mark.parametrize("keys", [FLOOD, pytest.param(30, marks=pytest.mark.full)])
def test_a_flood_lets_another_tenants_messages_pass(stage: Stage, keys: int) -> None:
    """Ten messages behind 6,000, of which the member keeps 100 in memory."""
    flood(stage, keys=keys, each=FLOOD // keys)
    flood(stage, keys=5, each=2, tenant="small")
    recorder = Recorder(act=pace)
    settings = stage.settings(lease_s=PATIENT_S)
    app = stage.consume(recorder, key_class=BY_PREFIX, concurrency=4, prefetch_count=100, settings=settings)
    stage.wait_settled(timeout_s=40)
    assert behind(recorder, "small") < FLOOD / 4
    assert recorder.count() == FLOOD + 10
    recorder.assert_in_order()
    assert len(recorder.begun) == member_of(app).stats.handled == FLOOD + 10


def test_keys_stay_in_order_while_classes_change_and_partitions_move(stage: Stage) -> None:
    """By header, a key's messages have two classes; members come and go, and the rule is changed under backlogs."""
    recorder = Recorder(act=pace)
    operator = runtime_of(stage.database, actor="test")
    flood(stage, keys=20, each=100)
    rules: dict[str, Any] = {"concurrency": 4, "prefetch_count": 40, "settings": stage.settings(lease_s=PATIENT_S)}
    first = stage.consume(recorder, key_class=BY_PREFIX, **rules)
    wait_until(lambda: recorder.count() > 100, what="some are handled")
    set_group(operator, stage.topic, "g", key_class="header:tenant")
    second = stage.consume(recorder, **rules)
    flood(stage, keys=20, each=20, tenant="small")
    wait_until(lambda: len(set(stage.owners().values())) == 2, what="both own a partition")
    set_group(operator, stage.topic, "g", key_class="none")
    wait_until(lambda: recorder.count() > 800, timeout_s=30, what="more are handled")
    first.stop()
    stage.wait_settled(timeout_s=40)
    assert member_of(second).settings.rules.key_class == "none"
    assert recorder.count() == 2400
    recorder.assert_in_order()


def test_a_class_keeps_to_its_rate_and_its_concurrency_and_others_pass(stage: Stage) -> None:
    """Two members, of a partition each; the rate is the group's, the concurrency a member's."""
    rate, runs = 60.0, TenantRuns(members=2)
    for one in runs.recorders:
        stage.consume(one, key_class=BY_PREFIX, class_concurrency=2, class_rate=rate, concurrency=6, prefetch_count=200)
    wait_until(lambda: len(set(stage.owners().values())) == 2, what="both own a partition")
    began = time.monotonic()
    flood(stage, keys=400, each=2)
    wait_until(lambda: runs.count() > 20, what="they are at work")
    awake, before = awake_s(), runs.count()
    flood(stage, keys=10, each=1, tenant="small")
    wait_until(lambda: runs.ended("small") == 10, what="small")
    assert awake_s() - awake < 1.5
    wait_until(lambda: runs.count() >= before + 10 + 3 * rate, what="three seconds' worth")
    # Since the first of them, with a second's worth in advance: so much is there after the machine stood still, too.
    assert runs.ended("big") <= 1.25 * rate * (time.monotonic() - began) + rate
    assert awake_s() - awake < 1.35 * 3
    assert runs.most["big"] == 2
    for one in runs.recorders:
        one.assert_in_order()


@pytest.mark.full
def test_batches_take_turns(stage: Stage) -> None:
    seen: list[bytes] = []
    done = threading.Event()

    def handle(bodies: list[bytes]) -> None:
        time.sleep(0.005)
        seen.extend(bodies)
        if len(seen) == FLOOD + 10:
            done.set()

    stage.send((f"big/{number}", b"big") for number in range(FLOOD))
    stage.send((f"small/{number}", b"small") for number in range(10))
    stage.consume(handle, key_class=BY_PREFIX, batch=BatchOf("distinct", limit=10), prefetch_count=200, concurrency=2)
    assert done.wait(60)
    assert max(place for place, body in enumerate(seen) if body == b"small") < FLOOD / 4


def test_key_classes_are_checked(stage: Stage) -> None:
    app = stage.app()
    for limit in ({"class_concurrency": 0}, {"class_concurrency": 1.5}, {"class_rate": 0}):
        with pytest.raises(InvalidInput, match=r"rate is|class_concurrency"):
            app.consumer(stage.topic, group="g", key_class=BY_PREFIX, **limit)(lambda body: None)
    for wrong in ("prefix:", "tenant", "header:", "prefix:\u00e9", "prefix:" + "x" * 64):
        with pytest.raises(InvalidInput, match="key_class"):
            app.consumer(stage.topic, group="g", key_class=wrong)(lambda body: None)
    stage.consume(lambda body: None, key_class="prefix:::")
    assert find_group(stage.database, stage.topic, "g").rules.key_class == "prefix:::"
