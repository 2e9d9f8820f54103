"""How long the keys of a moved partition wait: the half of case 23 that is a time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from mqlayer import App, Context, MemberOptions, failpoints
from mqlayer.consuming.engine import heartbeat
from mqlayer.consuming.ordered.reader import BLOCK_MS
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from mqlayer.producing import Producer, Receipt
from mqlayer.redis.keys import partition_keys
from mqlayer.runtime.route_cache import load_route
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import move
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

KEYS = 4
EVERY_S = 0.02
LEASE_S = 180.0
BEAT_S = 60.0
"""Not one heartbeat comes by itself while a test runs: what waits for the next one waits longer than the test does."""
GIVE_UP_S = 10.0
WAITING = 100
"""So many messages wait in the successor before the parent may be drained: half a second of the load."""
POLL_S = BLOCK_MS / 1000
ALLOWANCE_S = 6.0
"""For what no clock of ours decides: round trips, the change's last step, other processes on the machine."""


StartMembers = Callable[[str, str], dict[str, App]]

pytestmark = pytest.mark.world(nodes=2, partitions=3)


class Handled(NamedTuple):
    key: str
    number: int
    partition: int
    began: float
    ended: float


class Clocked:
    """A handler that notes when it ran; after `hold` it stays in the next message of the first key until `release`."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.handled: list[Handled] = []
        self._free = threading.Event()
        self._free.set()
        self.caught = threading.Event()

    def __call__(self, body: bytes, ctx: Context) -> None:
        began = time.monotonic()
        if ctx.key == self.keys[0] and not self._free.is_set():
            self.caught.set()
            self._free.wait(3 * GIVE_UP_S)
        self.handled.append(Handled(ctx.key or "", int(body), ctx.partition, began, time.monotonic()))

    def hold(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def of(self, partition: int) -> list[Handled]:
        """Return what was handled of a partition."""
        return [handled for handled in list(self.handled) if handled.partition == partition]

    def by_key(self) -> dict[str, list[Handled]]:
        """Return what was handled of each key, in the order of its handling."""
        found: dict[str, list[Handled]] = defaultdict(list)
        for handled in sorted(self.handled, key=lambda handled: handled.began):
            found[handled.key].append(handled)
        return found

    def each_has(self, count: int, partition: int) -> bool:
        """Say whether so many messages of every key were handled in a partition."""
        keys = [handled.key for handled in self.of(partition)]
        return min(map(keys.count, self.keys)) >= count


@contextmanager
def steady_load(producer: Producer, keys: list[str]) -> Iterator[list[Future[Receipt]]]:
    """Bring each key its next message, numbered on, every few milliseconds; stop at the end and wait for all."""
    sent: list[Future[Receipt]] = []
    ended = threading.Event()

    def publish() -> None:
        while not ended.wait(EVERY_S):
            number = len(sent) // len(keys)
            sent.extend([producer.send_async("orders", key=key, body=b"%d" % number) for key in keys])

    thread = threading.Thread(target=publish, name="steady-load")
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()
    assert producer.flush(20) == 0


@pytest.fixture
def clocked(world: World) -> Clocked:
    """The handler of all members, and the keys of the second partition."""
    parent = world.routes["orders"].ranges[1]
    names = (f"key-{number}" for number in range(1_000))
    return Clocked(list(islice((n for n in names if parent.lp_from <= lp_of(n.encode()) < parent.lp_to), KEYS)))


@pytest.fixture
def start_members(world: World, clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartMembers]:
    """Start two members without heartbeats: the first one holds two partitions, the second one the third."""
    monkeypatch.setattr(heartbeat, "LONGEST_HEARTBEAT_S", BEAT_S)
    apps: dict[str, App] = {}

    def start(first: str, second: str) -> dict[str, App]:
        for name in (first, second):
            apps[name] = App(world.settings(lease_s=LEASE_S))
            options = MemberOptions(concurrency=KEYS, member_id=name)
            apps[name].consumer("orders", group="ledger", options=options)(clocked)
            apps[name].start()
        shared = [{1, 2}, {3}]
        wait_until(
            lambda: [holds(apps[name]) for name in (first, second)] == shared, what="the partitions to be shared"
        )
        return apps

    yield start
    clocked.let_go()
    for app in apps.values():
        app.stop()


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")], ids=["to-the-same-member", "to-another-member"])
def test_a_move_under_load_stops_a_key_for_the_drain_and_one_poll(
    world: World, database: Database, clocked: Clocked, start_members: StartMembers, first: str, second: str
) -> None:
    """Case 23: the pause is the parent's drain and one poll, not a heartbeat more.

    The drain is as long as a handler is held, with messages waiting in the successor. Member "a" gets the successor:
    in the beat that says that the parent is drained where it owned that too, else by notice. It waits in a read of
    another partition of that node, which has no messages, as long as one poll lasts.
    """
    apps = start_members(first, second)
    parent = load_route(database, "orders").ranges[1]
    with Producer(world.settings(), name="load") as producer, steady_load(producer, clocked.keys) as sent:
        wait_until(lambda: clocked.each_has(5, parent.partition), what="the load to be handled")
        clocked.hold()
        wait_until(clocked.caught.is_set, what="a handler to be held")
        child = move(runtime_of(database, world.key_prefix), "orders", parent.partition).ranges[1]
        # Later than the seal, so the drain is rather counted too short.
        sealed_at = time.monotonic()
        assert child.node != parent.node
        log = partition_keys(world.key_prefix, child.partition).log
        with redis.Redis.from_url(world.urls[child.node - 1]) as client:
            wait_until(lambda: int(str(client.xlen(log))) >= WAITING, what="messages to wait in the successor")
        assert clocked.of(child.partition) == []
        clocked.let_go()
        wait_for_the_successor(clocked, child.partition)
        assert child.partition in holds(apps["a"])
    wait_until(lambda: len(clocked.handled) == len(sent), what="the rest to be handled")

    drained_at = max(handled.ended for handled in clocked.of(parent.partition))
    assert min(handled.began for handled in clocked.of(child.partition)) >= drained_at
    drain_s = drained_at - sealed_at
    for key, of_key in clocked.by_key().items():
        assert [handled.number for handled in of_key] == list(range(len(sent) // KEYS)), key
        pause_s = max(after.began - before.ended for before, after in pairwise(of_key))
        assert pause_s <= drain_s + POLL_S + ALLOWANCE_S, key
        begins = next(handled.began for handled in of_key if handled.partition == child.partition)
        assert begins - drained_at <= POLL_S + ALLOWANCE_S, key


def test_a_parent_drained_before_its_successor_may_be_read_costs_no_heartbeat_either(
    world: World, database: Database, clocked: Clocked, start_members: StartMembers, tmp_path: Path
) -> None:
    """Case 23: who drains between the seal and the new route finds nothing to give out; the change has to tell."""
    start_members("a", "b")
    parent = load_route(database, "orders").ranges[1]
    go_on, reached = tmp_path / "go", tmp_path / "reached"
    with (
        Producer(world.settings(), name="load") as producer,
        steady_load(producer, clocked.keys),
        ThreadPoolExecutor(1) as pool,
    ):
        wait_until(lambda: clocked.each_has(5, parent.partition), what="the load to be handled")
        failpoints.arm("change.after_open", f"mark:{reached}")
        failpoints.arm("change.after_open", f"wait:{go_on}")
        try:
            driving = pool.submit(move, runtime_of(database, world.key_prefix), "orders", parent.partition)
            wait_until(reached.exists, what="the parent to be sealed")
            drained = "SELECT partition_id FROM mqlayer.drained"
            wait_until(lambda: world.rows(drained) == [(parent.partition,)], what="the group to have drained it")
        finally:
            go_on.touch()
        wait_for_the_successor(clocked, driving.result(20).ranges[1].partition)


def wait_for_the_successor(clocked: Clocked, partition: int) -> None:
    """Wait until some messages of every key were handled there."""
    what = "the successor to be handled without a heartbeat"
    wait_until(lambda: clocked.each_has(5, partition), timeout_s=GIVE_UP_S, what=what)


def holds(app: App) -> set[int]:
    """Return the partitions that the one member of an application holds."""
    return set(app.members[0].owned())
