"""Circuit breakers of groups: what opens them, what counts meanwhile, and how they close."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqlayer import BatchOf, Context, MemberOptions
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups import find_group
from mqlayer.groups.admin import set_group
from mqlayer.groups.breaker import LONGEST_PROBE_S, RAMP_S
from mqlayer.groups.breaker_admin import reset_breaker, trip_breaker
from mqlayer.groups.group import RetrySettings
from mqlayer.inspect import group_statuses
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.due_keys import try_now
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

SETTLED_S = 60.0
BOTH_BEGIN_S = 30.0
KILLED_S = 60.0
AWAY_S = 120


class Downstream:
    """A TCP server that answers; refuses connections while it is away, and answers nothing while it hangs."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._awake = threading.Event()
        self._awake.set()
        self.port, self.calls = 0, 0
        self.come_back()

    def come_back(self) -> None:
        """Answer, at the same port as before."""
        self._awake.set()
        if self._listener is None:
            self._listener = listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(128)
            self.port = listener.getsockname()[1]
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def go_away(self) -> None:
        """Refuse connections."""
        self._awake.set()
        if self._listener is not None:
            # Ends the accepting thread's call, which would hold the port.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def hang(self) -> None:
        """Accept connections, and answer none."""
        self.come_back()
        self._awake.clear()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1000)
                self.calls += 1
                self._awake.wait()
                try:
                    connection.sendall(b"ok")
                except OSError:
                    continue


@pytest.fixture
def downstream() -> Iterator[Downstream]:
    server = Downstream()
    yield server
    server.go_away()


class Breaker:
    """A group's breaker, as Postgres has it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def row(self) -> Any:
        with self.stage.database.connection() as connection:
            query = "SELECT state, cause, probes, failing_keys, probe_session FROM mqlayer.breaker"
            return connection.execute(query).fetchone() or ("closed", "", 0, 0, None)

    @property
    def state(self) -> str:
        return str(self.row()[0])

    @property
    def probes(self) -> int:
        return int(self.row()[2])

    def last_failure(self) -> tuple[int, datetime]:
        """Wait until a probe has failed and none is under way; return how many failed, and when the last one did."""
        query = "SELECT probes, changed_at FROM mqlayer.breaker WHERE state = 'open' AND probes > 0"
        with self.stage.database.connection() as connection:
            row: Any = wait_until(lambda: connection.execute(query).fetchone(), timeout_s=30, what="a probe failed")
        return row[0], row[1]

    def wait(self, state: str, *, timeout_s: float = 40.0) -> None:
        wait_until(lambda: self.state == state, timeout_s=timeout_s, what=f"the breaker is {state}")


@pytest.fixture
def breaker(stage: Stage) -> Breaker:
    return Breaker(stage)


def left(stage: Stage) -> tuple[int, int]:
    """Return how many messages are parked, and how many died."""
    with stage.database.connection() as connection:
        row = connection.execute(
            "SELECT (SELECT count(*) FROM mqlayer.parked_message), (SELECT count(*) FROM mqlayer.dead_message)"
        ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


# -- an outage -------------------------------------------------------------------------------------------------------


class Members:
    """Processes that call the downstream, under load, and their log."""

    def __init__(self, stage: Stage, downstream: Downstream, directory: Path) -> None:
        self.stage, self.downstream, self.log = stage, downstream, directory / "log"
        self.processes: dict[int, Process] = {}
        self.keys, self.sent, self._stop = 30, 1, threading.Event()
        self._load = threading.Thread(target=self._publish, daemon=True)

    def start(self, failpoints: str = "", *, mode: str = "exclusive", lease_s: float = 2.0) -> Process:
        settings = self.stage.settings()
        environment = os.environ | {
            "MQLAYER_DSN": settings.control_dsn(), "MQLAYER_KEY_PREFIX": settings.key_prefix,
            "MQLAYER_LEASE_S": str(lease_s),
        }  # fmt: skip
        environment |= armed(failpoints)
        process = start_python(
            "tests.proof.downstream_member", self.stage.topic, str(self.downstream.port), str(self.log), mode,
            env=environment,
        )  # fmt: skip
        self.processes[process.pid] = process
        return process

    def load(self) -> None:
        self._load.start()

    def _publish(self) -> None:
        while not self._stop.wait(0.1):
            self.stage.send_numbers(keys=self.keys, each=1, first=self.sent)
            self.sent += 1

    def stop_load(self) -> None:
        self._stop.set()
        if self._load.ident is not None:
            self._load.join()

    def end(self) -> None:
        self.stop_load()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def lines(self) -> list[list[bytes]]:
        return [line.split() for line in self.log.read_bytes().splitlines()] if self.log.exists() else []

    def begun(self) -> int:
        return sum(line[1] == b"b" for line in self.lines())

    def handled(self) -> int:
        return self.log.read_bytes().count(b" e ")

    def assert_first_attempts(self) -> None:
        """Each message was handled, and no attempt counted."""
        assert {int(line[4]) for line in self.lines()} == {1}
        ended = {(key, int(body)) for _, what, key, body, _ in self.lines() if what == b"e"}
        assert ended == {(b"key-%d" % key, body) for key in range(self.keys) for body in range(1, self.sent)}

    def assert_in_order(self, keys: int) -> None:
        """Each key's messages ended first in order, none is missing, and none had more than two attempts."""
        ended: dict[bytes, list[int]] = {}
        for _, what, key, body, attempt in self.lines():
            assert int(attempt) <= 2
            if what == b"e" and int(body) not in ended.setdefault(key, []):
                ended[key].append(int(body))
        assert ended == {b"key-%d" % key: [*range(1, self.sent)] for key in range(keys)}

    def wait_both(self) -> None:
        """Wait until each of the processes has handled messages."""
        wait_until(
            lambda: {int(line[0]) for line in self.lines()} == {*self.processes},
            timeout_s=BOTH_BEGIN_S,
            what="both handle messages",
        )

    def prober(self) -> int:
        with self.stage.database.connection() as connection:
            row = connection.execute(
                "SELECT m.pid FROM mqlayer.breaker b JOIN mqlayer.member m ON m.session = b.probe_session"
            ).fetchone()
        return 0 if row is None else int(row[0])


