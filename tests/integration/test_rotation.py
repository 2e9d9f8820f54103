"""A slot of the outbox is emptied when everything in it is relayed and old, and never before (invariant 14)."""

from __future__ import annotations

import psycopg
import pytest

from mqlayer.outbox import rotate
from mqlayer.relay import relay_once
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.partition_values import fall_back, set_states, snapshot
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(relayed=20)


@pytest.fixture
def old_slot(world: World) -> int:
    """The slot of half an hour ago, into which all rows are put."""
    return age(world)


def age(world: World) -> int:
    """Put all rows into the slot of half an hour ago; return it."""
    (slot,) = world.rows("SELECT (floor(date_part('epoch', clock_timestamp()) / 900)::bigint + 2) & 3")[0]
    world.rows("UPDATE mqlayer_app.outbox SET slot = %s", slot)
    return int(slot)


def relayed_count(world: World) -> int:
    """Return how many messages are recorded as relayed."""
    return int(world.rows("SELECT coalesce(sum(seq), 0) FROM mqlayer_app.relayed")[0][0])


def rotated(world: World) -> dict[int, str]:
    return dict(rotate(world.database))


def test_a_slot_whose_rows_are_relayed_and_old_is_emptied(world: World, old_slot: int) -> None:
    answers = rotated(world)
    assert answers[old_slot] == "emptied"
    assert sorted(answers.values()) == ["current", "current", "emptied", "empty"]
    assert world.published() == {}
    assert rotated(world)[old_slot] == "empty"


def test_a_slot_with_one_row_that_is_not_relayed_stays(world: World, old_slot: int) -> None:
    world.publish(1, tag="waiting")
    world.rows("UPDATE mqlayer_app.outbox SET slot = %s", old_slot)
    assert rotated(world)[old_slot] == "waiting"
    assert sum(map(len, world.published().values())) == 21


def test_rows_of_this_and_the_last_quarter_of_an_hour_stay(world: World) -> None:
    assert "emptied" not in rotated(world).values()
    assert sum(map(len, world.published().values())) == 20


@pytest.mark.parametrize("known", [-1, 77])
def test_nothing_is_emptied_before_an_outbox_that_may_lack_commits_is_recovered(
    world: World, old_slot: int, known: int
) -> None:
    """What nodes lost of it is not noted so far, and is to be sent again from these rows."""
    world.rows("UPDATE mqlayer_app.identity SET timeline = %s", known)
    assert rotated(world)[old_slot] == "waiting"
    world.rows("UPDATE mqlayer_app.identity SET timeline = 0")
    assert rotated(world)[old_slot] == "emptied"


def test_a_slot_that_an_open_transaction_wrote_to_stays_and_nobody_waits(world: World, old_slot: int) -> None:
    with kept_session(world.dsn) as writer:
        writer.execute("UPDATE mqlayer_app.outbox SET key = key WHERE slot = %s", (old_slot,))
        assert rotated(world)[old_slot] == "busy"
        writer.rollback()
    assert rotated(world)[old_slot] == "emptied"


def test_relaying_goes_on_after_rotation(world: World, old_slot: int) -> None:
    assert rotated(world)[old_slot] == "emptied"
    world.publish(10, tag="after")
    assert relay_once(world.settings(), limits=QUICK) == 10
    assert sum(map(len, world.relayed().values())) == 30


@pytest.mark.full
def test_what_redis_lost_keeps_its_slot_until_it_is_sent_again(world: World) -> None:
    """A node falls back and takes nothing for a while: the relay takes back what it had recorded as relayed."""
    before = snapshot(world)
    world.publish(20, tag="lost")
    relay_once(world.settings(), limits=QUICK)
    slot = age(world)
    assert relayed_count(world) == 40
    fall_back(world, before, state="sealed")
    with world.relay():
        wait_until(lambda: relayed_count(world) == 20, what="what was lost to be taken back")
        # The relay reads there: a slot that it holds just then is busy.
        wait_until(lambda: rotated(world)[slot] == "waiting", what="the slot to be looked at")
        set_states(world, "open")
        world.wait_until_whole()
        wait_until(lambda: relayed_count(world) == 40, what="it to be recorded again")
    assert rotated(world)[slot] == "emptied"


@pytest.mark.usefixtures("new_sessions")
def test_rotation_sees_what_was_committed_last_whatever_the_databases_isolation_is(world: World, old_slot: int) -> None:
    (name,) = world.rows("SELECT current_database()")[0]
    world.rows(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'")
    assert rotated(world)[old_slot] == "emptied"
    with psycopg.connect(world.dsn) as session, pytest.raises(psycopg.DatabaseError, match="READ COMMITTED"):
        session.execute("SELECT mqlayer_app.outbox_rotate_v1(0::smallint)")
