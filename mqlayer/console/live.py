"""A page's parts by server-sent events, as they change."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from mqlayer.errors import MqlayerError

EVERY_S: Final = 2.0
LONGEST_S: Final = 600.0
"""A stream ends then; the browser comes again, and its session is looked at anew."""
STREAMS: Final = 64
"""At once; each renders a page every two seconds."""


class LivePages:
    """Streams of pages."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self.stopping = False
        self._open = 0

    def stream(self, render: Callable[[], str | None]) -> Response:
        """Answer with a page each time it differs; it ends where `render` returns None."""
        if self._open >= STREAMS:
            return Response("too many live pages", 503, {"Retry-After": "30"})
        return StreamingResponse(self._events(render), media_type="text/event-stream")

    async def _events(self, render: Callable[[], str | None]) -> AsyncIterator[str]:
        self._open += 1
        try:
            sent, deadline = b"", asyncio.get_running_loop().time() + LONGEST_S
            while not self.stopping and asyncio.get_running_loop().time() < deadline:
                try:
                    page = await run_in_threadpool(render)
                except MqlayerError as error:
                    yield _event("trouble", str(error))
                else:
                    if page is None:
                        yield _event("ended", "")
                        return
                    digest = hashlib.sha256(page.encode()).digest()
                    yield _event("page", page) if digest != sent else ": same\n\n"
                    sent = digest
                await asyncio.sleep(self.every_s)
        finally:
            self._open -= 1


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