@pytest.fixture
def members(stage: Stage, downstream: Downstream, tmp_path: Path) -> Iterator[Members]:
    found = Members(stage, downstream, tmp_path)
    yield found
    found.end()


def test_an_outage_under_load_counts_parks_and_kills_nothing(
    stage: Stage, downstream: Downstream, members: Members, breaker: Breaker
) -> None:
    """Two processes, of which the probing one is killed: no attempt counts, order holds, and the end is noticed."""
    members.start()
    members.start()
    members.load()
    members.wait_both()
    downstream.go_away()
    breaker.wait("open")
    (probes, failed_at), before = breaker.last_failure(), members.begun()
    wait_until(lambda: breaker.probes > probes, timeout_s=30, what="another one")
    assert members.begun() - before <= breaker.probes - probes + 1
    assert breaker.last_failure()[1] - failed_at > timedelta(seconds=1)
    # A probe that takes its time, and its member that dies with it.
    calls = downstream.calls
    downstream.hang()
    wait_until(lambda: downstream.calls == calls + 1 and members.prober() != 0, timeout_s=40, what="a probe hangs")
    killed = members.prober()
    os.kill(killed, signal.SIGKILL)
    members.processes.pop(killed).wait()
    wait_until(lambda: members.prober() not in (0, killed), timeout_s=20, what="the other one probes")
    assert downstream.calls <= calls + 2
    downstream.come_back()
    breaker.wait("closed", timeout_s=LONGEST_PROBE_S + 2 * RAMP_S)
    members.stop_load()
    stage.wait_settled(timeout_s=SETTLED_S)
    assert left(stage) == (0, 0)
    members.assert_in_order(keys=30)


