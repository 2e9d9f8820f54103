"""Joining, beating, leaving: who may consume what, by the database's word and clock alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import FailpointHit, arm
from mqlayer.groups import (
    Group,
    GroupSettings,
    HeartbeatReply,
    MemberSession,
    ensure_group,
    find_group,
    join,
    leave,
    rebalance,
    release,
    send_heartbeat,
    start_leaving,
)
from mqlayer.groups.members import MemberReplaced, end_dead, next_session, renew
from mqlayer.groups.rebalance import change_group
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until, within

LEASE_S = 60.0


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of five partitions."""
    return start_stage(redis_url, partitions=5)


@pytest.fixture
def group(stage: Stage) -> Group:
    """A group of the topic."""
    return make_group(stage)


def make_group(stage: Stage, name: str = "g", settings: GroupSettings | None = None) -> Group:
    return ensure_group(
        stage.runtime,
        RouteCache(stage.database),
        topic=stage.topic,
        name=name,
        settings=settings or GroupSettings(),
    )


class Members:
    """Members of a group that do nothing but beat."""

    def __init__(self, stage: Stage, group: Group) -> None:
        self.stage, self.group = stage, group
        self.sessions: dict[str, MemberSession] = {}

    def join(self, *names: str, lease_s: float = LEASE_S) -> None:
        for name in names:
            self.sessions[name] = join(
                self.stage.database, group_id=self.group.group_id, member_id=name, lease_s=lease_s
            )

    def beat(self, name: str, lease_s: float = LEASE_S) -> HeartbeatReply:
        return send_heartbeat(self.stage.database, self.sessions[name], lease_s=lease_s)

    def settle(self) -> None:
        """Let all members do what they are asked for, until nobody is asked for anything."""
        asked = True
        while asked:
            asked = False
            for name, session in self.sessions.items():
                for assigned in self.beat(name).assignments:
                    if assigned.release:
                        release(self.stage.database, session, assigned)
                        asked = True

    def shares(self) -> dict[str | None, int]:
        return dict(Counter(self.stage.owners().values()))

    def join_again(self, name: str, lease_s: float = LEASE_S) -> None:
        """Join as a process does whose lease ran out."""
        own = [self.sessions[name].session]
        self.sessions[name] = join(
            self.stage.database, group_id=self.group.group_id, member_id=name, lease_s=lease_s, own=own
        )

    def expire(self, *names: str, ago_s: float = 0.001) -> None:
        """Let leases have run out, by the database's clock."""
        with self.stage.database.connection() as connection:
            connection.execute(
                "UPDATE mqlayer.member SET lease_until = now() - make_interval(secs => %s) WHERE member_id = ANY(%s)",
                [ago_s, list(names)],
            )

    def epochs(self) -> dict[int, int]:
        return {partition: epoch for partition, _, epoch, _ in self.stage.assignments()}

    def allocation(self) -> int:
        with self.stage.database.connection() as connection:
            row = connection.execute("SELECT allocation FROM mqlayer.consumer_group").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def members(stage: Stage, group: Group) -> Members:
    """No member yet."""
    return Members(stage, group)


def test_the_first_member_gets_everything_at_once(members: Members) -> None:
    members.join("a")
    answer = members.beat("a")
    assert [a.partition for a in answer.assignments] == members.stage.partitions
    assert len({a.epoch for a in answer.assignments}) == 5
    assert not any(a.release for a in answer.assignments)
    assert answer.rules == members.group.rules


def test_the_session_of_a_dead_process_ends_at_once_and_only_that(members: Members) -> None:
    """A word of death that comes late, or twice, takes nothing from who joined meanwhile under the same id."""
    members.join("a", "b")
    members.settle()
    before, dead = members.epochs(), members.sessions["a"]
    lost = [partition for partition, owner in members.stage.owners().items() if owner == "a"]
    assert end_dead(members.stage.database, dead)
    assert members.shares() == {"b": 5}
    after = members.epochs()
    assert all(after[partition] > before[partition] for partition in lost)
    assert not members.beat("a").known
    assert not end_dead(members.stage.database, dead)
    members.join("a")
    members.settle()
    shares = members.shares()
    assert not end_dead(members.stage.database, dead)
    assert members.shares() == shares == {"a": 2, "b": 3}


