"""Insert messages, up to 10,000 per statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.outbox.outbox_message import OutboxMessage, arguments_of
from mqlayer.postgres.caller_connections import Statement, Statements, run
from mqlayer.postgres.queries import query

AT_ONCE: Final = 10_000


def send(connection: Any, messages: Sequence[OutboxMessage]) -> None:
    """Write messages in the open transaction, in LP order."""
    run(connection, sending(messages))


def sending(messages: Sequence[OutboxMessage]) -> Statements[None]:
    """Write messages in LP order."""
    yield from statements_for(messages)


def statements_for(messages: Sequence[OutboxMessage]) -> Iterator[Statement]:
    """Return statements, with arguments, that write messages."""
    if len(messages) > AT_ONCE:
        # All statements together lock LPs in one order.
        messages = sorted(messages, key=_place_of)
    for first in range(0, len(messages), AT_ONCE):
        yield _statement_for(messages[first : first + AT_ONCE])


def _place_of(message: OutboxMessage) -> tuple[str, int]:
    name = message.dedup_id if message.key is None else message.key
    return message.topic, LP_COUNT if name is None else lp_of(name.encode())


def _statement_for(messages: Sequence[OutboxMessage]) -> Statement:
    once = any(message.dedup_id is not None for message in messages)
    if len(messages) == 1:
        return Statement(query("outbox_publish_once" if once else "outbox_publish"), messages[0]._asdict())
    return Statement(query("outbox_publish_many_once" if once else "outbox_publish_many"), arguments_of(messages))
