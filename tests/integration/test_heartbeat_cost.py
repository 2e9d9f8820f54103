"""What membership asks of Postgres: it grows with what changes, not with the group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from mqlayer.errors import MqlayerError
from mqlayer.groups import Group, GroupSettings, HeartbeatReply, MemberSession, ensure_group, join, release
from mqlayer.groups import members as membership
from mqlayer.groups.admin import set_group
from mqlayer.groups.members import GROUP_HEARTBEATS, LOOKS, HeardGroup, send_heartbeat, start_leaving
from mqlayer.groups.pauses import pause_partitions, pause_topic
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.runtime import heartbeat_sender, route_cache
from mqlayer.runtime.heartbeat_sender import HeartbeatSender
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Stage, StartStage, member_of
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

LEASE_S = 60.0


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of eight partitions."""
    return start_stage(redis_url, partitions=8)


@pytest.fixture
def group(stage: Stage) -> Group:
    """A group without members."""
    return ensure_group(
        stage.runtime, RouteCache(stage.database), topic=stage.topic, name="g", settings=GroupSettings()
    )


class Listener:
    """A member that remembers what its heartbeats heard."""

    def __init__(self, stage: Stage, group: Group, name: str) -> None:
        self._database, self.heard = stage.database, HeardGroup()
        self.session: MemberSession = join(stage.database, group_id=group.group_id, member_id=name, lease_s=LEASE_S)
        self.beat()

    def beat(self) -> HeartbeatReply:
        """Send a heartbeat, which reads what has to be read."""
        return send_heartbeat(self._database, self.session, lease_s=LEASE_S, heard=self.heard)

    def give_back(self) -> None:
        """Release what is asked for."""
        asked = [one for one in self.beat().assignments if one.release]
        if asked:
            release(self._database, self.session, *asked)


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Note what this process executes."""
    found: list[Any] = []
    run = psycopg.Connection.execute

    def execute(connection: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
        found.append(statement)
        return run(connection, statement, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", execute)
        yield found


class Unlucky:
    """Random numbers by which nobody looks who does not have to."""

    def random(self) -> float:
        """Return the highest."""
        return 1.0


def grow(stage: Stage, group: Group, listeners: list[Listener], count: int) -> None:
    """Have so many members in all, and each with its share."""
    listeners += [Listener(stage, group, f"m{number}") for number in range(len(listeners), count)]
    for one in listeners * 2:
        one.give_back()
    for one in listeners:
        one.heard.wants_all = True
        one.beat()


def test_a_heartbeat_that_has_nothing_to_hear_is_one_statement_in_any_group(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners: list[Listener] = []
    monkeypatch.setattr(membership, "RNG", Unlucky())
    for count in (LOOKS, 2 * LOOKS):
        grow(stage, group, listeners, count)
        with statements(monkeypatch) as executed:
            replies = [one.beat() for one in listeners]
        assert executed == [query("member_beat")] * count
        assert all(reply.known and reply.assignments and reply.rules == group.rules for reply in replies)


def test_some_heartbeats_of_a_second_look_at_the_group_however_many_there_are() -> None:
    assert all(HeardGroup(members=count).looks(0.999) for count in range(LOOKS + 1))
    for count in (10, 100, 1000):
        looks = sum(HeardGroup(members=count).looks((number + 0.5) / count) for number in range(count))
        assert looks == LOOKS * max(1, count / GROUP_HEARTBEATS), "larger groups have longer rounds"


def bump_epochs(stage: Stage) -> None:
    """Raise epochs as arming a node does: no number of the group counts that."""
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()")


def open_a_breaker(stage: Stage) -> None:
    with stage.database.connection() as connection:
        connection.execute(
            "INSERT INTO mqlayer.breaker (group_id, state, cause, actor, failing_keys, probe_at) "
            "SELECT group_id, 'open', 'operator', 'a test', 0, now() FROM mqlayer.consumer_group"
        )


def act_on_a_key(stage: Stage) -> None:
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.consumer_group SET parking = parking + 1")


def limit_the_age(stage: Stage) -> None:
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.topic SET message_ttl_s = 60")


CHANGES: dict[str, tuple[Callable[[Stage], object], Callable[[HeartbeatReply], object]]] = {
    "settings": (
        lambda stage: set_group(runtime_of(stage.database, actor="a test"), stage.topic, "g", attempt_limit=3),
        lambda reply: reply.rules is not None and reply.rules.attempt_limit,
    ),
    "paused partition": (
        lambda stage: pause_partitions(
            runtime_of(stage.database, actor="a test"), stage.topic, "g", [stage.partitions[0]]
        ),
        lambda reply: [one.release for one in reply.assignments],
    ),
    "paused topic": (
        lambda stage: pause_topic(runtime_of(stage.database, actor="a test"), stage.topic),
        lambda reply: [one.release for one in reply.assignments],
    ),
    "epochs": (bump_epochs, lambda reply: [one.epoch for one in reply.assignments]),
    "breaker": (open_a_breaker, lambda reply: reply.breaker.state),
    "parked key": (act_on_a_key, lambda reply: reply.parking_version),
    "time to live": (limit_the_age, lambda reply: reply.time_to_live.ttl_s),
}


def test_each_change_is_heard_with_the_next_heartbeat_without_a_notification(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Listener(stage, group, "m0")
    monkeypatch.setattr(membership, "RNG", Unlucky())
    for name, (act, heard) in CHANGES.items():
        before = heard(alone.beat())
        act(stage)
        assert heard(alone.beat()) != before, name


def test_a_partition_that_is_gained_or_wanted_is_heard_with_the_next_heartbeat(stage: Stage, group: Group) -> None:
    first = Listener(stage, group, "m0")
    second = Listener(stage, group, "m1")
    assert second.beat().assignments == ()
    first.give_back()
    assert len(second.beat().assignments) == 4
    assert len(first.beat().assignments) == 4


def test_a_released_partition_passes_to_the_member_that_was_chosen(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes through the group for it."""
    first, second = Listener(stage, group, "m0"), Listener(stage, group, "m1")
    with statements(monkeypatch) as executed:
        first.give_back()
    assert query("assignments_pass") in executed
    assert query("assignment_list") not in executed
    assert len(second.beat().assignments) == 4