def test_a_session_that_never_began_can_be_ended(members: Members) -> None:
    """A process names its session before it joins, and may die between the two."""
    members.join("a")
    number = next_session(members.stage.database)
    assert not end_dead(members.stage.database, MemberSession(members.group.group_id, "b", number))
    assert members.shares() == {"a": 5}


def test_a_second_member_gets_its_share_when_the_owner_has_released_it(members: Members) -> None:
    """Cases 36 and 45: nothing changes hands before the owner said so, and only what must move moves."""
    members.join("a")
    before = members.epochs()
    members.join("b")
    assert members.shares() == {"a": 5}
    assert members.beat("b").assignments == ()
    asked = [a for a in members.beat("a").assignments if a.release]
    assert len(asked) == 2
    release(members.stage.database, members.sessions["a"], asked[0])
    assert [a.partition for a in members.beat("b").assignments] == [asked[0].partition]
    members.settle()
    assert members.shares() == {"a": 3, "b": 2}
    moved = {partition for partition, epoch in members.epochs().items() if epoch != before[partition]}
    assert moved == {a.partition for a in asked}
    assert all(members.epochs()[partition] > max(before.values()) for partition in moved)


def test_what_is_given_back_together_passes_on_at_once_but_not_under_an_old_epoch(members: Members) -> None:
    members.join("a")
    members.join("b")
    owner, before = members.sessions["a"], members.allocation()
    first, second = (a for a in members.beat("a").assignments if a.release)
    release(members.stage.database, owner, first, replace(second, epoch=second.epoch - 1))
    assert [a.partition for a in members.beat("b").assignments] == [first.partition]
    assert members.allocation() == before + 1
    release(members.stage.database, owner, first, second)
    assert [a.partition for a in members.beat("b").assignments] == [first.partition, second.partition]


def test_a_lease_that_ran_out_is_noted_by_others_and_its_partitions_go_on(members: Members) -> None:
    members.join("a", "b")
    members.settle()
    members.expire("a")
    members.beat("b")
    assert members.shares() == {"b": 5}


def test_an_expired_lease_never_comes_back(members: Members) -> None:
    """Whether others have noted it or not: the heartbeat on its way is refused."""
    members.join("a", "b")
    members.settle()
    members.expire("a")
    assert members.beat("a") == HeartbeatReply(known=False, replaced=False)
    members.beat("b")
    assert members.beat("a") == HeartbeatReply(known=False, replaced=False)
    assert members.shares() == {"b": 5}
    members.join("a")
    members.settle()
    assert members.shares() == {"a": 2, "b": 3}


def test_members_whose_leases_ran_out_together_come_back_to_what_they_had(members: Members) -> None:
    """The database was away: the first to come back is not given everything, to give it on again."""
    members.join("a", "b", "c")
    members.settle()
    owners, before = members.stage.owners(), members.epochs()
    members.expire("a", ago_s=7)
    members.expire("b", ago_s=7 + LEASE_S / 2)
    members.expire("c", ago_s=6)
    assert not members.beat("a").known
    members.join_again("a")
    assert members.stage.owners() == owners
    own = {a.partition: a.epoch for a in members.beat("a").assignments}
    assert all(epoch > before[partition] for partition, epoch in own.items())
    assert members.beat("b").known, "it came back within half a lease: nobody has had what it has"
    members.expire("c")
    members.join_again("c")
    assert members.stage.owners() == owners
    assert all(members.epochs()[a.partition] == before[a.partition] for a in members.beat("b").assignments)


def test_who_wants_to_leave_when_its_lease_ran_out_changes_nothing(members: Members) -> None:
    """The database may have been away: others, who are about to be back, are not noted as gone over it."""
    members.join("a", "b")
    members.settle()
    members.expire("a", "b")
    start_leaving(members.stage.database, members.sessions["a"])
    members.join_again("b")
    assert members.shares() == {"a": 3, "b": 2}


