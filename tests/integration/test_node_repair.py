"""Nodes that lose what a route change had done: re-arming brings it to what Postgres says, and order is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from mqlayer import failpoints
from mqlayer.domain.routing import lp_of
from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.failpoints import FailpointHit
from mqlayer.groups import drained
from mqlayer.producing import Producer
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.routes import change_driver, finish_changes
from mqlayer.stack import RedisServer
from mqlayer.topics import nodes, outbox_resend, partition_refill, rearm_node, set_node_address
from mqlayer.topics.outbox_access import borrow_outbox
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.fall_back import FallBack, lose_all
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

KEYS = 20
NEAR = next(f"key-{n}" for n in range(100) if lp_of(f"key-{n}".encode()) < 100)


class Scene(World):
    """One node that loses data, a topic of two partitions, a group."""

    def bring(self, count: int, tag: str, *, keys: int = KEYS) -> None:
        """Publish, and wait until the partitions hold it."""
        with self.relay():
            self.publish(count, keys=keys, tag=tag)
            self.wait_until_whole()

    def split(self, at: int = 100) -> None:
        """Split partition 1."""
        split(runtime_of(self.database, self.key_prefix), "orders", 1, at=[at])

    def member(self) -> ManualMember:
        """Join the group."""
        return ManualMember(self.database, self.key_prefix, "orders")

    def rearm(self, *, outbox: bool = True, **options: Any) -> int:
        """Arm the node as a worker does that can read the outbox, or can't."""
        here = runtime_of(self.database, self.key_prefix, application=self.database if outbox else None)
        return rearm_node(here, "node-1", **options)[1]

    def seal_id(self, partition: int = 1) -> str:
        """Return the recorded seal of a partition."""
        return str(self.rows("SELECT seal_id FROM mqlayer.seal WHERE partition_id = %s", partition)[0][0])

    def meta(self, partition: int) -> dict[str, str]:
        """Return what Redis says of a partition."""
        with redis.Redis.from_url(self.urls[0], decode_responses=True) as client:
            found: Any = client.hgetall(f"{self.key_prefix}:{{{partition}}}:meta")
            return dict(found)

    def audited(self) -> dict[str, Any]:
        """Return what the last audit row says."""
        facts = self.rows("SELECT facts FROM mqlayer.audit ORDER BY audit_id DESC LIMIT 1")[0][0]
        return dict(facts)

    def judge(self, member: ManualMember) -> None:
        """Every key was handled in the order of its commits, repeats aside, and to the end."""
        expected: dict[str, list[str]] = {}
        for chain in self.published().values():
            for _, key, body in chain:
                expected.setdefault(str(key), []).append(body)
        assert {key: list(dict.fromkeys(bodies)) for key, bodies in member.bodies().items()} == expected


@pytest.fixture
def scene(database_dsn: str, node: RedisServer, key_prefix: str) -> Scene:
    scene = Scene(database_dsn, key_prefix, [node.url])
    scene.add_topic("orders", partitions=2)
    return scene


def test_a_node_that_fell_back_behind_a_recorded_seal_is_filled_up_and_sealed_anew(
    scene: Scene, node: RedisServer, tmp_path: Path
) -> None:
    member = scene.member()
    scene.bring(100, "a")
    then = FallBack(node, tmp_path / "then")
    scene.bring(100, "b")
    scene.split()
    scene.bring(100, "c")
    member.consume(1, 30)
    old, command = member.assigned()[1], member.position(1)[1]
    seal_id = scene.seal_id()
    assert command is not None
    assert command.seal_id == seal_id
    then.happen()
    assert scene.rearm() > 0
    assert scene.seal_id() != seal_id
    assert scene.meta(1)["seal"] == scene.seal_id()
    assert {p: scene.meta(p)["state"] for p in (1, 2, 3, 4)} == {1: "sealed", 2: "open", 3: "open", 4: "open"}
    # Whoever read the command that was lost can't open the gate, under whatever epoch.
    assert not drained(scene.database, member.session, old, seal_id)
    assert not drained(scene.database, member.session, member.assigned()[1], seal_id)
    scene.bring(100, "d")
    assert member.consume(1) > 0
    member.consume_all()
    assert member.version == 2
    scene.judge(member)
    assert scene.rearm() == 0, "what is right is left as it is"


