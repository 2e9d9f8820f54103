"""Effects of messages of an ordered pop: once, in order, whichever receiver comes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from mqlayer import PopMessage, Receiver
from mqlayer.errors import AlreadyApplied, InvalidInput, OutOfOrder, StaleOwner, StaleToken
from mqlayer.topics.nodes import rearm_node
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.kept_connections import kept_session
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

Connection = psycopg.Connection[Any]


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    stage = start_stage(redis_url, partitions=1)
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, who text, body text)")
    return stage


@pytest.fixture
def connection(one: Stage) -> Iterator[Connection]:
    with kept_session(one.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def receivers(one: Stage) -> Iterator[tuple[Receiver, Receiver]]:
    with (
        Receiver(one.topic, group="g", settings=one.settings()) as a,
        Receiver(one.topic, group="g", settings=one.settings()) as b,
    ):
        yield a, b


def book(connection: Connection, receiver: Receiver, message: PopMessage, who: str) -> None:
    with connection.transaction():
        receiver.fence(connection, message)
        connection.execute("INSERT INTO sink (who, body) VALUES (%s, %s)", (who, message.body.decode()))


def booked(connection: Connection) -> list[tuple[str, str]]:
    return [tuple(row) for row in connection.execute("SELECT who, body FROM sink ORDER BY position").fetchall()]


def test_a_receiver_that_wakes_up_late_repeats_no_effect_and_makes_none_out_of_turn(
    one: Stage, connection: Connection, receivers: tuple[Receiver, Receiver]
) -> None:
    """Cases 53 and 77: both have the same epoch; the seq per key keeps them apart."""
    late, other = receivers
    one.send([("k", b"1"), ("k", b"2"), ("k", b"3")])
    old = late.receive(2, visibility_timeout_s=0.02)
    new = other.receive(3, wait_s=5)
    book(connection, other, new[0], "other")
    with pytest.raises(AlreadyApplied):
        book(connection, late, old[0], "late")
    # Its turn by the effects, though the token is void: whichever comes first.
    book(connection, late, old[1], "late")
    with pytest.raises(AlreadyApplied):
        book(connection, other, new[1], "other")
    book(connection, other, new[2], "other")
    with pytest.raises(StaleToken):
        late.ack(old)
    other.ack(new)
    assert booked(connection) == [("other", "1"), ("late", "2"), ("other", "3")]
    assert one.all_settled()


def test_an_effect_before_an_earlier_one_of_its_key_is_refused(
    one: Stage, connection: Connection, receivers: tuple[Receiver, Receiver]
) -> None:
    """Invariant 12: the fence would take the earlier one for applied from then on."""
    receiver, _ = receivers
    one.send([("k", b"1"), ("k", b"2"), ("l", b"3")])
    first, second, other = receiver.receive()
    with pytest.raises(InvalidInput, match="no transaction is open"):
        receiver.fence(connection, first)
    with pytest.raises(OutOfOrder, match=f"{first.token.partition}/1 of the same key"):
        book(connection, receiver, second, "a")
    book(connection, receiver, other, "a")
    book(connection, receiver, first, "a")
    book(connection, receiver, second, "a")
    receiver.ack([other, second, first])
    assert [body for _, body in booked(connection)] == ["3", "1", "2"]


def test_an_acknowledged_message_needs_no_effect_of_its_own(
    one: Stage, connection: Connection, receivers: tuple[Receiver, Receiver]
) -> None:
    receiver, _ = receivers
    one.send([("k", b"1"), ("k", b"2")])
    first, second = receiver.receive()
    receiver.ack([first])
    book(connection, receiver, second, "a")
    assert booked(connection) == [("a", "2")]


def test_no_effect_comes_of_what_was_given_back(
    one: Stage, connection: Connection, receivers: tuple[Receiver, Receiver]
) -> None:
    receiver, _ = receivers
    one.send([("k", b"1"), ("k", b"2")])
    first, second = receiver.receive()
    receiver.nack(first)
    for message in (first, second):
        with pytest.raises(StaleToken):
            book(connection, receiver, message, "a")
    again = receiver.receive(wait_s=5)
    for message in again:
        book(connection, receiver, message, "b")
    # An old message in a new batch's place is not before it.
    with pytest.raises(StaleToken):
        book(connection, receiver, second, "a")
    assert booked(connection) == [("b", "1"), ("b", "2")]


def test_an_effect_under_an_earlier_epoch_is_refused(
    one: Stage, connection: Connection, receivers: tuple[Receiver, Receiver]
) -> None:
    """Case 34: after its node was armed again, and a later receiver has acted in the LP."""
    late, other = receivers
    one.send([("k", b"1"), ("k", b"2")])
    old = late.receive(visibility_timeout_s=0.05)
    connection.execute("UPDATE mqlayer.node SET armed_run_id = 'another'")
    rearm_node(runtime_of(one.database, one.prefix, application=one.database, actor="test"), "node-1")
    new = other.receive(wait_s=5)
    book(connection, other, new[0], "other")
    with pytest.raises(StaleOwner):
        book(connection, late, old[0], "late")
    book(connection, other, new[1], "other")
    assert [who for who, _ in booked(connection)] == ["other", "other"]
