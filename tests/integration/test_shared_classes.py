"""Key classes of shared groups: a tenant's flood waits on the node, and other tenants' messages pass."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.groups.admin import set_group
from mqlayer.redis.keys import pop_keys
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.shared_members import due, pending, share, shared_member
from tests.fixtures.tenants import TenantRuns
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

FLOOD = 3_000
BY_PREFIX = "prefix:/"


def flood(stage: Stage, count: int, tenant: str = "big") -> None:
    """Append messages of a tenant."""
    stage.send((f"{tenant}/{number}", b"%d" % number) for number in range(count))


def pace(_body: bytes, _ctx: Context) -> None:
    """Take a millisecond, so that a flood takes a while."""
    time.sleep(0.001)


def behind(recorder: Recorder, tenant: str) -> int:
    """Return how many messages of others were handled before a tenant's last one."""
    places = [place for place, run in enumerate(recorder.ended) if (run.key or "").startswith(tenant)]
    return places[-1] + 1 - len(places)


def deferred(stage: Stage) -> int:
    """Return how many messages the nodes' indexes name."""
    group_id = stage.group_id()
    return sum(stage.redis.zcard(pop_keys(stage.prefix, one, group_id).queues) for one in stage.partitions)


def test_a_flood_lets_another_tenants_messages_pass(stage: Stage) -> None:
    """Ten messages behind 3,000, of which the member keeps 100 in memory; all of them once, and nothing is left."""
    flood(stage, FLOOD)
    flood(stage, 10, tenant="small")
    recorder = Recorder(act=pace)
    app = share(stage, recorder, key_class=BY_PREFIX, concurrency=4, prefetch_count=100, visibility_timeout_s=30.0)
    stage.wait_settled(timeout_s=40)
    assert behind(recorder, "small") < FLOOD / 4
    assert recorder.count() == len(recorder.begun) == FLOOD + 10
    # The node settles first, then the member counts its answer.
    wait_until(lambda: shared_member(app).stats.settled == FLOOD + 10, what="the member counts all, once")
    assert deferred(stage) == sum(due(stage, one) for one in stage.partitions) == 0


def test_a_flood_is_bounded_in_memory_and_others_take_what_a_member_deferred(stage: Stage) -> None:
    """A member whose handlers hang has no more than its read-ahead in hand; a second one handles the rest."""
    go_on = threading.Event()
    flood(stage, FLOOD)

    def hang(_body: bytes, _ctx: Context) -> None:
        go_on.wait(30)

    slow, quick = Recorder(act=hang), Recorder()
    first = share(stage, slow, key_class=BY_PREFIX, concurrency=2, prefetch_count=40, visibility_timeout_s=30.0)
    wait_until(lambda: deferred(stage) > FLOOD - 100, what="the flood waits on the node")
    assert shared_member(first).prefetch.count <= 40
    share(stage, quick, key_class=BY_PREFIX, concurrency=2, prefetch_count=40, visibility_timeout_s=30.0)
    wait_until(lambda: quick.count() >= FLOOD - 40, timeout_s=30, what="the other one handles the rest")
    go_on.set()
    stage.wait_settled()
    handled = Counter(run.key for one in (slow, quick) for run in one.ended)
    assert len(handled) == FLOOD
    assert set(handled.values()) == {1}


def test_a_class_keeps_to_its_rate_and_its_concurrency_and_others_pass(stage: Stage) -> None:
    """Two members: the rate is the group's, whichever of them begins a message; the concurrency a member's."""
    rate, runs = 60.0, TenantRuns(members=2)
    for one in runs.recorders:
        share(stage, one, key_class=BY_PREFIX, class_concurrency=2, class_rate=rate, concurrency=6, prefetch_count=200)
    flood(stage, 800)
    wait_until(lambda: runs.count() > rate + 10, what="the first burst is over")
    began, awake, before = time.monotonic(), awake_s(), runs.count()
    flood(stage, 10, tenant="small")
    wait_until(lambda: runs.ended("small") == 10, what="small")
    assert awake_s() - awake < 4.0
    wait_until(lambda: runs.count() >= before + 10 + 4 * rate, timeout_s=20, what="four seconds' worth")
    # Members that stood still may begin a second's worth at once.
    assert time.monotonic() - began > 0.75 * (4 - 1)
    assert awake_s() - awake < 2 * 4
    assert runs.most["big"] == 2


