"""Writing messages into the outbox: one statement, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqlayer.outbox.messages import Message, arguments_of
from mqlayer.postgres.queries import query
from mqlayer.postgres.sessions import caller_errors, run_one, run_one_async


def send(connection: Any, messages: Sequence[Message]) -> None:
    """Write messages in the transaction that is open on the connection, in the order of their LPs."""
    if messages:
        with caller_errors(connection):
            run_one(connection, *statement_for(messages))


async def asend(connection: Any, messages: Sequence[Message]) -> None:
    """Do the same on an async connection."""
    if messages:
        with caller_errors(connection):
            await run_one_async(connection, *statement_for(messages))


def statement_for(messages: Sequence[Message]) -> tuple[str, dict[str, Any]]:
    """Return the statement that writes these messages, and its arguments."""
    once = any(message.dedup_id is not None for message in messages)
    if len(messages) == 1:
        return query("outbox_publish_once" if once else "outbox_publish"), messages[0]._asdict()
    return query("outbox_publish_many_once" if once else "outbox_publish_many"), arguments_of(messages)
