"""A handler that fails for some keys, and what of these is parked."""

from __future__ import annotations

from typing import Any

from mqlayer import Context
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.due_keys import try_now

LATER_S = 3600.0


class Fault(Exception):
    """What a handler fails with."""


class ParkingShop:
    """A handler that fails for some keys until it is repaired."""

    def __init__(self, *broken: str, error: Exception | None = None) -> None:
        self.broken, self.error = set(broken), error or Fault("no stock")
        self.recorder = Recorder(self.act)

    def act(self, body: bytes, ctx: Context) -> None:
        if ctx.key in self.broken:
            raise self.error


def rows(stage: Stage, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """Return what the control database says."""
    with stage.database.connection() as connection:
        return connection.execute(sql.encode(), arguments).fetchall()


def parked(stage: Stage) -> dict[str, list[int]]:
    """Return the seqs that are parked of each key, in their order."""
    found = rows(stage, "SELECT convert_from(key, 'UTF8'), seq FROM mqlayer.parked_message ORDER BY position, seq")
    return {key: [seq for name, seq in found if name == key] for key, _ in found}


def release(stage: Stage, group: str = "g") -> None:
    """Have every parked key of a group tried now, as an operator does."""
    try_now(stage.database, stage.group_id(group))
