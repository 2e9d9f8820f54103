"""Sending a living group elsewhere: back over route changes, forward, under load, and with a crash in between."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import pairwise

import pytest

from mqlayer import App, Context
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.groups import SeekPlan, Start, apply_seek, drained, planned_seek
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Database
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Fenced, LockHolder, settle_command, settle_reply
from mqlayer.routes import drain_progress, retire_partitions
from mqlayer.runtime.route_cache import RouteCache, load_nodes
from mqlayer.topics import rearm_node
from tests.fixtures.commands import Commands
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.partition_values import Snapshot, fall_back, snapshot
from tests.proof.rounds import ROUND, Seen, a_moment_between, of_tags, publish
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2, partitions=1, relay=True)


def plan_of(world: World, database: Database, to: Start) -> SeekPlan:
    with closing(RouteCache(database)) as routes:
        return planned_seek(runtime_of(database, world.key_prefix), routes, topic="orders", name="ledger", to=to)


def seek(world: World, database: Database, to: Start, *, replay: bool = False) -> None:
    plan = plan_of(world, database, to)
    assert apply_seek(runtime_of(database, world.key_prefix, actor="a test"), plan, replay=replay) == []


def split_and_publish(world: World, database: Database) -> datetime:
    """Make a lineage: rounds a and b in partition 1, c in its successors; return a time between a and b."""
    publish(world, "a")
    at = a_moment_between()
    publish(world, "b")
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
    publish(world, "c")
    return at


@pytest.mark.full
def test_a_time_in_an_older_version_replays_from_there_and_fences_who_holds_newer_partitions(
    world: World, database: Database
) -> None:
    """Case 31."""
    at = split_and_publish(world, database)
    before = ManualMember(database, world.key_prefix, "orders")
    before.consume_all()
    assert before.bodies() == of_tags("a", "b", "c")
    held = before.assigned()
    assert sorted(held) == [2, 3]
    assert before.version == 2

    seek(world, database, at)

    again = ManualMember(database, world.key_prefix, "orders", member="again")
    assert again.version == 1
    assert world.rows("SELECT partition_id FROM mqlayer.readable") == [(1,)]
    # Who still holds a successor settles nothing, drains nothing, and applies no effect once somebody replays.
    for old in held.values():
        node = next(node for node in load_nodes(database) if node.node_id == old.node)
        with NodeConnection(node) as node_connection:
            holder = LockHolder(world.key_prefix, old.partition, before.group_id, "hand", old.epoch)
            answer = settle_reply(node_connection.call([settle_command(node_connection, holder, [(1, 1)])])[0], "")
            assert isinstance(answer, Fenced)
            assert answer.epoch >= old.epoch
        assert not drained(database, before.session, old, "00000000-0000-0000-0000-000000000000")
    (parent,) = before.assigned().values() or again.assigned().values()
    with kept_session(world.dsn) as connection:
        connection.execute("SELECT mqlayer_app.fence_raise_v1(%s, 0::smallint, 1024::smallint, %s)",
                           (before.group_id, parent.epoch))  # fmt: skip
        for old in held.values():
            answers = connection.execute(
                "SELECT answer FROM mqlayer_app.fence_v1(%s, %s::smallint, 1, 'k', 1, %s)",
                (before.group_id, old.lp_from, old.epoch),
            )
            assert answers.fetchone() == ("stale",)
        connection.rollback()
    before.handled.clear()
    while before.consume_all() + again.consume_all():
        pass
    assert in_order(before, again) == of_tags("b", "c")
    assert again.version == 2


def in_order(*hands: ManualMember) -> Seen:
    """Return what hands that never worked at the same time handled, by key and publishing order of one outbox."""
    handled = sorted((record for member in hands for record in member.handled), key=lambda record: record.identity.seq)
    found: Seen = defaultdict(list)
    for record in handled:
        found[record.key.decode()].append(record.body.decode())
    for member in hands:
        for key, bodies in member.bodies().items():
            assert bodies == [body for body in found[key] if body in bodies], "out of order"
    return dict(found)


@contextmanager
def consuming(world: World, *, fenced: bool = False) -> Iterator[tuple[Seen, Seen]]:
    """Run two members of the group; what is handled, and what of it was applied, by key."""
    handled: Seen = defaultdict(list)
    applied: Seen = defaultdict(list)
    lock = threading.Lock()

    def book(body: bytes, ctx: Context) -> None:
        with lock:
            handled[ctx.key or ""].append(body.decode())
        if fenced:
            with kept_session(world.dsn) as connection:
                ctx.fence(connection)
                with lock:
                    applied[ctx.key or ""].append(body.decode())

    apps = [App(world.settings(lease_s=3.0)) for _ in range(2)]
    for app in apps:
        app.consumer("orders", group="ledger")(book)
        app.start()
    try:
        yield handled, applied
    finally:
        for app in apps:
            app.stop()


def settled(world: World) -> bool:
    """Say whether the group has come to the newest version and consumes nothing older."""
    return world.rows(
        "SELECT g.version = t.version FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)"
    ) == [(True,)]


def test_running_members_replay_in_order_without_a_restart(world: World, database: Database) -> None:
    """Case 31, by members that run: each key's messages come again from the time on, in order, and once."""
    at = split_and_publish(world, database)
    with consuming(world) as (handled, _):
        wait_until(lambda: handled == of_tags("a", "b", "c"), what="all to be handled")
        wait_until(lambda: settled(world), what="the parent to be drained")
        seek(world, database, at)
        twice = {key: bodies + of_tags("b", "c")[key] for key, bodies in of_tags("a", "b", "c").items()}
        wait_until(lambda: sum(map(len, handled.values())) >= sum(map(len, twice.values())), what="the replay")
        assert handled == twice
        wait_until(lambda: settled(world), what="the parent to be drained again")
        publish(world, "d")
        wait_until(lambda: all(bodies[-1] == of_tags("d")[key][-1] for key, bodies in handled.items()),
                   what="the new messages")  # fmt: skip
        assert handled == {key: bodies + of_tags("d")[key] for key, bodies in twice.items()}


