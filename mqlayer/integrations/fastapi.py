"""Consumers in a FastAPI application, and a session whose messages commit with the request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from mqlayer.integrations.starlette import Lifespan, lifespan
from mqlayer.outbox.transaction_sources import aopen_transaction, is_async_source, open_transaction

try:
    from fastapi import Depends
except ImportError as error:
    raise ImportError("mqlayer.integrations.fastapi needs FastAPI: pip install 'mqlayer[fastapi]'") from error

__all__ = ["Lifespan", "lifespan", "transaction"]


def transaction(source: Any) -> Any:
    """Return a dependency: a session in a transaction that commits when the path function returned, before the response
    is sent; an exception rolls it back.

    ```python
    Session = Annotated[AsyncSession, transaction(sessions)]

    @web.post("/orders")
    async def place(order: OrderPlaced, session: Session) -> None:
        await orders.apublish(session, order)
    ```

    `source`: SQLAlchemy's sessionmaker, async_sessionmaker or engine, a psycopg pool, or the alias of a Django
    database. A commit that fails is an error of the request. Raises InvalidInput for another source.
    """

    def session() -> Iterator[Any]:
        with open_transaction(source) as opened:
            yield opened

    async def async_session() -> AsyncIterator[Any]:
        async with aopen_transaction(source) as opened:
            yield opened

    # The scope "request", the default, would commit after the client was told of success.
    return Depends(async_session if is_async_source(source) else session, scope="function")
