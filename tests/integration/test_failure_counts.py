"""What happens to messages that fail is told and counted, whoever does it; and members look at what changed only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mqlayer import Context, Event, events
from mqlayer.errors import RetryLater
from mqlayer.groups import join
from mqlayer.groups.admin import set_group
from mqlayer.health import Health, health_endpoint
from mqlayer.parking import MAX_CHANGES, KeyRef, ParkingStore
from mqlayer.redelivery import (
    DeadFilter,
    cancel_bulk,
    discard_dead,
    discard_parked,
    failure_counts,
    new_worker,
    release_all,
    release_parked,
    retry_scan,
    skip_head,
    start_redrive,
    work_on,
)
from mqlayer.settings import Settings
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.failed_messages import Failing
from tests.fixtures.health_probes import ask, free_ports
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, Fault, ParkingShop, parked, rows
from tests.proof.runtimes import runtime_of


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    """What the hooks of this process hear."""
    found: list[Event] = []
    events.on_event(found.append)
    yield found
    events.remove_hook(found.append)


def totals(stage: Stage) -> dict[str, int]:
    """Return the counts of the group."""
    (counts,) = failure_counts(stage.database, stage.topic, "g")
    return dict(counts.totals)


def test_acts_of_operators_and_jobs_are_told_and_counted(stage: Stage, heard: list[Event]) -> None:
    """Another process sees what this one did; hooks never see a key or a body."""
    failing, database, by = Failing(stage), stage.database, "ann"
    join(database, group_id=failing.group_id, member_id="m1", lease_s=600)
    for key in "abcde":
        failing.park(*failing.publish((key, b"1"), (key, b"2")), due_in_s=600)
    release_parked(runtime_of(database, actor=by), "orders", "g", key="a")
    assert release_all(runtime_of(database, actor=by), "orders", "g") == 4
    discard_parked(runtime_of(database, actor=by), "orders", "g", key="b", reason="a test's")
    skip_head(runtime_of(database, stage.prefix, actor=by), "orders", "g", "c", reason="a test's")
    (dead_id,) = failing.dead_letter(*failing.publish(("z", b"1")))
    discard_dead(runtime_of(database, actor=by), dead_id, reason="a test's")
    worker = new_worker()
    work_on(
        database,
        start_redrive(runtime_of(database, actor=by), "orders", "g", DeadFilter(key="z"), worker=worker),
        worker=worker,
    )
    cancel_bulk(
        runtime_of(database, actor=by),
        start_redrive(runtime_of(database, actor=by), "orders", "g", DeadFilter(), worker=worker),
    )
    failing.sql("UPDATE mqlayer.parked_key SET due_at = now() - interval '1 hour'")
    assert retry_scan(database) == 1
    assert [(event.kind, event.count) for event in heard] == [
        ("released", 1), ("released", 4), ("discarded", 2), ("head_skipped", 1), ("kept_dead", 1), ("redriven", 1),
        ("redrive_ended", 1), ("redrive_ended", 1), ("overdue", 1),
    ]  # fmt: skip
    assert {(event.topic, event.group) for event in heard} == {("orders", "g")}
    assert {event.actor for event in heard[:5]} == {"ann"}
    assert totals(stage) == {
        "released": 5, "discarded": 2, "head_skipped": 1, "kept_dead": 1, "redriven": 1, "overdue": 1,
    }  # fmt: skip


def test_what_members_do_is_counted_where_others_see_it(
    stage: Stage, heard: list[Event], monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    """By group and word, with what waits now; in the tables, in the commands, and on the member's own port."""

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key == "dies":
            raise Fault("no stock")
        if not mended:
            raise RetryLater(LATER_S)

    mended: list[bool] = []
    stage.send([("dies", b"1"), ("waits", b"1"), ("waits", b"2")])
    app = stage.consume(act, backoff_s=(0.01,), attempt_limit=3, policy="dead_letter")
    stage.wait_settled()
    wait_until(lambda: totals(stage) == {"failed": 4, "parked": 1, "dead": 1}, what="all counted")
    (counts,) = failure_counts(stage.database)
    assert (counts.keys, counts.waiting, counts.messages, counts.dead, counts.overdue_s) == (1, 0, 2, 1, None)
    assert counts.bytes > 0
    mended.append(True)
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="waits")
    wait_until(lambda: totals(stage).get("unparked") == 1, what="in line again")
    (counts,) = failure_counts(stage.database)
    assert counts.totals == {"failed": 4, "parked": 1, "dead": 1, "released": 1, "unparked": 1}
    assert (counts.keys, counts.messages, counts.bytes, counts.dead, counts.oldest_s) == (0, 0, 0, 1, None)
    # The member tells its hooks after the commit.
    every = {"failed", "parked", "released", "unparked", "dead"}
    wait_until(lambda: {event.kind for event in heard} == every, what="all told to the hook")
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    typed = Commands()
    (told,) = typed.lines("parked", "stats", "orders", "g")
    assert (told["totals"], told["dead"], told["messages"]) == (dict(counts.totals), 1, 0)
    assert "failed 4" in typed.text("parked", "stats")
    (shown,) = typed.lines("group", "show", "orders", "g")
    assert shown["failures"]["totals"] == dict(counts.totals)
    (own,) = app.counts_as_json()
    assert (own["topic"], own["group"], own["failed"], own["dead"], own["parked"]) == ("orders", "g", 4, 1, 2)


