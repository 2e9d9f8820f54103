"""The inbox: a row for each message that has its effect, written in the effect's own transaction.

States of (group, message): *unknown* -> *noted* by one open transaction -> *applied* by its commit, or *unknown* again
by its end without one; then *unknown* once more, when the horizon is over and nothing can bring the message again (see
`mqlayer.maintenance.inbox_cleanup`). Who notes it while it is *noted* waits for that transaction. Row and effect have
one commit, so nobody has to repair anything: a crash before it leaves neither, a crash after it is answered "applied".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mqlayer.domain.message import Identity
from mqlayer.domain.names import check_id
from mqlayer.errors import AlreadyApplied
from mqlayer.failpoints import failpoint
from mqlayer.postgres.caller_connections import (
    caller_errors,
    check_in_transaction,
    check_in_transaction_async,
    run_one,
    run_one_async,
)
from mqlayer.postgres.queries import query


class InboxEntry(NamedTuple):
    """What is noted of a message in a group.

    `name`: in place of the message's identity; `seek`: the last seek under which effects are applied again; `replay`:
    which replay of the archive gave the message.
    """

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
        """Raise AlreadyApplied unless the effect is to be made."""
        if answer != "current":
            raise AlreadyApplied(self.group, self.topic, self.identity.lp, self.identity.seq)


def record_effect(connection: Any, entry: InboxEntry) -> None:
    """Note in the caller's transaction that a message has its effect. Raises AlreadyApplied where it has it.

    Raises InvalidInput where no transaction is open that the effect could share, and for names that are too long;
    TransactionConflict under REPEATABLE READ or SERIALIZABLE, where another transaction noted it meanwhile.
    """
    failpoint("inbox.before")
    with caller_errors(connection):
        check_in_transaction(connection)
        (answer,) = run_one(connection, query("inbox_put"), entry.facts())
    entry.judge(answer)
    failpoint("inbox.after")


async def arecord_effect(connection: Any, entry: InboxEntry) -> None:
    """Do what `record_effect` does on an async connection."""
    failpoint("inbox.before")
    with caller_errors(connection):
        await check_in_transaction_async(connection)
        (answer,) = await run_one_async(connection, query("inbox_put"), entry.facts())
    entry.judge(answer)
    failpoint("inbox.after")
