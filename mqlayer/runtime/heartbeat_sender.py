"""A process's heartbeats: one statement for all that wait."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

MOST: Final = 100
"""Heartbeats per statement."""
PATIENCE_S: Final = 1.0
"""After this wait one goes alone."""


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

    def send(self, facts: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the answer to one. Raises as `Database.first_row`."""
        mine = SentHeartbeat(facts)
        with self._adding:
            self._waiting.append(mine)
        if self._sending.acquire(timeout=PATIENCE_S):
            try:
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

    def _taken(self) -> list[SentHeartbeat]:
        with self._adding:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
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
        columns = {"group_ids": "group_id", "member_ids": "member_id", "sessions": "session"}
        columns |= {"lease_s": "lease_s", "acts_on": "acts_on"}
        facts = {name: [one.facts[of] for one in batch] for name, of in columns.items()}
        rows = self._database.rows(query("members_beat"), facts)
        for one, row in zip(batch, rows, strict=True):
            one.row = row
