"""What operators see of parked keys and dead messages, and what they say to them: release, discard, pass over."""

from __future__ import annotations

import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.domain.message import Identity, Record
from mqlayer.domain.names import parse_identity
from mqlayer.errors import Conflict, InvalidInput, KeyTooLarge, NotFound, StaleOwner, StoreUnavailable
from mqlayer.groups import Assignment
from mqlayer.redelivery import (
    DeadFilter,
    ParkedFilter,
    ParkedKey,
    SkippedHead,
    bulk_worker,
    dead_messages,
    discard_dead,
    discard_parked,
    find_dead,
    head_skip,
    operator_actions,
    parked_keys,
    parked_messages,
    release_all,
    release_parked,
    show_dead,
    show_parked,
    skip_head,
)
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Fenced, LockKept, LockTaken
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.partition_harness import MemberScripts, PartitionHarness
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.runtimes import runtime_of


@pytest.fixture
def failing(stage: Stage) -> Failing:
    """A group of a topic of two partitions."""
    return Failing(stage)


def numbered(failing: Failing, key: str, *numbers: int) -> list[tuple[int, Record]]:
    return failing.publish(*((key, str(number).encode()) for number in numbers))


# -- lists -----------------------------------------------------------------------------------------------------------


def test_parked_keys_are_listed_page_by_page_with_what_waits_in_them(failing: Failing) -> None:
    a, b, c = numbered(failing, "a", 1, 2), numbered(failing, "b", 33), failing.publish((None, b"4"))
    failing.park(*a, cause="exhausted", attempts=17)
    failing.park(*b, cause="retry", due_in_s=60, attempts=3)
    failing.park(*c, cause="rejected", alone=True)
    failing.attempt(b[0], 1, "TimeoutError at pay.py:3")
    database = failing.stage.database
    found = {one.key: one for one in parked_keys(database)}
    assert found.keys() == {"a", "b", None}
    one = found["a"]
    assert (one.topic, one.group, one.messages, one.cause, one.attempts) == ("orders", "g", 2, "exhausted", 17)
    assert (one.due_at, one.due_in_s, one.alone, one.head) == (None, None, False, identity_of(a[0]))
    assert one.bytes == sum(len(r.m) + len(r.key) + len(r.body) for _, r in a)
    waits = found["b"].due_in_s
    assert waits is not None
    assert 50 < waits <= 60
    assert (found[None].alone, found[None].head) == (True, identity_of(c[0]))

    pages: list[ParkedKey] = []
    after: str | None = None
    while page := parked_keys(database, after=after, limit=1):
        pages += page
        after = page[-1].cursor
    assert [one.key for one in pages] == [one.key for one in parked_keys(database)]

    def keys(**wanted: Any) -> set[str | None]:
        return {one.key for one in parked_keys(database, ParkedFilter(**wanted))}

    assert keys(topic="orders", group="g") == {"a", "b", None}
    assert keys(topic="orders", group="h") == set()
    assert keys(key="a") == {"a"}
    assert keys(cause="retry") == {"b"}
    assert keys(waiting=True) == {"a", None}
    assert keys(error="timeouterror") == {"b"}
    now = datetime.now(UTC)
    assert keys(until=now - timedelta(hours=1)) == set()
    assert len(keys(since=now - timedelta(hours=1))) == 3

    connection = parked_messages(database, found["a"])
    assert [(m.identity, m.partition, m.offset) for m in connection] == [(identity_of(r), r[0], r[1].offset) for r in a]
    assert [m.identity for m in parked_messages(database, found["a"], after=connection[0])] == [identity_of(a[1])]