@pytest.mark.parametrize("replay", some_of([False, True], 2))
def test_fenced_effects_are_applied_again_only_where_that_is_said(
    world: World, database: Database, replay: bool
) -> None:
    split_and_publish(world, database)
    everything = of_tags("a", "b", "c")
    with consuming(world, fenced=True) as (handled, applied):
        wait_until(lambda: applied == everything, what="all to be applied")
        wait_until(lambda: settled(world), what="the parent to be drained")
        seek(world, database, "earliest", replay=replay)
        twice = {key: bodies * 2 for key, bodies in everything.items()}
        wait_until(lambda: sum(map(len, handled.values())) >= 2 * 3 * ROUND, what="the replay")
        publish(world, "d")
        wanted = {key: bodies + of_tags("d")[key] for key, bodies in (twice if replay else everything).items()}
        wait_until(lambda: sum(map(len, applied.values())) >= sum(map(len, wanted.values())), what="the effects")
        assert applied == wanted


@pytest.mark.full
def test_a_seek_without_replay_ends_an_earlier_replay(world: World, database: Database) -> None:
    """What lay before the place where the replay began was applied once, and is passed over."""
    publish(world, "a")
    at = a_moment_between()
    world.publish(1, keys=1, tag="b")
    world.wait_until_whole()
    with consuming(world, fenced=True) as (handled, applied):
        wait_until(lambda: count_of(applied) == ROUND + 1, what="all to be applied")
        seek(world, database, at, replay=True)
        wait_until(lambda: applied["key-0"][-2:] == ["b-0", "b-0"], what="the replay")
        seek(world, database, "earliest")
        wait_until(lambda: count_of(handled) == 2 * (ROUND + 1) + 1, what="all to be given again")
        publish(world, "c")
        wait_until(lambda: all(bodies[-1].startswith("c-") for bodies in applied.values()), what="the new messages")
        wait_until(lambda: count_of(handled) == 2 * (ROUND + 1) + 1 + ROUND, what="all that is new")
    once = of_tags("a", "c")
    once["key-0"][3:3] = ["b-0", "b-0"]
    assert applied == once


def count_of(seen: Seen) -> int:
    return sum(map(len, seen.values()))