def test_the_rule_changes_while_a_flood_waits_and_failing_messages_keep_their_attempts(stage: Stage) -> None:
    """By header, then without classes: what was deferred under another name comes all the same, and dies in time."""
    failing = b"7"

    def act(body: bytes, ctx: Context) -> None:
        pace(body, ctx)
        if body == failing:
            raise ValueError("no")

    recorder, operator = Recorder(act=act), runtime_of(stage.database, actor="test")
    flood(stage, 600)
    rules: dict[str, Any] = {"concurrency": 2, "prefetch_count": 40, "attempt_limit": 3, "visibility_timeout_s": 30.0}
    app = share(stage, recorder, key_class=BY_PREFIX, **rules)
    wait_until(lambda: recorder.count() > 50, what="some are handled")
    set_group(operator, stage.topic, "g", key_class="header:tenant")
    wait_until(lambda: recorder.count() > 200, what="more are handled")
    set_group(operator, stage.topic, "g", key_class="none")
    stage.wait_settled(timeout_s=40)
    wait_until(lambda: not shared_member(app).prefetch.classes.active, what="the member hears of the last rule")
    assert recorder.count() == 599
    assert recorder.attempts(failing) == [1, 2, 3]
    assert deferred(stage) == 0


@pytest.mark.full
def test_many_tenants_share_a_member_evenly(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants' messages are published tenant by tenant; while a member has some of each, they begin in turn.

    What it read before it knew the others begins first, and what it has goes on while it fetches: handlers wait until
    it has some of each tenant again.
    """
    # Handlers that wait look slow: slow ones would have little read ahead.
    monkeypatch.setattr("mqlayer.consuming.shared.prefetch.AHEAD_S", 1_000.0)
    names = [f"t{number}" for number in range(20)]
    begun, missed, lock = Counter[str](), list[str](), threading.Lock()

    def act(body: bytes, ctx: Context) -> None:
        with lock:
            begun[(ctx.key or "").partition("/")[0]] += 1
            # The last ones of a tenant may all be with workers.
            wanted = {name.encode() for name in names if begun[name] < 40}
        deadline = time.monotonic() + 20
        while not missed and wanted.difference(name for name, _ in classes.deferred_room(1.0).named):
            if time.monotonic() > deadline:
                missed.append(ctx.key or "")
            time.sleep(0.001)
        pace(body, ctx)

    recorder = Recorder(act=act)
    app = share(stage, recorder, key_class=BY_PREFIX, concurrency=2, prefetch_count=80, visibility_timeout_s=30.0)
    classes = shared_member(app).prefetch.classes
    for name in names:
        flood(stage, 50, tenant=name)
    stage.wait_settled(timeout_s=40)
    assert not missed
    half = Counter((run.key or "").partition("/")[0] for run in recorder.begun[:500])
    assert len(half) == len(names)
    assert max(half.values()) - min(half.values()) <= 6, half


@pytest.mark.full
def test_a_member_that_ends_in_order_leaves_a_flood_for_others(stage: Stage) -> None:
    flood(stage, FLOOD)
    first, second = Recorder(act=pace), Recorder(act=pace)
    app = share(stage, first, key_class=BY_PREFIX, concurrency=2, prefetch_count=40, visibility_timeout_s=30.0)
    wait_until(lambda: deferred(stage) > FLOOD / 2 and first.count() > 10, what="the flood waits on the node")
    app.stop()
    assert {name for one in stage.partitions for name, count in pending(stage, one).items() if count} == {b"-"}
    share(stage, second, key_class=BY_PREFIX, concurrency=4, visibility_timeout_s=30.0)
    stage.wait_settled(timeout_s=40)
    assert len(first.ended) + len(second.ended) == FLOOD
