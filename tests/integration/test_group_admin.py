"""What an operator says to a living group: other settings, pause, resume, and the end of one member."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqlayer import App, Context, failpoints
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.groups import find_group, join
from mqlayer.groups.admin import evict_member, pause_group, resume_group, set_group
from mqlayer.groups.group import Group, RetrySettings, refuse_others, settings_of
from mqlayer.groups.partition_rates import balance_by_rate
from mqlayer.inspect import explain_key, group_statuses
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import run_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


def audit(stage: Stage) -> list[tuple[str, str, object]]:
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT act, object, facts FROM mqlayer.audit WHERE act LIKE 'group %' ORDER BY 1")
        return [(act, target, facts) for act, target, facts in rows]


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "brought", "both"),
    some_of(
        [
            ({"backoff_s": (1.0,)}, {"backoff_s": (2.0,)}, r"backoff_s = \(1\.0,\).*brings \(2\.0,\)"),
            ({"ordered": True}, {"ordered": False}, "ordered = True.*brings False"),
            ({"balance": "rate"}, {"balance": "count"}, "balance = rate.*brings count"),
        ],
        3,
    ),
)
def test_a_member_that_brings_other_settings_is_refused_and_both_are_named(
    stage: Stage, there: dict[str, object], brought: dict[str, object], both: str
) -> None:
    """Case 63, of what a group has besides filters."""
    stage.consume(Recorder(), **({"backoff_s": None} | there))  # type: ignore[arg-type]
    with pytest.raises(Conflict, match=both):
        stage.consume(Recorder(), **({"backoff_s": None} | brought))  # type: ignore[arg-type]
    stage.consume(Recorder(), **({"backoff_s": None} | there))  # type: ignore[arg-type]
    stage.consume(Recorder(), backoff_s=None)


@pytest.mark.parametrize(
    ("brought", "both"),
    [
        ({"jitter": 0.0}, r"jitter = 0\.5.*brings 0\.0"),
        ({"attempt_limit": 3}, "attempt_limit = 17.*brings 3"),
        ({"policy": "skip"}, "policy = park.*brings skip"),
        ({"non_retryable_errors": ()}, r"non_retryable_errors = \('KeyError',\).*brings \(\)"),
        ({"retryable_errors": (Conflict,)}, r"retryable_errors = \(\).*brings \('mqlayer\.errors\.Conflict',\)"),
        ({"time_limit_s": math.inf}, "time_limit_s = 5 .*brings inf"),
        ({"max_time_limit_s": 50.0}, r"max_time_limit_s = inf .*brings 50\.0"),
    ],
)
def test_each_rule_that_a_member_brings_is_held_against_the_groups(brought: RetrySettings, both: str) -> None:
    """Case 63, of the rules for messages that fail."""
    there = settings_of(jitter=0.5, non_retryable_errors=(KeyError,), time_limit_s=5)
    group = Group(1, 1, "orders", "g", "live", "earliest", "strict", 1, 0, True, "count", 1, None, there.rules())
    refuse_others(group, there)
    refuse_others(group, settings_of())
    with pytest.raises(Conflict, match=both):
        refuse_others(group, settings_of(**brought))


def test_changed_settings_are_in_force_in_running_members_at_once(stage: Stage) -> None:
    """Case 66's table, changed while a key waits by it: what fails from then on waits by the new one."""
    may_pass = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        if not may_pass.is_set():
            raise OSError

    recorder = Recorder(act)
    app = stage.consume(recorder, backoff_s=(0.05,))
    changed = set_group(runtime_of(stage.database, actor="a test"), "orders", "g", backoff_s=(600.0,), if_version=1)
    assert (changed.settings_version, changed.rules.backoff_s) == (2, (600.0,))
    wait_until(lambda: member_of(app).settings.rules.backoff_s == (600.0,), what="the member to know")
    stage.send([("k", b"1")])
    wait_until(lambda: len(recorder.attempts(b"1")) == 1, what="the first attempt")
    with pytest.raises(Conflict, match="at version 2"):
        set_group(runtime_of(stage.database, actor="a test"), "orders", "g", backoff_s=(1.0,), if_version=1)
    may_pass.set()
    stage.send([("l", b"2")])
    wait_until(lambda: recorder.bodies() == [b"2"], what="another key's message")
    assert recorder.attempts(b"1") == [1]
    assert audit(stage) == [
        ("group set", "orders/g", {"backoff_s": [600.0], "if_version": 1, "before": {"backoff_s": [0.05]}})
    ]


