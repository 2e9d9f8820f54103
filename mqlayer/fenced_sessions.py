"""A handler's session whose transaction is fenced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from mqlayer.arguments import explain
from mqlayer.consuming import Context, Depends
from mqlayer.outbox.transaction_sources import aopen_transaction, is_async_source, open_transaction


@explain
def fenced(source: Any) -> Depends:
    """Give a handler a session in a transaction that begins with `ctx.fence` and commits when the handler returns.

    ```python
    sessions = sessionmaker(engine)

    @app.consumer("orders", group="ledger")
    def book(order: Order, ctx: mqlayer.Context, session: Annotated[Session, mqlayer.fenced(sessions)]) -> None:
        session.add(Booking(order.id))
    ```

    An exception rolls it back; where the message was applied before, the handler is not called.
    `source`: SQLAlchemy's sessionmaker, async_sessionmaker or engine, a psycopg pool, or the alias of a Django
    database. Async sources belong to `async def` handlers. Raises InvalidInput for another source.
    """

    def session(context: Context) -> Iterator[Any]:
        with open_transaction(source) as opened:
            context.fence(opened)
            yield opened

    async def async_session(context: Context) -> AsyncIterator[Any]:
        async with aopen_transaction(source) as opened:
            await context.afence(opened)
            yield opened

    return Depends(async_session if is_async_source(source) else session)