def test_members_killed_at_each_step_leave_what_the_next_one_goes_on_with(
    stage: Stage, downstream: Downstream, members: Members, breaker: Breaker
) -> None:
    stage.send_numbers(keys=20, each=2)
    members.sent = 3
    downstream.go_away()
    killed = members.start("breaker.after_report=kill")
    assert killed.wait(KILLED_S) == -signal.SIGKILL
    assert breaker.state == "closed"
    assert members.start("breaker.after_open=kill").wait(KILLED_S) == -signal.SIGKILL
    assert breaker.state == "open"
    assert members.start("breaker.after_probe=kill").wait(KILLED_S) == -signal.SIGKILL
    assert breaker.state == "probing"
    downstream.come_back()
    assert members.start("breaker.before_result=kill").wait(KILLED_S) == -signal.SIGKILL
    assert breaker.state == "probing"
    members.start()
    breaker.wait("closed")
    stage.wait_settled(timeout_s=SETTLED_S)
    assert left(stage) == (0, 0)
    members.assert_in_order(keys=20)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_downstream_that_is_away_for_two_minutes_costs_no_attempt(
    stage: Stage, downstream: Downstream, members: Members, breaker: Breaker
) -> None:
    """Prints when the group handles again, when its breaker closes, and when it is at full speed."""
    members.keys = 10
    members.start()
    members.start()
    members.load()
    members.wait_both()
    downstream.go_away()
    began = time.monotonic()
    breaker.wait("open")
    opened_s = time.monotonic() - began
    wait_until(lambda: time.monotonic() - began > AWAY_S, timeout_s=AWAY_S + 10, what="it was away for long")
    assert breaker.state in ("open", "probing")
    probes = breaker.probes
    assert left(stage) == (0, 0)
    waiting = members.keys * (members.sent - 1) - members.handled()
    downstream.come_back()
    back, samples = time.monotonic(), [(0.0, members.handled())]

    def sampled() -> bool:
        samples.append((time.monotonic() - back, members.handled()))
        return breaker.state == "closed" and members.keys * (members.sent - 2) <= samples[-1][1]

    wait_until(sampled, timeout_s=100, what="the backlog is gone")
    members.stop_load()
    stage.wait_settled(timeout_s=SETTLED_S)
    first_s = next(at for at, count in samples if count > samples[0][1])
    rates = [((b[1] - a[1]) / (b[0] - a[0]), b[0]) for a, b in zip(samples, samples[5:], strict=False)]
    full_s = next(at for rate, at in rates if rate >= 0.8 * max(rates)[0])
    told = (
        f"opened after {opened_s:.1f} s; {probes} probes in {AWAY_S} s; {waiting} messages waited; after it was back: "
        f"first message {first_s:.1f} s, full speed ({max(rates)[0]:.0f} messages/s) {full_s:.1f} s"
    )
    print(told)  # noqa: T201
    assert full_s < LONGEST_PROBE_S + 2 * RAMP_S
    assert left(stage) == (0, 0)
    members.assert_in_order(keys=members.keys)
    with stage.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM mqlayer.parked_key").fetchone() == (0,)


def test_a_shared_group_brakes_and_counts_no_attempt(
    stage: Stage, downstream: Downstream, members: Members, breaker: Breaker
) -> None:
    """No message was given back with a count."""
    # No member dies here: an expired lease would give the messages in hand again, as another attempt.
    for _ in range(2):
        members.start(mode="shared", lease_s=10.0)
    members.load()
    members.wait_both()
    downstream.go_away()
    breaker.wait("open")
    wait_until(lambda: breaker.probes >= 1, what="a probe failed")
    probes, before = breaker.probes, members.begun()
    wait_until(lambda: breaker.probes > probes, timeout_s=30, what="another one")
    assert members.begun() - before <= breaker.probes - probes + 1
    downstream.come_back()
    breaker.wait("closed")
    members.stop_load()
    stage.wait_settled(timeout_s=SETTLED_S)
    assert left(stage) == (0, 0)
    members.assert_first_attempts()


def test_what_began_before_the_first_failure_of_a_shared_group_does_not_let_the_next_ones_count(stage: Stage) -> None:
    """Handlers that were under way when the downstream went away end well: they say nothing about it."""
    turns = {name: threading.Event() for name in ("first", "well", "next")}
    kinds = ["first", *["well"] * 5, "next"]
    failed = set[int]()

    def act(body: bytes, ctx: Context) -> None:
        number = int(body)
        turns[kinds[number]].wait(20)
        if kinds[number] != "well" and number not in failed:
            failed.add(number)
            raise ConnectionError("refused")

    recorder = Recorder(act)
    app, rules = stage.app(), RetrySettings(breaker_share=0.5, breaker_keys=6, attempt_limit=2, policy="dead_letter")
    app.consumer(stage.topic, group="g", mode="shared", options=MemberOptions(concurrency=8), **rules)(recorder)
    app.start()
    stage.send((f"key-{number}", b"%d" % number) for number in range(len(kinds)))
    stats = app.members[0].stats
    wait_until(lambda: len(recorder.begun) == len(kinds), what="all began")
    turns["first"].set()
    wait_until(lambda: stats.held == 1, what="the first failure is held")
    turns["well"].set()
    wait_until(lambda: stats.handled == 5, what="the others ended")
    turns["next"].set()
    stage.wait_settled(timeout_s=SETTLED_S)
    assert {run.attempt for run in recorder.begun} == {1}
    assert stats.held == 2


