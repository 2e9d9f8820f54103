"""Receivers of an ordered pop and messages that fail: the limit of attempts, parked keys, dead messages, filters."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, Final

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer import PopMessage, Producer, Receiver
from mqlayer.domain.retry_rules import Policy
from mqlayer.errors import AlreadyApplied, InvalidInput, StaleToken
from mqlayer.groups.admin import set_group
from mqlayer.redelivery import DeadFilter, new_worker, release_parked, skip_head, start_redrive, work_on
from mqlayer.settings import Settings
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.receivers import OpenReceiver
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

WAIT_S: Final = 20.0
LIMIT: Final = 2


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


def bodies(messages: list[PopMessage]) -> list[bytes]:
    return [message.body for message in messages]


def fail(receiver: Receiver, times: int) -> None:
    """Give the first message of what comes back, so often, and acknowledge those of other keys."""
    for _ in range(times):
        first, *others = receiver.receive(wait_s=WAIT_S)
        receiver.nack(first)
        receiver.ack([other for other in others if other.key != first.key])


def parked(stage: Stage) -> list[tuple[bytes, str, int]]:
    """Return parked keys: name, cause, messages."""
    rows = ask_postgres(stage.dsn, "SELECT name, cause, messages FROM mqlayer.parked_key ORDER BY name")
    return [(bytes(name), cause, messages) for name, cause, messages in rows]


def all_settled(stage: Stage) -> bool:
    position = stage.position(stage.partitions[0])
    return position.committed == position.next


def dead(stage: Stage) -> list[tuple[bytes | None, str]]:
    """Return dead messages: body, cause."""
    return list(ask_postgres(stage.dsn, "SELECT body, cause FROM mqlayer.dead_message WHERE redriven_at IS NULL"))


def test_a_message_that_fails_too_often_is_parked_with_its_key_and_comes_again_when_released(
    one: Stage, receiver_of: OpenReceiver
) -> None:
    a, b = receiver_of(one, attempt_limit=LIMIT, policy="park"), receiver_of(one)
    one.send([("k", b"1"), ("k", b"2"), ("other", b"3")])
    fail(a, LIMIT)
    one.send([("k", b"4"), ("other", b"5")])
    got: list[bytes] = []

    def another_key_goes_on() -> bool:
        for message in b.receive(wait_s=0.1):
            assert message.key == "other"
            b.ack([message])
            got.append(message.body)
        return got == [b"5"] and parked(one) == [(b"k", "exhausted", 3)]

    wait_until(another_key_goes_on, what="the key to be parked with what follows")
    assert all_settled(one)
    release_parked(runtime_of(one.database), one.topic, "g", key="k")
    for number, body in enumerate((b"1", b"2", b"4")):
        (message,) = (a, b)[number % 2].receive(wait_s=WAIT_S)
        message = pickle.loads(pickle.dumps(message))
        assert (message.body, message.attempt) == (body, 1)
        with pytest.raises(StaleToken):
            a.ack([_with_an_older_claim(message)])
        b.ack([message])
        a.ack([message])
    assert parked(one) == []
    one.send([("k", b"6")])
    assert bodies(a.receive(wait_s=WAIT_S)) == [b"6"]


def _with_an_older_claim(message: PopMessage) -> PopMessage:
    assert message.claimed is not None
    claim = message.claimed.claim
    return replace(message, claimed=message.claimed._replace(claim=claim._replace(number=claim.number - 1)))


def test_a_parked_message_that_fails_again_waits_and_is_parked_for_good(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one, attempt_limit=LIMIT, policy="park")
    one.send([("k", b"1"), ("k", b"2")])
    fail(receiver, LIMIT)
    wait_until(lambda: not receiver.receive(wait_s=0) and parked(one), what="the key to be parked")
    release_parked(runtime_of(one.database), one.topic, "g", key="k")
    # Not settled in its time, then given back: both are failed attempts.
    (late,) = receiver.receive(wait_s=WAIT_S, visibility_timeout_s=0.05)
    (again,) = receiver.receive(wait_s=WAIT_S)
    assert (again.body, again.attempt) == (b"1", 2)
    with pytest.raises(StaleToken):
        receiver.ack([late])
    receiver.extend(again, 30)
    receiver.nack(again, error=ValueError("no"))
    assert receiver.receive(wait_s=0.3) == []
    [(attempt, error)] = ask_postgres(one.dsn, "SELECT attempt, error FROM mqlayer.failed_attempt")
    assert (attempt, "ValueError: no" in error) == (2, True)
    here = runtime_of(one.database, one.prefix, actor="a test")
    skip_head(here, one.topic, "g", "k", reason="broken")
    assert bodies(receiver.receive(wait_s=WAIT_S)) == [b"2"]


@pytest.mark.parametrize(
    ("policy", "left"), some_of([("dead_letter", [(b"1", "exhausted")]), ("skip", [(None, "skipped")])], 2)
)
def test_a_message_that_fails_too_often_leaves_the_group(
    one: Stage, receiver_of: OpenReceiver, policy: Policy, left: list[Any]
) -> None:
    receiver = receiver_of(one, attempt_limit=LIMIT, policy=policy)
    one.send([("k", b"1"), ("k", b"2")])
    # Silent receivers fail as those that give a message back: the first of a key, not what is behind it.
    receiver.receive(wait_s=WAIT_S, visibility_timeout_s=0.01)
    fail(receiver, 1)
    (second,) = receiver.receive(wait_s=WAIT_S)
    assert (second.body, dead(one)) == (b"2", left)
    with psycopg.connect(one.dsn) as connection:
        receiver.fence(connection, second)
    receiver.ack([second])
    if policy == "dead_letter":
        here, worker = runtime_of(one.database, actor="a test"), new_worker()
        work_on(one.database, start_redrive(here, one.topic, "g", DeadFilter(), worker=worker), worker=worker)
        (again,) = receiver.receive(wait_s=WAIT_S)
        assert again.body == b"1"
        with psycopg.connect(one.dsn) as connection:
            # The later one's effect is there already: that does not stand in its way.
            receiver.fence(connection, again)
        with psycopg.connect(one.dsn) as connection, pytest.raises(AlreadyApplied):
            receiver.fence(connection, again)
        receiver.ack([again])
        assert parked(one) == []


@pytest.mark.parametrize("place", some_of(["pop.after_park", "parking.before_commit"], 2))
def test_a_receiver_that_dies_while_it_parks_leaves_the_key_to_others(
    one: Stage, receiver_of: OpenReceiver, place: str
) -> None:
    a, b = receiver_of(one, attempt_limit=1, policy="park"), receiver_of(one)
    one.send([("k", b"1"), ("k", b"2")])
    fail(a, 1)
    with broken_off_at(place):
        a.receive(wait_s=WAIT_S, visibility_timeout_s=0.05)
    wait_until(lambda: b.receive(wait_s=0.1) == [] and parked(one) == [(b"k", "exhausted", 2)], what="all to be parked")
    assert all_settled(one)


@pytest.mark.parametrize(
    "place",
    some_of(["pop.after_claim", "pop.before_claim", "pop.after_parked_commit", "pop.before_parked_commit"], 4),
)
def test_a_receiver_that_dies_with_a_parked_message_loses_and_reverses_nothing(
    one: Stage, receiver_of: OpenReceiver, place: str
) -> None:
    a, b = receiver_of(one, attempt_limit=1, policy="park"), receiver_of(one)
    one.send([("k", b"1"), ("k", b"2")])
    fail(a, 1)
    wait_until(lambda: a.receive(wait_s=0) == [] and len(parked(one)) == 1, what="the key to be parked")
    set_group(runtime_of(one.database), one.topic, "g", attempt_limit=5)
    release_parked(runtime_of(one.database), one.topic, "g", key="k")
    with broken_off_at(place):
        a.ack(a.receive(wait_s=WAIT_S, visibility_timeout_s=0.2))
    got: list[bytes] = []

    def all_came() -> bool:
        batch = b.receive(wait_s=0.1)
        got.extend(bodies(batch))
        b.ack(batch)
        return got[-1:] == [b"2"]

    wait_until(all_came, what="the rest to come")
    assert got == ([b"2"] if place == "pop.after_parked_commit" else [b"1", b"2"])
    assert parked(one) == []


def test_a_filter_leaves_messages_out(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one, tag_filter="any:eu")
    settings = Settings(dsn=SecretStr(one.dsn), key_prefix=one.prefix)
    with Producer(settings, name="tagged") as producer:
        for number, tags in enumerate([("eu",), ("us",), (), ("us", "eu")]):
            producer.send(one.topic, key="k", body=b"%d" % number, tags=tags)
    batch = receiver.receive(wait_s=WAIT_S)
    assert bodies(batch) == [b"0", b"3"]
    receiver.ack(batch)
    assert all_settled(one)


def test_a_limit_without_a_policy_is_refused(one: Stage, receiver_of: OpenReceiver) -> None:
    with pytest.raises(InvalidInput, match="policy"):
        receiver_of(one, attempt_limit=3)


def test_renewal_withholds_messages_while_a_handler_runs_and_not_for_ever(
    one: Stage, receiver_of: OpenReceiver
) -> None:
    a, b = receiver_of(one), receiver_of(one)
    one.send([("k", b"1"), ("k", b"2")])
    # A machine that is busy renews late: two thirds of the timeout are left for that.
    batch = a.receive(wait_s=WAIT_S, visibility_timeout_s=1.5, renew_for_s=30)
    assert b.receive(wait_s=3.5) == [], "twice its visibility timeout"
    a.ack(batch[:1])
    assert b.receive(wait_s=2.0) == []
    a.ack(batch[1:])
    one.send([("k", b"3")])
    a.receive(wait_s=WAIT_S, visibility_timeout_s=0.3, renew_for_s=0.1)
    assert bodies(b.receive(wait_s=WAIT_S)) == [b"3"]


def test_one_call_gives_messages_of_several_partitions(
    start_stage: StartStage, redis_url: str, receiver_of: OpenReceiver
) -> None:
    stage = start_stage(redis_url, partitions=4)
    receiver = receiver_of(stage)
    stage.send((f"key-{number}", b"%d" % number) for number in range(40))
    batch = receiver.receive(40, wait_s=WAIT_S)
    assert sorted(map(int, bodies(batch))) == list(range(40))
    assert {message.token.partition for message in batch} == set(stage.partitions)
    receiver.ack(batch)
    assert receiver.receive(wait_s=0) == []


def test_a_head_that_an_operator_passed_over_is_not_given_again(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one)
    one.send([("k", b"1"), ("other", b"2"), ("k", b"3")])
    first, second, third = sorted(receiver.receive(wait_s=WAIT_S, visibility_timeout_s=0.5), key=lambda one: one.body)
    skip_head(runtime_of(one.database, one.prefix, actor="a test"), one.topic, "g", "k", reason="broken")
    with pytest.raises(StaleToken):
        receiver.ack([first, second, third])
    got: list[bytes] = []

    def others_came() -> bool:
        batch = receiver.receive(wait_s=0.1)
        got.extend(bodies(batch))
        receiver.ack(batch)
        return all_settled(one)

    wait_until(others_came, what="all to be settled")
    assert sorted(got) == [b"2", b"3"]


def test_messages_are_acknowledged_with_the_next_request_and_none_is_lost_where_that_is_refused(
    one: Stage, receiver_of: OpenReceiver
) -> None:
    a, b = receiver_of(one), receiver_of(one)
    one.send([("k", b"1"), ("other", b"2")])
    first = a.receive(1, wait_s=WAIT_S)
    second = a.receive(1, wait_s=WAIT_S, ack=first, visibility_timeout_s=0.05)
    assert (bodies(first), bodies(second)) == ([b"1"], [b"2"])
    late = b.receive(wait_s=WAIT_S)
    one.send([("k", b"3")])
    with pytest.raises(StaleToken):
        a.receive(wait_s=WAIT_S, ack=second)
    third = a.receive(wait_s=WAIT_S)
    assert [(message.body, message.attempt) for message in third] == [(b"3", 1)]
    assert a.receive(wait_s=0, ack=third) == []
    b.ack(late)
    assert all_settled(one)
