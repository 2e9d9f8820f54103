"""Bulk actions: a set that is fixed before it begins, its order, and what is passed by; over kills and cancels."""

from __future__ import annotations

import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer.domain.message import Record
from mqlayer.errors import Conflict, InvalidInput, NotFound, PermissionDenied
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.redelivery import (
    BulkAct,
    BulkAction,
    DeadFilter,
    ParkedFilter,
    bulk_action,
    bulk_actions,
    bulk_items,
    cancel_bulk,
    clean_bulk,
    dead_messages,
    discard_dead,
    discard_parked,
    estimate_parked,
    new_worker,
    parked_keys,
    pause_key,
    plan_bulk,
    release_parked,
    retry_scan,
    start_bulk,
    top_errors,
    work_on,
)
from mqlayer.runtime.runtime import Runtime
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failed_messages import Failing
from tests.fixtures.failpoints import armed, broken_off_at
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.roles import Roles
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


@pytest.fixture
def failing(stage: Stage) -> Failing:
    """A group of a topic of two partitions."""
    return Failing(stage)


def here(failing: Failing, actor: str = "ann") -> Runtime:
    return runtime_of(failing.stage.database, actor=actor)


def plan(failing: Failing, act: BulkAct, wanted: DeadFilter | ParkedFilter | None = None, **changes: Any) -> BulkAction:
    wanted = wanted or (DeadFilter() if act in ("redrive", "keep") else ParkedFilter())
    return plan_bulk(here(failing), act, "orders", failing.group, wanted, **changes)


def run(failing: Failing, planned: BulkAction, *, batch: int = 100, reason: str = "repaired") -> BulkAction:
    worker = new_worker()
    start_bulk(here(failing, "bob"), planned.bulk_id, reason=reason, worker=worker)
    return work_on(failing.stage.database, planned.bulk_id, worker=worker, batch=batch)


def words(failing: Failing, action: BulkAction) -> list[str | None]:
    return [one.result for one in bulk_items(failing.stage.database, action.bulk_id, limit=1_000)]


def counts(action: BulkAction) -> tuple[str, int, int, int]:
    return action.state, action.done, action.skipped, action.failed


def numbered(failing: Failing, key: str, *numbers: int) -> list[tuple[int, Record]]:
    return failing.publish(*((key, str(number).encode()) for number in numbers))


# -- the set ---------------------------------------------------------------------------------------------------------


def test_a_set_is_fixed_and_shown_in_its_order_before_anything_is_done(failing: Failing) -> None:
    a, b = numbered(failing, "a", 1, 2, 3), numbered(failing, "b", 4)
    failing.dead_letter(a[1], a[0], b[0])
    planned = plan(failing, "redrive")
    assert (planned.state, planned.size, planned.matched, planned.actor) == ("planned", 3, 3, "ann")
    items = bulk_items(failing.stage.database, planned.bulk_id)
    assert [one.number for one in items] == [1, 2, 3]
    assert [one.dead_id for one in items if one.key == "a"] == [2, 1], "as they were published"
    assert failing.parked() == []
    failing.dead_letter(a[2])
    done = run(failing, planned)
    assert (counts(done), done.actor, done.reason) == (("done", 3, 0, 0), "bob", "repaired")
    assert failing.parked("a") == [b"1", b"2"]
    assert failing.dead() == [b"3"], "it died after the plan"