def test_seeking_again_and_again_under_load_keeps_the_order_between_the_seeks(world: World, database: Database) -> None:
    """Each key's messages only ever go forward by one, but for the jumps back, of which there is one a seek at most."""
    seeks = 6
    with consuming(world) as (handled, _):
        for number in range(seeks):
            publish(world, f"{number}")
            if number == 2:
                split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
            seek(world, database, "earliest")
        publish(world, "last")
        wanted = of_tags(*map(str, range(seeks)), "last")
        wait_until(
            lambda: all(handled[key][-len(bodies) :] == bodies for key, bodies in wanted.items()), what="all in order"
        )
    for key, bodies in handled.items():
        places = [wanted[key].index(body) for body in bodies]
        jumps = [(one, next_one) for one, next_one in pairwise(places) if next_one != one + 1]
        assert len(jumps) <= seeks, (key, places)
        assert all(next_one == 0 for _, next_one in jumps), (key, places)


def test_latest_leaves_out_what_waits(world: World, database: Database) -> None:
    member = ManualMember(database, world.key_prefix, "orders")
    split_and_publish(world, database)
    seek(world, database, "latest")
    assert member.version == 2
    assert member.consume_all() == 0
    publish(world, "d")
    member.consume_all()
    assert member.bodies() == of_tags("d")


def test_what_is_to_be_given_again_is_not_trimmed_before_anybody_takes_it(world: World, database: Database) -> None:
    """Invariant 10: what was committed before a seek is void, also while no member has looked at it since."""
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume_all()
    seek(world, database, "earliest")
    assert trim_pass(runtime_of(database, world.key_prefix)).total == 0
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
    (progress,) = drain_progress(runtime_of(database, world.key_prefix), "orders")
    assert progress.remaining == ROUND
    member.handled.clear()
    member.consume_all()
    assert member.bodies() == of_tags("a")


@pytest.mark.full
@pytest.mark.parametrize("group", some_of(["ledger", "new"], 9))
def test_what_is_kept_of_a_lineage_has_no_hole(world: World, database: Database, group: str) -> None:
    """A successor is not trimmed while its parent is kept: a group that begins there would miss what lies between."""
    publish(world, "a")
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
    world.publish(600, keys=1, tag="b")
    world.wait_until_whole()
    ManualMember(database, world.key_prefix, "orders").consume_all()
    everything = of_tags("a")["key-0"] + [f"b-{number}" for number in range(600)]
    for retired in (False, True):
        assert bool(retired and retire_partitions(runtime_of(database, world.key_prefix))) == retired
        assert bool(trim_pass(runtime_of(database, world.key_prefix)).total) == retired
        if group == "ledger":
            seek(world, database, "earliest")
        member = ManualMember(
            database, world.key_prefix, "orders", group="ledger" if group == "ledger" else f"new-{int(retired)}"
        )
        member.consume_all()
        bodies = member.bodies().get("key-0", [])
        assert bodies == everything[len(everything) - len(bodies) :]
        assert retired or bodies == everything


def test_a_group_is_not_sent_back_to_what_is_being_retired(world: World, database: Database) -> None:
    """The pass looked before the seek, and is held up: the seek waits, or the partition would go while it is given."""
    split_and_publish(world, database)
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume_all()
    with kept_session(world.dsn) as other, ThreadPoolExecutor() as pool:
        other.execute("SELECT FROM mqlayer.partition WHERE partition_id = 1 FOR NO KEY UPDATE")
        retired = pool.submit(retire_partitions, runtime_of(database, world.key_prefix))
        wait_until(lambda: waiting(world) == 1, what="the pass to wait")
        sought = pool.submit(seek, world, database, "earliest")
        wait_until(lambda: waiting(world) == 2, what="the seek to wait")
        other.commit()
        assert retired.result() == [1]
        sought.result()
    member.handled.clear()
    member.consume_all()
    assert member.bodies() == of_tags("c")
    assert member.version == 2


def waiting(world: World) -> int:
    (row,) = world.rows("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND wait_event_type = 'Lock'")  # fmt: skip
    return int(row[0])


def fall_back_and_arm(world: World, database: Database, before: Snapshot) -> None:
    """Let the nodes hold what they held, as after a restart."""
    fall_back(world, before)
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'before'")
    for name in ("node-1", "node-2"):
        rearm_node(runtime_of(database, world.key_prefix), name)


def test_offsets_from_before_a_node_was_armed_again_are_refused(world: World, database: Database) -> None:
    """It may have fallen back: offsets of the plan are given out again, to messages that nobody has seen."""
    before = snapshot(world)
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    plan, back = plan_of(world, database, "latest"), plan_of(world, database, "earliest")
    fall_back_and_arm(world, database, before)
    publish(world, "b")
    with pytest.raises(Conflict, match="was armed again or given up in the meantime"):
        apply_seek(runtime_of(database, world.key_prefix, actor="a test"), plan)
    assert apply_seek(runtime_of(database, world.key_prefix, actor="a test"), back) == []
    member.consume_all()
    assert in_order(member) == of_tags("a", "b")