def test_a_node_that_lost_everything_gets_parents_and_successors_again(scene: Scene, node: RedisServer) -> None:
    member = scene.member()
    scene.bring(100, "a")
    scene.split()
    scene.bring(100, "b")
    merge(runtime_of(scene.database, scene.key_prefix), "orders", [3, 4])
    scene.bring(100, "c")
    member.consume(1, 10)
    lose_all(node)
    scene.rearm()
    audited = scene.audited()
    assert audited["partitions_remade"] == [1, 2, 3, 4, 5]
    assert audited["opened"] == [3, 4, 5]
    assert audited["sealed"] == [1, 3, 4]
    assert audited["lost"] == {}
    scene.bring(100, "d")
    member.consume_all()
    assert member.version == 3
    scene.judge(member)


@pytest.mark.full
def test_a_sealed_partition_is_not_seen_open_while_an_emptied_node_gets_it_again(
    scene: Scene, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the same, and lines to it are open: what they append would be in it, and in its successor."""
    member = scene.member()
    scene.bring(200, "a")
    scene.split()
    scene.bring(50, "b")
    states: list[str] = []
    plain = NodeConnection.call

    def call(line: NodeConnection, commands: Any) -> list[Any]:
        replies = plain(line, commands)
        states.append(scene.meta(1).get("state", ""))
        return replies

    with redis.Redis.from_url(node.url) as client:
        client.flushall()
    monkeypatch.setattr(NodeConnection, "call", call)
    scene.rearm()
    monkeypatch.undo()
    assert set(states) <= {"", "importing", "sealed"}
    assert states.count("sealed") > 1
    with scene.relay():
        scene.wait_until_whole()
    member.consume_all()
    scene.judge(member)


def empty_before(
    monkeypatch: pytest.MonkeyPatch, node: RedisServer, step: str, then: Callable[[], object] = lambda: None
) -> None:
    """Empty the node once, before a driver does a part of a step, and do something more."""
    plain = getattr(change_driver.ChangeDriver, step)

    def emptied(driver: Any, *facts: Any) -> None:
        monkeypatch.undo()
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
        then()
        plain(driver, *facts)

    monkeypatch.setattr(change_driver.ChangeDriver, step, emptied)


def test_a_seal_that_an_emptied_node_lost_is_not_recorded(
    scene: Scene, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is emptied and made again between the seal and the look at its run, which is the same."""
    scene.bring(100, "a")
    empty_before(monkeypatch, node, "_still_armed", scene.rearm)
    with pytest.raises(StoreUnavailable, match="not there any more"):
        scene.split()
    assert scene.meta(1)["state"] == "open"
    finish_changes(runtime_of(scene.database, scene.key_prefix, application=scene.database), topic="orders")
    assert scene.meta(1)["seal"] == scene.seal_id()
    scene.bring(50, "b")


def test_a_successor_that_an_emptied_node_lost_is_made_again_by_arming_it(
    scene: Scene, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been open, and consumed: under the epochs of before an old ack would pass."""
    scene.bring(100, "a")
    empty_before(monkeypatch, node, "_hand_over_ids")
    split(runtime_of(scene.database, scene.key_prefix, application=scene.database), "orders", 1, at=[100])
    assert scene.audited()["partitions_remade"] == [1, 2, 3, 4]
    assert {partition: scene.meta(partition)["state"] for partition in (3, 4)} == {3: "open", 4: "open"}
    scene.bring(50, "b")


def test_a_relay_mends_a_node_that_lost_everything(scene: Scene, node: RedisServer) -> None:
    member = scene.member()
    scene.bring(100, "a")
    scene.split()
    with scene.relay():
        scene.publish(100, keys=KEYS, tag="b")
        scene.wait_until_whole()
        lose_all(node)
        scene.wait_until_whole()
    member.consume_all()
    scene.judge(member)


def test_filling_up_takes_its_time_and_keeps_its_locks(
    scene: Scene, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that seems to get stuck is ended: who is stopped while arming must not keep others from it."""
    scene.bring(20, "a")
    scene.split()
    plain = partition_refill.PartitionRefill._append

    def append(refill: partition_refill.PartitionRefill, *args: Any) -> str:
        threading.Event().wait(0.1)
        return plain(refill, *args)

    monkeypatch.setattr(partition_refill.PartitionRefill, "_append", append)
    monkeypatch.setattr(partition_refill, "SEEN_EVERY_S", 0.0)
    monkeypatch.setattr(outbox_resend, "ROWS_PER_READ", 1)
    monkeypatch.setitem(nodes.TIMEOUTS, "idle", "500ms")

    def filled_up() -> bool:
        lose_all(node)
        try:
            scene.rearm()
        except StoreUnavailable:
            # A machine that stands still between two rows ends it, too, but not each time.
            return False
        return True

    wait_until(filled_up, timeout_s=30, what="the node to be filled up")
    assert scene.meta(1)["seal"] == scene.seal_id()


@pytest.mark.full
@pytest.mark.parametrize(("size", "most"), some_of([(1, 1_000), (700, 1_000), (outbox_resend.BYTES_PER_READ, 3)], 9))
def test_many_lps_are_filled_up_at_a_time_by_rows_and_by_bytes(
    scene: Scene, node: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    """Nobody is served by the node meanwhile: a round trip for each LP would be seconds."""
    member = scene.member()
    scene.bring(400, "a", keys=300)
    scene.split()
    lose_all(node)
    appends: list[int] = []
    plain = partition_refill.PartitionRefill._append

    def append(refill: partition_refill.PartitionRefill, wanted: Any, seal_id: str, source: int, runs: Any) -> str:
        appends.append(len(runs))
        return plain(refill, wanted, seal_id, source, runs)

    monkeypatch.setattr(partition_refill.PartitionRefill, "_append", append)
    monkeypatch.setattr(outbox_resend, "BYTES_PER_READ", size)
    scene.rearm()
    assert 0 < len(appends) <= most
    scene.bring(50, "b")
    member.consume_all()
    scene.judge(member)


def test_without_the_outbox_a_sealed_partition_waits_for_who_can_read_it(scene: Scene, node: RedisServer) -> None:
    scene.bring(100, "a")
    scene.split()
    lose_all(node)
    with pytest.raises(StoreUnavailable, match="waits for the relay of outbox"):
        scene.rearm(outbox=False)
    scene.rearm()
    assert scene.meta(1)["state"] == "sealed"


def test_another_outbox_fills_nothing_up_and_gives_nothing_up(scene: Scene, node: RedisServer) -> None:
    scene.bring(100, "a")
    scene.split()
    scene.rows("DELETE FROM mqlayer_app.outbox WHERE lp >= 512 AND seq = 1")
    lose_all(node)
    ours = scene.rows("SELECT outbox_uuid FROM mqlayer_app.identity")[0][0]
    scene.rows("UPDATE mqlayer_app.identity SET outbox_uuid = gen_random_uuid()")
    with borrow_outbox(scene.database, ours) as outbox:
        assert outbox is None
    with pytest.raises(StoreUnavailable, match=f"waits for the relay of outbox {ours}"):
        scene.rearm(accept_loss=True)
    scene.rows("UPDATE mqlayer.partition SET state = 'deleted' WHERE partition_id = 1")
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {}
    scene.rows("UPDATE mqlayer_app.identity SET outbox_uuid = %s", ours)
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"].keys() == {"2"}


@pytest.mark.full
@pytest.mark.parametrize("broken", some_of(["repair.after_resend", "rearm.before_arm"], 2))
def test_where_groups_begin_goes_by_what_the_node_had_before_an_arming_that_broke_off(
    scene: Scene, node: RedisServer, tmp_path: Path, broken: str
) -> None:
    """That lies LP by LP at the offsets of before: what the group is owed may be in front of its start."""
    then = FallBack(node, tmp_path / "then")
    scene.bring(50, "a")
    member = ManualMember(scene.database, scene.key_prefix, "orders", start="latest")
    scene.bring(50, "b")
    scene.split()
    then.happen()
    failpoints.arm(broken, "raise")
    with pytest.raises(FailpointHit):
        scene.rearm()
    scene.rearm()
    scene.bring(50, "c")
    member.consume_all()
    handled = {body for bodies in member.bodies().values() for body in bodies}
    assert handled >= {f"{tag}-{number}" for tag in "bc" for number in range(50)}


@pytest.mark.parametrize("broken", some_of(["", "repair.after_seal", "repair.after_resend"], 9))
def test_direct_messages_that_are_lost_are_counted(
    scene: Scene, node: RedisServer, tmp_path: Path, broken: str
) -> None:
    """Also where whoever repaired the partition first did not come to record it."""
    member = scene.member()
    with Producer(scene.settings(), name="direct") as producer:
        producer.send("orders", key=NEAR, body=b"1")
        then = FallBack(node, tmp_path / "then")
        for body in (b"2", b"3", b"4"):
            producer.send("orders", key=NEAR, body=body)
        scene.split()
    then.happen()
    if broken:
        failpoints.arm(broken, "raise")
        with pytest.raises(FailpointHit):
            scene.rearm()
    scene.rearm()
    assert scene.audited()["lost"] == {"1": 3}
    with Producer(scene.settings(), name="direct") as producer:
        producer.send("orders", key=NEAR, body=b"5")
    member.consume_all()
    assert member.bodies() == {NEAR: ["1", "5"]}
    assert member.version == 2


@pytest.mark.parametrize(
    ("gone", "broken"),
    some_of(
        [
            ("the first", ""),
            ("the last", ""),
            ("the middle", ""),
            ("all", ""),
            ("the first", "repair.after_resend"),
            ("all", "repair.after_seal"),
        ],
        9,
    ),
)
def test_rows_that_the_outbox_does_not_hold_any_more_are_given_up_only_by_an_operators_word(
    scene: Scene, node: RedisServer, tmp_path: Path, gone: str, broken: str
) -> None:
    member = scene.member()
    with scene.relay():
        for number in range(2):
            _publish(scene, NEAR, number)
        scene.wait_until_whole()
    then = FallBack(node, tmp_path / "then")
    with scene.relay():
        for number in range(2, 6):
            _publish(scene, NEAR, number)
        scene.wait_until_whole()
    scene.split()
    first, last = {"the first": (3, 4), "the middle": (4, 5), "the last": (5, 6), "all": (3, 6)}[gone]
    scene.rows("DELETE FROM mqlayer_app.outbox WHERE seq BETWEEN %s AND %s", first, last)
    then.happen()
    with pytest.raises(Conflict, match="--accept-loss"):
        scene.rearm()
    with pytest.raises(Conflict, match="--accept-loss"):
        scene.rearm()
    if broken:
        failpoints.arm(broken, "raise")
        with pytest.raises(FailpointHit):
            scene.rearm(accept_loss=True)
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {"1": last - first + 1}
    with scene.relay():
        _publish(scene, NEAR, 6)
        wait_until(lambda: scene.relayed()["orders", lp_of(NEAR.encode())][-1][0] == 7, what="the next to be relayed")
    member.consume_all()
    kept = [str(number) for number in range(7) if not first <= number + 1 <= last]
    assert member.bodies() == {NEAR: kept}
    assert member.version == 2


@pytest.mark.full
def test_what_was_given_up_and_written_down_is_not_counted_by_a_later_mending(
    scene: Scene, node: RedisServer, tmp_path: Path
) -> None:
    def relay(*numbers: int) -> None:
        with scene.relay():
            for number in numbers:
                _publish(scene, NEAR, number)
            last = (numbers[-1] + 1, NEAR, str(numbers[-1]))
            wait_until(lambda: last in scene.relayed()["orders", lp_of(NEAR.encode())], what="the last one")

    relay(0, 1)
    then = FallBack(node, tmp_path / "then")
    relay(2, 3, 4)
    scene.rows("DELETE FROM mqlayer_app.outbox WHERE seq <= 4")
    then.happen()
    failpoints.arm("rearm.before_arm", "raise")
    with pytest.raises(FailpointHit):
        scene.rearm(accept_loss=True)
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {"1": 2}
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {}, "the same two"
    later = FallBack(node, tmp_path / "later")
    relay(5, 6)
    scene.split()
    scene.rows("DELETE FROM mqlayer_app.outbox WHERE seq = 7")
    later.happen()
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {"1": 1}
    later.happen()
    scene.rearm(accept_loss=True)
    assert scene.audited()["lost"] == {}, "the same one"


@pytest.mark.parametrize("address", some_of(["the same", "another"], 9))
def test_direct_messages_that_were_counted_as_lost_are_not_counted_by_a_later_mending(
    scene: Scene, node: RedisServer, tmp_path: Path, address: str
) -> None:
    first = FallBack(node, tmp_path / "first")
    with Producer(scene.settings(), name="direct") as producer:
        producer.send("orders", key=NEAR, body=b"1")
        second = FallBack(node, tmp_path / "second")
        for body in (b"2", b"3", b"4"):
            producer.send("orders", key=NEAR, body=body)
        scene.split()
    second.happen()
    if address == "another":
        url = node.url.replace("127.0.0.1", "localhost")
        set_node_address(runtime_of(scene.database, scene.key_prefix, application=scene.database), "node-1", url)
    scene.rearm()
    assert scene.audited()["lost"] == {"1": 3}
    first.happen()
    scene.rearm()
    assert scene.audited()["lost"] == {"1": 1}


@pytest.mark.full
def test_a_successor_that_fell_back_to_importing_is_opened_again(
    scene: Scene, node: RedisServer, tmp_path: Path
) -> None:
    member = scene.member()
    scene.bring(100, "a")
    failpoints.arm("change.after_make", "raise", occurrence=2)
    with pytest.raises(FailpointHit):
        scene.split()
    then = FallBack(node, tmp_path / "then")
    assert finish_changes(runtime_of(scene.database, scene.key_prefix)) == {1: "done"}
    scene.bring(100, "b")
    then.happen()
    scene.rearm()
    assert scene.audited()["opened"] == [3, 4]
    assert scene.audited()["sealed"] == [1]
    assert {p: scene.meta(p)["state"] for p in (1, 3, 4)} == {1: "sealed", 3: "open", 4: "open"}
    scene.bring(100, "c")
    member.consume_all()
    scene.judge(member)


@pytest.mark.full
@pytest.mark.parametrize("place", some_of(["change.after_seal", "change.before_sealed_commit", "change.after_open"], 3))
def test_a_node_that_falls_back_and_is_armed_under_a_driver_is_noticed(
    scene: Scene, node: RedisServer, tmp_path: Path, place: str
) -> None:
    """What Postgres records of a node is of the run in service: else nobody would ever look again."""
    member = scene.member()
    scene.bring(100, "a")
    with broken_off_at("change.after_make", occurrence=2):
        scene.split()
    then = FallBack(node, tmp_path / "then")
    reached, go_on = tmp_path / "reached", tmp_path / "go-on"
    nth = 2 if place == "change.after_open" else 1
    failpoints.arm(place, f"mark:{reached}", occurrence=nth)
    failpoints.arm(place, f"wait:{go_on}", occurrence=nth)
    with ThreadPoolExecutor(2) as pool:
        driving = pool.submit(finish_changes, runtime_of(scene.database, scene.key_prefix))
        wait_until(reached.exists, what="the driver to be there")
        then.happen()
        arming = pool.submit(scene.rearm)
        wait_until(lambda: arming.done() or _waits_for_a_lock(scene), what="the node to be armed, or to wait")
        go_on.touch()
        arming.result(20)
        came_to = driving.result(20)
    # A line that broke is no harm: whoever comes next goes on.
    assert came_to == {1: "done"} or finish_changes(runtime_of(scene.database, scene.key_prefix)) == {1: "done"}
    assert {p: scene.meta(p)["state"] for p in (1, 3, 4)} == {1: "sealed", 3: "open", 4: "open"}
    assert scene.meta(1)["seal"] == scene.seal_id()
    scene.bring(100, "b")
    member.consume_all()
    scene.judge(member)


def test_a_drained_parent_that_is_repaired_is_not_handled_again(scene: Scene, node: RedisServer) -> None:
    member = scene.member()
    scene.bring(100, "a")
    scene.split()
    member.consume_all()
    before = len(member.handled)
    lose_all(node)
    with scene.relay():
        scene.wait_until_whole()
    assert set(member.assigned()) == {2, 3, 4}
    assert member.version == 2
    again = member.consume_all()
    assert again == len(member.handled) - before
    with redis.Redis.from_url(scene.urls[0]) as client:
        assert again == client.xlen(partition_keys(scene.key_prefix, 2).log)
    scene.judge(member)


def _publish(scene: Scene, key: str, number: int) -> None:
    scene.rows("SELECT mqlayer_app.publish_v1('orders', %s, %s)", key, b"%d" % number)


def _waits_for_a_lock(scene: Scene) -> bool:
    return scene.rows(
        "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ) != [(0,)]