def test_a_larger_set_is_refused_with_what_to_do_or_its_first_ones_are_taken(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", 1, 2, 3))
    with pytest.raises(InvalidInput, match="3 items match, more than the limit of 2: narrow the filter"):
        plan(failing, "redrive", limit=2)
    assert bulk_actions(failing.stage.database) == []
    first = plan(failing, "redrive", limit=2, first=True)
    assert (first.size, first.matched) == (2, 3)
    run(failing, first)
    assert failing.parked("a") == [b"1", b"2"]
    for number in range(3):
        failing.park(*numbered(failing, f"p{number}", 9))
    with pytest.raises(InvalidInput, match="narrow"):
        plan(failing, "release", limit=2)
    assert plan(failing, "release", limit=2, first=True).size == 2


def test_the_first_ones_of_a_key_are_those_with_the_lower_numbers_wherever_they_lay(failing: Failing) -> None:
    """A node that fell back was sent the later ones again, at lower offsets."""
    a = numbered(failing, "a", 1, 2, 3)
    failing.dead_letter(*((p, r._replace(offset=at)) for (p, r), at in zip(a, (9, 5, 4), strict=True)))
    run(failing, plan(failing, "redrive", limit=2, first=True), batch=1)
    assert failing.parked("a") == [b"1", b"2"]


def test_a_filter_narrows_by_error_age_attempts_and_waiting(failing: Failing) -> None:
    a, b, c = (numbered(failing, key, 1) for key in "abc")
    failing.park(*a, attempts=3)
    failing.attempt(a[0], 1, "TimeoutError: slow (pay.py:3)")
    failing.park(*b, attempts=9, due_in_s=600)
    failing.park(*c, attempts=9)
    failing.attempt(c[0], 1, "KeyError: 'x' (shop.py:9)")
    later = datetime.now(UTC) + timedelta(hours=1)
    for wanted, keys in (
        (ParkedFilter(error="timeouterror"), {"a"}),
        (ParkedFilter(min_attempts=9), {"b", "c"}),
        (ParkedFilter(min_attempts=9, waiting=True), {"c"}),
        (ParkedFilter(key="b"), {"b"}),
        (ParkedFilter(since=later), set()),
        (ParkedFilter(), {"a", "b", "c"}),
    ):
        planned = plan(failing, "release", wanted)
        items = bulk_items(failing.stage.database, planned.bulk_id)
        assert ({one.key for one in items}, planned.filter) == (keys, wanted)


@pytest.mark.parametrize(
    ("act", "wanted", "changes"),
    [
        ("release", DeadFilter(), {}),
        ("keep", ParkedFilter(), {}),
        ("release", ParkedFilter(topic="mails"), {}),
        ("redrive", DeadFilter(cause="hunger"), {}),
        ("redrive", DeadFilter(dead_ids=()), {}),
        ("redrive", DeadFilter(), {"limit": 0}),
        ("redrive", DeadFilter(), {"limit": 1_000_001}),
    ],
)
def test_what_no_plan_can_be_is_refused(
    failing: Failing, act: BulkAct, wanted: DeadFilter | ParkedFilter, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        plan(failing, act, wanted, **changes)


# -- acts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", some_of([1, 100], 2))
def test_parked_keys_are_released_but_for_those_that_changed(failing: Failing, batch: int) -> None:
    database = failing.stage.database
    for key in ("same", "paused", "gone", "due", "head"):
        failing.park(*numbered(failing, key, 1, 2), attempts=7)
    planned = plan(failing, "release", ParkedFilter(cause="exhausted"))
    pause_key(here(failing), "orders", "g", "paused")
    discard_parked(here(failing), "orders", "g", key="gone", reason="no")
    release_parked(here(failing), "orders", "g", key="due")
    failing.sql("DELETE FROM mqlayer.parked_message WHERE key = 'head' AND body = '1'")
    failing.park(*numbered(failing, "new", 1))
    done = run(failing, planned, batch=batch)
    assert counts(done) == ("done", 1, 4, 0)
    found = {one.key: one.result for one in bulk_items(database, planned.bulk_id)}
    assert found == {"same": "done", "paused": "paused", "gone": "gone", "due": "due", "head": "changed"}
    assert failing.key_row("same") == ("exhausted", True, 0)
    assert failing.key_row("head") == ("exhausted", False, 7)
    assert failing.key_row("new") == ("exhausted", False, 0)


def test_a_key_that_was_parked_anew_is_another_one(failing: Failing) -> None:
    a = numbered(failing, "a", 1)
    failing.park(*a)
    planned = plan(failing, "release")
    failing.sql("UPDATE mqlayer.parked_key SET parked_at = clock_timestamp()")
    assert (counts(run(failing, planned)), words(failing, planned)) == (("done", 0, 1, 0), ["changed"])


def test_dead_messages_stay_dead_with_the_reason_but_for_those_that_changed(failing: Failing) -> None:
    kept, given, again = failing.dead_letter(*numbered(failing, "a", 1, 2, 3))
    planned = plan(failing, "keep")
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now() WHERE dead_id = %s", given)
    failing.sql("UPDATE mqlayer.dead_message SET died_at = clock_timestamp() WHERE dead_id = %s", again)
    done = run(failing, planned, reason="cancelled by phone")
    assert (counts(done), words(failing, planned)) == (("done", 1, 2, 0), ["done", "already", "changed"])
    rows = failing.sql("SELECT cause, reason, actor FROM mqlayer.dead_message WHERE dead_id = %s", kept)
    assert rows == [("discarded", "cancelled by phone", "bob")]


def test_a_message_that_an_operator_ruled_on_since_is_not_given_back(failing: Failing) -> None:
    (dead_id,) = failing.dead_letter(*numbered(failing, "a", 1))
    planned = plan(failing, "redrive")
    discard_dead(here(failing), dead_id, reason="no")
    assert (counts(run(failing, planned)), failing.parked()) == (("done", 0, 1, 0), [])


@pytest.mark.parametrize("at_once", some_of([2, 3, 500], 2))
def test_parked_keys_die_as_they_were_planned_in_parts(
    failing: Failing, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.redelivery.bulk_worker.AT_ONCE", at_once)
    monkeypatch.setattr("mqlayer.redelivery.operator_actions.AT_ONCE", at_once)
    failing.park(*numbered(failing, "a", 1, 2, 3, 4), due_in_s=600)
    failing.park(*numbered(failing, "b", 5))
    planned = plan(failing, "discard")
    assert sum(one.messages or 0 for one in bulk_items(failing.stage.database, planned.bulk_id)) == 5
    failing.park(*numbered(failing, "a", 6))
    failing.park(*numbered(failing, "c", 7))
    done = run(failing, planned, reason="a test's")
    assert (counts(done), words(failing, planned)) == (("done", 2, 0, 0), ["done", "done"])
    assert failing.parked() in ([b"6", b"7"], [b"7", b"6"]), "these came after the plan"
    dead = failing.sql("SELECT body, reason, actor FROM mqlayer.dead_message WHERE key = 'a' ORDER BY dead_id")
    assert dead == [(body, "a test's", "bob") for body in (b"1", b"2", b"3", b"4")]


def test_a_row_that_no_transaction_can_write_fails_alone(failing: Failing) -> None:
    dead = failing.dead_letter(*numbered(failing, "a", 1, 2, 3))
    failing.sql("ALTER TABLE mqlayer.parked_message ADD CONSTRAINT broken CHECK (body <> '2') NOT VALID")
    planned = plan(failing, "redrive")
    assert counts(run(failing, planned)) == ("done", 2, 0, 1)
    (broken,) = bulk_items(failing.stage.database, planned.bulk_id, failed=True)
    assert (broken.dead_id, broken.number) == (dead[1], 2)
    assert "broken" in str(broken.error)
    assert (failing.parked("a"), failing.dead()) == ([b"1", b"3"], [b"2"])


# -- starts, cancels, workers ----------------------------------------------------------------------------------------


def test_a_plan_starts_once_with_a_reason_and_within_an_hour(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", 1))
    database = failing.stage.database
    planned, old = plan(failing, "redrive"), plan(failing, "redrive")
    assert retry_scan(database) == 0
    assert bulk_action(database, planned.bulk_id).state == "planned", "nobody starts it by itself"
    with pytest.raises(InvalidInput, match="say why"):
        start_bulk(here(failing), planned.bulk_id, reason=" ")
    assert run(failing, planned).done == 1
    with pytest.raises(Conflict, match="is done"):
        start_bulk(here(failing), planned.bulk_id, reason="again")
    failing.sql("UPDATE mqlayer.redrive SET planned_at = planned_at - interval '61 minutes'")
    with pytest.raises(Conflict, match="more than an hour ago"):
        start_bulk(here(failing), old.bulk_id, reason="late")
    assert clean_bulk(database) == 1
    assert [one.bulk_id for one in bulk_actions(database)] == [planned.bulk_id]
    failing.sql("UPDATE mqlayer.redrive SET ended_at = ended_at - interval '31 days'")
    assert clean_bulk(database) == 1
    with pytest.raises(NotFound, match="bulk action"):
        bulk_items(database, planned.bulk_id)


def test_a_cancelled_one_stops_after_the_batch_in_hand(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", *range(6)))
    planned, worker = plan(failing, "redrive"), new_worker()
    start_bulk(here(failing), planned.bulk_id, reason="r", worker=worker)
    with broken_off_at("bulk.after_commit", occurrence=2):
        work_on(failing.stage.database, planned.bulk_id, worker=worker, batch=2)
    assert counts(cancel_bulk(here(failing), planned.bulk_id)) == ("cancelled", 4, 0, 0)
    over = work_on(failing.stage.database, planned.bulk_id, worker=worker, batch=2)
    assert (over.state, failing.parked("a")) == ("cancelled", [b"0", b"1", b"2", b"3"])
    assert words(failing, planned) == ["done"] * 4 + [None] * 2
    with pytest.raises(Conflict, match="is cancelled"):
        cancel_bulk(here(failing), planned.bulk_id)
    with pytest.raises(Conflict, match="is cancelled"):
        start_bulk(here(failing), planned.bulk_id, reason="r")
    assert [act for act, _, _ in failing.audit()] == ["bulk plan", "bulk start", "bulk cancel"]


@pytest.mark.full
def test_two_runners_and_two_actions_on_the_same_set_do_each_item_once(failing: Failing) -> None:
    for key in "abcd":
        failing.dead_letter(*numbered(failing, key, *range(12)))
    actions = [plan(failing, "redrive") for _ in range(2)]
    runners = []
    for one in actions:
        worker = new_worker()
        start_bulk(here(failing), one.bulk_id, reason="r", worker=worker)
        # One has the lease; the other one finds that and goes.
        for name in (worker, new_worker()):
            facts = {"worker": name, "batch": 5}
            runners.append(threading.Thread(target=work_on, args=(failing.stage.database, one.bulk_id), kwargs=facts))
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    done = [bulk_action(failing.stage.database, one.bulk_id) for one in actions]
    assert {one.state for one in done} == {"done"}
    assert (sum(one.done for one in done), sum(one.skipped for one in done)) == (48, 48)
    for key in "abcd":
        assert failing.parked(key) == [str(number).encode() for number in range(12)]


def test_released_keys_are_handled_in_order_by_a_running_member(failing: Failing) -> None:
    recorder = Recorder()
    for key in "ab":
        failing.park(*numbered(failing, key, 1, 2, 3))
    failing.stage.consume(recorder, backoff_s=None)
    planned = plan(failing, "release")
    start_bulk(here(failing), planned.bulk_id, reason="r")
    retry_scan(failing.stage.database)
    assert counts(bulk_action(failing.stage.database, planned.bulk_id)) == ("done", 2, 0, 0)
    wait_until(lambda: failing.key_row("a") is failing.key_row("b") is None, what="the keys to be in line again")
    assert (recorder.bodies("a"), recorder.bodies("b")) == ([b"1", b"2", b"3"], [b"1", b"2", b"3"])


def test_the_right_of_the_worker_carries_every_act_on_and_that_to_look_plans_none(
    failing: Failing, roles: Roles
) -> None:
    failing.dead_letter(*numbered(failing, "a", 1), *numbered(failing, "b", 2), reason="KeyError: 'x'")
    for key in "cd":
        failing.park(*numbered(failing, key, 3))
    wanted: tuple[tuple[BulkAct, DeadFilter | ParkedFilter], ...] = (
        ("redrive", DeadFilter(key="a")), ("keep", DeadFilter(key="b")), ("release", ParkedFilter(key="c")),
        ("discard", ParkedFilter(key="d")),
    )  # fmt: skip
    for act, one in wanted:
        start_bulk(here(failing), plan(failing, act, one).bulk_id, reason="r")
    planned = plan(failing, "discard", ParkedFilter(key="c"))
    for right in (Right.WORK, Right.CONSUME):
        with (
            pytest.raises(Conflict, match="redrive_started"),
            Database(roles.login(right)) as other,
            other.connection() as connection,
        ):
            connection.execute("UPDATE mqlayer.redrive SET state = 'running' WHERE redrive_id = %s", (planned.bulk_id,))
    cancel_bulk(here(failing), planned.bulk_id)
    with Database(roles.login(Right.WORK)) as worker:
        retry_scan(worker)
        assert clean_bulk(worker) == 0
    with Database(roles.login(Right.VIEW)) as viewer:
        assert [(one.act, *counts(one)) for one in bulk_actions(viewer, state="done")] == [
            (act, "done", 1, 0, 0) for act in ("discard", "release", "keep", "redrive")
        ]
        assert [one.reason for one in dead_messages(viewer)] == ["r", "r"]
        assert estimate_parked(viewer).count == len(parked_keys(viewer)) == 2
        assert [one.error for one in top_errors(viewer, "orders", "g")] == ["r"]
        with pytest.raises(PermissionDenied):
            plan_bulk(runtime_of(viewer, actor="eve"), "release", "orders", "g", ParkedFilter())
    assert {facts["reason"] for act, _, facts in failing.audit() if act in ("bulk start", "bulk end")} == {"r"}


# -- kills -----------------------------------------------------------------------------------------------------------


def command(failing: Failing, *typed: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    places = {"MQLAYER_DSN": failing.stage.dsn, "MQLAYER_KEY_PREFIX": failing.stage.prefix}
    return ask_python("mqlayer", *typed, env=os.environ | places | armed(failpoint))


@pytest.mark.parametrize(("place", "plans"), some_of([("bulk.before_plan", 0), ("bulk.after_plan", 1)], 2))
def test_a_plan_that_is_killed_is_whole_or_not_there(failing: Failing, place: str, plans: int) -> None:
    failing.dead_letter(*numbered(failing, "a", 1, 2))
    killed = command(failing, "bulk", "plan", "redrive", "orders", "g", "--all", failpoint=f"{place}=kill")
    assert killed.returncode == -9, killed.stderr
    found = bulk_actions(failing.stage.database)
    assert [(one.state, one.size) for one in found] == [("planned", 2)] * plans
    assert failing.sql("SELECT count(*) FROM mqlayer.bulk_item") == [(2 * plans,)]


@pytest.mark.parametrize(
    ("place", "came"),
    some_of(
        [
            ("bulk.after_start", 0),
            ("bulk.before_commit", 0),
            ("bulk.after_commit", 100),
            ("bulk.before_end", 120),
        ],
        2,
    ),
)
def test_a_release_that_is_killed_is_gone_on_with_by_the_scan(failing: Failing, place: str, came: int) -> None:
    for number in range(120):
        failing.sql(
            "INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) VALUES (%s, %s, %s, 'exhausted')",
            failing.group_id, number, b"k%d" % number,
        )  # fmt: skip
    planned = plan(failing, "release")
    killed = command(failing, "bulk", "start", str(planned.bulk_id), "--reason", "r", failpoint=f"{place}=kill")
    assert killed.returncode == -9, killed.stderr
    left = bulk_action(failing.stage.database, planned.bulk_id)
    due = "SELECT count(*) FROM mqlayer.parked_key WHERE due_at IS NOT NULL"
    assert (left.state, left.done, failing.sql(due)) == ("running", came, [(came,)])
    failing.sql("UPDATE mqlayer.redrive SET lease_until = clock_timestamp()")
    retry_scan(failing.stage.database)
    assert counts(bulk_action(failing.stage.database, planned.bulk_id)) == ("done", 120, 0, 0)
    assert failing.sql(due) == [(120,)]


def test_a_discard_that_is_killed_between_parts_of_a_key_goes_on_there(failing: Failing) -> None:
    """Its own first part changed the key's head."""
    failing.park(*numbered(failing, "a", *range(7)))
    planned, worker = plan(failing, "discard"), new_worker()
    start_bulk(here(failing), planned.bulk_id, reason="r", worker=worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mqlayer.redelivery.bulk_worker.AT_ONCE", 3)
        with broken_off_at("bulk.after_commit"):
            work_on(failing.stage.database, planned.bulk_id, worker=worker)
    assert len(failing.parked("a")) == 4
    assert counts(work_on(failing.stage.database, planned.bulk_id, worker=worker)) == ("done", 1, 0, 0)
    assert (failing.parked("a"), len(failing.dead())) == ([], 7)


# -- commands --------------------------------------------------------------------------------------------------------


def test_the_commands_plan_show_start_and_cancel(failing: Failing) -> None:
    failing.dead_letter(*numbered(failing, "a", 1, 2), reason="TimeoutError: slow")
    planned = command(failing, "bulk", "plan", "redrive", "orders", "g", "--error", "timeout")
    assert planned.stdout.splitlines()[0] == (
        "bulk action 1 is planned: redrive 2 dead messages of group g of topic orders, in this order"
    )
    assert "nothing is done yet; within an hour: mqlayer bulk start 1 --reason WHY" in planned.stdout
    assert "no act" in command(failing, "bulk", "plan", "eat", "orders", "g", "--all").stderr
    assert "say which" in command(failing, "bulk", "plan", "release", "orders", "g").stderr
    started = command(failing, "bulk", "start", "1", "--reason", "repaired")
    assert started.stdout == "bulk action 1 is done: 2 messages given back, 0 skipped, 0 failed; mqlayer bulk show 1\n"
    assert "repaired" in command(failing, "bulk", "show", "1").stdout