def test_who_does_not_come_back_is_gone_half_a_lease_later(members: Members) -> None:
    members.join("a", "b")
    members.settle()
    members.expire("a", "b")
    members.join_again("a", lease_s=4.0)
    assert members.shares() == {"a": 3, "b": 2}
    wait_until(lambda: (members.beat("a"), members.shares() == {"a": 5})[1], what="the other's time to be over")
    assert not members.beat("b").known


def test_a_process_whose_joining_was_lost_with_its_commit_joins_again(members: Members) -> None:
    """A promoted standby knows an earlier session of it: that is nobody else's."""
    members.join("a", "b")
    earlier = members.sessions["a"]
    members.join_again("a")
    with members.stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET session = %s WHERE member_id = 'a'", [earlier.session])
    assert members.beat("a") == HeartbeatReply(known=False, replaced=False)
    members.join_again("a")
    assert members.beat("a").known


def test_an_eviction_between_two_joinings_of_a_process_is_not_undone(members: Members) -> None:
    """The number of a joining may be drawn before it, and higher than the eviction's."""
    members.join("a", "b")
    held = members.sessions["a"]
    own = [held.session, next_session(members.stage.database) + 1_000]
    with members.stage.database.connection() as connection:
        connection.execute(query("member_evict"), {"group_id": members.group.group_id, "member_id": "a"})
    assert send_heartbeat(members.stage.database, held, lease_s=LEASE_S, own=own).replaced
    with pytest.raises(MemberReplaced):
        join(members.stage.database, group_id=members.group.group_id, member_id="a", lease_s=LEASE_S, own=own)


def test_nobody_is_spared_who_died_before_or_was_leaving(members: Members) -> None:
    members.join("a", "b", "c")
    members.settle()
    start_leaving(members.stage.database, members.sessions["c"])
    members.expire("a", "c")
    members.expire("b", ago_s=LEASE_S + 1)
    members.join_again("a")
    assert members.shares() == {"a": 5}
    assert not members.beat("b").known
    assert not members.beat("c").known


def test_nobody_is_spared_while_somebody_lives_or_by_a_new_process(members: Members) -> None:
    members.join("a", "b", "c")
    members.settle()
    members.expire("a", "b")
    members.join_again("a")
    assert not members.beat("b").known
    members.settle()
    assert set(members.shares()) == {"a", "c"}
    members.expire("a", "c")
    members.join("a")
    assert members.shares() == {"a": 5}


def test_leases_are_judged_by_the_databases_clock_in_one_statement(members: Members) -> None:
    """A short lease runs out while its member's own clock is not asked at all."""
    members.join("a", lease_s=0.2)
    members.join("b")
    wait_until(lambda: (members.beat("b"), members.shares() == {"b": 5})[1], what="the lease ran out")
    assert not members.beat("a", lease_s=0.2).known


def test_a_heartbeat_that_waits_while_it_is_replaced_is_told(members: Members) -> None:
    """It must not take the end of its session for a lease that ran out: it would join again, and end the newer one."""
    members.join("a")
    with kept_session(members.stage.dsn) as other, ThreadPoolExecutor(1) as pool:
        other.execute("UPDATE mqlayer.member SET session = nextval('mqlayer.member_session')")
        answer = pool.submit(members.beat, "a")
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with kept_session(members.stage.dsn, autocommit=True) as watcher:
            wait_until(lambda: watcher.execute(waits).rowcount == 1, what="the heartbeat to wait")
        other.commit()
        assert answer.result(20) == HeartbeatReply(known=False, replaced=True)


def test_the_same_id_again_gets_a_new_session_and_new_epochs_and_the_old_one_is_told(members: Members) -> None:
    """Case 39."""
    members.join("a", "b")
    members.settle()
    old, before = members.sessions["a"], members.epochs()
    members.join("a")
    assert send_heartbeat(members.stage.database, old, lease_s=LEASE_S) == HeartbeatReply(known=False, replaced=True)
    owned = {a.partition: a.epoch for a in members.beat("a").assignments}
    assert owned
    assert all(epoch > before[partition] for partition, epoch in owned.items())
    assert members.epochs() == before | owned


