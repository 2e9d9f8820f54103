"""A process of members that beat as members do, without nodes and handlers: for `bench.members`.

`python -m bench.member_process FIRST COUNT GROUPS TOPICS`: members `mFIRST` and on, each of a group `g<number modulo
GROUPS>`, and the groups on the topics in turn: `bench`, `bench1`, `bench2` …
A line on its input is a command, a line on its output the answer in JSON: `join N`, `count`, `owned`, `vanish N` (as
killed), `leave N`. `MQLAYER_DSN` is the database.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psycopg

from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.heartbeat import Heartbeat
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.consuming.engine.partitions import MemberPartitions
from mqlayer.groups import Assignment, Group, GroupSettings, HeartbeatReply, MemberSession, ensure_group, release
from mqlayer.groups.wakeups import wakes
from mqlayer.postgres.database import Database
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.runtime.heartbeat_sender import HeartbeatSender
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

BYTES_SENT: Final = 120
BYTES_RECEIVED: Final = 128
"""Places in Linux's `struct tcp_info`."""


class Owned(MemberPartitions):
    """Assigned partitions; one that is asked back is given back at once."""

    def __init__(self, core: MemberCore) -> None:
        self._core = core
        self.held: dict[int, int] = {}
        self._asked: list[Assignment] = []

    def follow(self, session: MemberSession, reply: HeartbeatReply) -> None:
        """Hold the assigned partitions; note those that are to be released."""
        del session
        self.held = {int(one.partition): one.epoch for one in reply.assignments if not one.release}
        self._asked = [one for one in reply.assignments if one.release]
        if self._asked:
            self._core.beat.set()

    def report(self, session: MemberSession) -> None:
        """Release the partitions that are to be released."""
        if self._asked:
            release(self._core.runtime.control, session, *self._asked)

    def lease_lost(self) -> None:
        """Hold nothing."""
        self.held, self._asked = {}, []

    @property
    def unreported(self) -> bool:
        """Say that nothing has to be repeated."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def served(self) -> dict[int, tuple[int, str]]:
        """Return nothing: no node is asked."""
        return {}

    def missing(self) -> tuple[str, ...]:
        """Return nothing, for the same reason."""
        return ()


class TimedHeartbeat(Heartbeat):
    """A heartbeat that notes how long each took, in s."""

    took: list[float]
    group_id, member_id = 0, ""

    def _heartbeat(self, session: MemberSession) -> None:
        began = time.perf_counter()
        super()._heartbeat(session)
        self.took.append(time.perf_counter() - began)


class Crew:
    """The members of this process, on its connections."""

    def __init__(self, first: int, count: int, groups: int, topics: int) -> None:
        self._statements, self._took = Counted(), list[float]()
        settings = Settings()
        # As many as an application with so many consumers has.
        self._database = Database(settings.control_dsn(), application="mqlayer consumer", max_size=12 * count)
        beats = Database(settings.control_dsn(), application="mqlayer consumer", max_size=2)
        self._routes = RouteCache(self._database)
        runtime = Runtime(self._database, settings, beats=beats, sender=HeartbeatSender(beats))
        self._groups = [
            ensure_group(
                runtime, self._routes, topic=topic_name(number % topics), name=f"g{number}", settings=GroupSettings()
            )
            for number in range(groups)
        ]
        self.members = [self._member(runtime, self._groups[at % groups], at) for at in range(first, first + count)]
        self._joined = 0
        self._notices = NotificationListener(self._database, GROUP, self._wake)
        self._notices.start()

    def join(self, count: int) -> dict[str, Any]:
        """Have so many more join, and say how long that took."""
        began = time.perf_counter()
        for heartbeat, _ in self.members[self._joined : self._joined + count]:
            heartbeat.start()
        self._joined += count
        return {"seconds": time.perf_counter() - began}

    def count(self) -> dict[str, Any]:
        """Return the counts since the last call."""
        took, self._took[:] = list(self._took), []
        sent, received = traffic()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "took": took,
            "statements": self._statements.take(),
            "bytes": sent + received,
            "cpu": usage.ru_utime + usage.ru_stime,
        }

    def owned(self) -> dict[str, Any]:
        """Say how many partitions its members hold."""
        return {"owned": sum(len(owned.held) for _, owned in self.members)}

    def vanish(self, count: int) -> dict[str, Any]:
        """End the heartbeats of the first members, as if they were killed."""
        gone, self.members = self.members[:count], self.members[count:]
        self._joined -= len(gone)
        for heartbeat, _ in gone:
            heartbeat.end()
        for heartbeat, _ in gone:
            heartbeat.join(10.0)
        return {}

    def leave(self, count: int) -> dict[str, Any]:
        """Have the first members leave."""
        gone, self.members = self.members[:count], self.members[count:]
        self._joined -= len(gone)
        for heartbeat, _ in gone:
            heartbeat.stop(10.0)
        return {}

    def _member(self, runtime: Runtime, group: Group, number: int) -> tuple[TimedHeartbeat, Owned]:
        core = MemberCore.of(runtime, self._routes, group, MemberOptions(member_id=f"m{number}"))
        owned = Owned(core)
        heartbeat = TimedHeartbeat(core, owned, self._routes.follow_nodes, lambda _: None)
        heartbeat.took, heartbeat.group_id, heartbeat.member_id = self._took, group.group_id, core.member_id
        return heartbeat, owned

    def _wake(self, payload: str) -> None:
        for heartbeat, _ in self.members[: self._joined]:
            if wakes(payload, heartbeat.group_id, heartbeat.member_id):
                heartbeat.wake.set()


class Counted:
    """Counts the statements of this process."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()
        run = psycopg.Connection.execute

        def execute(connection: Any, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._count += 1
            return run(connection, *arguments, **options)

        psycopg.Connection.execute = execute  # type: ignore[method-assign]

    def take(self) -> int:
        """Return the count since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


def traffic() -> tuple[int, int]:
    """Return the bytes that this process's open TCP connections have sent and received."""
    found = list(tcp_connections())
    return sum(sent for sent, _ in found), sum(received for _, received in found)


def tcp_connections() -> Iterator[tuple[int, int]]:
    """Yield the bytes that each has sent and received."""
    for place in Path("/proc/self/fd").iterdir():
        try:
            if not str(place.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(place.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    facts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    yield (*struct.unpack_from("Q", facts, BYTES_SENT), *struct.unpack_from("Q", facts, BYTES_RECEIVED))
        except OSError:
            continue


def topic_name(number: int) -> str:
    """Return the name of a topic, by its number."""
    return f"bench{number}" if number else "bench"


def main(first: int, count: int, groups: int, topics: int) -> None:
    """Carry out commands until the input ends."""
    crew = Crew(first, count, groups, topics)
    say({"ready": True})
    for line in sys.stdin:
        name, *numbers = line.split()
        say(getattr(crew, name)(*map(int, numbers)))
    # Nothing leaves: the bench is over.
    os._exit(0)


def say(answer: dict[str, Any]) -> None:
    """Answer a command."""
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