@pytest.mark.parametrize("lost", ["leaves", "died"])
def test_a_released_partition_goes_to_another_where_the_chosen_one_is_gone(
    stage: Stage, group: Group, lost: str
) -> None:
    first, second = Listener(stage, group, "m0"), Listener(stage, group, "m1")
    asked = [one for one in first.beat().assignments if one.release]
    assert len(asked) == 4
    if lost == "leaves":
        start_leaving(stage.database, second.session)
    else:
        with stage.database.connection() as connection:
            connection.execute("UPDATE mqlayer.member SET lease_until = now() - interval '1 ms' WHERE member_id = 'm1'")
    release(stage.database, first.session, *asked)
    assert set(stage.owners().values()) == {"m0"}


def test_members_that_join_together_are_placed_by_few_rebalances(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for the group's lock; the first rebalance behind it sees them all."""
    count = 6
    waiting = (
        "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database() "
        "AND application_name <> 'holder'"
    )
    with (
        kept_session(stage.dsn) as holder,
        kept_session(stage.dsn, autocommit=True) as watcher,
        statements(monkeypatch) as executed,
        ThreadPoolExecutor(count) as pool,
    ):
        holder.execute("SELECT FROM mqlayer.consumer_group FOR NO KEY UPDATE")
        names = [f"m{number}" for number in range(count)]
        joining = [
            pool.submit(join, stage.database, group_id=group.group_id, member_id=name, lease_s=LEASE_S)
            for name in names
        ]
        wait_until(lambda: watcher.execute(waiting).rowcount >= 4, what="all connections of the pool to wait")
        holder.commit()
        for one in joining:
            one.result(20)
        rebalances = executed.count(query("assignment_list"))
    assert rebalances < count
    targets = {target for _, _, _, target in stage.assignments()}
    assert targets == set(names)


def test_one_that_joins_again_under_its_id_is_placed_anew(stage: Stage, group: Group) -> None:
    """It was leaving, so all that it has was wanted by another."""
    first, second = Listener(stage, group, "m0"), Listener(stage, group, "m1")
    first.give_back()
    second.beat()
    start_leaving(stage.database, first.session)
    assert all(one.release for one in first.beat().assignments)
    Listener(stage, group, "m0")
    assert Counter(target for _, _, _, target in stage.assignments()) == {"m0": 4, "m1": 4}
    assert second.beat().known


def test_a_statement_finds_out_that_its_connection_has_ended(stage: Stage) -> None:
    database = stage.database
    assert database.first_row("SELECT 1", {}) == (1,)
    with kept_session(stage.dsn, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database() AND state = 'idle' AND application_name LIKE 'mqlayer%'"
        )
    assert database.first_row("SELECT 2", {}) == (2,)


def test_members_of_a_large_group_beat_less_often_within_a_third_of_the_lease(stage: Stage) -> None:
    app = stage.consume(lambda _: None, settings=stage.settings(lease_s=30.0))
    heartbeat = member_of(app)._heartbeat
    # Each answer says anew how many members there are.
    app.stop()
    assert 0.8 <= heartbeat._wait_s() <= 1.0
    heartbeat._heard.members = 1000
    assert 3.2 <= heartbeat._wait_s() <= 4.0
    heartbeat._heard.members = 5000
    assert 8.0 <= heartbeat._wait_s() <= 10.0


class HeldBack:
    """A database whose statements wait for a word; notes how many heartbeats each of them carried."""

    def __init__(self, database: Database) -> None:
        self._database, self.go, self.carried = database, threading.Event(), list[int]()

    def first_row(self, statement: Any, facts: Any) -> Any:
        """Answer one heartbeat."""
        return (self.rows(statement, facts) or [None])[0]

    def rows(self, statement: Any, facts: Any) -> list[Any]:
        """Answer some."""
        self.carried.append(len(facts.get("sessions", "1")))
        assert self.go.wait(20)
        return self._database.rows(statement, facts)


def test_heartbeats_of_a_process_that_wait_go_together_and_each_gets_its_own_answer(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_sender, "PATIENCE_S", 60.0)
    other = ensure_group(
        stage.runtime, RouteCache(stage.database), topic=stage.topic, name="other", settings=GroupSettings()
    )
    listeners = [Listener(stage, one, f"m{number}") for number in range(3) for one in (group, other)]
    gone = Listener(stage, other, "gone")
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET lease_until = '-infinity' WHERE member_id = 'gone'")
    held = HeldBack(stage.database)
    sender = HeartbeatSender(held)  # type: ignore[arg-type]

    def beat(one: Listener) -> HeartbeatReply:
        return send_heartbeat(stage.database, one.session, lease_s=LEASE_S, sender=sender)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(beat, listeners[0])
        wait_until(lambda: held.carried == [1], what="the first to be on its way")
        others = [pool.submit(beat, one) for one in (*listeners[1:], gone)]
        wait_until(lambda: len(sender._waiting) == 6, what="the others to wait")
        held.go.set()
        replies = [first.result(20), *(one.result(20) for one in others)]
    assert held.carried == [1, 6]
    assert [reply.known for reply in replies] == [True] * 6 + [False]
    alone = [send_heartbeat(stage.database, one.session, lease_s=LEASE_S) for one in listeners]
    assert [reply.assignments for reply in replies[:6]] == [reply.assignments for reply in alone]


def test_a_heartbeat_does_not_wait_long_for_the_one_before_it(stage: Stage, group: Group) -> None:
    """A row that somebody holds costs its own member time, not the others of the process."""
    stuck, free = Listener(stage, group, "m0"), Listener(stage, group, "m1")
    sender = HeartbeatSender(stage.database)
    waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        kept_session(stage.dsn) as holder,
        kept_session(stage.dsn, autocommit=True) as watcher,
        ThreadPoolExecutor(2) as pool,
    ):
        holder.execute("SELECT FROM mqlayer.member WHERE member_id = 'm0' FOR UPDATE")
        waiting = pool.submit(send_heartbeat, stage.database, stuck.session, lease_s=LEASE_S, sender=sender)
        wait_until(lambda: watcher.execute(waits).rowcount == 1, what="the heartbeat to wait")
        assert send_heartbeat(stage.database, free.session, lease_s=LEASE_S, sender=sender).known
        assert not waiting.done()
        holder.commit()
        assert waiting.result(20).known