def test_dead_messages_are_listed_newest_first_page_by_page_and_searched(failing: Failing) -> None:
    a, b = numbered(failing, "a", 1, 2), numbered(failing, "b", 3)
    failing.dead_letter(a[0], reason="TimeoutError at pay.py:3", age_s=7_200)
    failing.dead_letter(b[0], cause="skipped", body=False, reason="Skip", age_s=3_600)
    failing.dead_letter(a[1], reason="KeyError at shop.py:9")
    database = failing.stage.database

    def found(wanted: DeadFilter | None = None, **more: Any) -> list[int]:
        return [one.dead_id for one in dead_messages(database, wanted, **more)]

    assert found() == [3, 2, 1]
    assert found(limit=2) == [3, 2]
    assert found(after=2) == [1]
    assert found(DeadFilter(key="a")) == [3, 1]
    assert found(DeadFilter(error="timeout")) == [1]
    assert found(DeadFilter(cause="skipped")) == [2]
    assert found(DeadFilter(since=datetime.now(UTC) - timedelta(minutes=90)), topic="orders", group="g") == [3, 2]
    assert found(topic="payments") == []
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now() WHERE dead_id = 1")
    assert (found(), found(redriven=True)) == ([3, 2], [3, 2, 1])
    second = dead_messages(database)[1]
    assert (second.bytes, second.cause, second.reason, second.key) == (None, "skipped", "Skip", "b")
    assert second.identity == identity_of(b[0])


@pytest.mark.parametrize("limit", [0, 1_001])
def test_what_no_page_can_be_is_refused(failing: Failing, limit: int) -> None:
    with pytest.raises(InvalidInput, match="1 to 1000 rows"):
        dead_messages(failing.stage.database, limit=limit)
    with pytest.raises(InvalidInput, match="1 to 1000 rows"):
        parked_keys(failing.stage.database, limit=limit)
    for place in ("x", "1:2:zz", "1:2"):
        with pytest.raises(InvalidInput, match="no place"):
            parked_keys(failing.stage.database, after=place)
    with pytest.raises(InvalidInput, match="no time zone"):
        dead_messages(failing.stage.database, DeadFilter(since=datetime(2026, 1, 1)))  # noqa: DTZ001 - the point of it
    with pytest.raises(InvalidInput, match="no cause"):
        parked_keys(failing.stage.database, ParkedFilter(cause="hunger"))
    for text in ("1:2", "a:b:c", "1:2:3:4", ""):
        with pytest.raises(InvalidInput, match="source:lp:seq"):
            parse_identity(text)


