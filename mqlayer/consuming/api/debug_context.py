"""A context whose effects never commit: a commit rolls back, and the database refuses one that comes another way."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from mqlayer.consuming.api.context import Context
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.postgres.caller_connections import caller_errors, check_in_transaction, driver_connection, driver_cursor
from mqlayer.redis.partition_scripts import LockHolder

CONSTRAINT: Final = "mqlayer_debug_rolls_back"
_UNIQUE_AT_COMMIT: Final = f"CONSTRAINT {CONSTRAINT} UNIQUE DEFERRABLE INITIALLY DEFERRED"
_REFUSE_COMMIT: Final = (
    f"CREATE TEMP TABLE IF NOT EXISTS mqlayer_debug (one int {_UNIQUE_AT_COMMIT}) ON COMMIT DROP",
    "INSERT INTO pg_temp.mqlayer_debug VALUES (1), (1)",
)


class DebugContext(Context):
    """A message for a handler under a debugger. `fence` and `inbox` make the transaction one that can't commit."""

    __slots__ = ("rolled_back",)

    def __init__(self, topic: str, group: str, partition: int, record: Record, *, attempts: int) -> None:
        self.rolled_back = False
        """Whether the handler gave a connection."""
        assignment = Assignment(PartitionId(partition), NodeId(0), 0, 1, epoch=0, start=1, release=False)
        owned = OwnedPartition(assignment, LockHolder("", partition, 0, "debug", 0))
        super().__init__(topic, group, 0, owned, ParkedRecord.of(record, attempts=attempts, redriven=False))

    def fence(self, connection: Any) -> None:
        """Have the transaction's commit refused."""
        self._only_once()
        self._refuse_commit(connection)

    async def afence(self, connection: Any) -> None:
        """`fence` for an async connection."""
        self._only_once()
        await self._arefuse_commit(connection)

    def inbox(self, connection: Any, *, name: str | None = None) -> None:
        """Have the transaction's commit refused."""
        self._entry(name)
        self._refuse_commit(connection)

    async def ainbox(self, connection: Any, *, name: str | None = None) -> None:
        """`inbox` for an async connection."""
        self._entry(name)
        await self._arefuse_commit(connection)

    def _refuse_commit(self, connection: Any) -> None:
        check_in_transaction(connection)
        with caller_errors(connection), driver_cursor(connection) as cursor:
            for statement in _REFUSE_COMMIT:
                cursor.execute(statement)
        _roll_back_instead(driver_connection(connection))
        self.rolled_back = True

    async def _arefuse_commit(self, connection: Any) -> None:
        if hasattr(connection, "run_sync"):
            await connection.run_sync(self._refuse_commit)
            return
        check_in_transaction(connection)
        with caller_errors(connection):
            for statement in _REFUSE_COMMIT:
                await connection.execute(statement)
        _roll_back_instead(connection)
        self.rolled_back = True


def _roll_back_instead(driver: Any) -> None:
    """Have the driver's next commit roll back; the one after commits again, for pools."""

    def commit() -> Any:
        vars(driver).pop("commit", None)
        # Of an async connection, a coroutine.
        return driver.rollback()

    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        vars(driver)["commit"] = commit


def is_refused_commit(error: BaseException) -> bool:
    """Whether an exception comes from the commit that the database refused."""
    seen: BaseException | None = error
    while seen is not None:
        of_psycopg = seen.diag.constraint_name if isinstance(seen, psycopg.errors.UniqueViolation) else None
        # asyncpg's error has the name itself.
        if CONSTRAINT in (of_psycopg, getattr(seen, "constraint_name", None)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