def test_heartbeats_and_looks_at_groups_share_one_connection(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where one waits for long is there a second one, which the pool closes again."""
    monkeypatch.setattr(heartbeat_sender, "PATIENCE_S", 60.0)
    listeners = [Listener(stage, group, f"m{number}") for number in range(4)]
    held = "SELECT pid FROM pg_stat_activity WHERE application_name = 'beats' AND datname = current_database()"
    with Database(stage.dsn, application="beats", max_size=2) as beats, ThreadPoolExecutor(4) as pool:
        sender = HeartbeatSender(beats)

        def beat(one: Listener) -> bool:
            return send_heartbeat(beats, one.session, lease_s=LEASE_S, heard=HeardGroup(), sender=sender).known

        assert all(pool.map(beat, listeners * 25))
        assert len(stage.world.rows(held)) == 1


def test_all_heartbeats_of_a_statement_that_fails_fail(stage: Stage, group: Group) -> None:
    one = Listener(stage, group, "m0")
    sender = HeartbeatSender(stage.database)
    with pytest.raises(MqlayerError):
        send_heartbeat(stage.database, one.session, lease_s=float("nan"), sender=sender)
    assert send_heartbeat(stage.database, one.session, lease_s=LEASE_S, sender=sender).known


def test_a_heartbeat_waits_for_others_and_one_with_a_reason_for_none(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_sender, "GATHER_S", 60.0)
    monkeypatch.setattr(heartbeat_sender, "PATIENCE_S", 60.0)
    monkeypatch.setattr(heartbeat_sender, "MOST", 3)
    listeners = [Listener(stage, group, f"m{number}") for number in range(3)]
    held = HeldBack(stage.database)
    held.go.set()
    sender = HeartbeatSender(held)  # type: ignore[arg-type]

    def beat(one: Listener) -> HeartbeatReply:
        return send_heartbeat(stage.database, one.session, lease_s=LEASE_S, heard=one.heard, sender=sender)

    with ThreadPoolExecutor(3) as pool:
        assert all(reply.known for reply in pool.map(beat, listeners))
        assert held.carried == [3], "as many as a statement takes"
        waiting = pool.submit(beat, listeners[0])
        wait_until(lambda: len(sender._waiting) == 1, what="one to wait for others")
        listeners[1].heard.urgent = True
        assert beat(listeners[1]).known
        assert waiting.result(20).known
        assert held.carried == [3, 2]
    listeners[2].heard.urgent = True
    assert beat(listeners[2]).known
    assert held.carried == [3, 2, 1]


@pytest.mark.parametrize("analyzed", [False, True])
def test_heartbeats_are_not_planned_anew_each_time(stage: Stage, group: Group, *, analyzed: bool) -> None:
    """Planning costs more than the statement does."""
    listeners = [Listener(stage, group, f"m{number}") for number in range(8)]
    batch = [membership._facts(one.session) | {"lease_s": LEASE_S, "acts_on": 1} for one in listeners]
    together = heartbeat_sender.together(batch)
    with kept_session(stage.dsn, autocommit=True) as connection:
        if analyzed:
            connection.execute("ANALYZE mqlayer.member, mqlayer.assignment, mqlayer.consumer_group, mqlayer.protocol")
        for name, facts in (("member_beat", batch[0]), ("members_beat", together)):
            for _ in range(8):
                connection.execute(query(name), facts, prepare=True)
            asked = "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE %s"
            row = connection.execute(asked, [query(name)[:40] + "%"]).fetchone()
            # Five with their arguments, by which the server judges what planning is worth.
            assert row == (3, 5), name


def set_zone(stage: Stage, zone: str) -> None:
    """Change all nodes."""
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET zone = %s", [zone])


def zones(nodes: Mapping[Any, Node]) -> set[str]:
    """Return the zones of nodes."""
    return {node.zone for node in nodes.values()}


def test_members_read_the_nodes_only_when_one_has_changed(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes times members would be read each second."""
    monkeypatch.setattr(membership, "RNG", Unlucky())
    listeners: list[Listener] = []
    grow(stage, group, listeners, LOOKS)
    routes = RouteCache(stage.database)
    assert zones(routes.follow_nodes(listeners[0].beat().nodes)) == {""}
    with statements(monkeypatch) as executed:
        for one in listeners:
            routes.follow_nodes(one.beat().nodes)
    assert executed == [query("member_beat")] * LOOKS
    set_zone(stage, "a")
    assert zones(routes.follow_nodes(listeners[1].beat().nodes)) == {"a"}
    assert routes.nodes == routes.follow_nodes("")


def test_a_slow_reading_of_nodes_does_not_restore_what_was_before(
    stage: Stage, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes, has_read, goes_on = RouteCache(stage.database), threading.Event(), threading.Event()
    read = route_cache._read_nodes

    def slowly(connection: Any) -> Any:
        found = read(connection)
        has_read.set()
        assert goes_on.wait(20)
        return found

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(route_cache, "_read_nodes", slowly)
        slow = pool.submit(routes.follow_nodes, "earlier")
        assert has_read.wait(20)
        monkeypatch.setattr(route_cache, "_read_nodes", read)
        set_zone(stage, "a")
        assert zones(routes.follow_nodes("later")) == {"a"}
        goes_on.set()
        slow.result(20)
    assert zones(routes.nodes) == zones(routes.follow_nodes("later")) == {"a"}


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
def test_a_look_at_a_group_asks_only_of_partitions_without_an_owner_whether_it_may_consume_them(
    stage: Stage, group: Group, plans: str
) -> None:
    one = Listener(stage, group, "m0")
    facts = membership._facts(one.session)

    def looked() -> int:
        """Return how often each of the tables was asked that hide partitions."""
        with kept_session(stage.dsn, autocommit=True) as connection:
            connection.execute("SELECT set_config('plan_cache_mode', %s, false)", [plans])
            row = connection.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + query("group_unbalanced"), facts).fetchone()
        assert row is not None
        hiding = {"drained", "partition_pause"}
        return sum(node["Actual Loops"] for node in nodes_of(row[0][0]["Plan"]) if node.get("Relation Name") in hiding)

    assert looked() == 0
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.assignment SET member_id = NULL, target = NULL WHERE partition_id = 1")
    assert looked() > 0


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes_of(child)
