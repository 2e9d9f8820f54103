"""Joining, beating, leaving: who may consume what, by the database's word and clock alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import FailpointHit, arm, disarm_all
from mqlayer.membership import (
    Beat,
    Group,
    GroupSettings,
    Session,
    beat,
    ensure_group,
    find_group,
    join,
    leave,
    rebalance,
    release,
    start_leaving,
)
from mqlayer.membership.members import Replaced, next_session, renew
from mqlayer.membership.rebalance import change_group
from mqlayer.postgres.queries import query
from mqlayer.routes.cache import RouteCache
from tests.fixtures.consuming import Stage, StartStage
from tests.fixtures.waiting import wait_until, within

LEASE_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    disarm_all()


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
        stage.database,
        RouteCache(stage.database),
        topic=stage.topic,
        name=name,
        prefix=stage.prefix,
        settings=settings or GroupSettings(),
    )


class Crew:
    """Members of a group that do nothing but beat."""

    def __init__(self, stage: Stage, group: Group) -> None:
        self.stage, self.group = stage, group
        self.sessions: dict[str, Session] = {}

    def join(self, *names: str, lease_s: float = LEASE_S) -> None:
        for name in names:
            self.sessions[name] = join(
                self.stage.database, group_id=self.group.group_id, member_id=name, lease_s=lease_s
            )

    def beat(self, name: str, lease_s: float = LEASE_S) -> Beat:
        return beat(self.stage.database, self.sessions[name], lease_s=lease_s)

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
def crew(stage: Stage, group: Group) -> Crew:
    """No member yet."""
    return Crew(stage, group)


def test_the_first_member_gets_everything_at_once(crew: Crew) -> None:
    crew.join("a")
    answer = crew.beat("a")
    assert [a.partition for a in answer.assignments] == crew.stage.partitions
    assert len({a.epoch for a in answer.assignments}) == 5
    assert not any(a.release for a in answer.assignments)
    assert answer.rules == crew.group.rules


def test_a_second_member_gets_its_share_when_the_owner_has_released_it(crew: Crew) -> None:
    """Cases 36 and 45: nothing changes hands before the owner said so, and only what must move moves."""
    crew.join("a")
    before = crew.epochs()
    crew.join("b")
    assert crew.shares() == {"a": 5}
    assert crew.beat("b").assignments == ()
    asked = [a for a in crew.beat("a").assignments if a.release]
    assert len(asked) == 2
    release(crew.stage.database, crew.sessions["a"], asked[0])
    assert [a.partition for a in crew.beat("b").assignments] == [asked[0].partition]
    crew.settle()
    assert crew.shares() == {"a": 3, "b": 2}
    moved = {partition for partition, epoch in crew.epochs().items() if epoch != before[partition]}
    assert moved == {a.partition for a in asked}
    assert all(crew.epochs()[partition] > max(before.values()) for partition in moved)


def test_what_is_given_back_together_passes_on_at_once_but_not_under_an_old_epoch(crew: Crew) -> None:
    crew.join("a")
    crew.join("b")
    owner, before = crew.sessions["a"], crew.allocation()
    first, second = (a for a in crew.beat("a").assignments if a.release)
    release(crew.stage.database, owner, first, replace(second, epoch=second.epoch - 1))
    assert [a.partition for a in crew.beat("b").assignments] == [first.partition]
    assert crew.allocation() == before + 1
    release(crew.stage.database, owner, first, second)
    assert [a.partition for a in crew.beat("b").assignments] == [first.partition, second.partition]


def test_a_lease_that_ran_out_is_noted_by_others_and_its_partitions_go_on(crew: Crew) -> None:
    crew.join("a", "b")
    crew.settle()
    crew.expire("a")
    crew.beat("b")
    assert crew.shares() == {"b": 5}


def test_an_expired_lease_never_comes_back(crew: Crew) -> None:
    """Whether others have noted it or not: the heartbeat on its way is refused."""
    crew.join("a", "b")
    crew.settle()
    crew.expire("a")
    assert crew.beat("a") == Beat(known=False, replaced=False)
    crew.beat("b")
    assert crew.beat("a") == Beat(known=False, replaced=False)
    assert crew.shares() == {"b": 5}
    crew.join("a")
    crew.settle()
    assert crew.shares() == {"a": 2, "b": 3}


def test_members_whose_leases_ran_out_together_come_back_to_what_they_had(crew: Crew) -> None:
    """The database was away: the first to come back is not given everything, to give it on again."""
    crew.join("a", "b", "c")
    crew.settle()
    owners, before = crew.stage.owners(), crew.epochs()
    crew.expire("a", ago_s=7)
    crew.expire("b", ago_s=7 + LEASE_S / 2)
    crew.expire("c", ago_s=6)
    assert not crew.beat("a").known
    crew.join_again("a")
    assert crew.stage.owners() == owners
    own = {a.partition: a.epoch for a in crew.beat("a").assignments}
    assert all(epoch > before[partition] for partition, epoch in own.items())
    assert crew.beat("b").known, "it came back within half a lease: nobody has had what it has"
    crew.expire("c")
    crew.join_again("c")
    assert crew.stage.owners() == owners
    assert all(crew.epochs()[a.partition] == before[a.partition] for a in crew.beat("b").assignments)


def test_who_wants_to_leave_when_its_lease_ran_out_changes_nothing(crew: Crew) -> None:
    """The database may have been away: others, who are about to be back, are not noted as gone over it."""
    crew.join("a", "b")
    crew.settle()
    crew.expire("a", "b")
    start_leaving(crew.stage.database, crew.sessions["a"])
    crew.join_again("b")
    assert crew.shares() == {"a": 3, "b": 2}


def test_who_does_not_come_back_is_gone_half_a_lease_later(crew: Crew) -> None:
    crew.join("a", "b")
    crew.settle()
    crew.expire("a", "b")
    crew.join_again("a", lease_s=4.0)
    assert crew.shares() == {"a": 3, "b": 2}
    wait_until(lambda: (crew.beat("a"), crew.shares() == {"a": 5})[1], what="the other's time to be over")
    assert not crew.beat("b").known


def test_a_process_whose_joining_was_lost_with_its_commit_joins_again(crew: Crew) -> None:
    """A promoted standby knows an earlier session of it: that is nobody else's."""
    crew.join("a", "b")
    earlier = crew.sessions["a"]
    crew.join_again("a")
    with crew.stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET session = %s WHERE member_id = 'a'", [earlier.session])
    assert crew.beat("a") == Beat(known=False, replaced=False)
    crew.join_again("a")
    assert crew.beat("a").known


