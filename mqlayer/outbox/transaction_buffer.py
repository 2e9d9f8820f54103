"""Write a psycopg transaction's messages right before COMMIT, so LP locks are short and ordered.

psycopg does not report a rolled back inner `connection.transaction()`. So each message there leaves a trace in a
transaction-local setting; Postgres rolls it back, and the message is discarded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import psycopg

from mqlayer.errors import InvalidInput
from mqlayer.outbox.batch_insert import asend, send
from mqlayer.outbox.outbox_message import Body, OutboxMessage, message_of
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.queries import query

_WRONG_CONNECTION: Final = "takes a psycopg 3 connection: SQLAlchemy and Django transactions collect by themselves"
_numbers = count(1)

AnyConnection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"


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
        if not isinstance(self.connection, psycopg.Connection):
            raise InvalidInput("this connection is asynchronous: await tx.apublish(…)")
        collect(self.connection, message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id))

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
        if not isinstance(self.connection, psycopg.AsyncConnection):
            raise InvalidInput("this connection is synchronous: tx.publish(…)")
        await acollect(
            self.connection, message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
        )

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
        """Discard rolled back messages."""
        left = {int(number) for number in traces.split(",") if number}
        self.messages = [(message, 0) for message, trace in self.messages if not trace or trace in left]


_open: Final[WeakKeyDictionary[AnyConnection, list[OutboxTransaction]]] = WeakKeyDictionary()


@contextmanager
def transaction(connection: psycopg.Connection[Any]) -> Iterator[OutboxTransaction]:
    """Open a transaction or savepoint that collects messages.

    Writes them right before COMMIT, sorted by LP. Rolling back a savepoint discards its messages; a SAVEPOINT statement
    of your own goes unnoticed. Raises as `publish`.
    """
    if not isinstance(connection, psycopg.Connection):
        raise InvalidInput(f"a {type(connection).__name__}: outbox.transaction {_WRONG_CONNECTION}")
    with connection.transaction(), _collecting(connection) as (collector, outer):
        yield collector
        _drop_rolled_back(connection, collector)
        if outer is None:
            send(connection, [message for message, _ in collector.messages])
    # Only now can no rollback of the savepoint follow.
    if outer is not None:
        _add(connection, outer, [message for message, _ in collector.messages])


@asynccontextmanager
async def atransaction(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[OutboxTransaction]:
    """As `transaction`, on an AsyncConnection."""
    if not isinstance(connection, psycopg.AsyncConnection):
        raise InvalidInput(f"a {type(connection).__name__}: outbox.transaction {_WRONG_CONNECTION}")
    async with connection.transaction():
        with _collecting(connection) as (collector, outer):
            yield collector
            await _adrop_rolled_back(connection, collector)
            if outer is None:
                await asend(connection, [message for message, _ in collector.messages])
    if outer is not None:
        await _aadd(connection, outer, [message for message, _ in collector.messages])


def collect(connection: Any, message: OutboxMessage) -> bool:
    """Add a message to the open collector; False without one."""
    collector = _innermost(connection)
    if collector is None:
        return False
    _add(connection, collector, [message])
    return True


async def acollect(connection: psycopg.AsyncConnection[Any], message: OutboxMessage) -> bool:
    """As `collect`, asynchronously."""
    collector = _innermost(connection)
    if collector is None:
        return False
    await _aadd(connection, collector, [message])
    return True


def depth_of(connection: AnyConnection) -> int:
    """Return the depth of `connection.transaction()` blocks."""
    # psycopg has no public name for its count; without it, plain savepoints go unnoticed.
    return int(getattr(connection, "_num_transactions", 0))


def _innermost(connection: Any) -> OutboxTransaction | None:
    stack = _open.get(connection) if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection) else None
    return stack[-1] if stack else None


def _add(connection: Any, collector: OutboxTransaction, messages: Iterable[OutboxMessage]) -> None:
    trace = collector.add(messages)
    if trace:
        with caller_errors(connection):
            run_one(connection, query("outbox_trace"), {"trace": trace})


async def _aadd(connection: Any, collector: OutboxTransaction, messages: Iterable[OutboxMessage]) -> None:
    trace = collector.add(messages)
    if trace:
        with caller_errors(connection):
            await run_one_async(connection, query("outbox_trace"), {"trace": trace})


async def _adrop_rolled_back(connection: psycopg.AsyncConnection[Any], collector: OutboxTransaction) -> None:
    if collector.needs_traces:
        with caller_errors(connection):
            (traces,) = await run_one_async(connection, query("outbox_traces"), {})
        collector.keep(traces)


def _drop_rolled_back(connection: psycopg.Connection[Any], collector: OutboxTransaction) -> None:
    if collector.needs_traces:
        with caller_errors(connection):
            (traces,) = run_one(connection, query("outbox_traces"), {})
        collector.keep(traces)


@contextmanager
def _collecting(connection: AnyConnection) -> Iterator[tuple[OutboxTransaction, OutboxTransaction | None]]:
    stack = _open.setdefault(connection, [])
    outer = stack[-1] if stack else None
    stack.append(OutboxTransaction(connection))
    try:
        yield stack[-1], outer
    finally:
        stack.pop()
