"""A command record that was removed and appended again has another entry id: every reader takes it for what it is."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from mqlayer import App, Context, Receiver
from mqlayer.archive import archive_pass, archive_status, create_snapshot
from mqlayer.doctor.verify import verify
from mqlayer.groups import GroupSettings, apply_seek, ensure_group, find_group, planned_seek
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Database
from mqlayer.redelivery import new_worker, replays, work_on_replay
from mqlayer.redelivery.redelivery_job import claim_abandoned
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import seal_command
from mqlayer.redis.shared_scripts import (
    SharedDrained,
    SharedGroupPartition,
    native_group,
    shared_acquire_command,
    shared_acquire_reply,
    shared_read_command,
    shared_reclaim_command,
    shared_settle_command,
)
from mqlayer.relay import relay_once
from mqlayer.routes import retire_partitions
from mqlayer.runtime.route_cache import RouteCache, load_nodes
from mqlayer.topics import rearm_node, set_archived
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.rounds import KEYS, ROUND, Seen, of_tags
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

PARENT: Final = 1
GROUP: Final = "ledger"
PARTS: Final = (2, 9)
"""What may stand behind the dash in place of 1."""


class Sealed:
    """An archived topic whose first partition was split: round a is in it, round b in its successors."""

    def __init__(self, world: World, database: Database, part: int) -> None:
        self.world, self.database, self.prefix = world, database, world.key_prefix
        self.keys = partition_keys(self.prefix, PARENT)
        self.client: redis.Redis = redis.Redis.from_url(world.urls[0])
        set_archived(runtime_of(database, actor="test"), "orders", archived=True)
        self.publish("a")
        split(runtime_of(database, self.prefix), "orders", PARENT, at=[500])
        self.part = part
        self.seal_until(part)
        self.publish("b")

    def publish(self, tag: str) -> None:
        self.world.publish(ROUND, keys=KEYS, tag=tag)
        relay_once(self.world.settings(), limits=QUICK)

    def call(self, *commands: Callable[[NodeConnection], Command]) -> list[Any]:
        """Run commands on the node."""
        with NodeConnection(load_nodes(self.database)[0]) as connection:
            return connection.call([make(connection) for make in commands])

    def last_id(self) -> bytes:
        """The entry id of the parent's last record."""
        found: Any = self.client.xrevrange(self.keys.log, count=1)
        return bytes(found[0][0])

    def seal_until(self, part: int) -> None:
        """Remove the command record, and have who drives the change append it again, up to this id."""
        ((change,),) = self.world.rows("SELECT change_id FROM mqlayer.route_change")
        for number in range(2, part + 1):
            self.client.xdel(self.keys.log, self.last_id())
            reply = self.call(lambda connection: seal_command(connection, self.prefix, PARENT, change, "another seal"))[
                0
            ]
            assert reply[0] == b"sealed", reply
            assert self.last_id() == b"%d-%d" % (ROUND, number)

    def is_drained(self, group: str = GROUP) -> bool:
        """Say whether a group knows that it is through with the parent."""
        return find_group(self.database, "orders", group).version == 2

    def wrong(self) -> list[Any]:
        """What `mqlayer verify` says of differences."""
        found = verify(runtime_of(self.database, self.prefix, application=self.database), "orders", deep=True)
        return [finding for finding in found if finding.verdict != "ok"]


