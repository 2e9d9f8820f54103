"""Who consumes, as far as a run has to know: members that own partitions, or receivers that ask for batches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from examples.bank.effects import GROUP, TOPIC
from examples.bank.figures import Figures, Watch
from mqlayer.inspect import group_statuses
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.stack.wait import comes_true

LOOK_WITHIN_S: Final = 0.1
LOOKS: Final = 20
"""How often each process is looked at over one connection."""
"""How long a statement may take to end after its process was stopped; what takes longer waits for a lock."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that has something to lose. `relieved` says whether others have all of it."""

    pid: int
    has: str
    relieved: Callable[[], bool]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that ended is left alone."""
        _signal(self.pid, number)


class Crew(Protocol):
    """The consumers of a run. `hold`: what keeps a stopped one's work for it; `over`: what others did after that."""

    hold: str
    over: str

    def complete(self) -> bool:
        """Say whether all of them are at work."""
        ...

    def catch(self) -> Victim | None:
        """Return one that has something to lose, None where none has now; it may be stopped already (SIGSTOP)."""
        ...


class Members:
    """Members in the worker, which is spared, and in other processes."""

    hold = "lease"
    over = "others have its partitions"

    def __init__(self, figures: Figures, *, spared_pid: int, members: int, partitions: int) -> None:
        self._figures, self._spared_pid = figures, spared_pid
        self._members, self._partitions = members, partitions
        self._caught: set[int] = set()

    def complete(self) -> bool:
        """Say whether all members are there and share all partitions."""
        members = self._figures.members()
        return len(members) == self._members and sum(one.partitions for one in members) == self._partitions

    def catch(self) -> Victim | None:
        """Return a member that holds partitions."""
        for one in self._figures.members():
            if one.partitions and one.pid not in self._caught | {self._spared_pid}:
                self._caught.add(one.pid)
                return Victim(one.pid, f"{one.partitions} partitions", partial(self._holds_none, one.member_id))
        return None

    def _holds_none(self, member_id: str) -> bool:
        return not any(one.member_id == member_id and one.partitions for one in self._figures.members())


class Receivers:
    """Receivers in processes of their own. Nobody on a server knows them: they are caught in the midst of an effect."""

    hold = "visibility timeout"
    over = "others handled its messages"

    def __init__(self, figures: Figures, control_dsn: str, pids: Sequence[int], *, prefix: str) -> None:
        self._figures, self._dsn, self._prefix = figures, control_dsn, prefix
        self._free = list(pids)

    def complete(self) -> bool:
        """Say whether all processes live: each said that it was ready."""
        return all(_is_alive(pid) for pid in self._free)

    def catch(self) -> Victim | None:
        """Stop a process that has a batch in hand and is inside an effect's transaction; return it."""
        # An effect takes a few milliseconds: a connection for each look would be longer than most of them.
        with self._figures.watch() as states:
            for pid in self._free * LOOKS:
                if _stopped_at_work(pid, states):
                    self._free.remove(pid)
                    return Victim(pid, "a batch in hand", self._relief())
        return None

    def _relief(self) -> Callable[[], bool]:
        """Return what says that all that was published before now is settled."""
        caught_at = time.monotonic()

        def relieved() -> bool:
            asked_s = time.monotonic() - caught_at
            with Database(self._dsn, application="bank relief") as database:
                runtime = Runtime(database, Settings(key_prefix=self._prefix))
                (status,) = group_statuses(runtime, TOPIC, GROUP)
            return not status.unreachable and (status.age_s is None or status.age_s < asked_s)

        return relieved


def _stopped_at_work(pid: int, states: Watch) -> bool:
    _signal(pid, signal.SIGSTOP)
    comes_true(lambda: "active" not in states(pid), within_s=LOOK_WITHIN_S)
    if "idle in transaction" in states(pid):
        return True
    _signal(pid, signal.SIGCONT)
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