def test_a_process_answers_its_counts_where_it_answers_its_health() -> None:
    port = free_ports()
    with health_endpoint(Settings(health_port=port), Health, counts=lambda: [{"failed": 3}]):
        answer: Any = ask(port, "/counts")
    assert (answer.status, answer.facts) == (200, [{"failed": 3}])


@pytest.mark.parametrize("policy", ["park", "dead_letter"])
def test_a_time_out_is_told_besides_what_becomes_of_its_message(stage: Stage, heard: list[Event], policy: str) -> None:
    """Case 58: it is a failed attempt like any; who looks for slow handlers sees it by itself."""
    begun = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        begun.set()
        while True:
            begun.wait(0.01)

    stage.send([("k", b"1")])
    app = stage.consume(act, time_limit_s=0.05, attempt_limit=1, policy=policy)
    wait_until(lambda: totals(stage).get("timed_out") == 1, what="counted")
    wait_until(lambda: heard and heard[-1].kind in ("parked", "dead"), what="its end")
    assert [event.kind for event in heard] == (
        ["timed_out", "failed", "parked"] if policy == "park" else ["timed_out", "dead"]
    )
    assert (member_of(app).stats.timed_out, member_of(app).stats.failed) == (1, 1)


def test_a_key_parked_before_that_blocks_tells_so(stage: Stage, heard: list[Event]) -> None:
    """Under the policy block it waits in Postgres, and for ever all the same."""
    failing = Failing(stage)
    failing.park(*failing.publish(("k", b"1")), due_in_s=0)
    set_group(runtime_of(stage.database, actor="ann"), "orders", "g", policy="block", attempt_limit=1)
    app = stage.consume(ParkingShop("k").recorder, backoff_s=None)
    wait_until(lambda: heard, what="an event")
    assert heard[0].kind == "blocked"
    assert member_of(app).stats.blocked >= 1


def test_a_release_while_the_last_attempt_runs_counts(stage: Stage) -> None:
    """Case 66: the operator repaired the cause while it ran; else the key would wait for a second word."""
    begun, released = threading.Event(), threading.Event()
    tries: list[int] = []

    def act(_body: bytes, ctx: Context) -> None:
        tries.append(ctx.attempt)
        if len(tries) == 2:
            begun.set()
            assert released.wait(10)
        if len(tries) < 3:
            raise Fault("no stock")

    stage.send([("k", b"1"), ("k", b"2")])
    stage.consume(recorder := Recorder(act), backoff_s=(10.5,), attempt_limit=2)
    wait_until(lambda: parked(stage) == {"k": [1, 2]}, what="parked")
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="k")
    rows_of = "SELECT attempts FROM mqlayer.parked_key"
    assert begun.wait(10)
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="k")
    released.set()
    wait_until(lambda: recorder.bodies("k") == [b"1", b"2"], what="both handled")
    wait_until(lambda: not rows(stage, rows_of), what="nothing parked")
    assert tries == [1, 1, 1, 1]


