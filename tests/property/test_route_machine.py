"""Publish, split, merge, move, drop, consume, seek, retire, and break off anywhere: each group handles each key's list.

A machine of Hypothesis on real servers: two nodes, an outbox with its relay, a direct producer, two groups. Every call
is made by the test's own thread, one after the other, so that a failing run can be repeated; the consuming side are the
scripts and the membership functions, without threads.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
import redis
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mqlayer import failpoints
from mqlayer.domain.message import Record
from mqlayer.domain.routing import LpRange, Route, lp_of
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import FailpointHit
from mqlayer.groups import apply_seek, find_group, join, planned_seek
from mqlayer.postgres.database import Database
from mqlayer.producing.sources import open_source
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import MessageRun, Refused, append_command, append_reply
from mqlayer.relay import relay_once
from mqlayer.routes import drop_change, finish_changes, retire_partitions
from mqlayer.runtime.route_cache import RouteCache, load_nodes, load_route
from mqlayer.topics import create_topic
from tests.fixtures.servers import StartRedis
from tests.proof.failpoint_names import failpoint_names
from tests.proof.manual_member import LEASE_S, ManualMember
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import merge, move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

CHANGE = sorted(name for name in failpoint_names() if name.startswith("change."))
DROP = sorted(name for name in failpoint_names() if name.startswith("drop."))
RETIRE = sorted(name for name in failpoint_names() if name.startswith("retire."))
SEEK = sorted(name for name in failpoint_names() if name.startswith("seek."))
DRAINED = sorted(name for name in failpoint_names() if name.startswith("drained."))
KEYS = [f"{kind}-{number}" for kind in ("outbox", "direct") for number in range(6)]
GROUPS = ("slow", "fast")
RELAY_S = 0.3
"""How long the relay tries where a partition is sealed and its successors are not open."""

_topics = itertools.count(1)


class Direct:
    """A direct producer as a person would write it: it knows an old route, and repeats what it has no answer for."""

    def __init__(self, database: Database, prefix: str, topic: str) -> None:
        self._database, self._prefix, self._topic = database, prefix, topic
        self._source = open_source(database, "machine")
        self._route: Route = load_route(database, topic)
        self._waiting: dict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
        self._acked: dict[int, int] = defaultdict(int)
        self._connections = {node.node_id: NodeConnection(node) for node in load_nodes(database)}

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def queue(self, key: str, body: bytes) -> None:
        self._waiting[int(lp_of(key.encode()))].append((key.encode(), body))

    def send(self, *, lose_reply: bool = False) -> bool:
        """Send what waits; say whether nothing is left."""
        for lp in [lp for lp, waiting in self._waiting.items() if waiting]:
            if not self._send_lp(lp, lose_reply=lose_reply):
                self._route = load_route(self._database, self._topic)
                self._send_lp(lp, lose_reply=lose_reply)
        return not any(self._waiting.values())

    def _send_lp(self, lp: int, *, lose_reply: bool) -> bool:
        waiting = self._waiting[lp]
        place = range_of(self._route, lp)
        fields = [part for key, body in waiting for part in (b"1700000000000", key, body)]
        run = MessageRun(lp, self._acked[lp] + 1, len(waiting), fields)
        connection = self._connections[place.node]
        reply = connection.call([append_command(connection, self._prefix, place.partition, self._source, [run])])[0]
        answer = append_reply(reply, "the node")
        if isinstance(answer, Refused):
            assert answer.status in ("sealed", "deleted"), answer
            return False
        # Marks came with the LP: what was stored before an answer got lost is known wherever it goes on.
        assert all(outcome.status in ("ok", "dup") for outcome in answer.outcomes or ()), (lp, answer)
        if not lose_reply:
            self._acked[lp] += len(waiting)
            waiting.clear()
        return True


@contextmanager
def broken_off(name: str | None, nth: int) -> Iterator[None]:
    """Let whoever comes by a place fail there: what a kill leaves, without a process."""
    if name is not None:
        failpoints.arm(name, "raise", occurrence=nth)
    try:
        yield
    except FailpointHit:
        note(f"broken off at {name}")
    finally:
        failpoints.disarm_all()


def places(names: list[str]) -> st.SearchStrategy[str | None]:
    """Often no place at all."""
    return st.one_of(st.none(), st.none(), st.sampled_from(names))


class Routes(RuleBasedStateMachine):
    """One topic from its creation until everything is drained."""

    world: World
    database: Database
    clients: list[redis.Redis]

    def __init__(self) -> None:
        super().__init__()
        self.prefix, self.topic = self.world.key_prefix, f"topic-{next(_topics)}"
        create_topic(runtime_of(self.database, self.prefix, application=self.database), self.topic, partitions=2)
        self.hands = {group: ManualMember(self.database, self.prefix, self.topic, group) for group in GROUPS}
        self.direct = Direct(self.database, self.prefix, self.topic)
        self.published: dict[str, int] = dict.fromkeys(KEYS, 0)
        # Per group: how many of each key it has handled, and how much of its handled list was looked at.
        self.handled = {group: dict.fromkeys(KEYS, 0) for group in GROUPS}
        self.seen = dict.fromkeys(GROUPS, 0)
        # Keys of which the group may be given earlier messages next, from whichever is kept.
        self.sent_back: dict[str, set[str]] = {group: set() for group in GROUPS}

    # -- publishing

    @initialize()
    def publish_to_all(self) -> None:
        self.publish(KEYS)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12))
    def publish(self, keys: list[str]) -> None:
        with psycopg.connect(self.world.dsn) as connection:
            for key in keys:
                body = b"%d" % self.published[key]
                self.published[key] += 1
                if key.startswith("outbox"):
                    connection.execute("SELECT mqlayer_app.publish_v1(%s, %s, %s)", (self.topic, key, body))
                else:
                    self.direct.queue(key, body)

    @rule(lose_reply=st.booleans())
    def send(self, lose_reply: bool) -> None:
        self.direct.send(lose_reply=lose_reply)

    @rule()
    def relay(self) -> None:
        relay_once(self.world.settings(), at_most_s=RELAY_S, limits=QUICK)

    # -- changing

    @rule(which=st.integers(0, 9), at=st.integers(1, 1023), name=places(CHANGE), nth=st.integers(1, 2))
    def split(self, which: int, at: int, name: str | None, nth: int) -> None:
        r = self.pick(which)
        point = r.lp_from + 1 + at % max(1, r.lp_to - r.lp_from - 1)
        nodes = ["node-1", "node-2"] if at % 2 else []
        self.change(
            lambda: split(runtime_of(self.database, self.prefix), self.topic, r.partition, at=[point], to=nodes),
            name,
            nth,
        )

    @rule(which=st.integers(0, 9), count=st.integers(2, 3), name=places(CHANGE), nth=st.integers(1, 2))
    def merge(self, which: int, count: int, name: str | None, nth: int) -> None:
        ranges = load_route(self.database, self.topic).ranges
        at = which % len(ranges)
        chosen = [r.partition for r in ranges[at : at + count]]
        self.change(lambda: merge(runtime_of(self.database, self.prefix), self.topic, chosen), name, nth)

    @rule(which=st.integers(0, 9), name=places(CHANGE), nth=st.integers(1, 2))
    def move(self, which: int, name: str | None, nth: int) -> None:
        r = self.pick(which)
        self.change(lambda: move(runtime_of(self.database, self.prefix), self.topic, r.partition), name, nth)

    @rule(name=places(DROP))
    def drop(self, name: str | None) -> None:
        self.change(lambda: drop_change(runtime_of(self.database), self.topic), name, 1)

    @rule(name=places(CHANGE), nth=st.integers(1, 2))
    def resume(self, name: str | None, nth: int) -> None:
        self.change(lambda: finish_changes(runtime_of(self.database, self.prefix), topic=self.topic), name, nth)

    @rule(name=places(RETIRE))
    def retire(self, name: str | None) -> None:
        with broken_off(name, 1):
            retire_partitions(runtime_of(self.database, self.prefix))

    # -- consuming

    @rule(group=st.sampled_from(GROUPS), which=st.integers(0, 9), count=st.integers(1, 20), name=places(DRAINED))
    def consume(self, group: str, which: int, count: int, name: str | None) -> None:
        member = self.hands[group]
        mine = sorted(member.assigned())
        if mine:
            with broken_off(name, 1):
                member.consume(mine[which % len(mine)], count)
        self.judge(group)

    @rule(group=st.sampled_from(GROUPS))
    def consume_all(self, group: str) -> None:
        self.hands[group].consume_all()
        self.judge(group)

    @rule(group=st.sampled_from(GROUPS), which=st.integers(0, 9), count=st.integers(1, 5))
    def die_before_settling(self, group: str, which: int, count: int) -> None:
        member = self.hands[group]
        mine = sorted(member.assigned())
        if mine:
            member.consume(mine[which % len(mine)], count, settle=False)
        self.judge(group)
        member.session = join(self.database, group_id=member.group_id, member_id=member.member, lease_s=LEASE_S)

    @rule(group=st.sampled_from(GROUPS), name=places(SEEK))
    def send_back(self, group: str, name: str | None) -> None:
        with broken_off(name, 1), closing(RouteCache(self.database)) as routes:
            plan = planned_seek(
                runtime_of(self.database, self.prefix), routes, topic=self.topic, name=group, to="earliest"
            )
            apply_seek(runtime_of(self.database, self.prefix, actor="machine"), plan)
        if name != "seek.before_commit":
            self.sent_back[group] = set(KEYS)

    # -- what holds

    @invariant()
    def at_most_one_partition_accepts_an_lp(self) -> None:
        """Invariant 4."""
        serving = [0] * 1024
        metas = [partition_keys(self.prefix, partition).meta for partition in self.partitions()]
        for client in self.clients:
            with client.pipeline(transaction=False) as pipeline:
                for meta in metas:
                    pipeline.hmget(meta, "state", "lp_from", "lp_to")
                for state, lp_from, lp_to in pipeline.execute():
                    for lp in range(int(lp_from), int(lp_to)) if state == "open" else ():
                        serving[lp] += 1
        assert max(serving) <= 1

    @invariant()
    def a_groups_version_is_not_ahead(self) -> None:
        in_force = load_route(self.database, self.topic).version
        assert all(find_group(self.database, self.topic, group).version <= in_force for group in GROUPS)

    def teardown(self) -> None:
        finished = finish_changes(runtime_of(self.database, self.prefix), topic=self.topic)
        assert set(finished.values()) <= {"done", "dropped"}, finished
        assert finish_changes(runtime_of(self.database, self.prefix), topic=self.topic) == {}
        self.publish_to_all()
        assert self.direct.send(), "direct messages are refused though no change is open"
        self.direct.close()
        relay_once(self.world.settings(), limits=QUICK)
        version = load_route(self.database, self.topic).version
        for group in GROUPS:
            self.hands[group].consume_all()
            self.judge(group)
            assert self.handled[group] == self.published, group
            assert self.hands[group].version == version
        retire_partitions(runtime_of(self.database, self.prefix))
        in_force = {int(r.partition) for r in load_route(self.database, self.topic).ranges}
        assert set(self.partitions(deleted=False)) == in_force

    # -- help

    def pick(self, which: int) -> LpRange:
        ranges = load_route(self.database, self.topic).ranges
        return ranges[which % len(ranges)]

    def change(self, act: Callable[[], object], name: str | None, nth: int) -> None:
        # Something is on its way at every change, stored or not.
        self.direct.send()
        self.publish_to_all()
        with broken_off(name, nth):
            try:
                note(f"came to {act()}")
            except (Conflict, InvalidInput, NotFound) as error:
                note(f"refused: {error}")

    def judge(self, group: str) -> None:
        """Each message is the next of its key, or one that was handled before; after a seek what follows it is next."""
        handled = self.hands[group].handled
        for record in handled[self.seen[group] :]:
            self.count(group, record)
        self.seen[group] = len(handled)

    def count(self, group: str, record: Record) -> None:
        key, number = record.key.decode(), int(record.body)
        assert number <= self.handled[group][key], f"{group} handled {key} {number} before {self.handled[group][key]}"
        first = key in self.sent_back[group]
        self.sent_back[group].discard(key)
        self.handled[group][key] = number + 1 if first else max(self.handled[group][key], number + 1)

    def partitions(self, *, deleted: bool = True) -> list[int]:
        with self.database.connection() as connection:
            rows = connection.execute(
                "SELECT partition_id FROM mqlayer.partition JOIN mqlayer.topic USING (topic_id) "
                "WHERE name = %s AND (%s OR state <> 'deleted')", (self.topic, deleted)
            ).fetchall()  # fmt: skip
        return [partition for (partition,) in rows]


@pytest.mark.slow
def test_whatever_becomes_of_a_route_each_group_handles_each_keys_list(
    request: pytest.FixtureRequest, database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    """Cases 5, 7, 12, 16, 18, 20 to 26, 31: `--long` for many runs."""
    world = World(database_dsn, key_prefix, [redis_url, start_redis().url])
    long = request.config.getoption("--long", default=False)
    with Database(database_dsn, max_size=6) as database:

        class Here(Routes):
            pass

        Here.world, Here.database = world, database
        Here.clients = [redis.Redis.from_url(url, decode_responses=True) for url in world.urls]
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=400 if long else 5,
                stateful_step_count=60 if long else 30,
                deadline=None,
                print_blob=True,
                # Shrinking takes minutes here; a long run may take them.
                phases=[*Phase] if long else [Phase.explicit, Phase.reuse, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