def test_each_setting_can_be_changed_alone_and_taken_back(stage: Stage) -> None:
    """What is set reaches the running member by its heartbeat; what is not named stays."""
    app = stage.consume(Recorder(), backoff_s=None)
    changed = RetryRules()
    steps: list[dict[str, Any]] = [
        {"attempt_limit": 3},
        {"policy": "dead_letter", "jitter": 0.25},
        {"non_retryable_errors": ("KeyError",), "retryable_errors": ("shop.errors.Busy",)},
        {"time_limit_s": 5.0, "max_time_limit_s": 60.0},
        {"backoff_s": (1.0, 2.0)},
    ]
    for step in steps:
        changed = replace(changed, **step)
        assert set_group(runtime_of(stage.database, actor="a test"), "orders", "g", **step).rules == changed
        wait_until(lambda: member_of(app).settings.rules == changed, what="the member to know")  # noqa: B023  # asked here only
    set_group(
        runtime_of(stage.database, actor="a test"),
        "orders",
        "g",
        non_retryable_errors=(),
        retryable_errors=(),
        time_limit_s=math.inf,
        max_time_limit_s=math.inf,
    )
    taken_back = replace(
        changed, non_retryable_errors=(), retryable_errors=(), time_limit_s=None, max_time_limit_s=None
    )
    wait_until(lambda: member_of(app).settings.rules == taken_back, what="the member to know")
    facts = audit(stage)[-1][2]
    assert facts == {
        "non_retryable_errors": [],
        "retryable_errors": [],
        "time_limit_s": "none",
        "max_time_limit_s": "none",
        "before": {
            "non_retryable_errors": ["KeyError"],
            "retryable_errors": ["shop.errors.Busy"],
            "time_limit_s": 5.0,
            "max_time_limit_s": 60.0,
        },
    }


def test_a_limit_that_does_not_fit_the_cap_in_force_is_refused(stage: Stage) -> None:
    stage.consume(Recorder(), time_limit_s=5.0, max_time_limit_s=10.0)
    with pytest.raises(InvalidInput, match="of 20 s is over max_time_limit_s, 10 s"):
        set_group(runtime_of(stage.database, actor="a test"), "orders", "g", time_limit_s=20.0)
    assert find_group(stage.database, "orders", "g").settings_version == 1
    changed = set_group(
        runtime_of(stage.database, actor="a test"), "orders", "g", time_limit_s=20.0, max_time_limit_s=30.0
    )
    assert changed.settings_version == 2


@pytest.mark.parametrize("bad", some_of([{"backoff_s": ()}, {"backoff_s": (-1.0,)}, {"backoff_s": (float("nan"),)},
                                 {"backoff_s": (float("inf"),)},
                                 {"balance": "luck"}, {}, {"policy": "hope"}], 3))  # fmt: skip
def test_settings_that_no_group_can_have_are_refused(stage: Stage, bad: dict[str, object]) -> None:
    stage.consume(Recorder())
    with pytest.raises(InvalidInput, match=r"backoff table|balanced by|nothing to set|policy is one of"):
        set_group(runtime_of(stage.database, actor="a test"), "orders", "g", **bad)  # type: ignore[arg-type]
    if bad:
        with pytest.raises(InvalidInput):
            App(stage.settings()).consumer("orders", group="h", **bad)  # type: ignore[call-overload]
    assert find_group(stage.database, "orders", "g").settings_version == 1


