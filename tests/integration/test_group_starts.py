"""Where a new group starts in a topic whose partitions were split, merged and moved before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import redis

from mqlayer import App, Context, failpoints
from mqlayer.errors import InvalidInput, NodeNotArmed
from mqlayer.groups.group import Group, GroupSettings, ensure_group
from mqlayer.groups.start_positions import Start
from mqlayer.postgres.database import Database
from mqlayer.routes import retire_partitions
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import rearm_node
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.partition_values import fall_back, snapshot
from tests.proof.rounds import KEYS, ROUND, Seen, a_moment_between, of_tags, publish
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2, relay=True)


def split_first(world: World, database: Database, at: int) -> None:
    partition = next(row[0] for row in world.rows(
        "SELECT r.partition_id FROM mqlayer.route r JOIN mqlayer.topic t USING (topic_id, version) ORDER BY r.lp_from"
    ))  # fmt: skip
    split(runtime_of(database, world.key_prefix), "orders", partition, at=[at])


@contextmanager
def consuming(world: World, start: Start) -> Iterator[Seen]:
    """Run a new group from a start; what its handler sees, per key."""
    app = App(world.settings(lease_s=10.0))
    seen: Seen = defaultdict(list)

    @app.consumer("orders", group="late", start=start)
    def book(body: bytes, ctx: Context) -> None:
        seen[ctx.key or ""].append(body.decode())

    app.start()
    try:
        yield seen
    finally:
        app.stop()


def ensure(world: World, database: Database, start: Start, name: str = "late") -> Group:
    return ensure_group(
        runtime_of(database, world.key_prefix),
        RouteCache(database),
        topic="orders",
        name=name,
        settings=GroupSettings(start=start),
    )


def version_of(world: World) -> int:
    return int(world.rows("SELECT version FROM mqlayer.consumer_group WHERE name = 'late'")[0][0])


def test_earliest_replays_the_whole_lineage_in_order(world: World, database: Database) -> None:
    """Case 27."""
    publish(world, "a")
    split_first(world, database, 200)
    publish(world, "b")
    split_first(world, database, 100)
    publish(world, "c")
    with consuming(world, "earliest") as seen:
        wait_until(lambda: seen == of_tags("a", "b", "c"), what="all of the lineage")
        wait_until(lambda: version_of(world) == 3, what="the group to come to the newest version")


def test_latest_begins_in_the_newest_version_behind_all_that_there_is(world: World, database: Database) -> None:
    """Case 27."""
    publish(world, "a")
    split_first(world, database, 200)
    publish(world, "b")
    with consuming(world, "latest") as seen:
        assert version_of(world) == 2
        publish(world, "c")
        wait_until(lambda: sum(map(len, seen.values())) >= ROUND, what="the new messages")
        assert seen == of_tags("c")


@pytest.mark.full
def test_a_time_inside_a_version_begins_in_the_partitions_of_that_version(world: World, database: Database) -> None:
    """Case 27: inside version 2, with version 3 in force; version 1 counts as drained."""
    publish(world, "a")
    split_first(world, database, 200)
    publish(world, "b")
    at = a_moment_between()
    publish(world, "c")
    split_first(world, database, 100)
    publish(world, "d")
    with consuming(world, at.astimezone(timezone(timedelta(hours=5)))) as seen:
        wait_until(lambda: seen == of_tags("c", "d"), what="what was published since")
        wait_until(lambda: version_of(world) == 3, what="the group to come to the newest version")
    assert not world.rows("SELECT 1 FROM mqlayer.readable r JOIN mqlayer.partition p USING (partition_id) "
                          "WHERE p.state = 'sealed'")  # fmt: skip


def test_a_time_before_everything_is_the_earliest_start_and_one_to_come_the_latest(
    world: World, database: Database
) -> None:
    publish(world, "a")
    split_first(world, database, 200)
    publish(world, "b")
    with consuming(world, datetime(2001, 1, 1, tzinfo=UTC)) as seen:
        wait_until(lambda: seen == of_tags("a", "b"), what="everything")
    ensure(world, database, datetime.now(UTC) + timedelta(days=1), name="tomorrow")
    starts = world.rows(
        "SELECT s.start_offset > 1 FROM mqlayer.group_start s JOIN mqlayer.consumer_group g USING (group_id) "
        "JOIN mqlayer.partition p USING (partition_id) WHERE g.name = 'tomorrow' AND p.state = 'open'"
    )
    assert starts == [(True,)] * 3


def test_a_merge_of_a_drained_and_an_undrained_parent_begins_with_its_first_message(
    world: World, database: Database
) -> None:
    publish(world, "a")
    split_first(world, database, 200)
    at = a_moment_between()
    publish(world, "b")
    first, second = (row[0] for row in world.rows(
        "SELECT partition_id FROM mqlayer.partition WHERE state = 'open' ORDER BY lp_from LIMIT 2"
    ))  # fmt: skip
    merge(runtime_of(database, world.key_prefix), "orders", [first, second])
    publish(world, "c")
    with consuming(world, at) as seen:
        wait_until(lambda: seen == of_tags("b", "c"), what="what was published since")


@pytest.mark.parametrize("start", some_of([datetime(2026, 1, 1), "newest", 7], 9))  # noqa: DTZ001 - the point of it
def test_a_start_that_means_nothing_is_refused_before_anything_runs(world: World, start: Start) -> None:
    with pytest.raises(InvalidInput, match=r"time zone|a group starts at"):
        App(world.settings()).consumer("orders", group="late", start=start)
    assert not world.rows("SELECT 1 FROM mqlayer.consumer_group")


def test_a_retired_partition_is_behind_every_new_group(world: World, database: Database) -> None:
    publish(world, "a")
    split_first(world, database, 200)
    ensure(world, database, "latest", name="first")
    assert retire_partitions(runtime_of(database, world.key_prefix)) == [1]
    world.publish(KEYS, keys=KEYS, tag="b")
    with consuming(world, "earliest") as seen:
        wait_until(lambda: sum(map(len, seen.values())) > 0, what="what is kept")
        assert version_of(world) == 2


def test_a_partition_that_its_node_lost_is_no_empty_one(world: World, database: Database) -> None:
    """A missing meta means "refuse", never "new": the group would start with what it must not see."""
    publish(world, "a")
    redis.Redis.from_url(world.urls[0]).delete(f"{world.key_prefix}:{{1}}:meta")
    with pytest.raises(NodeNotArmed, match="partition 1 is gone"):
        ensure(world, database, "latest")


@pytest.mark.full
def test_where_a_group_starts_is_found_again_if_a_node_was_armed_in_between(
    world: World, database: Database, tmp_path: Path
) -> None:
    """It may have fallen back: the offset that was found is given out again, to a message that is new."""
    before, door = snapshot(world), tmp_path / "door"
    publish(world, "a")
    failpoints.arm("group.before_starts", f"mark:{door}-reached", occurrence=1)
    failpoints.arm("group.before_starts", f"wait:{door}", occurrence=1)
    with ThreadPoolExecutor(1) as pool:
        group = pool.submit(ensure, world, database, "latest")
        wait_until((tmp_path / "door-reached").exists, what="the group to know where it would start")
        fall_back(world, before)
        world.rows("UPDATE mqlayer.node SET armed_run_id = 'before'")
        for name in ("node-1", "node-2"):
            rearm_node(runtime_of(database, world.key_prefix), name)
        world.wait_until_whole()
        publish(world, "b")
        door.touch()
        assert group.result(30).state == "live"
    ends = world.rows("SELECT partition_id, start_offset - 1 FROM mqlayer.group_start ORDER BY partition_id")
    counts = Counter(record.partition for record in world.records())
    assert ends == sorted(counts.items())


def test_of_two_first_members_one_says_where_the_group_starts(world: World, database: Database, tmp_path: Path) -> None:
    """What they saw is not mixed: a split came between, and each has seen other partitions.

    Had both a say, the group would start at the parent's old end, take the parent for drained all the same, and begin
    behind what its successors hold.
    """
    publish(world, "a")
    doors = [tmp_path / "first", tmp_path / "second"]
    for number, door in enumerate(doors, start=1):
        failpoints.arm("group.before_starts", f"mark:{door}-reached", occurrence=number)
        failpoints.arm("group.before_starts", f"wait:{door}", occurrence=number)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ensure, world, database, "latest")
        wait_until((tmp_path / "first-reached").exists, what="one to know where it would start")
        publish(world, "b")
        split_first(world, database, 200)
        publish(world, "c")
        second = pool.submit(ensure, world, database, "latest")
        wait_until((tmp_path / "second-reached").exists, what="both to know where they would start")
        doors[0].touch()
        group = first.result(30)
        before = world.rows("SELECT * FROM mqlayer.group_start ORDER BY partition_id")
        doors[1].touch()
        assert second.result(30) == group
    assert world.rows("SELECT * FROM mqlayer.group_start ORDER BY partition_id") == before
    assert [row[1] for row in before] == [1, 2]
    assert not world.rows("SELECT 1 FROM mqlayer.drained")
