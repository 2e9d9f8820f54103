"""A process's heartbeats: one statement for all that wait."""

# Alone, a heartbeat costs Postgres ten times its share in a statement of a hundred: most is the commit and the start of
# the plan. So members of a process beat at common moments, and the first to come waits a little for the others.

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.randomness import RNG

MOST: Final = 100
"""Heartbeats per statement."""
PATIENCE_S: Final = 1.0
"""After this wait one goes alone."""
GATHER_S: Final = 0.01
"""Wait of a heartbeat without a reason."""
MOMENTS: Final = 5
"""At least so many between two heartbeats."""
COLUMNS: Final[Mapping[str, str]] = {
    "group_ids": "group_id",
    "member_ids": "member_id",
    "sessions": "session",
    "lease_s": "lease_s",
    "acts_on": "acts_on",
}
"""Arguments of `members_beat`."""


class SentHeartbeat:
    """One member's heartbeat on its way."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.row: tuple[Any, ...] | None = None
        self.error: BaseException | None = None
        self.answered = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it was answered, or failed."""
        return self.answered.is_set()


class HeartbeatSender:
    """Sends heartbeats of any thread, one statement at a time: the others wait, and go together."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[SentHeartbeat] = []
        self._adding, self._sending = threading.Lock(), threading.Lock()
        self._full = threading.Event()
        # Processes that start together do not beat together.
        self._phase_s = RNG.uniform(0, 60)

    def wait_s(self, most_s: float) -> float:
        """Return the time to a common moment: 80 to 100 % of `most_s`."""
        # Powers of two: moments of longer intervals are moments of shorter ones.
        step_s = 2.0 ** math.floor(math.log2(most_s / MOMENTS))
        return most_s - (time.monotonic() + self._phase_s + most_s) % step_s

    def send(self, facts: Mapping[str, Any], *, urgent: bool = True) -> tuple[Any, ...] | None:
        """Return the answer; if not urgent, wait for others. Raises as `Database.first_row`."""
        mine = SentHeartbeat(facts)
        with self._adding:
            self._waiting.append(mine)
            if urgent or len(self._waiting) >= MOST:
                self._full.set()
        if self._sending.acquire(timeout=PATIENCE_S):
            try:
                if not mine.done:
                    self._full.wait(GATHER_S)
                while not mine.done:
                    self._send(self._taken())
            finally:
                self._sending.release()
        elif self._withdrawn(mine):
            # A row that another's heartbeat waits for must not cost this one its lease.
            return self._database.first_row(query("member_beat"), facts)
        else:
            mine.answered.wait()
        if mine.error is not None:
            raise mine.error
        return mine.row

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run a statement between heartbeats; after `PATIENCE_S`, beside them."""
        taken = self._sending.acquire(timeout=PATIENCE_S)
        try:
            yield
        finally:
            if taken:
                self._sending.release()

    def _taken(self) -> list[SentHeartbeat]:
        with self._adding:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            if not self._waiting:
                self._full.clear()
        return batch

    def _withdrawn(self, one: SentHeartbeat) -> bool:
        with self._adding:
            if one not in self._waiting:
                return False
            self._waiting.remove(one)
        return True

    def _send(self, batch: list[SentHeartbeat]) -> None:
        try:
            self._answer(batch)
        except BaseException as error:
            # Without a row they would take themselves for replaced.
            for one in batch:
                one.error = error
            if not isinstance(error, MqlayerError):
                raise
        finally:
            for one in batch:
                one.answered.set()

    def _answer(self, batch: list[SentHeartbeat]) -> None:
        if len(batch) == 1:
            batch[0].row = self._database.first_row(query("member_beat"), batch[0].facts)
            return
        rows = self._database.rows(query("members_beat"), together([one.facts for one in batch]))
        for one, row in zip(batch, rows, strict=True):
            one.row = row


def together(each: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the arguments of one statement."""
    return {name: [facts[of] for facts in each] for name, of in COLUMNS.items()}