def test_an_eviction_between_two_joinings_of_a_process_is_not_undone(crew: Crew) -> None:
    """The number of a joining may be drawn before it, and higher than the eviction's."""
    crew.join("a", "b")
    held = crew.sessions["a"]
    own = [held.session, next_session(crew.stage.database) + 1_000]
    with crew.stage.database.connection() as connection:
        connection.execute(query("member_evict"), {"group_id": crew.group.group_id, "member_id": "a"})
    assert beat(crew.stage.database, held, lease_s=LEASE_S, own=own).replaced
    with pytest.raises(Replaced):
        join(crew.stage.database, group_id=crew.group.group_id, member_id="a", lease_s=LEASE_S, own=own)


def test_nobody_is_spared_who_died_before_or_was_leaving(crew: Crew) -> None:
    crew.join("a", "b", "c")
    crew.settle()
    start_leaving(crew.stage.database, crew.sessions["c"])
    crew.expire("a", "c")
    crew.expire("b", ago_s=LEASE_S + 1)
    crew.join_again("a")
    assert crew.shares() == {"a": 5}
    assert not crew.beat("b").known
    assert not crew.beat("c").known


def test_nobody_is_spared_while_somebody_lives_or_by_a_new_process(crew: Crew) -> None:
    crew.join("a", "b", "c")
    crew.settle()
    crew.expire("a", "b")
    crew.join_again("a")
    assert not crew.beat("b").known
    crew.settle()
    assert set(crew.shares()) == {"a", "c"}
    crew.expire("a", "c")
    crew.join("a")
    assert crew.shares() == {"a": 5}


def test_leases_are_judged_by_the_databases_clock_in_one_statement(crew: Crew) -> None:
    """A short lease runs out while its member's own clock is not asked at all."""
    crew.join("a", lease_s=0.2)
    crew.join("b")
    wait_until(lambda: (crew.beat("b"), crew.shares() == {"b": 5})[1], what="the lease ran out")
    assert not crew.beat("a", lease_s=0.2).known


def test_a_heartbeat_that_waits_while_it_is_replaced_is_told(crew: Crew) -> None:
    """It must not take the end of its session for a lease that ran out: it would join again, and end the newer one."""
    crew.join("a")
    with psycopg.connect(crew.stage.dsn) as other, ThreadPoolExecutor(1) as pool:
        other.execute("UPDATE mqlayer.member SET session = nextval('mqlayer.member_session')")
        answer = pool.submit(crew.beat, "a")
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with psycopg.connect(crew.stage.dsn, autocommit=True) as watcher:
            wait_until(lambda: watcher.execute(waits).rowcount == 1, what="the heartbeat to wait")
        other.commit()
        assert answer.result(20) == Beat(known=False, replaced=True)


def test_the_same_id_again_gets_a_new_session_and_new_epochs_and_the_old_one_is_told(crew: Crew) -> None:
    """Case 39."""
    crew.join("a", "b")
    crew.settle()
    old, before = crew.sessions["a"], crew.epochs()
    crew.join("a")
    assert beat(crew.stage.database, old, lease_s=LEASE_S) == Beat(known=False, replaced=True)
    owned = {a.partition: a.epoch for a in crew.beat("a").assignments}
    assert owned
    assert all(epoch > before[partition] for partition, epoch in owned.items())
    assert crew.epochs() == before | owned


