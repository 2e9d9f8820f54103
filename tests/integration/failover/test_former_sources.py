"""An outbox that goes on under another source ends all former ones: nobody can prove or send again what was theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqlayer.errors import ConfigurationRefused
from mqlayer.outbox import adopt, renew
from mqlayer.postgres.database import Database
from mqlayer.relay import recover_now, relay_once
from mqlayer.routes import give_up_node
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.variants import some_of
from tests.proof.fall_back import lose_all
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

Act = Callable[[World, Database], None]

pytestmark = pytest.mark.world(nodes=2, relayed=40)


def relay(world: World) -> int:
    """Start a relay, and have it relay what waits."""
    return relay_once(world.settings(), limits=QUICK)


def recovered(world: World, database: Database) -> None:
    """Recover the outbox by hand, as after a promotion."""
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    assert recover_now(runtime_of(database, settings=world.settings(), application=database)) is not None


def adopted(_: World, database: Database) -> None:
    """Adopt the outbox."""
    adopt(database)


def live_sources(world: World) -> list[tuple[object, ...]]:
    """Return the outboxes whose sources are live, oldest first."""
    return world.rows("SELECT outbox_uuid FROM mqlayer.source WHERE closed_at IS NULL ORDER BY source_id")


def identity(world: World) -> list[tuple[object, ...]]:
    """Return which outbox it is now."""
    return world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")


@pytest.mark.parametrize(
    "acts",
    some_of(
        [[adopted], [adopted, adopted], [recovered, recovered], [recovered, adopted], [adopted, recovered, recovered]],
        9,
    ),
    ids=lambda acts: " ".join(act.__name__ for act in acts),
)
def test_one_source_is_live_whatever_was_done_before_a_relay_starts(
    world: World, database: Database, acts: list[Act]
) -> None:
    for act in acts:
        act(world, database)
    world.publish(10, tag="after")
    assert relay(world) == 10
    assert live_sources(world) == identity(world)


def test_a_copy_that_is_renewed_ends_nothing_of_its_original(world: World, database: Database) -> None:
    """Nor what its original went on in place of: that is the original's business."""
    adopt(database)
    relay(world)
    (original,) = live_sources(world)
    renew(database)
    world.publish(3, tag="own")
    assert relay(world) == 3
    assert live_sources(world) == [original, *identity(world)]


@pytest.mark.full
def test_a_node_is_given_up_after_an_outbox_was_adopted(world: World, database: Database, node: RedisServer) -> None:
    adopt(database)
    world.publish(20, tag="after")
    relay(world)
    node.kill()
    loss = give_up_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    assert loss.moved == (2,)
    assert 0 < loss.resent < 20
    assert relay(world) == loss.resent


@pytest.mark.parametrize("stale", some_of([False, True], 2), ids=["", "a former one opened late"])
def test_a_node_that_lost_what_a_former_source_sent_is_armed_again(
    world: World, database: Database, node: RedisServer, stale: bool
) -> None:
    """Its sealed partition is short of marks that nobody can restore: that is counted, and waited for by nobody."""
    split(runtime_of(database, world.key_prefix), "orders", 2, at=[768])
    of_the_sealed = sum(record.lp >= 512 for record in world.records())
    adopt(database)
    relay(world)
    lose_all(node)
    if stale:
        # As by a relay that was stopped between reading the identity and opening its source.
        world.rows("UPDATE mqlayer.source SET closed_at = NULL WHERE source_id = 1")
        recovered(world, database)
    rearm_node(runtime_of(database, world.key_prefix, application=database), "node-2")
    lost = world.rows("SELECT facts -> 'lost' FROM mqlayer.audit WHERE object = 'node-2' AND facts ? 'lost'")
    assert [facts for (facts,) in lost if facts] == [{"2": of_the_sealed}]


@pytest.mark.full
def test_a_former_primary_that_a_relay_is_started_on_is_refused(world: World, database: Database) -> None:
    """Under a source of its own all that it has would come again. If it is the one that is left, it is adopted."""
    ((before,),) = identity(world)
    recovered(world, database)
    assert relay(world) == 0
    ((since,),) = identity(world)
    world.rows("UPDATE mqlayer_app.identity SET outbox_uuid = %s", before)
    world.publish(5, tag="isolated")
    with pytest.raises(ConfigurationRefused, match="outbox adopt"):
        relay(world)
    # Also where it was recovered to a point in time, on a timeline of its own: nothing of it can be proven.
    world.rows("UPDATE mqlayer_app.identity SET timeline = 77")
    with pytest.raises(ConfigurationRefused, match="outbox adopt"):
        relay(world)
    assert live_sources(world) == [(since,)]
    adopt(database)
    assert relay(world) == 5
    assert live_sources(world) == identity(world)


def test_a_copy_that_is_renewed_beside_its_original_ends_nothing_of_it(world: World, database: Database) -> None:
    """Copied as files, it has the original's name of cluster and database."""
    ((original,),) = identity(world)
    renew(database)
    relay(world)
    assert [uuid for (uuid,) in live_sources(world)] == [original, identity(world)[0][0]]
