"""The window of keys against a model, and the breaker in Postgres against its states."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.domain.key_window import KeyWindow
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.groups import GroupSettings, ensure_group, join
from mqlayer.groups.breaker import (
    LONGEST_PROBE_S,
    BreakerReply,
    State,
    close_breaker,
    end_probe,
    open_breaker,
    report_keys,
    take_probe,
)
from mqlayer.groups.breaker_admin import reset_breaker, trip_breaker
from mqlayer.groups.members import MemberSession, release, send_heartbeat
from mqlayer.postgres.database import Database
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Stage

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
RESULTS = st.lists(st.tuples(KEYS, st.booleans(), st.integers(0, 3)), max_size=30)


@given(RESULTS, st.integers(1, 8))
def test_a_window_counts_each_key_once_by_its_last_result(results: list[tuple[bytes, bool, int]], width: int) -> None:
    window, last, now = KeyWindow(), dict[bytes, tuple[int, bool]](), 0
    for key, fails, later in results:
        now += later
        if fails:
            window.fail(key, now, "E")
        else:
            window.succeed(key, now)
        last.pop(key, None)
        last[key] = now, fails
        window.forget(now - width)
        last = {key: result for key, result in last.items() if result[0] >= now - width}
        failing = sum(fails for _, fails in last.values())
        assert (window.failing, window.tried) == (failing, len(last))
        assert window.fails(0.5, 2) == (failing >= 2 and 2 * failing >= len(last))


class KeyPart:
    """What a worker has of a key."""

    def __init__(self, key: bytes) -> None:
        self.key = key


STATES = st.sampled_from(["closed", "open", "probing", "ramping"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), STATES, st.booleans()),
        st.tuples(st.just("end"), st.sampled_from(["failed", "handled", "given back"]), st.integers(0, 5)),
        st.tuples(st.just("begin"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_member_begins_no_more_than_its_group_allows(steps: list[tuple[str, Any, Any]]) -> None:
    """Whatever it hears, in whichever order: nothing while open, one while it probes, none after its result."""
    rules = RetryRules(breaker_share=0.5, breaker_keys=2)
    breaker, running, state, mine = CircuitBreaker(lambda: rules), list[KeyPart](), "closed", False
    for number, (act, what, more) in enumerate(steps):
        if act == "hear":
            if (what, bool(more)) != (state, mine) and not (what == "probing" and more and mine):
                running = [] if what in ("ramping", "closed") or (what == "probing" and more) else running
            state, mine = what, bool(more) and what == "probing"
            breaker.follow(BreakerReply(what, mine=mine))
        elif act == "begin" and breaker.engaged and breaker.room():
            running.append(KeyPart(b"%d" % number))
            breaker.begin(running[-1])
        elif act == "end" and running:
            part = running.pop(more % len(running))
            if what == "failed":
                assert breaker.failed(part, part.key, OSError()) or state in ("closed", "ramping")
            breaker.ended(part, part.key, int(what == "handled"))
        assert breaker.engaged == (state != "closed")
        if state == "open" or (state == "probing" and not mine):
            assert breaker.room() == 0
        if state == "probing" and mine and breaker.verdict() is not None:
            assert breaker.room() == 0


class Machine(RuleBasedStateMachine):
    """Two members and an operator at one group's breaker in a real Postgres."""

    database: Database
    stage: Stage
    group_id: int
    sessions: list[MemberSession]

    def __init__(self) -> None:
        super().__init__()
        self.state: State = "closed"
        self.prober: int | None = None
        self.reports: dict[int, tuple[int, int]] = {}
        with self.database.connection() as connection:
            connection.execute("DELETE FROM mqlayer.breaker")
            connection.execute("UPDATE mqlayer.member SET failing_keys = 0, tried_keys = 0, reported_at = 'epoch'")

    def facts(self, member: int) -> dict[str, object]:
        session = self.sessions[member]
        return {"group_id": session.group_id, "member_id": session.member_id, "session": session.session}

    @rule(member=st.integers(0, 1), failing=st.integers(0, 6), more=st.integers(0, 6))
    def report(self, member: int, failing: int, more: int) -> None:
        report_keys(self.database, self.facts(member), failing=failing, tried=failing + more)
        self.reports[member] = failing, failing + more

    @rule(member=st.integers(0, 1), waited=st.booleans())
    def open(self, member: int, waited: bool) -> None:
        failing = sum(failing for failing, _ in self.reports.values())
        tried = sum(tried for _, tried in self.reports.values())
        enough = failing >= (2 if self.state == "ramping" else 4) and 2 * failing >= tried
        opens = self.state in ("closed", "ramping") and enough and (waited or len(self.reports) == 2)
        found = open_breaker(self.database, self.facts(member), cause="E", waited=waited)
        assert found == (failing if opens else None)
        if opens:
            self.enter("open")

    @rule(member=st.integers(0, 1), due=st.booleans())
    def probe(self, member: int, due: bool) -> None:
        with self.database.connection() as connection:
            interval = "- interval '1 second'" if due else "+ interval '1 hour'"
            connection.execute(f"UPDATE mqlayer.breaker SET probe_at = now() {interval}")
        taken = take_probe(self.database, self.facts(member))
        assert taken == (self.state == "open" and due)
        if taken:
            self.enter("probing", member)

    @rule(member=st.integers(0, 1), succeeded=st.booleans())
    def result(self, member: int, succeeded: bool) -> None:
        end_probe(self.database, self.facts(member), succeeded=succeeded, cause="E")
        if self.state == "probing" and self.prober == member:
            self.enter("ramping" if succeeded else "open")

    @rule(member=st.integers(0, 1), over=st.booleans())
    def close(self, member: int, over: bool) -> None:
        if over:
            with self.database.connection() as connection:
                connection.execute("UPDATE mqlayer.breaker SET changed_at = changed_at - interval '1 minute'")
        closed = close_breaker(self.database, self.facts(member)) is not None
        # A prober that is silent for a minute is another rule's.
        if self.state == "probing" and over:
            self.renew()
        assert closed == (self.state == "ramping" and over)
        if closed:
            self.enter("closed")
        elif over and self.state in ("closed", "ramping"):
            self.renew()

    @rule()
    def trip(self) -> None:
        assert trip_breaker(self.stage.runtime, self.stage.topic, "g") == (self.state in ("closed", "ramping"))
        if self.state in ("closed", "ramping"):
            self.enter("open")

    @rule()
    def reset(self) -> None:
        assert reset_breaker(self.stage.runtime, self.stage.topic, "g") == (self.state != "closed")
        if self.state != "closed":
            self.enter("closed")

    @rule(member=st.integers(0, 1))
    def prober_dies(self, member: int) -> None:
        if self.state != "probing" or self.prober == member:
            return
        assert self.prober is not None
        with self.database.connection() as connection:
            dead = self.sessions[self.prober].member_id
            connection.execute(
                "UPDATE mqlayer.member SET lease_until = now() - interval '1 s' WHERE member_id = %s", [dead]
            )
            assert take_probe(self.database, self.facts(member))
            connection.execute(
                "UPDATE mqlayer.member SET lease_until = now() + interval '1 h' WHERE member_id = %s", [dead]
            )
        self.enter("probing", member)

    def renew(self) -> None:
        with self.database.connection() as connection:
            connection.execute("UPDATE mqlayer.breaker SET changed_at = changed_at + interval '1 minute'")

    def enter(self, state: State, prober: int | None = None) -> None:
        self.state, self.prober = state, prober
        self.reports.clear()

    @invariant()
    def members_hear_it(self) -> None:
        for number, session in enumerate(self.sessions):
            heard = send_heartbeat(self.database, session, lease_s=3600).breaker
            assert heard.state == self.state
            assert heard.mine == (self.prober == number)
            assert not heard.orphaned


