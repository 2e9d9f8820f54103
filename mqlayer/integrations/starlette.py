"""Consumers in an ASGI application; its other half is `mqlayer.integrations.fastapi`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from mqlayer.consuming import App

Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(consumers: App, wrapped: Lifespan | None = None, *, stop_timeout_s: float | None = None) -> Lifespan:
    """Return a lifespan for Starlette or FastAPI: consumers start with the web application and stop with it.

    ```python
    web = FastAPI(lifespan=lifespan(consumers))
    ```

    `wrapped`: a lifespan of your own, entered before they start and left after they stopped. `stop_timeout_s`: as of
    `App.stop`. Each worker process of the server is a member of the groups. An error at the start stops the server.
    """

    @asynccontextmanager
    async def running(web: Any) -> AsyncIterator[Any]:
        if wrapped is None:
            async with _running(consumers, stop_timeout_s):
                yield None
            return
        async with wrapped(web) as state, _running(consumers, stop_timeout_s):
            yield state

    return running


@asynccontextmanager
async def _running(consumers: App, stop_timeout_s: float | None) -> AsyncIterator[None]:
    # Both wait for servers and threads, which the event loop must not.
    await asyncio.to_thread(consumers.start)
    try:
        yield
    finally:
        await asyncio.to_thread(consumers.stop, stop_timeout_s)