def test_what_the_old_session_says_changes_nothing(members: Members) -> None:
    members.join("a")
    old = members.sessions["a"]
    assigned = members.beat("a").assignments[0]
    members.join("a")
    before = members.stage.assignments()
    release(members.stage.database, old, assigned)
    renew(members.stage.database, old, assigned)
    start_leaving(members.stage.database, old)
    leave(members.stage.database, old)
    assert members.stage.assignments() == before
    assert members.beat("a").known


def test_leaving_keeps_partitions_until_they_are_released(members: Members) -> None:
    members.join("a", "b")
    members.settle()
    start_leaving(members.stage.database, members.sessions["a"])
    answer = members.beat("a")
    assert answer.known
    assert all(a.release for a in answer.assignments)
    assert members.shares() == {"a": 3, "b": 2}
    members.settle()
    assert members.shares() == {"b": 5}
    leave(members.stage.database, members.sessions.pop("a"))
    assert members.shares() == {"b": 5}


def test_the_last_one_that_leaves_frees_everything(members: Members) -> None:
    members.join("a")
    leave(members.stage.database, members.sessions["a"])
    assert members.shares() == {None: 5}
    before = members.epochs()
    members.join("b")
    assert members.shares() == {"b": 5}
    assert min(members.epochs().values()) > max(before.values())


def test_more_members_than_partitions_are_stable_and_an_idle_one_takes_over(members: Members) -> None:
    """Case 44."""
    names = [f"m{number}" for number in range(8)]
    members.join(*names)
    members.settle()
    before, allocation = members.stage.owners(), members.allocation()
    assert sorted(Counter(before.values()).values()) == [1] * 5
    for _ in range(3):
        for name in names:
            members.beat(name)
    assert (members.stage.owners(), members.allocation()) == (before, allocation)
    leaver = before[members.stage.partitions[0]]
    assert leaver is not None
    leave(members.stage.database, members.sessions[leaver])
    after = members.stage.owners()
    assert {partition for partition in after if after[partition] != before[partition]} == {members.stage.partitions[0]}
    assert after[members.stage.partitions[0]] not in before.values()


def test_many_at_once_join_and_release_and_every_partition_has_one_owner(members: Members) -> None:
    """Cases 45 and 48: rebalances at once come one after the other."""
    names = [f"m{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(members.join, names))
    members.settle()
    assert sorted(Counter(members.stage.owners().values()).values()) == [1] * 5
    assert len(set(members.epochs().values())) == 5


def test_two_rebalances_at_once_make_one_change(members: Members) -> None:
    members.join("a", "b")
    members.settle()
    members.expire("a")
    group_id = members.group.group_id
    before = members.allocation()
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(change_group, members.stage.database, group_id, lambda c: rebalance(c, group_id), idle_s=30.0)
            for _ in range(2)
        ]
        assert sorted(one.result() for one in work) == [False, True]
    assert members.allocation() == before + 1