def test_members_and_operators_take_the_breaker_through_its_states_alone(stage: Stage) -> None:
    rules = GroupSettings(breaker_share=0.5, breaker_keys=4)
    routes = RouteCache(stage.database)
    Machine.database, Machine.stage = stage.database, stage
    Machine.group_id = ensure_group(stage.runtime, routes, topic=stage.topic, name="g", settings=rules).group_id
    routes.close()
    Machine.sessions = [
        join(stage.database, group_id=Machine.group_id, member_id=f"m{number}", lease_s=3600) for number in range(2)
    ]
    # Only owners are heard: the first member hands one of the two partitions over.
    reply = send_heartbeat(stage.database, Machine.sessions[0], lease_s=3600)
    release(stage.database, Machine.sessions[0], *(one for one in reply.assignments if one.release))
    assert len(set(stage.owners().values())) == 2
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=10, stateful_step_count=12, deadline=None, suppress_health_check=checks)
    )


def test_the_wait_for_a_probe_doubles_up_to_its_limit(stage: Stage) -> None:
    with closing(RouteCache(stage.database)) as routes:
        group = ensure_group(
            stage.runtime, routes, topic=stage.topic, name="g", settings=GroupSettings(breaker_share=0.5)
        )
    session = join(stage.database, group_id=group.group_id, member_id="m", lease_s=3600)
    facts = {"group_id": session.group_id, "member_id": session.member_id, "session": session.session}
    trip_breaker(stage.runtime, stage.topic, "g")
    waits = []
    for _ in range(6):
        with stage.database.connection() as connection:
            connection.execute("UPDATE mqlayer.breaker SET probe_at = now()")
            assert take_probe(stage.database, facts)
            end_probe(stage.database, facts, succeeded=False)
            seconds = "SELECT round(extract(epoch FROM probe_at - changed_at))::int FROM mqlayer.breaker"
            waits += connection.execute(seconds).fetchall()
    assert waits == [(2,), (4,), (8,), (LONGEST_PROBE_S,), (LONGEST_PROBE_S,), (LONGEST_PROBE_S,)]