def test_what_the_old_session_says_changes_nothing(crew: Crew) -> None:
    crew.join("a")
    old = crew.sessions["a"]
    assigned = crew.beat("a").assignments[0]
    crew.join("a")
    before = crew.stage.assignments()
    release(crew.stage.database, old, assigned)
    renew(crew.stage.database, old, assigned)
    start_leaving(crew.stage.database, old)
    leave(crew.stage.database, old)
    assert crew.stage.assignments() == before
    assert crew.beat("a").known


def test_leaving_keeps_partitions_until_they_are_released(crew: Crew) -> None:
    crew.join("a", "b")
    crew.settle()
    start_leaving(crew.stage.database, crew.sessions["a"])
    answer = crew.beat("a")
    assert answer.known
    assert all(a.release for a in answer.assignments)
    assert crew.shares() == {"a": 3, "b": 2}
    crew.settle()
    assert crew.shares() == {"b": 5}
    leave(crew.stage.database, crew.sessions.pop("a"))
    assert crew.shares() == {"b": 5}


def test_the_last_one_that_leaves_frees_everything(crew: Crew) -> None:
    crew.join("a")
    leave(crew.stage.database, crew.sessions["a"])
    assert crew.shares() == {None: 5}
    before = crew.epochs()
    crew.join("b")
    assert crew.shares() == {"b": 5}
    assert min(crew.epochs().values()) > max(before.values())


def test_more_members_than_partitions_are_stable_and_an_idle_one_takes_over(crew: Crew) -> None:
    """Case 44."""
    names = [f"m{number}" for number in range(8)]
    crew.join(*names)
    crew.settle()
    before, allocation = crew.stage.owners(), crew.allocation()
    assert sorted(Counter(before.values()).values()) == [1] * 5
    for _ in range(3):
        for name in names:
            crew.beat(name)
    assert (crew.stage.owners(), crew.allocation()) == (before, allocation)
    leaver = before[crew.stage.partitions[0]]
    assert leaver is not None
    leave(crew.stage.database, crew.sessions[leaver])
    after = crew.stage.owners()
    assert {partition for partition in after if after[partition] != before[partition]} == {crew.stage.partitions[0]}
    assert after[crew.stage.partitions[0]] not in before.values()


def test_many_at_once_join_and_release_and_every_partition_has_one_owner(crew: Crew) -> None:
    """Cases 45 and 48: rebalances at once come one after the other."""
    names = [f"m{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(crew.join, names))
    crew.settle()
    assert sorted(Counter(crew.stage.owners().values()).values()) == [1] * 5
    assert len(set(crew.epochs().values())) == 5


def test_two_rebalances_at_once_make_one_change(crew: Crew) -> None:
    crew.join("a", "b")
    crew.settle()
    crew.expire("a")
    group_id = crew.group.group_id
    before = crew.allocation()
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(change_group, crew.stage.database, group_id, lambda c: rebalance(c, group_id)) for _ in range(2)
        ]
        assert sorted(one.result() for one in work) == [False, True]
    assert crew.allocation() == before + 1


def test_a_process_stopped_inside_a_transaction_holds_its_group_up_for_seconds_only(crew: Crew) -> None:
    """Heartbeats go on meanwhile; the lock comes free when the database ends the stopped transaction."""
    crew.join("a", "b")
    crew.settle()
    inside, go_on = threading.Event(), threading.Event()

    def stop_inside(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        inside.set()
        go_on.wait(30)

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(change_group, crew.stage.database, crew.group.group_id, stop_inside)
        assert inside.wait(10)
        crew.expire("a")

        def beaten_s() -> float:
            began = time.monotonic()
            assert crew.beat("b", lease_s=1.0).known
            return time.monotonic() - began

        within(beaten_s, 1.0, what="a heartbeat")
        wait_until(
            lambda: (crew.beat("b"), crew.shares() == {"b": 5})[1], timeout_s=20, what="the lock came free by itself"
        )
        go_on.set()
        assert stopped.exception() is not None


def test_a_new_epoch_is_given_to_an_owner_whose_present_one_is_refused(crew: Crew) -> None:
    crew.join("a")
    assigned = crew.beat("a").assignments[2]
    renew(crew.stage.database, crew.sessions["a"], assigned)
    renewed = crew.beat("a").assignments[2]
    assert renewed.epoch > assigned.epoch
    renew(crew.stage.database, crew.sessions["a"], assigned)
    assert crew.beat("a").assignments[2] == renewed


def test_a_join_that_fails_before_its_commit_changes_nothing(crew: Crew) -> None:
    crew.join("a")
    before = crew.stage.assignments()
    arm("member.before_join_commit", "raise")
    with pytest.raises(FailpointHit):
        crew.join("b")
    assert crew.stage.assignments() == before
    crew.join("b")
    crew.settle()
    assert crew.shares() == {"a": 3, "b": 2}


def test_an_epoch_never_falls_and_a_new_owner_needs_a_new_one(crew: Crew) -> None:
    """Invariant 9, by the database itself."""
    crew.join("a", "b")
    for change in ("epoch = epoch - 1", "member_id = 'b'"):
        with (
            crew.stage.database.connection() as connection,
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