@pytest.mark.full
def test_a_process_stopped_inside_a_transaction_holds_its_group_up_for_seconds_only(members: Members) -> None:
    """Heartbeats go on meanwhile; the lock comes free when the database ends the stopped transaction."""
    members.join("a", "b")
    members.settle()
    inside, go_on = threading.Event(), threading.Event()

    def stop_inside(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        inside.set()
        go_on.wait(30)

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(change_group, members.stage.database, members.group.group_id, stop_inside)
        assert inside.wait(10)
        members.expire("a")

        def beaten_s() -> float:
            began = time.monotonic()
            assert members.beat("b", lease_s=4.0).known
            return time.monotonic() - began

        within(beaten_s, 1.0, what="a heartbeat")
        wait_until(
            lambda: (members.beat("b"), members.shares() == {"b": 5})[1],
            timeout_s=20,
            what="the lock came free by itself",
        )
        go_on.set()
        assert stopped.exception() is not None


def test_a_new_epoch_is_given_to_an_owner_whose_present_one_is_refused(members: Members) -> None:
    members.join("a")
    assigned = members.beat("a").assignments[2]
    renew(members.stage.database, members.sessions["a"], assigned)
    renewed = members.beat("a").assignments[2]
    assert renewed.epoch > assigned.epoch
    renew(members.stage.database, members.sessions["a"], assigned)
    assert members.beat("a").assignments[2] == renewed


def test_a_join_that_fails_before_its_commit_changes_nothing(members: Members) -> None:
    members.join("a")
    before = members.stage.assignments()
    arm("member.before_join_commit", "raise")
    with pytest.raises(FailpointHit):
        members.join("b")
    assert members.stage.assignments() == before
    members.join("b")
    members.settle()
    assert members.shares() == {"a": 3, "b": 2}


def test_an_epoch_never_falls_and_a_new_owner_needs_a_new_one(members: Members) -> None:
    """Invariant 9, by the database itself."""
    members.join("a", "b")
    for change in ("epoch = epoch - 1", "member_id = 'b'"):
        with (
            members.stage.database.connection() as connection,
            pytest.raises(psycopg.errors.CheckViolation, match="only grows"),
        ):
            connection.execute(f"UPDATE mqlayer.assignment SET {change}")


def test_a_group_starts_where_it_was_told_to(stage: Stage) -> None:
    stage.send_numbers(keys=20, each=3)
    make_group(stage, "early", GroupSettings("earliest"))
    make_group(stage, "late", GroupSettings("latest"))
    nexts = {partition: position.next for partition, position in stage.positions("late").items()}
    assert starts(stage, "early") == dict.fromkeys(stage.partitions, 1)
    assert starts(stage, "late") == nexts
    assert sum(nexts.values()) == 65
    stage.send_numbers(keys=20, each=1, first=4)
    make_group(stage, "late", GroupSettings("latest"))
    make_group(stage, "late", GroupSettings())
    with pytest.raises(Conflict, match="mqlayer group seek"):
        make_group(stage, "late", GroupSettings("earliest"))
    assert starts(stage, "late") == nexts


def starts(stage: Stage, group: str) -> dict[int, int]:
    with stage.database.connection() as connection:
        rows = connection.execute(
            "SELECT partition_id, start_offset FROM mqlayer.group_start WHERE group_id = %s ORDER BY 1",
            [stage.group_id(group)],
        ).fetchall()
    return {int(partition): int(offset) for partition, offset in rows}


@pytest.mark.parametrize("name", ["group.after_insert", "group.before_starts", "group.before_live"])
def test_a_group_whose_creation_was_cut_off_is_finished_by_whoever_asks_next(stage: Stage, name: str) -> None:
    stage.send_numbers(keys=20, each=3)
    arm(name, "raise")
    with pytest.raises(FailpointHit):
        make_group(stage, "g", GroupSettings("latest"))
    assert find_group(stage.database, stage.topic, "g").state == "creating"
    group = make_group(stage, "g", GroupSettings("earliest"))
    assert (group.state, group.start) == ("live", "latest")
    assert sum(starts(stage, "g").values()) == 65


def test_many_that_create_a_group_at_once_make_one(stage: Stage) -> None:
    stage.send_numbers(keys=20, each=3)
    with ThreadPoolExecutor(6) as pool:
        groups = list(pool.map(lambda _: make_group(stage, "g", GroupSettings("latest")), range(6)))
    assert len({group.group_id for group in groups}) == 1
    assert len(starts(stage, "g")) == 5


def test_groups_are_refused_with_bad_settings_or_an_unknown_topic(stage: Stage) -> None:
    for bad in (GroupSettings("now"), GroupSettings(backoff_s=()), GroupSettings(backoff_s=(-1.0,))):  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            make_group(stage, "g", bad)
    with pytest.raises(NotFound, match="unknown group"):
        find_group(stage.database, stage.topic, "g")
    stage.topic = "nothing"
    with pytest.raises(NotFound, match="unknown topic"):
        make_group(stage)
