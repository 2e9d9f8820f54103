"""The inbox: a row per applied message, committed with its effect.

A second transaction waits for the first. `mqlayer.maintenance.inbox_cleanup` deletes rows that no redelivery needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mqlayer.domain.message import Identity
from mqlayer.domain.names import check_id
from mqlayer.errors import AlreadyApplied
from mqlayer.failpoints import failpoint
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query


class InboxEntry(NamedTuple):
    """`name`: replaces the identity; `seek`: the last that applies effects again; `replay`: the one that gave the
    message."""

    group_id: int
    group: str
    topic: str
    identity: Identity
    name: str | None = None
    seek: int = 0
    replay: int | None = None

    def facts(self) -> Mapping[str, Any]:
        """Return the statement's parameters."""
        source, lp, seq = self.identity
        name = None if self.name is None else check_id("effect", self.name)
        named = {"name": name, "seek": self.seek, "replay": self.replay}
        return {"group_id": self.group_id, "source": source, "lp": lp, "seq": seq, **named}

    def judge(self, answer: str) -> None:
        """Raise AlreadyApplied unless it is new."""
        if answer != "current":
            raise AlreadyApplied(self.group, self.topic, self.identity.lp, self.identity.seq)


def record_effect(connection: Any, entry: InboxEntry) -> None:
    """Record a message's effect in the caller's transaction. Raises AlreadyApplied if it had one.

    Raises InvalidInput without an open transaction or for long names; TransactionConflict for a concurrent record under
    REPEATABLE READ or SERIALIZABLE.
    """
    run(connection, _recording(entry))


async def arecord_effect(connection: Any, entry: InboxEntry) -> None:
    """`record_effect` on an async connection."""
    await run_async(connection, _recording(entry))


def _recording(entry: InboxEntry) -> Statements[None]:
    failpoint("inbox.before")
    (answer,) = yield Statement(query("inbox_put"), entry.facts(), in_transaction=True)
    entry.judge(answer)
    failpoint("inbox.after")
