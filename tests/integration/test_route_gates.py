"""What groups see of split, merged and moved partitions, and when: cases 5, 7, 18 to 26, 28 to 30."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mqlayer import App, Context, MemberOptions, failpoints
from mqlayer.domain.routing import NodeId, lp_of
from mqlayer.errors import StoreUnavailable
from mqlayer.failpoints import FailpointHit
from mqlayer.groups import MemberSession, drained, join, raise_group_version
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Connection
from mqlayer.producing import Producer
from mqlayer.redis.keys import partition_keys
from mqlayer.routes import (
    apply_change,
    drain_progress,
    drop_change,
    finish_changes,
    plan_move,
    retire_partitions,
    route_history,
)
from mqlayer.runtime.route_cache import load_route
from mqlayer.topics import rearm_node
from tests.fixtures.consumers import Recorder
from tests.fixtures.gate_scenes import KEYS, GateScene
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import LEASE_S
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2)

# Publishing


def test_a_producer_with_an_old_route_finds_the_successors_and_keeps_order(gate_scene: GateScene) -> None:
    """Cases 5 and 7: what was queued behind a refused message isn't sent before it."""
    with Producer(gate_scene.world.settings(), name="direct") as producer:
        futures = [producer.send_async("orders", key=f"key-{n % KEYS}", body=b"%d" % (n // KEYS)) for n in range(400)]
        one, other = gate_scene.split(1, 100)
        futures += [
            producer.send_async("orders", key=f"key-{n % KEYS}", body=b"%d" % (n // KEYS)) for n in range(400, 800)
        ]
        assert producer.flush(20) == 0
        receipts = [future.result(1) for future in futures]
    by_key: dict[str | None, list[str]] = {}
    for record in gate_scene.world.records():
        by_key.setdefault(record.key, []).append(record.value)
    assert by_key == {f"key-{key}": [str(n) for n in range(800 // KEYS)] for key in range(KEYS)}
    assert {int(receipt.partition) for receipt in receipts[400:]} <= {one, other, 2}


def test_a_parent_on_a_node_that_is_away_leaves_the_others_open(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    """Publishing to a healthy partition must not wait for a node that has nothing to do with it."""
    away = start_redis()
    world = World(database_dsn, key_prefix, [redis_url, away.url])
    world.add_topic("orders", partitions=2)
    scene = GateScene(world)
    away.kill()
    with pytest.raises(StoreUnavailable):
        scene.merge(1, 2)
    assert scene.client(1).hget(partition_keys(key_prefix, 1).meta, "state") == b"open"
    away.start()
    rearm_node(runtime_of(world.database, key_prefix), "node-2")
    assert finish_changes(runtime_of(world.database, key_prefix)) == {1: "done"}
    member = scene.member()
    scene.publish()
    member.consume_all()
    assert member.bodies() == scene.expected()


# Gates


def test_a_child_is_invisible_until_everything_before_the_command_is_settled(gate_scene: GateScene) -> None:
    """Case 20."""
    member = gate_scene.member()
    gate_scene.publish()
    children = gate_scene.split(1, 100)
    gate_scene.publish()
    assert set(member.assigned()) == {1, 2}
    records, command = member.position(1)
    assert command is not None
    assert member.consume(1, len(records) - 1) == len(records) - 1
    assert set(member.assigned()) == {1, 2}
    assert member.consume(1) == 1
    assert set(member.assigned()) == {2, *children}
    member.consume_all()
    assert member.bodies() == gate_scene.expected()


def test_a_failing_head_on_the_parent_holds_the_child_and_nobody_else(gate_scene: GateScene) -> None:
    """Cases 20, 21 and 30: the parent's other keys and the other partition go on; the child waits for the head."""
    blocked = next(f"key-{key}" for key in range(KEYS) if lp_of(f"key-{key}".encode()) < 512)
    heal = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == blocked and not heal.is_set():
            raise RuntimeError("planted")

    recorder = Recorder(act)
    app = App(gate_scene.world.settings(lease_s=10.0))
    app.consumer("orders", group="ledger", backoff_s=(0.05,), policy="block", options=MemberOptions(concurrency=4))(
        recorder
    )
    app.start()
    try:
        gate_scene.publish(5)
        children = gate_scene.split(1, 100)
        gate_scene.publish(5)
        far = [f"key-{key}" for key in range(KEYS) if lp_of(f"key-{key}".encode()) >= 512]
        near = [f"key-{key}" for key in range(KEYS) if lp_of(f"key-{key}".encode()) < 512 and f"key-{key}" != blocked]
        wait_until(lambda: all(len(recorder.bodies(key)) == 10 for key in far), what="the other partition goes on")
        wait_until(lambda: all(len(recorder.bodies(key)) == 5 for key in near), what="the parent's other keys go on")
        tries = len(recorder.attempts(b"0"))
        wait_until(lambda: len(recorder.attempts(b"0")) > tries + 3, what="the head to be tried again")
        assert not {handled.partition for handled in recorder.begun} & set(children)
        heal.set()
        wait_until(lambda: recorder.count() == 10 * KEYS, timeout_s=20, what="everything to be handled")
    finally:
        heal.set()
        app.stop()
    recorder.assert_in_order()


def test_untouched_partitions_go_on_while_another_drains(gate_scene: GateScene) -> None:
    """Case 21."""
    member = gate_scene.member()
    gate_scene.publish()
    gate_scene.split(1, 100)
    before = member.assigned()[2]
    gate_scene.publish()
    assert member.consume(2) > 0
    assert member.assigned()[2] == before


@pytest.mark.parametrize("first", some_of([0, 1], 2))
def test_a_merged_partition_is_invisible_until_both_parents_are_drained(gate_scene: GateScene, first: int) -> None:
    """Case 22: whichever is drained first."""
    member = gate_scene.member()
    gate_scene.publish()
    (child,) = gate_scene.merge(1, 2)
    gate_scene.publish()
    order = [1, 2] if first == 0 else [2, 1]
    member.consume(order[0])
    assert set(member.assigned()) == {order[1]}
    assert member.version == 1
    member.consume(order[1])
    assert set(member.assigned()) == {child}
    assert member.version == 2
    member.consume_all()
    assert member.bodies() == gate_scene.expected()


def test_nothing_of_a_moved_partition_is_handled_before_the_last_of_its_parent(gate_scene: GateScene) -> None:
    """Case 23."""
    member = gate_scene.member()
    gate_scene.publish()
    (child,) = gate_scene.move(1)
    gate_scene.publish()
    places = gate_scene.world.rows("SELECT node_id FROM mqlayer.partition WHERE partition_id IN (1, %s)", child)
    assert places[0] != places[1]
    assert child not in member.assigned()
    member.consume(1, report=False)
    assert child not in member.assigned()
    member.consume(1)
    assert child in member.assigned()
    member.consume_all()
    assert member.bodies() == gate_scene.expected()


def test_an_empty_partition_is_drained_by_its_command_alone(gate_scene: GateScene) -> None:
    member = gate_scene.member()
    children = gate_scene.split(1, 100)
    assert member.consume(1) == 0
    assert set(member.assigned()) == {2, *children}


@pytest.mark.full
def test_the_command_is_neither_handled_nor_counted(gate_scene: GateScene) -> None:
    """Case 19."""
    manual = gate_scene.member("by-hand")
    gate_scene.publish()
    children = gate_scene.split(1, 100)
    (moved,) = gate_scene.move(2)
    sealed = len(manual.position(1)[0])
    left = {
        (p.group, p.partition): p.remaining
        for p in drain_progress(runtime_of(gate_scene.database, gate_scene.world.key_prefix), "orders")
    }
    assert left["by-hand", 1] == sealed
    manual.consume(1, report=False)
    left = {
        (p.group, p.partition): p.remaining
        for p in drain_progress(runtime_of(gate_scene.database, gate_scene.world.key_prefix), "orders")
    }
    assert left["by-hand", 1] == 0

    recorder = Recorder()
    app = App(gate_scene.world.settings(lease_s=10.0))
    app.consumer("orders", group="ledger")(recorder)
    app.start()
    (member,) = app.members
    try:
        wait_until(lambda: set(member.owned()) == {*children, moved}, timeout_s=20, what="the parents to be drained")
    finally:
        app.stop()
    assert sorted(h.body for h in recorder.begun) == sorted(b"%d" % n for n in range(3) for _ in range(KEYS))
    assert member.stats.settled == 3 * KEYS
    groups = {p.group for p in drain_progress(runtime_of(gate_scene.database, gate_scene.world.key_prefix), "orders")}
    assert groups == {"by-hand"}


def test_a_group_without_members_during_a_change_keeps_order(gate_scene: GateScene) -> None:
    """Case 29."""
    first = gate_scene.member()
    gate_scene.publish()
    first.consume(1, 5)
    gate_scene.world.rows("UPDATE mqlayer.member SET lease_until = now() - interval '1 s'")
    one, other = gate_scene.split(1, 100)
    gate_scene.publish()
    (merged,) = gate_scene.merge(one, other)
    gate_scene.publish()
    recorder = Recorder()
    app = App(gate_scene.world.settings(lease_s=10.0))
    app.consumer("orders", group="ledger")(recorder)
    app.start()
    try:
        wait_until(lambda: recorder.count() == 9 * KEYS - 5, timeout_s=20, what="everything to be handled")
    finally:
        app.stop()
    recorder.assert_in_order()
    assert {h.partition for h in recorder.begun} == {1, 2, one, other, merged}


# Versions


def test_group_versions_go_up_one_by_one_whatever_is_drained_first(gate_scene: GateScene) -> None:
    """Case 24: the command of v3 is reached before that of v2; partitions whose own parents are drained go on."""
    member = gate_scene.member()
    gate_scene.publish()
    one, _ = gate_scene.split(1, 100)
    (moved,) = gate_scene.move(2)
    gate_scene.publish()
    grandchildren = gate_scene.split(one, 50)
    gate_scene.publish()
    member.consume(2)
    assert member.version == 1
    assert moved in member.assigned()
    assert member.consume(moved) > 0
    gate_scene.world.rows(
        "CREATE TABLE public.version_seen (position serial, version int); "
        "CREATE FUNCTION note_version() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF new.version <> old.version THEN "
        "INSERT INTO public.version_seen (version) VALUES (new.version); END IF; RETURN new; END $$; "
        "CREATE TRIGGER note AFTER UPDATE ON mqlayer.consumer_group FOR EACH ROW EXECUTE FUNCTION note_version()"
    )
    member.consume(1)
    member.consume(one)
    seen = [row[0] for row in gate_scene.world.rows("SELECT version FROM public.version_seen ORDER BY position")]
    assert seen == [2, 3, 4]
    assert set(grandchildren) <= set(member.assigned())
    member.consume_all()
    assert member.bodies() == gate_scene.expected()


def test_of_two_that_raise_a_groups_version_at_once_one_does(gate_scene: GateScene) -> None:
    """Case 25."""
    member = gate_scene.member()
    gate_scene.split(1, 100)
    gate_scene.world.rows("INSERT INTO mqlayer.drained (group_id, partition_id) VALUES (%s, 1)", member.group_id)
    together = threading.Barrier(2)

    def raise_it() -> int:
        def work(connection: Connection) -> int:
            together.wait(10)
            return raise_group_version(connection, member.group_id)

        return gate_scene.database.transaction(work)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(raise_it) for _ in range(2)]
        assert [end.result(20) for end in ends] == [2, 2]
    assert member.version == 2


def test_a_partition_drained_while_its_change_is_put_in_force_raises_the_version(
    gate_scene: GateScene, tmp_path: Path
) -> None:
    """Case 24, nothing sticks: neither transaction sees the other's half, so they have to go one after the other."""
    member = gate_scene.member()
    gate_scene.publish()
    go_on, reached = tmp_path / "go", tmp_path / "reached"
    failpoints.arm("change.before_done_commit", f"mark:{reached}")
    failpoints.arm("change.before_done_commit", f"wait:{go_on}")
    with ThreadPoolExecutor(2) as pool:
        driving = pool.submit(gate_scene.split, 1, 100)
        wait_until(reached.exists, what="the driver to be about to commit")
        draining = pool.submit(member.consume, 1)
        wait_until(
            lambda: draining.done() or _waits_for_a_lock(gate_scene.world), what="the group to have drained, or to wait"
        )
        go_on.touch()
        driving.result(20)
        draining.result(20)
    assert member.version == 2


def test_a_slow_group_does_not_hold_a_fast_one(gate_scene: GateScene) -> None:
    """Case 26."""
    slow, fast = gate_scene.member("slow"), gate_scene.member("fast")
    gate_scene.publish()
    one, other = gate_scene.split(1, 100)
    gate_scene.publish()
    (merged,) = gate_scene.merge(one, other)
    (moved,) = gate_scene.move(2)
    gate_scene.publish()
    fast.consume_all()
    assert (fast.version, slow.version) == (4, 1)
    assert set(fast.assigned()) == {merged, moved}
    assert set(slow.assigned()) == {1, 2}
    assert fast.bodies() == gate_scene.expected()
    slow.consume_all()
    assert slow.version == 4
    assert slow.bodies() == gate_scene.expected()


# The end of partitions


def test_a_sealed_partition_stays_until_every_group_passed_its_command(gate_scene: GateScene) -> None:
    """Case 28: neither trimmed nor retired before; a retired group doesn't hold it."""
    slow, fast = gate_scene.member("slow"), gate_scene.member("fast")
    gate_scene.publish(20)
    gate_scene.split(1, 100)
    log = partition_keys(gate_scene.world.key_prefix, 1).log
    length = gate_scene.client(1).xlen(log)
    fast.consume_all()
    slow.consume(1, 10)
    trim_pass(runtime_of(gate_scene.database, gate_scene.world.key_prefix))
    kept: Any = gate_scene.client(1).xlen(log)
    assert kept >= int(str(length)) - 10
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == []
    slow.consume(1, report=False)
    trim_pass(runtime_of(gate_scene.database, gate_scene.world.key_prefix))
    assert slow.position(1)[1] is not None, "the command is trimmed only with its partition"
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == []
    gate_scene.world.rows("UPDATE mqlayer.consumer_group SET state = 'retired' WHERE name = 'slow'")
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == [1]
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == []
    assert gate_scene.states()[1] == "deleted"
    assert gate_scene.client(1).keys(f"{gate_scene.world.key_prefix}:{{1}}:*") == [
        partition_keys(gate_scene.world.key_prefix, 1).meta
    ]
    gate_scene.publish()
    fast.consume_all()
    assert fast.bodies() == gate_scene.expected()


def test_a_topic_without_groups_retires_nothing(gate_scene: GateScene) -> None:
    gate_scene.publish()
    gate_scene.split(1, 100)
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == []
    member = gate_scene.member()
    member.consume_all()
    assert member.bodies() == gate_scene.expected()


def test_a_group_that_begins_after_a_parent_is_gone_reads_what_is_left(gate_scene: GateScene) -> None:
    """Case 27, as far as records are retained."""
    first = gate_scene.member()
    gate_scene.publish()
    gate_scene.split(1, 100)
    gate_scene.publish()
    first.consume_all()
    assert retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix)) == [1]
    later = gate_scene.member("later")
    later.consume_all()
    near = {key: bodies for key, bodies in later.bodies().items() if lp_of(key.encode()) < 512}
    assert all(bodies == ["3", "4", "5"] for bodies in near.values())
    assert later.version == 2


@pytest.mark.parametrize("start", some_of(["earliest", "latest"], 2))
def test_a_group_begins_anywhere_in_a_lineage(gate_scene: GateScene, start: Any) -> None:
    """Case 27."""
    gate_scene.publish()
    one, other = gate_scene.split(1, 100)
    gate_scene.publish()
    (merged,) = gate_scene.merge(one, other)
    gate_scene.publish()
    member = gate_scene.member(start=start)
    if start == "latest":
        assert member.version == 3
        assert set(member.assigned()) == {2, merged}
    member.consume_all()
    gate_scene.publish()
    member.consume_all()
    assert member.version == 3
    expected = gate_scene.expected()
    if start == "latest":
        expected = {key: bodies[9:] for key, bodies in expected.items()}
    assert member.bodies() == expected


@pytest.mark.full
def test_a_group_that_begins_at_a_time_begins_in_the_partitions_of_that_time(gate_scene: GateScene) -> None:
    """Case 27: what lies before counts as drained, what follows comes along the lineage."""
    gate_scene.publish()
    one, other = gate_scene.split(1, 100)
    # Records bear the publishers' time in whole milliseconds.
    gate_scene.world.rows("SELECT pg_sleep(0.01)")
    since = datetime.now(UTC)
    gate_scene.world.rows("SELECT pg_sleep(0.01)")
    gate_scene.publish()
    gate_scene.merge(one, other)
    gate_scene.publish()
    member = gate_scene.member(start=since)
    assert member.version == 2
    assert set(member.assigned()) == {2, one, other}
    member.consume_all()
    assert member.bodies() == {key: bodies[3:] for key, bodies in gate_scene.expected().items()}
    assert member.version == 3


def test_partition_ids_are_never_used_again(gate_scene: GateScene) -> None:
    """Case 18: not those of a dropped change, nor those of retired partitions."""
    member = gate_scene.member()
    seen = set(gate_scene.in_force())
    plan = plan_move(load_route(gate_scene.database, "orders"), 1, NodeId(2))
    failpoints.arm("change.after_plan", "raise")
    with pytest.raises(FailpointHit):
        apply_change(runtime_of(gate_scene.database, gate_scene.world.key_prefix), plan)
    drop_change(runtime_of(gate_scene.database), "orders")
    dropped = set(gate_scene.states()) - seen
    assert len(dropped) == 1
    seen |= dropped
    for _ in range(3):
        new = gate_scene.move(gate_scene.in_force()[0])
        assert not set(new) & seen
        seen |= set(new)
        member.consume_all()
        retire_partitions(runtime_of(gate_scene.database, gate_scene.world.key_prefix))
    changes = route_history(gate_scene.database, "orders")
    assert [change.version for change in changes if change.state == "done"] == [2, 3, 4]
    assert {p for p, state in gate_scene.states().items() if state == "deleted"} >= dropped


# Who may open a gate


@pytest.mark.parametrize("wrong", some_of(["seal", "epoch", "session", "member", "nothing"], 9))
def test_only_the_owner_that_read_the_recorded_command_opens_the_gate(gate_scene: GateScene, wrong: str) -> None:
    """A zombie that read a command which was lost, or that is not the owner any more, is refused."""
    member = gate_scene.member()
    gate_scene.publish()
    children = gate_scene.split(1, 100)
    one = member.assigned()[1]
    command = member.position(1)[1]
    assert command is not None
    member.consume(1, report=False)
    session, seal_id = member.session, command.seal_id
    if wrong == "seal":
        seal_id = str(uuid.uuid4())
    elif wrong == "epoch":
        gate_scene.world.rows("UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch') WHERE partition_id = 1")
    elif wrong == "session":
        member.session = join(gate_scene.database, group_id=member.group_id, member_id=member.member, lease_s=LEASE_S)
        one = member.assigned()[1]
    elif wrong == "member":
        session = MemberSession(session.group_id, "somebody", session.session)
    taken = drained(gate_scene.database, session, one, seal_id)
    assert taken is (wrong == "nothing")
    assert (member.version == 2) is taken
    rows = gate_scene.world.rows(
        "SELECT partition_id FROM mqlayer.readable WHERE group_id = %s ORDER BY 1", member.group_id
    )
    assert [row[0] for row in rows] == ([2, *children] if taken else [1, 2])


def _waits_for_a_lock(world: World) -> bool:
    return world.rows(
        "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ) != [(0,)]
