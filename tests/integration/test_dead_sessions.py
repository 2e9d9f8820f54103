"""Sessions of dead processes, which their supervisor ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from mqlayer.cli.dead_sessions import DeadSessions
from mqlayer.cli.supervisor import Child
from mqlayer.cli.supervisor_pipe import SupervisorPipe
from mqlayer.groups import GroupSettings, MemberSession, ensure_group, join
from mqlayer.redelivery import reclaim_dead
from mqlayer.redis.shared_scripts import SharedGroupPartition, shared_read_command
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.shared_members import pending, share, shared_member
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy

WAITS: Final = (sys.executable, "-c", "import sys; sys.stdin.read()")


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of two partitions."""
    return start_stage(redis_url, partitions=2)


@pytest.fixture
def line(stage: Stage) -> Iterator[TcpProxy]:
    """The supervisor's way to Postgres."""
    parts = conninfo_to_dict(stage.dsn)
    with TcpProxy(str(parts["host"]), int(str(parts["port"]))) as line:
        yield line


def joined(stage: Stage, *names: str) -> list[MemberSession]:
    """Join some members."""
    group = ensure_group(
        stage.runtime, RouteCache(stage.database), topic=stage.topic, name="g", settings=GroupSettings()
    )
    return [join(stage.database, group_id=group.group_id, member_id=name, lease_s=60.0) for name in names]


def test_postgres_that_is_away_is_asked_again_within_a_lease(
    stage: Stage, line: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mqlayer")
    dead, _ = joined(stage, "a", "b")
    assert set(stage.owners().values()) == {"a"}
    dsn = SecretStr(make_conninfo(stage.dsn, host=line.host, port=line.port))
    line.reset_new()
    with DeadSessions(stage.runtime.settings.model_copy(update={"dsn": dsn, "lease_s": 60.0})) as ending:
        ending.end([dead])
        wait_until(lambda: line.accepted_count > 0, what="a connection that is cut")
        line.heal()
        wait_until(lambda: set(stage.owners().values()) == {"b"}, what="the other member has all")
    assert "dead_member_ended" in caplog.text


def test_what_can_not_be_ended_is_left_to_its_lease(
    stage: Stage, line: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    (dead,) = joined(stage, "a")
    dsn = SecretStr(make_conninfo(stage.dsn, host=line.host, port=line.port))
    line.refuse_new()
    with DeadSessions(stage.runtime.settings.model_copy(update={"dsn": dsn, "lease_s": 0.3})) as ending:
        ending.end([dead])
        wait_until(lambda: "dead_process_left_to_its_lease" in caplog.text, what="it gives up")
    assert set(stage.owners().values()) == {"a"}


def test_messages_of_a_dead_member_of_a_shared_group_are_taken_at_once(stage: Stage) -> None:
    """Those of a later process of its id are not: whether that one lives is another question."""
    [partition, _] = stage.partitions
    recorder = Recorder()
    app = share(stage, lambda _body, _context: None, visibility_timeout_s=120.0)
    place = SharedGroupPartition(stage.prefix, partition, stage.group_id(), shared_member(app).owned()[partition][0])
    app.stop()
    dead = join(stage.database, group_id=place.group_id, member_id="gone", lease_s=60.0)
    key = stage.key_in(partition)
    with stage.connection() as connection:
        read = shared_read_command([place], "gone", group_id=place.group_id, count=10, block_ms=0)
        stage.send((key, b"%d" % number) for number in range(10))
        assert connection.call([read])[0]
        died_at = time.monotonic()
        wait_until(lambda: time.monotonic() > died_at + 0.5, what="time passes")
        stage.send((key, b"%d" % number) for number in range(10, 20))
        assert connection.call([read])[0]
    assert reclaim_dead(stage.runtime, dead, died_at) == 10
    assert pending(stage, partition) == {b"-": 10, b"gone": 10}
    app = share(stage, recorder, visibility_timeout_s=120.0)
    wait_until(lambda: len(recorder.bodies()) == 10, what="the survivor has what the dead one had")
    with DeadSessions(stage.settings()) as ending:
        ending.end([dead])
        wait_until(lambda: len(recorder.bodies()) == 20, what="and the rest, after its end")
    stage.wait_settled()
    assert sorted(recorder.attempts(b"0")) == [1]


class Supervised:
    """A child that says what a test has it say."""

    def __init__(self) -> None:
        self.ended: list[Collection[MemberSession | str]] = []
        self.pipe: SupervisorPipe | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.child = Child(self._start, self.ended.append)
        self.told = threading.Event()

    def _start(self, pipe: socket.socket) -> subprocess.Popen[bytes]:
        self.pipe = SupervisorPipe(pipe.dup(), 1)
        self.processes.append(subprocess.Popen(WAITS, stdin=subprocess.PIPE))
        return self.processes[-1]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep this process where the line breaks."""
        before = signal.signal(signal.SIGTERM, lambda *_: self.told.set())
        try:
            yield
            # Not in one long wait: a signal that comes as that begins is handled at its end.
            wait_until(self.told.is_set, what="SIGTERM")
        finally:
            signal.signal(signal.SIGTERM, before)

    def kill(self) -> None:
        """Kill it, and have its end noted."""
        self.processes[-1].kill()
        self.processes[-1].wait()
        self.child.check(time.monotonic())


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    """A started child."""
    one = Supervised()
    one.child.check(time.monotonic())
    yield one
    one.child.close()
    if one.pipe is not None:
        one.pipe._pipe.close()
    for process in one.processes:
        process.kill()
        process.communicate()


def test_the_last_session_of_each_member_is_handed_over_once_the_child_has_ended(supervised: Supervised) -> None:
    assert supervised.pipe is not None
    for session in (MemberSession(1, "a", 5), MemberSession(2, "a", 6), MemberSession(1, "a", 7)):
        supervised.pipe.report_joining(session)
    supervised.pipe.report_started()
    supervised.child.check(time.monotonic())
    assert supervised.child.serves
    assert supervised.ended == []
    supervised.pipe.report_joining(MemberSession(1, "b", 8))
    supervised.kill()
    assert supervised.ended == [(MemberSession(1, "a", 7), MemberSession(2, "a", 6), MemberSession(1, "b", 8))]


def test_a_child_hears_that_work_is_free_and_its_relay_is_handed_over(supervised: Supervised) -> None:
    assert supervised.pipe is not None
    heard = threading.Event()
    with supervised.kept():
        supervised.pipe.watch(heard.set)
        supervised.pipe.report_relaying("relay-1")
        supervised.child.wake()
        wait_until(heard.is_set, what="it hears")
        supervised.kill()
    assert supervised.ended == [("relay-1",)]


def test_lines_that_were_cut_off_name_no_session(supervised: Supervised) -> None:
    assert supervised.pipe is not None
    for line in (b"joining 1 a 5joining 1 a 6", b"joining 1 a", b"joining x a 7", b"joining 1 a -7", b"joining 1 a 8"):
        supervised.pipe._pipe.send(line + (b"" if line.endswith(b" 8") else b"\n"))
    supervised.kill()
    assert supervised.ended == []


def test_a_child_never_waits_for_a_supervisor_that_reads_nothing(supervised: Supervised) -> None:
    assert supervised.pipe is not None
    for number in range(100_000):
        supervised.pipe.report_joining(MemberSession(1, "a", number))
    supervised.kill()
    ((session,),) = supervised.ended
    assert isinstance(session, MemberSession)
    assert session.session > 0