def test_an_unordered_group_handles_messages_of_a_key_side_by_side_and_each_fenced_effect_once(
    stage: Stage,
) -> None:
    both_run = threading.Barrier(2, timeout=20)
    applied: list[bytes] = []

    def handle(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1 and body in (b"1", b"2"):
            both_run.wait()
        with kept_session(stage.dsn) as connection:
            ctx.fence(connection)
        applied.append(body)
        if ctx.attempt == 1 and body == b"2":
            raise OSError

    stage.send([("k", b"1"), ("k", b"2"), ("k", b"3")])
    stage.consume(handle, ordered=False, concurrency=4)
    stage.wait_settled()
    assert sorted(applied) == [b"1", b"2", b"3"]


# -- pause and resume --------------------------------------------------------------------------------------------------


def test_a_paused_group_finishes_what_runs_starts_nothing_more_and_goes_on_where_it_rested(stage: Stage) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            runs.set()
            may_end.wait(20)

    recorder = Recorder(act)
    stage.send([("k", b"1"), ("k", b"2")])
    app = stage.consume(recorder, settings=stage.settings(lease_s=20.0))
    assert runs.wait(20)
    assert pause_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    assert not pause_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    newcomer = Recorder()
    stage.consume(newcomer)
    wait_until(lambda: {state for _, state in member_of(app).owned().values()} == {"draining"}, what="it to hear")
    may_end.set()
    wait_until(lambda: set(stage.owners().values()) == {None}, what="all partitions to be given back")
    assert recorder.bodies() == [b"1"]
    stage.send([("k", b"3")])
    assert sum(position.next - position.committed for position in stage.positions().values()) == 2
    assert resume_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    assert not resume_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    stage.wait_settled()
    assert recorder.bodies() + newcomer.bodies() == [b"1", b"2", b"3"]
    assert recorder.attempts(b"1") == [1]
    assert [act for act, _, _ in audit(stage)] == ["group pause", "group resume"]


def test_a_group_that_is_resumed_before_its_owners_have_let_go_loses_nothing(stage: Stage) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            runs.set()
            may_end.wait(20)

    recorder = Recorder(act)
    stage.send([("k", b"%d" % number) for number in range(1, 50)])
    stage.consume(recorder)
    assert runs.wait(20)
    for _ in range(3):
        assert pause_group(runtime_of(stage.database, actor="a test"), "orders", "g")
        assert resume_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    may_end.set()
    stage.wait_settled()
    recorder.assert_in_order()
    assert len(recorder.bodies()) == 49


def test_a_pause_stays_over_the_death_of_all_members(stage: Stage) -> None:
    app = stage.consume(Recorder())
    pause_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    app.stop()
    recorder = Recorder()
    stage.consume(recorder)
    stage.send([("k", b"1")])
    join(stage.database, group_id=stage.group_id(), member_id="other", lease_s=5.0)
    assert set(stage.owners().values()) == {None}
    assert recorder.begun == []
    resume_group(runtime_of(stage.database, actor="a test"), "orders", "g")


def test_it_shows_that_a_group_is_paused_and_how_to_let_it_go_on(stage: Stage) -> None:
    stage.consume(Recorder())
    pause_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    wait_until(lambda: set(stage.owners().values()) == {None}, what="all partitions to be given back")
    stage.send([("k", b"1")])
    (status,) = group_statuses(stage.runtime, "orders", "g")
    assert status.facts.paused_at is not None
    assert {one.stall.reason for one in status.partitions if one.stall} == {"paused"}
    explained = explain_key(stage.runtime, "orders", "k", "g")
    assert explained.run_next.startswith("mqlayer group resume orders g")
    resume_group(runtime_of(stage.database, actor="a test"), "orders", "g")
    stage.wait_settled()


# -- evict -------------------------------------------------------------------------------------------------------------


def test_an_evicted_member_stops_and_others_have_its_partitions_at_once(stage: Stage) -> None:
    first = stage.consume(Recorder())
    wait_until(lambda: set(stage.owners().values()) == {member_of(first).member_id}, what="all partitions to be owned")
    second = stage.consume(Recorder())
    evict_member(runtime_of(stage.database, actor="a test"), "orders", "g", member_of(first).member_id)
    assert set(stage.owners().values()) == {member_of(second).member_id}
    wait_until(lambda: not first.running, what="the evicted member to stop")
    assert not first.health().live, "nothing but a new process brings it back"
    assert second.running
    assert second.health().live
    stage.send([("k", b"1")])
    stage.wait_settled()
    with pytest.raises(NotFound, match="mqlayer group members orders g"):
        evict_member(runtime_of(stage.database, actor="a test"), "orders", "g", "nobody")
    with pytest.raises(NotFound):
        evict_member(runtime_of(stage.database, actor="a test"), "orders", "g", member_of(first).member_id)


def test_a_member_that_is_evicted_long_after_it_joined_does_not_join_again(stage: Stage) -> None:
    """Members that are gone and joined long ago are forgotten: not this one, or its process would join as new."""
    first, second = stage.consume(Recorder()), stage.consume(Recorder())
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET joined_at = now() - interval '2 hours'")
    evict_member(runtime_of(stage.database, actor="a test"), "orders", "g", member_of(first).member_id)
    wait_until(lambda: not first.running, what="the evicted member to stop")
    assert set(stage.owners().values()) == {member_of(second).member_id}


def test_a_member_that_is_evicted_while_it_joins_again_stays_out(stage: Stage, tmp_path: Path) -> None:
    """Its lease ran out, it saw so, and was evicted before it joined again."""
    app = stage.consume(Recorder())
    reached, go_on = tmp_path / "reached", tmp_path / "go-on"
    failpoints.arm("member.before_join", f"mark:{reached}")
    failpoints.arm("member.before_join", f"wait:{go_on}")
    end_lease(stage)
    wait_until(reached.exists, what="it to join again")
    evict_member(runtime_of(stage.database, actor="a test"), "orders", "g", member_of(app).member_id)
    go_on.touch()
    wait_until(lambda: not app.running, what="the evicted member to stop")
    assert set(stage.owners().values()) == {None}


def test_a_member_whose_joining_again_was_not_answered_is_not_taken_for_another(stage: Stage) -> None:
    """The session that it finds then is its own: to end would leave its partitions to nobody."""
    recorder = Recorder()
    app = stage.consume(recorder)
    last = max(epoch for _, _, epoch, _ in stage.assignments())
    failpoints.arm("member.after_join_commit", "raise")
    end_lease(stage)

    def taken_again() -> bool:
        taken = {(partition, held[0]) for partition, held in member_of(app).owned().items() if held[1] == "open"}
        given = {(partition, epoch) for partition, _, epoch, _ in stage.assignments()}
        return taken == given and all(epoch > last for _, epoch in given)

    wait_until(lambda: not app.running or taken_again(), what="it to join again")
    stage.send([("k", b"1")])
    stage.wait_settled()
    assert app.running
    assert recorder.bodies() == [b"1"]


def end_lease(stage: Stage) -> None:
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET lease_until = now() - interval '1 second'")


# -- balance by rate ---------------------------------------------------------------------------------------------------


def test_a_group_balanced_by_rate_keeps_hot_partitions_apart(start_stage: StartStage, redis_url: str) -> None:
    stage = start_stage(redis_url, partitions=4)
    first, second = (stage.consume(Recorder(), balance="rate") for _ in range(2))
    members = {member_of(app).member_id for app in (first, second)}
    # Not only some: a partition that is on its way to the second member would be taken for one of the first's.
    halves = dict.fromkeys(members, 2)
    wait_until(lambda: Counter(stage.owners().values()) == halves, what="each to own a half")
    assert balance_by_rate(stage.runtime) == 0
    mine = [partition for partition, owner in stage.owners().items() if owner == member_of(first).member_id]
    hot = sorted(mine)[:2]
    assert len(hot) == 2
    before = stage.assignments()
    for partition in hot:
        stage.send([(stage.key_in(partition), b"x")] * 2_000)
    assert balance_by_rate(stage.runtime) == 1

    def apart() -> bool:
        owners = stage.owners()
        return None not in owners.values() and owners[hot[0]] != owners[hot[1]]

    wait_until(apart, what="the hot partitions to be apart")
    stage.wait_settled()
    moved = [new[0] for old, new in zip(before, stage.assignments(), strict=True) if old != new]
    assert set(moved) & set(hot)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_commands_set_and_show_a_filter(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    """Case 63, from the command line."""
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    run = Commands()
    stage.consume(Recorder(), backoff_s=None)
    assert facts_of(run.text("group", "show", "orders", "g"))["tag filter"] == "none"
    said = run.text("group", "set", "orders", "g", "--tag-filter", "all:vip,eu")
    assert said.endswith(", balance by count, only messages with all of eu,vip\n")
    assert facts_of(run.text("group", "show", "orders", "g"))["tag filter"] == "all:eu,vip"
    said = run.text("group", "set", "orders", "g", "--tag-filter", "none", "--if-version", "2")
    assert said.endswith(", balance by count\n")
    refused = run("group", "set", "orders", "g", "--tag-filter", "eu")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "say for example any:eu,vip" in refused.stderr
    before = {"tag_filter": "all:eu,vip"}
    assert audit(stage)[-1] == ("group set", "orders/g", {"tag_filter": "none", "if_version": 2, "before": before})


def test_the_commands_say_what_they_did(stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    run = Commands()

    def assert_fails(told: str, *words: str) -> None:
        # The member of this process logs there too.
        result = run(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert told in result.stderr

    app = stage.consume(Recorder())
    said = run.text("group", "set", "orders", "g", "--backoff", "1,5,10", "--balance", "rate", "--if-version", "1")
    assert said == "settings version 2: backoff 1,5,10 s, 17 attempts, then park, balance by rate\n"
    said = run.text("group", "set", "orders", "g", "--backoff", "exponential:1,10,500", "--jitter", "0.5",
                    "--attempts", "4", "--policy", "skip", "--non-retryable", "KeyError, shop.Bad", "--retryable",
                    "OSError",
                    "--time-limit", "2.5", "--max-time-limit", "60")  # fmt: skip
    assert said == (
        "settings version 3: backoff 1,10,100,500 s, jitter 0.5, 4 attempts, then skip, "
        "non-retryable: KeyError shop.Bad, retryable: OSError, time limit 2.5 s, max time limit 60 s, balance by rate\n"
    )
    shown = run.text("group", "show", "orders", "g")
    assert facts_of(shown).items() >= {
        "jitter": "0.5", "attempt limit": "4", "policy": "skip", "non retryable errors": "KeyError, shop.Bad",
        "retryable errors": "OSError", "time limit": "2.5 s", "max time limit": "60 s",
    }.items()  # fmt: skip
    said = run.text("group", "set", "orders", "g", "--backoff", "default", "--jitter", "0", "--non-retryable", "none",
                    "--retryable", "all", "--time-limit", "none", "--max-time-limit", "none")  # fmt: skip
    assert said.startswith("settings version 4: backoff 1,5,10,30,60,")
    assert said.endswith(",7200 s, 4 attempts, then skip, balance by rate\n")
    assert run.text("group", "pause", "orders", "g") == "group g of topic orders is paused\n"
    assert run.text("group", "pause", "orders", "g") == "group g of topic orders is paused already\n"
    assert run.text("group", "resume", "orders", "g") == "group g of topic orders goes on\n"
    assert run.text("group", "resume", "orders", "g") == "group g of topic orders was not paused\n"
    member = member_of(app).member_id
    assert (
        run.text("group", "evict", "orders", "g", member) == f"member {member} of group g of topic orders is evicted\n"
    )
    assert_fails("exponential:FIRST", "group", "set", "orders", "g", "--backoff", "linear:1,2,3")
    assert_fails("a factor over 1", "group", "set", "orders", "g", "--backoff", "exponential:1,1,3")
    assert_fails("no limit of time", "group", "set", "orders", "g", "--time-limit", "long")
    assert_fails("the policy is one of", "group", "set", "orders", "g", "--policy", "hope")
    assert_fails("no list of seconds", "group", "set", "orders", "g", "--backoff", "soon")
    assert_fails("balanced by count or by rate", "group", "set", "orders", "g", "--balance", "luck")
    assert_fails("nothing to set", "group", "set", "orders", "g")
    assert_fails("at version 4", "group", "set", "orders", "g", "--backoff", "1", "--if-version", "1")
    assert_fails("orders/h", "group", "pause", "orders", "h")
    assert len(audit(stage)) == 6


@pytest.mark.parametrize("said", some_of(["pause", "evict m1", "set --backoff 9"], 3))
def test_a_word_that_is_cut_off_was_said_or_not_at_all(stage: Stage, said: str) -> None:
    words = said.split()
    # Its lease outlives a slow start of the command: it would join again.
    stage.consume(Recorder(), member_id="m1", settings=stage.settings(lease_s=60.0))
    before = group_state(stage)
    facts = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    killed = os.environ | facts | armed("group_admin.before_commit=kill")
    assert run_python("mqlayer", "group", words[0], "orders", "g", *words[1:], env=killed, timeout=60) == -9
    assert group_state(stage) == before
    assert audit(stage) == []


def group_state(stage: Stage) -> list[object]:
    with stage.database.connection() as connection:
        settings = connection.execute("SELECT settings_version, paused_at, allocation FROM mqlayer.consumer_group")
        members = connection.execute("SELECT member_id, session, leaving FROM mqlayer.member")
        return [*settings.fetchall(), *members.fetchall(), *stage.assignments()]