@pytest.mark.parametrize("kind", some_of(["async", "batch"], 2))
def test_a_breaker_gives_back_the_attempts_that_opened_it(stage: Stage, breaker: Breaker, kind: str) -> None:
    away, attempts = threading.Event(), list[int]()
    events: list[Any] = []

    def work(body: bytes, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if away.is_set():
            raise ConnectionError("refused")

    async def wait(body: bytes, ctx: Context) -> None:
        work(body, ctx)

    def work_all(bodies: list[bytes]) -> None:
        if away.is_set():
            raise ConnectionError("refused")

    handler: Any = {"async": wait, "batch": work_all}[kind]
    batch = BatchOf("distinct", limit=5) if kind == "batch" else None
    away.set()
    app = stage.consume(handler, breaker_share=0.5, breaker_keys=8, attempt_limit=2, policy="dead_letter", batch=batch)
    app.on_event(events.append)
    stage.send_numbers(keys=20, each=3)
    breaker.wait("open")
    wait_until(lambda: breaker.probes >= 1, what="a probe failed")
    with stage.database.connection() as connection:
        (facts,) = group_statuses(stage.runtime, stage.topic, "g")
        assert connection.execute("SELECT count(*) FROM mqlayer.dead_message").fetchone() == (0,)
    assert {one.stall.reason for one in facts.undrained if one.stall is not None} == {"breaker"}
    assert all(one.head is not None and one.head.attempts == 0 for one in facts.undrained)
    away.clear()
    stage.wait_settled(timeout_s=SETTLED_S)
    assert left(stage) == (0, 0)
    # The member counts a moment after its node has settled.
    wait_until(lambda: member_of(app).stats.handled == 60, what="all counted, once")
    assert member_of(app).stats.held > 0
    assert max(attempts, default=1) <= 2
    breaker.wait("closed")
    # The member tells of it after its commit.
    wait_until(lambda: events and events[-1].kind == "breaker_closed", what="the last event")
    told = [(event.kind, event.cause, event.actor) for event in events if event.kind.startswith("breaker")]
    assert told == [("breaker_opened", "ConnectionError", member_of(app).member_id), ("breaker_closed", "", "")]


# -- what does not open it -------------------------------------------------------------------------------------------


def test_neither_one_bad_key_nor_half_of_the_keys_below_the_share_opens_it(stage: Stage, breaker: Breaker) -> None:
    bad = {"key-0"}

    def fail(body: bytes, ctx: Context) -> None:
        if ctx.key in bad:
            raise ValueError("bad data")

    recorder = Recorder(act=fail)
    rules: dict[str, Any] = {"attempt_limit": 2, "policy": "dead_letter"}
    # The first keys that a member tries may all fail: of fewer than eight, a share says nothing.
    app = stage.consume(recorder, breaker_share=0.75, breaker_keys=8, **rules)
    stage.send_numbers(keys=20, each=3)
    stage.wait_settled()
    assert left(stage) == (0, 3)
    bad |= {f"key-{number}" for number in range(0, 20, 2)}
    stage.send_numbers(keys=20, each=3, first=4)
    stage.wait_settled(timeout_s=SETTLED_S)
    assert breaker.row()[:2] == ("closed", "")
    assert left(stage) == (0, 33)
    assert member_of(app).stats.parked == 0


def test_errors_that_are_final_or_not_named_never_open_it(stage: Stage, breaker: Breaker) -> None:
    def fail(body: bytes, ctx: Context) -> None:
        raise KeyError("final") if int(body) % 2 else OSError("not named")

    rules: dict[str, Any] = {"attempt_limit": 1, "policy": "dead_letter"}
    stage.consume(
        fail, breaker_share=0.1, breaker_keys=1, breaker_errors=(TimeoutError,), non_retryable_errors=(KeyError,),
        **rules,
    )  # fmt: skip
    stage.send_numbers(keys=20, each=2)
    stage.wait_settled()
    assert left(stage) == (0, 40)
    assert breaker.row()[:2] == ("closed", "")


@pytest.mark.full
def test_one_of_two_members_that_alone_fails_brakes_only_itself_by_the_rules(
    start_stage: StartStage, redis_url: str
) -> None:
    """A host that can't reach the downstream is outvoted: its keys fail and die as without a breaker."""
    stage = start_stage(redis_url, partitions=4)
    breaker, sick = Breaker(stage), threading.Event()

    def fail(body: bytes, ctx: Context) -> None:
        if sick.is_set():
            raise ConnectionError("no route to host")

    rules: dict[str, Any] = {
        "breaker_share": 0.8, "breaker_keys": 4, "attempt_limit": 2, "policy": "dead_letter", "breaker_window_s": 4,
    }  # fmt: skip
    ill, well = Recorder(act=fail), Recorder()
    apps = [stage.consume(recorder, **rules) for recorder in (ill, well)]
    wait_until(lambda: len(set(stage.owners().values())) == 2, what="both own partitions")
    sick.set()
    number = 0

    def settled_of_ill() -> bool:
        nonlocal number
        number += 1
        stage.send_numbers(keys=40, each=1, first=number)
        return member_of(apps[0]).stats.dead >= 5

    wait_until(settled_of_ill, timeout_s=SETTLED_S, what="its messages die")
    assert breaker.state == "closed"
    assert member_of(apps[1]).stats.failed == 0


# -- operators -------------------------------------------------------------------------------------------------------


def test_an_operator_opens_and_closes_it_and_parked_keys_wait_with_it(
    stage: Stage, breaker: Breaker, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = threading.Event()

    def fail(body: bytes, ctx: Context) -> None:
        if fails.is_set():
            raise RuntimeError("away")

    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    recorder, operator = Recorder(act=fail), runtime_of(stage.database, actor="ann")
    app = stage.consume(recorder, backoff_s=(30.0,))
    with pytest.raises(InvalidInput, match="--breaker"):
        trip_breaker(operator, stage.topic, "g")
    set_group(operator, stage.topic, "g", breaker_share=0.5, breaker_window_s=1)
    fails.set()
    stage.send([("bad", b"1"), ("bad", b"2")])
    wait_until(lambda: left(stage) == (2, 0), what="the key is parked")
    assert trip_breaker(operator, stage.topic, "g")
    assert not trip_breaker(operator, stage.topic, "g")
    wait_until(lambda: member_of(app).settings.breaker.engaged, what="the member hears of it")
    try_now(stage.database, stage.group_id())
    begun = len(recorder.begun)
    stage.send_numbers(keys=6, each=1)
    wait_until(lambda: breaker.probes >= 2, what="two probes that fail")
    assert len(recorder.begun) - begun <= breaker.probes + 1
    assert not any(run.key == "bad" for run in recorder.begun[begun:])
    (status,) = group_statuses(stage.runtime, stage.topic, "g")
    assert status.facts.breaker is not None
    assert "circuit breaker" in run.text("group", "show", stage.topic, "g")
    fails.clear()
    assert reset_breaker(operator, stage.topic, "g")
    assert not reset_breaker(operator, stage.topic, "g")
    stage.wait_settled()
    wait_until(lambda: left(stage) == (0, 0), what="the parked key goes on", timeout_s=SETTLED_S)
    assert member_of(app).stats.failed == 1
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT act, actor FROM mqlayer.audit WHERE act ~ 'breaker' ORDER BY audit_id")
        assert rows.fetchall() == [("breaker open", "ann"), ("breaker close", "ann")]


def test_settings_of_the_breaker_are_checked(stage: Stage) -> None:
    app = stage.app()
    for wrong in ({"breaker_share": 0}, {"breaker_share": 1.5}, {"breaker_keys": 0}, {"breaker_window_s": 0.5}):
        with pytest.raises(InvalidInput):
            app.consumer(stage.topic, group="g", **({"breaker_share": 0.5} | wrong))(lambda body: None)
    stage.consume(lambda body: None, breaker_share=0.5)
    assert find_group(stage.database, stage.topic, "g").rules.breaker_keys == 10
    with pytest.raises(Conflict, match=r"--breaker 0\.7"):
        stage.consume(lambda body: None, breaker_share=0.7)