@pytest.fixture(params=some_of(PARTS, 2), ids=[f"-{part}" for part in PARTS])
def sealed(request: pytest.FixtureRequest, database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[Sealed]:
    world = World(database_dsn, key_prefix, [redis_url])
    world.add_topic("orders", partitions=1)
    sealed = Sealed(world, world.database, request.param)
    with sealed.client:
        yield sealed


def handled_by(sealed: Sealed, *, group: str = GROUP, count: int = 2 * ROUND, **said: Any) -> Seen:
    """Run a member until it has handled so many messages and is through with the parent; return what it handled."""
    seen: defaultdict[str, list[str]] = defaultdict(list)
    app = App(sealed.world.settings(lease_s=10.0))
    # An instance has a group of its own.
    drained_by = f"{group}@{said['instance']}" if "instance" in said else group

    @app.consumer("orders", group=group, start="earliest", **said)
    def note(body: bytes, ctx: Context) -> None:
        seen[str(ctx.key)].append(ctx.body.decode())

    app.start()
    try:
        wait_until(lambda: sum(map(len, seen.values())) >= count, what=f"{count} messages", timeout_s=20)
        wait_until(lambda: sealed.is_drained(drained_by), what="the parent to be drained")
    finally:
        app.stop()
    return dict(seen)


def by_a_member(sealed: Sealed) -> None:
    assert handled_by(sealed) == of_tags("a", "b")


def by_a_member_with_a_filter(sealed: Sealed) -> None:
    """Nothing has such a tag: all is left out on the server, and the command is found behind it."""
    assert handled_by(sealed, count=0, tag_filter="any:eu") == {}


def by_a_shared_group(sealed: Sealed) -> None:
    found = handled_by(sealed, mode="shared")
    assert {key: sorted(bodies) for key, bodies in found.items()} == {
        key: sorted(bodies) for key, bodies in of_tags("a", "b").items()
    }
    group_id = find_group(sealed.database, "orders", GROUP).group_id
    assert sealed.client.xpending(sealed.keys.log, native_group(group_id))["pending"] == 0


def by_a_broadcast_group(sealed: Sealed) -> None:
    assert handled_by(sealed, mode="broadcast", instance="web-1") == of_tags("a", "b")


def by_a_group_that_begins_with_the_archive(sealed: Sealed) -> None:
    """It is given the parent from the archive, where the archive ends with it."""
    archive_pass(runtime_of(sealed.database, sealed.prefix))
    with closing(RouteCache(sealed.database)) as routes:
        settings = GroupSettings(from_archive=True)
        ensure_group(runtime_of(sealed.database, sealed.prefix), routes, topic="orders", name=GROUP, settings=settings)
    (replay,) = replays(sealed.database, topic="orders", group=GROUP)
    worker = new_worker()
    assert claim_abandoned(sealed.database, replay.replay_id, worker)
    stop = threading.Event()
    given = threading.Thread(
        target=work_on_replay, args=(sealed.database, replay.replay_id), kwargs={"worker": worker, "stop": stop}
    )
    given.start()
    try:
        assert handled_by(sealed, from_archive=True) == of_tags("a", "b")
    finally:
        stop.set()
        given.join()


def by_a_receiver(sealed: Sealed) -> None:
    seen: defaultdict[str, list[str]] = defaultdict(list)
    with Receiver("orders", group=GROUP, settings=sealed.world.settings()) as receiver:

        def receive() -> bool:
            messages = receiver.receive(7, wait_s=1)
            for message in messages:
                seen[str(message.key)].append(message.body.decode())
            receiver.ack(messages)
            return sum(map(len, seen.values())) == 2 * ROUND

        wait_until(receive, what="all messages", timeout_s=20)
    assert dict(seen) == of_tags("a", "b")
    assert sealed.is_drained()


def by_a_receiver_that_waits_for_what_is_out(sealed: Sealed) -> None:
    """Nothing more is to come, and it knows: it asks no more often than behind any other command record."""
    with Receiver("orders", group=GROUP, settings=sealed.world.settings()) as receiver:
        out = list(itertools.chain(*itertools.takewhile(bool, (receiver.receive(500, wait_s=0) for _ in range(9)))))
        assert len(out) == ROUND
        assert receiver.receive(wait_s=0.1) == []
        before = _asked(sealed)
        assert receiver.receive(wait_s=2) == []
        assert _asked(sealed) - before < 10
        receiver.ack(out)
        assert receiver.receive(wait_s=5) != []


def _asked(sealed: Sealed) -> int:
    """How many scripts the node ran."""
    statistics: Any = sealed.client.info("commandstats")
    return int(statistics.get("cmdstat_evalsha", {"calls": 0})["calls"])


def by_verify(sealed: Sealed) -> None:
    handled_by(sealed)
    archive_pass(runtime_of(sealed.database, sealed.prefix))
    assert sealed.wrong() == []


def by_the_archiver(sealed: Sealed) -> None:
    archive_pass(runtime_of(sealed.database, sealed.prefix))
    ((count, chains),) = sealed.world.rows(
        "SELECT count(*), count(DISTINCT (source, lp, seq)) FROM mqlayer_archive.record"
    )
    assert count == chains == 2 * ROUND
    (status,) = archive_status(runtime_of(sealed.database, sealed.prefix))
    assert status.lag == 0
    assert sealed.wrong() == []


def by_trimming(sealed: Sealed) -> None:
    """What all settled goes, the command stays until the partition goes."""
    handled_by(sealed)
    archive_pass(runtime_of(sealed.database, sealed.prefix))
    trim_pass(runtime_of(sealed.database, sealed.prefix))
    assert sealed.last_id() == b"%d-%d" % (ROUND, sealed.part)
    assert sealed.wrong() == []
    assert retire_partitions(runtime_of(sealed.database, sealed.prefix)) == [PARENT]
    assert sealed.wrong() == []


def by_a_group_that_is_sent_back(sealed: Sealed) -> None:
    assert handled_by(sealed) == of_tags("a", "b")
    with closing(RouteCache(sealed.database)) as routes:
        here = runtime_of(sealed.database, sealed.prefix)
        plan = planned_seek(here, routes, to="earliest", topic="orders", name=GROUP)
    assert apply_seek(runtime_of(sealed.database, sealed.prefix, actor="test"), plan, replay=False) == []
    assert not sealed.is_drained()
    assert handled_by(sealed) == of_tags("a", "b")


def by_arming(sealed: Sealed) -> None:
    """A seal that is right is left as it is, and what Postgres recorded of it too."""
    before = sealed.client.xrange(sealed.keys.log)
    rearm_node(runtime_of(sealed.database, sealed.prefix, application=sealed.database), "node-1")
    assert sealed.client.xrange(sealed.keys.log) == before
    assert handled_by(sealed) == of_tags("a", "b")


def by_people_who_look(sealed: Sealed) -> None:
    handled_by(sealed)
    (group,) = group_statuses(runtime_of(sealed.database, sealed.prefix), "orders")
    assert (group.lag, [one.head for one in group.partitions]) == (0, [None] * 3)
    key = explain_key(runtime_of(sealed.database, sealed.prefix), "orders", "key-1", GROUP)
    assert key.search.head is None


@pytest.mark.parametrize(
    "read",
    some_of([
        by_a_member, by_a_member_with_a_filter, by_a_shared_group, by_a_broadcast_group,
        by_a_group_that_begins_with_the_archive, by_a_receiver, by_a_receiver_that_waits_for_what_is_out, by_verify,
        by_the_archiver, by_trimming, by_a_group_that_is_sent_back, by_arming, by_people_who_look,
    ], 3),
)  # fmt: skip
def test_a_command_under_another_entry_id_is_read(read: Callable[[Sealed], None], sealed: Sealed) -> None:
    read(sealed)


@pytest.mark.full
def test_a_snapshot_behind_such_a_command_is_read_by_spark(spark: Any, sealed: Sealed, tmp_path: Path) -> None:
    from mqlayer.spark import read_snapshot

    archive_pass(runtime_of(sealed.database, sealed.prefix))
    create_snapshot(runtime_of(sealed.database), "s")
    frame = read_snapshot(spark, "s", dsn=sealed.world.dsn, method="python", columns=["key", "seq"], check=True)
    assert frame.count() == 2 * ROUND
    lineage = read_snapshot(spark, "s", dsn=sealed.world.dsn, method="python", table="lineage")
    assert lineage.count() == 3


def test_a_shared_group_that_read_the_removed_command_is_through(sealed: Sealed) -> None:
    """Its reader ended before it settled the command: that stays pending, and has no record any more."""
    place = SharedGroupPartition(sealed.prefix, PARENT, 7, 1)

    def read(connection: NodeConnection) -> Command:
        return shared_read_command([place], "gone", group_id=7, count=ROUND + 9, block_ms=0)

    sealed.call(lambda connection: shared_acquire_command(connection, place), read)
    sealed.client.xdel(sealed.keys.log, sealed.last_id())
    ((change,),) = sealed.world.rows("SELECT change_id FROM mqlayer.route_change")
    sealed.call(lambda connection: seal_command(connection, sealed.prefix, PARENT, change, "another seal"), read)
    sealed.call(
        lambda connection: shared_settle_command(connection, place, "gone", [(1, ROUND)]),
        lambda connection: shared_reclaim_command(connection, place, 0),
    )
    (reply,) = sealed.call(lambda connection: shared_acquire_command(connection, place))
    assert isinstance(shared_acquire_reply(reply, ""), SharedDrained)
    assert sealed.client.xpending(sealed.keys.log, native_group(7))["pending"] == 0