def test_a_plan_that_was_overtaken_is_refused_and_changes_nothing(world: World, database: Database) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    old = plan_of(world, database, "earliest")
    seek(world, database, "latest")
    before = state(world)
    with pytest.raises(Conflict, match="was sent elsewhere in the meantime"):
        apply_seek(runtime_of(database, world.key_prefix, actor="a test"), old)
    assert state(world) == before
    assert member.consume_all() == 0


def state(world: World) -> list[tuple[object, ...]]:
    return [
        *world.rows("SELECT version, seek, replay, allocation FROM mqlayer.consumer_group"),
        *world.rows("SELECT partition_id, start_offset FROM mqlayer.group_start ORDER BY 1"),
        *world.rows("SELECT partition_id FROM mqlayer.drained ORDER BY 1"),
        *world.rows("SELECT partition_id, member_id, epoch FROM mqlayer.assignment ORDER BY 1"),
        *world.rows("SELECT act, object, facts FROM mqlayer.audit ORDER BY audit_id"),
    ]


@pytest.mark.parametrize("place", some_of(["seek.before_commit", "seek.after_commit"], 2))
def test_a_seek_that_is_killed_is_done_or_not_at_all(world: World, database: Database, place: str) -> None:
    """Between the two there is nothing; who held a partition is fenced by its next owner's taking."""
    split_and_publish(world, database)
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume_all()
    before = state(world)
    words = ("group", "seek", "orders", "ledger", "--to", "earliest", "--yes")
    facts = {"MQLAYER_DSN": world.dsn, "MQLAYER_KEY_PREFIX": world.key_prefix}
    done = ask_python("mqlayer", *words, env=os.environ | facts | armed(f"{place}=kill"))
    assert done.returncode == -9, done.stderr
    member.handled.clear()
    if place == "seek.before_commit":
        assert state(world) == before
        assert member.consume_all() == 0
    else:
        assert state(world) != before
        member.consume_all()
        assert member.bodies() == of_tags("a", "b", "c")


def test_what_makes_no_sense_is_refused(world: World, database: Database) -> None:
    with pytest.raises(NotFound, match="orders/ledger"):
        plan_of(world, database, "earliest")
    ManualMember(database, world.key_prefix, "orders")
    with pytest.raises(InvalidInput, match="no time zone"):
        plan_of(world, database, datetime(2026, 1, 1))  # noqa: DTZ001 - the point of it
    world.rows("UPDATE mqlayer.consumer_group SET state = 'creating'")
    with pytest.raises(Conflict, match="is creating, not live"):
        plan_of(world, database, "earliest")


def test_the_command_prints_its_plan_and_applies_it(
    run: Commands, empty_database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    run.text("migrate")
    world = World(empty_database_dsn, key_prefix, [redis_url])
    run.text("topic", "create", "orders", "--partitions", "2")
    with world.relay():
        publish(world, "a")
    member = ManualMember(world.database, key_prefix, "orders")
    member.consume_all()
    words = ("group", "seek", "orders", "ledger", "--to", "earliest")
    assert run.text(*words).splitlines() == [
        "seek of group ledger of topic orders; fenced effects that were applied are passed over",
        "  partition 1, LPs [0, 512): from offset 1",
        "  partition 2, LPs [512, 1024): from offset 1",
        "nothing was changed: --yes does this",
    ]
    assert member.consume_all() == 0
    said = run.text(*words, "--replay", "--yes").splitlines()
    assert said[0] == "seek of group ledger of topic orders; fenced effects are applied again"
    assert said[-1] == "group ledger of topic orders goes on from there"
    assert member.consume_all() == ROUND
    assert "no place to go" in run.failure("group", "seek", "orders", "ledger", "--to", "yesterday")
    assert "no time zone" in run.failure("group", "seek", "orders", "ledger", "--to", "2026-11-21T09:30:00")
    assert "choose one" in run.failure(*words, "--plan", "--yes")
    (row,) = world.rows("SELECT facts FROM mqlayer.audit WHERE act = 'group seek' AND object = 'orders/ledger'")
    assert row[0] == {"to": "earliest", "replay": True}
