"""Write a psycopg transaction's messages right before COMMIT, so LP locks are short and ordered.

psycopg reports no rolled back inner `connection.transaction()`. So each message leaves a trace in a
transaction-local setting, which Postgres rolls back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import psycopg

from mqlayer.arguments import explain_methods
from mqlayer.errors import InvalidInput
from mqlayer.outbox.batch_insert import sending
from mqlayer.outbox.outbox_message import Body, OutboxMessage, message_of, placed
from mqlayer.postgres.caller_connections import StandIn, Statement, Statements, run, run_async
from mqlayer.postgres.queries import query

_WRONG_CONNECTION: Final = "takes a psycopg 3 connection: SQLAlchemy and Django transactions collect by themselves"
_numbers = count(1)

AnyConnection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | StandIn"


@explain_methods
class OutboxTransaction:
    """One `outbox.transaction`'s messages."""

    def __init__(self, connection: AnyConnection) -> None:
        self.connection = connection
        self.messages: list[tuple[OutboxMessage, int]] = []
        self.depth = depth_of(connection)

    def publish(
        self,
        topic: str,
        *,
        key: str | None = None,
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
    ) -> None:
        """As `outbox.publish`."""
        if not _is_sync(self.connection):
            raise InvalidInput("this connection is asynchronous: await tx.apublish(…)")
        message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
        run(self.connection, publishing(self.connection, message))

    async def apublish(
        self,
        topic: str,
        *,
        key: str | None = None,
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
    ) -> None:
        """As `outbox.apublish`."""
        if not _is_async(self.connection):
            raise InvalidInput("this connection is synchronous: tx.publish(…)")
        message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
        await run_async(self.connection, publishing(self.connection, message))

    def add(self, messages: Iterable[OutboxMessage]) -> int:
        """Add messages; return their trace, 0 for none."""
        trace = next(_numbers) if depth_of(self.connection) > self.depth else 0
        self.messages += [(message, trace) for message in messages]
        return trace

    @property
    def needs_traces(self) -> bool:
        """Whether messages may be rolled back."""
        return any(trace for _, trace in self.messages)

    def keep(self, traces: str) -> None:
        """Discard rolled back messages, at the end."""
        self.keep_traced(traces)
        self.messages = [(message, 0) for message, _ in self.messages]

    def keep_traced(self, traces: str) -> None:
        """Discard rolled back messages."""
        left = {int(number) for number in traces.split(",") if number}
        self.messages = [each for each in self.messages if not each[1] or each[1] in left]


_open: Final[WeakKeyDictionary[AnyConnection, list[OutboxTransaction]]] = WeakKeyDictionary()


@contextmanager
def transaction(connection: psycopg.Connection[Any] | StandIn) -> Iterator[OutboxTransaction]:
    """Open a transaction or savepoint that collects messages.

    Writes them right before COMMIT, sorted by LP. Rolling back a savepoint discards its messages; a SAVEPOINT statement
    of your own goes unnoticed. Raises as `publish`.
    """
    if not _is_sync(connection):
        raise InvalidInput(f"a {type(connection).__name__}: outbox.transaction {_WRONG_CONNECTION}")
    with connection.transaction(), _collecting(connection) as (collector, outer):
        yield collector
        run(connection, _ending(collector, outer))
    # Only now can no rollback of the savepoint follow.
    run(connection, _handing_on(collector, outer))


@asynccontextmanager
async def atransaction(connection: psycopg.AsyncConnection[Any] | StandIn) -> AsyncIterator[OutboxTransaction]:
    """As `transaction`, on an AsyncConnection."""
    if not _is_async(connection):
        raise InvalidInput(f"a {type(connection).__name__}: outbox.transaction {_WRONG_CONNECTION}")
    async with connection.transaction():
        with _collecting(connection) as (collector, outer):
            yield collector
            await run_async(connection, _ending(collector, outer))
    await run_async(connection, _handing_on(collector, outer))


def publishing(connection: Any, message: OutboxMessage) -> Statements[None]:
    """Add a message to the open collector; without one, write it."""
    message = yield from placed(connection, message)
    collector = _innermost(connection)
    if collector is None:
        yield from sending([message])
    else:
        yield from _adding(collector, [message])


def collected(connection: AnyConnection) -> Statements[list[OutboxMessage]]:
    """Return what open transactions of a connection have collected and not rolled back."""
    collectors = _open.get(connection, [])
    if any(collector.needs_traces for collector in collectors):
        (traces,) = yield Statement(query("outbox_traces"), {})
        for collector in collectors:
            collector.keep_traced(traces)
    return [message for collector in collectors for message, _ in collector.messages]


def depth_of(connection: AnyConnection) -> int:
    """Return the depth of `connection.transaction()` blocks."""
    # psycopg has no public name for its count; without it, plain savepoints go unnoticed.
    return int(getattr(connection, "_num_transactions", 0))


def _is_sync(connection: object) -> bool:
    return isinstance(connection, psycopg.Connection) or getattr(connection, "asynchronous", True) is False


def _is_async(connection: object) -> bool:
    return isinstance(connection, psycopg.AsyncConnection) or getattr(connection, "asynchronous", False) is True


def _innermost(connection: Any) -> OutboxTransaction | None:
    stack = _open.get(connection) if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection) else None
    return stack[-1] if stack else None


def _adding(collector: OutboxTransaction, messages: Iterable[OutboxMessage]) -> Statements[None]:
    trace = collector.add(messages)
    if trace:
        yield Statement(query("outbox_trace"), {"trace": trace})


def _ending(collector: OutboxTransaction, outer: OutboxTransaction | None) -> Statements[None]:
    if collector.needs_traces:
        (traces,) = yield Statement(query("outbox_traces"), {})
        collector.keep(traces)
    if outer is None:
        yield from sending([message for message, _ in collector.messages])


def _handing_on(collector: OutboxTransaction, outer: OutboxTransaction | None) -> Statements[None]:
    if outer is not None:
        yield from _adding(outer, [message for message, _ in collector.messages])


@contextmanager
def _collecting(connection: AnyConnection) -> Iterator[tuple[OutboxTransaction, OutboxTransaction | None]]:
    stack = _open.setdefault(connection, [])
    outer = stack[-1] if stack else None
    stack.append(OutboxTransaction(connection))
    try:
        yield stack[-1], outer
    finally:
        stack.pop()