def test_attempts_in_place_go_on_behind_what_an_operator_gives_back(stage: Stage) -> None:
    """Case 68: an earlier message of the key is given back while a later one fails in place."""
    failing = Failing(stage)
    first, second = failing.publish(("k", b"1"), ("k", b"2"))
    failing.dead_letter(first)
    set_group(runtime_of(stage.database, actor="ann"), "orders", "g", backoff_s=(0.01, 0.01, 3.0))
    tries: list[int] = []

    def act(body: bytes, ctx: Context) -> None:
        if body == b"2":
            tries.append(ctx.attempt)
            if len(tries) < 4:
                raise Fault("no stock")

    stage.consume(recorder := Recorder(act), backoff_s=None)
    wait_until(lambda: tries == [1, 2, 3], what="three attempts in place")
    worker = new_worker()
    work_on(
        stage.database,
        start_redrive(runtime_of(stage.database, actor="ann"), "orders", "g", DeadFilter(), worker=worker),
        worker=worker,
    )
    wait_until(lambda: recorder.bodies("k") == [b"1", b"2"], what="both handled")
    assert tries == [1, 2, 3, 4]
    assert second[1].identity.seq == 2


def test_members_are_told_which_keys_changed_and_look_at_all_where_that_is_not_known(stage: Stage) -> None:
    """Each batch of a redrive would have every member read all parked keys of its partitions."""
    failing = Failing(stage)
    store = ParkingStore(stage.database, failing.group_id, "m1")
    for key in "ab":
        failing.park(*failing.publish((key, b"1")), due_in_s=600)
    refs = {
        key: KeyRef(*row)
        for key, row in zip("ab", rows(stage, "SELECT lp, name FROM mqlayer.parked_key ORDER BY name"), strict=True)
    }
    before = failing.parking()
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="a")
    assert store.changes(before, before + 1) == [refs["a"]]
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="b")
    assert store.changes(before, before + 2) == [refs["a"], refs["b"]]
    assert store.changes(before + 1, before + 2) == [refs["b"]]
    failing.sql("UPDATE mqlayer.consumer_group SET parking = parking + 1")
    assert store.changes(before, before + 3) is None, "by somebody who does not say which"
    assert store.changes(before, before + MAX_CHANGES + 1) is None
    failing.sql("UPDATE mqlayer.consumer_group SET parking = parking + %s", MAX_CHANGES)
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="b")
    assert [row[0] for row in rows(stage, "SELECT number FROM mqlayer.parking_change")] == [failing.parking()]


def test_a_member_follows_single_changes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released, discarded and given back: each key by itself, the others are not read."""
    named: list[Any] = []
    keys = ParkingStore.keys

    def noted(self: ParkingStore, span: Any, only: Any = None) -> Any:
        named.append(only)
        return keys(self, span, only)

    monkeypatch.setattr(ParkingStore, "keys", noted)
    shop = ParkingShop("a", "b", "c")
    stage.send([(key, b"1") for key in "abc"])
    # A member whose lease ran out would read all keys again.
    stage.consume(shop.recorder, backoff_s=(LATER_S,), settings=stage.settings(lease_s=20.0))
    wait_until(lambda: len(parked(stage)) == 3, what="all parked")
    stage.wait_settled()
    shop.broken.clear()
    release_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="a")
    wait_until(lambda: shop.recorder.bodies("a") == [b"1"], what="a handled")
    discard_parked(runtime_of(stage.database, actor="ann"), "orders", "g", key="b", reason="a test's")
    stage.send([("b", b"2")])
    wait_until(lambda: shop.recorder.bodies("b") == [b"2"], what="b in line again")
    worker = new_worker()
    work_on(
        stage.database,
        start_redrive(runtime_of(stage.database, actor="ann"), "orders", "g", DeadFilter(), worker=worker),
        worker=worker,
    )
    wait_until(lambda: shop.recorder.bodies("b") == [b"2", b"1"], what="b given back")
    assert shop.recorder.bodies("c") == []
    assert named
    assert all(only is not None for only in named)