def test_a_message_is_shown_with_every_attempt_and_found_by_its_identity(stage: Stage, failing: Failing) -> None:
    (a,) = numbered(failing, "a", 1)
    a = (a[0], a[1]._replace(m=a[1].m + b':{"trace":"t-1"}'))
    (dead_id,) = failing.dead_letter(a, reason="boom")
    failing.attempt(a, 2, "KeyError at shop.py:9", member="m2")
    failing.attempt(a, 1, "TimeoutError at pay.py:3", age_s=60)
    identity = str(identity_of(a))
    assert find_dead(stage.database, identity) == find_dead(stage.database, str(dead_id)) == dead_id
    shown = show_dead(stage.database, dead_id)
    assert (shown.identity, shown.key, shown.headers, shown.body) == (identity_of(a), "a", {"trace": "t-1"}, b"1")
    assert abs(shown.published_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert (shown.reason, shown.actor, shown.redriven) == ("boom", "m1", False)
    assert [(one.attempt, one.member, one.error) for one in shown.attempts] == [
        (1, "m1", "TimeoutError at pay.py:3"),
        (2, "m2", "KeyError at shop.py:9"),
    ]
    Failing(stage, group="h").dead_letter(a)
    with pytest.raises(InvalidInput, match="orders/g, orders/h"):
        find_dead(stage.database, identity)
    assert find_dead(stage.database, identity, group="g") == dead_id
    with pytest.raises(NotFound):
        find_dead(stage.database, "9:9:9")
    with pytest.raises(NotFound):
        show_dead(stage.database, 4_711)

    (b,) = numbered(failing, "b", 2)
    failing.park(b, cause="retry", due_in_s=60)
    parked = show_parked(stage.database, "orders", "g", identity_of(b))
    assert (parked.body, parked.cause, parked.due_at is not None, parked.attempts) == (b"2", "retry", True, [])
    with pytest.raises(NotFound):
        show_parked(stage.database, "orders", "g", identity_of(a))


# -- release and discard ---------------------------------------------------------------------------------------------


def test_a_released_key_is_due_with_all_of_its_attempts(failing: Failing) -> None:
    a, b = numbered(failing, "a", 1, 2), failing.publish((None, b"3"))
    failing.park(*a, attempts=17)
    failing.park(*b, alone=True)
    database, before = failing.stage.database, failing.parking()
    release_parked(runtime_of(database, actor="a test"), "orders", "g", key="a")
    assert failing.key_row("a") == ("exhausted", True, 0)
    release_parked(runtime_of(database, actor="a test"), "orders", "g", message=identity_of(b[0]))
    assert [one.due_in_s is not None for one in parked_keys(database)] == [True, True]
    assert failing.parking() == before + 2
    assert failing.audit() == [
        ("parked release", "orders/g", {"key": "a"}),
        ("parked release", "orders/g", {"key": str(identity_of(b[0]))}),
    ]
    for named in ({"key": "z"}, {"message": Identity(9, 9, 9)}):
        with pytest.raises(NotFound):
            release_parked(runtime_of(database, actor="a test"), "orders", "g", **named)
    with pytest.raises(InvalidInput, match="name one"):
        release_parked(runtime_of(database, actor="a test"), "orders", "g")
    with pytest.raises(KeyTooLarge):
        release_parked(runtime_of(database, actor="a test"), "orders", "g", key="k" * 513)


def test_all_keys_of_a_group_are_released_in_parts(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_worker, "AT_ONCE", 2)
    for number in range(5):
        failing.park(*numbered(failing, f"k{number}", 1), cause="rejected" if number == 4 else "exhausted")
    failing.park(*numbered(failing, "due", 1), due_in_s=-5, attempts=3)
    database = failing.stage.database
    assert release_all(runtime_of(database, actor="a test"), "orders", "g", cause="rejected") == 1
    assert release_all(runtime_of(database, actor="a test"), "orders", "g") == 4
    assert release_all(runtime_of(database, actor="a test"), "orders", "g") == 0
    assert failing.key_row("due") == ("exhausted", True, 3)
    ended = [facts["done"] for act, _, facts in failing.audit() if act == "bulk end"]
    assert ended == [1, 4, 0]


def test_a_discarded_key_dies_in_its_order_with_bodies_and_the_reason(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 16: with a written reason."""
    monkeypatch.setattr(operator_actions, "AT_ONCE", 2)
    a = numbered(failing, "a", 1, 2, 3, 4, 5)
    failing.park(*a)
    failing.attempt(a[0], 1, "boom")
    database = failing.stage.database
    with pytest.raises(InvalidInput, match="say why"):
        discard_parked(runtime_of(database, actor="a test"), "orders", "g", key="a", reason=" ")
    assert discard_parked(runtime_of(database, actor="a test"), "orders", "g", key="a", reason="a wrong batch") == 5
    assert (failing.parked(), failing.dead(), failing.key_row("a")) == ([], [b"1", b"2", b"3", b"4", b"5"], None)
    newest = dead_messages(database)[-1]
    assert (newest.cause, newest.reason, newest.actor, newest.attempts) == ("discarded", "a wrong batch", "a test", 1)
    facts = [facts["dead_ids"] for act, _, facts in failing.audit() if act == "parked discard"]
    assert facts == [[1, 2], [3, 4], [5]]
    with pytest.raises(NotFound):
        discard_parked(runtime_of(database, actor="a test"), "orders", "g", key="a", reason="again")


def test_a_discarded_head_lets_the_rest_of_the_key_go_on(failing: Failing) -> None:
    a = numbered(failing, "a", 1, 2)
    (earlier,) = failing.dead_letter(a[0])
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now(), redriven_seek = 0")
    failing.park(*a, attempts=17, redriven=True)
    database = failing.stage.database
    assert discard_parked(runtime_of(database, actor="a test"), "orders", "g", key="a", head=True, reason="no") == 1
    assert (failing.parked(), failing.dead(), failing.key_row("a")) == ([b"2"], [b"1"], ("exhausted", True, 0))
    again = show_dead(database, earlier)
    assert (again.cause, again.reason, again.redriven) == ("discarded", "no", False)
    assert failing.sql("SELECT redriven_seek FROM mqlayer.dead_message") == [(None,)]


def test_a_dead_message_is_discarded_with_what_was_said_before_in_the_audit_row(failing: Failing) -> None:
    (dead_id,) = failing.dead_letter(*numbered(failing, "a", 1), reason="KeyError at shop.py:9")
    database = failing.stage.database
    discard_dead(runtime_of(database, actor="a test"), dead_id, reason="the order was cancelled")
    shown = show_dead(database, dead_id)
    assert (shown.cause, shown.reason, shown.actor) == ("discarded", "the order was cancelled", "a test")
    before = {"cause": "exhausted", "reason": "KeyError at shop.py:9"}
    said = {"reason": "the order was cancelled", "before": before}
    assert failing.audit() == [("dead discard", str(dead_id), said)]
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now()")
    with pytest.raises(NotFound):
        discard_dead(runtime_of(database, actor="a test"), dead_id, reason="too late")


# -- skip-head -------------------------------------------------------------------------------------------------------


def skip(failing: Failing, key: str = "a", **more: Any) -> SkippedHead:
    application = more.pop("application", None)
    here = runtime_of(failing.stage.database, failing.stage.prefix, application=application, actor="a test")
    return skip_head(here, "orders", "g", key, **{"reason": "poison"} | more)


def owner(failing: Failing, partition: int) -> Assignment:
    """Return what a member holds that has taken a partition."""
    member = ManualMember(failing.stage.database, failing.stage.prefix, "orders", group="g")
    member.position(partition)
    return member.assigned()[partition]


def member_at(failing: Failing, connection: NodeConnection, one: Assignment) -> MemberScripts:
    place = PartitionHarness(connection, failing.stage.prefix, one.partition, group_id=failing.group_id)
    return place.member("hand", one.epoch)


def settle(failing: Failing, one: Assignment, offset: int) -> object:
    with failing.stage.connection() as connection:
        return member_at(failing, connection, one).settle([(offset, offset)])


def take(failing: Failing, one: Assignment) -> object:
    with failing.stage.connection() as connection:
        return member_at(failing, connection, one).acquire(afresh=True)


def test_the_head_of_a_parked_key_is_passed_over_and_the_rest_is_tried(failing: Failing) -> None:
    a = numbered(failing, "a", 1, 2)
    failing.park(*a, attempts=17)
    with pytest.raises(Conflict, match=f"waits for message {identity_of(a[0])}"):
        skip(failing, only=identity_of(a[1]))
    skipped = skip(failing, only=identity_of(a[0]))
    assert (skipped.identity, skipped.parked) == (identity_of(a[0]), True)
    assert show_dead(failing.stage.database, skipped.dead_id).body == b"1"
    assert (failing.parked(), failing.key_row("a")) == ([b"2"], ("exhausted", True, 0))
    skip(failing)
    assert (failing.parked(), failing.key_row("a"), failing.dead()) == ([], None, [b"1", b"2"])
    assert [act for act, _, _ in failing.audit()] == ["key skip-head"] * 2


def test_the_head_of_a_key_in_the_stream_is_passed_over_while_an_owner_has_it(failing: Failing) -> None:
    """Case 69: the owner's late ack is refused, its effect too, and the next owner finds the dead row."""
    a = numbered(failing, "a", 1, 2)
    partition = a[0][0]
    old = owner(failing, partition)
    skipped = skip(failing, application=failing.stage.database)
    assert skipped == SkippedHead(identity_of(a[0]), 1, parked=False, fenced=True)
    assert isinstance(settle(failing, old, a[0][1].offset), Fenced)
    assert isinstance(take(failing, old), Fenced)
    with kept_session(failing.stage.dsn) as connection:
        source, lp, seq = identity_of(a[0])
        facts = (failing.group_id, lp, source, "a", seq, old.epoch)
        answer = connection.execute("SELECT answer FROM mqlayer_app.fence_v1(%s, %s::smallint, %s, %s, %s, %s)", facts)
        assert answer.fetchone() == ("stale",)
    ((_, member, epoch, target),) = [row for row in failing.stage.assignments() if row[0] == partition]
    assert (member, target, epoch > old.epoch) == ("hand", "hand", True)
    now = ManualMember(failing.stage.database, failing.stage.prefix, "orders", group="g").assigned()[partition]
    assert isinstance(take(failing, now), LockTaken)
    shown = show_dead(failing.stage.database, 1)
    assert (shown.body, shown.cause, shown.reason, shown.actor) == (b"1", "discarded", "poison", "a test")
    said = {"key": "a", "message": str(identity_of(a[0])), "dead_id": 1, "reason": "poison"}
    assert failing.audit() == [("key skip-head", "orders/g", said)]
    # It is in the stream still, and nobody takes it for the head.
    assert skip(failing).identity == identity_of(a[1])
    with pytest.raises(NotFound, match="key explain"):
        skip(failing)


def test_a_key_that_nobody_ever_owned_can_be_passed_over_too(failing: Failing) -> None:
    a = numbered(failing, "a", 1)
    assert skip(failing).identity == identity_of(a[0])
    assert failing.stage.assignments() == []
    assert isinstance(take(failing, owner(failing, a[0][0])), LockTaken)


def test_what_was_given_back_is_not_the_head_of_the_stream_until_the_group_is_sent_elsewhere(failing: Failing) -> None:
    a = numbered(failing, "a", 1, 2)
    failing.dead_letter(a[0])
    failing.sql("UPDATE mqlayer.dead_message SET redriven_at = now(), redriven_seek = 0")
    failing.sql("UPDATE mqlayer.consumer_group SET seek = 1")
    assert skip(failing).identity == identity_of(a[0])


@pytest.mark.parametrize("meanwhile", ["settled", "parked", "dead", "seek", "gone"])
def test_a_message_that_somebody_dealt_with_since_the_look_is_not_ruled(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """What the present owner still does before its epoch is raised counts; nothing of the ruling is left then."""
    a = numbered(failing, "a", 1, 2)
    partition, record = a[0]
    old = owner(failing, partition)
    before = failing.stage.assignments()

    def found_then_lost(act: Any) -> Any:
        head = next(act._heads())
        if meanwhile == "settled":
            assert isinstance(settle(failing, old, record.offset), LockKept)
        elif meanwhile == "parked":
            failing.park(a[0])
        elif meanwhile == "dead":
            failing.dead_letter(a[0])
        elif meanwhile == "seek":
            failing.sql("UPDATE mqlayer.consumer_group SET seek = 1")
        else:
            failing.stage.redis.xdel(failing.stage.keys(partition).log, b"%d-0" % record.offset)
        monkeypatch.setattr(head_skip._HeadSkip, "_heads", lambda _: iter([head]))
        return original(act)

    original = head_skip._HeadSkip.skip_in_stream
    monkeypatch.setattr(head_skip._HeadSkip, "skip_in_stream", found_then_lost)
    with pytest.raises(Conflict, match=r"any more|dead already"):
        skip(failing)
    assert (failing.stage.assignments(), failing.audit()) == (before, [])
    # The owner is refused once, and gets a higher epoch from Postgres by itself; here by joining again.
    again = ManualMember(failing.stage.database, failing.stage.prefix, "orders", group="g").assigned()[partition]
    assert isinstance(take(failing, again), LockTaken)


def test_a_message_whose_effect_is_there_is_not_ruled_dead(failing: Failing) -> None:
    a = numbered(failing, "a", 1)
    old = owner(failing, a[0][0])
    with kept_session(failing.stage.dsn) as connection:
        source, lp, seq = identity_of(a[0])
        facts = (failing.group_id, lp, source, "a", seq, old.epoch)
        connection.execute("SELECT mqlayer_app.fence_v1(%s, %s::smallint, %s, %s, %s, %s)", facts)
        connection.commit()
    with pytest.raises(Conflict, match=r"effect of message .* is there"):
        skip(failing, application=failing.stage.database)
    assert failing.dead() == []


def test_an_effect_that_is_being_committed_is_told_of(failing: Failing) -> None:
    a = numbered(failing, "a", 1)
    old = owner(failing, a[0][0])
    with kept_session(failing.stage.dsn) as connection:
        source, lp, seq = identity_of(a[0])
        facts = (failing.group_id, lp, source, "a", seq, old.epoch)
        connection.execute("SELECT mqlayer_app.fence_v1(%s, %s::smallint, %s, %s, %s, %s)", facts)
        assert not skip(failing, application=failing.stage.database).fenced


def test_what_can_not_be_passed_over_is_refused(failing: Failing) -> None:
    with pytest.raises(NotFound, match="waiting message of the key"):
        skip(failing)
    numbered(failing, "a", 1)
    with pytest.raises(Conflict, match="waits for message"):
        skip(failing, only=Identity(9, 9, 9))
    with pytest.raises(InvalidInput, match="say why"):
        skip(failing, reason="")
    with pytest.raises(NotFound):
        skip_head(runtime_of(failing.stage.database, failing.stage.prefix, actor="t"), "orders", "x", "a", reason="r")
    assert (failing.dead(), failing.audit()) == ([], [])


def test_a_node_that_is_away_rules_nothing(start_redis: StartRedis, start_stage: StartStage) -> None:
    server = start_redis()
    failing = Failing(start_stage(server.url))
    numbered(failing, "a", 1)
    server.kill()
    with pytest.raises(StoreUnavailable, match="node-1"):
        skip(failing)


def test_a_running_member_passes_a_message_over_that_it_has_in_hand(failing: Failing) -> None:
    """Case 69: ack and effect are refused, the message is not handled again, the key goes on in order."""
    may_end, refused = threading.Event(), threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if body == b"1":
            may_end.wait(20)
            with kept_session(failing.stage.dsn) as connection:
                try:
                    ctx.fence(connection)
                except StaleOwner:
                    refused.set()
                    raise

    numbered(failing, "a", 1, 2, 3)
    recorder = Recorder(act)
    failing.stage.consume(recorder, backoff_s=None)
    wait_until(lambda: recorder.begun, what="the head to be in hand")
    assert skip(failing, application=failing.stage.database).fenced
    may_end.set()
    failing.stage.wait_settled()
    assert recorder.bodies("a") == [b"2", b"3"]
    assert len(recorder.attempts(b"1")) == 1
    assert refused.is_set()
    assert failing.dead() == [b"1"]
    recorder.assert_in_order()


# -- kills -----------------------------------------------------------------------------------------------------------


def command(failing: Failing, *typed: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    places = {"MQLAYER_DSN": failing.stage.dsn, "MQLAYER_KEY_PREFIX": failing.stage.prefix}
    return ask_python("mqlayer", *typed, env=os.environ | places | armed(failpoint))


@pytest.mark.parametrize("place", some_of(["skip.after_fence", "skip.before_commit", "skip.after_commit"], 3))
def test_a_passing_over_that_is_killed_is_done_or_not_at_all_and_its_owner_goes_on(
    failing: Failing, place: str
) -> None:
    may_end = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "a":
            may_end.wait(60)

    numbered(failing, "a", 1, 2, 3)
    recorder = Recorder(act)
    failing.stage.consume(recorder, backoff_s=None)
    wait_until(lambda: recorder.begun, what="the head to be in hand")
    done = command(failing, "key", "skip-head", "orders", "g", "a", "--reason", "poison", failpoint=f"{place}=kill")
    assert done.returncode == -9, done.stderr
    committed = place == "skip.after_commit"
    assert failing.dead() == ([b"1"] if committed else [])
    assert len(failing.audit()) == committed
    may_end.set()
    failing.stage.wait_settled()
    assert recorder.bodies("a")[-2:] == [b"2", b"3"]


@pytest.mark.parametrize(
    ("place", "typed"),
    [
        ("release.before_commit", ("parked", "release", "orders", "g", "a")),
        ("discard.before_commit", ("parked", "discard", "orders", "g", "a", "--reason", "no")),
        ("skip.parked_before_commit", ("key", "skip-head", "orders", "g", "a", "--reason", "no")),
    ],
)
def test_an_act_on_a_parked_key_that_is_killed_is_not_done_and_can_be_done_again(
    failing: Failing, place: str, typed: tuple[str, ...]
) -> None:
    failing.park(*numbered(failing, "a", 1, 2))
    done = command(failing, *typed, failpoint=f"{place}=kill")
    assert done.returncode == -9, done.stderr
    assert (failing.parked(), failing.dead(), failing.audit()) == ([b"1", b"2"], [], [])
    assert failing.key_row("a") == ("exhausted", False, 0)
    again = command(failing, *typed)
    assert again.returncode == 0, again.stderr
    assert len(failing.audit()) == 1
