"""A page's parts by server-sent events, as they change."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mqlayer.console.render import clock
from mqlayer.errors import MqlayerError

LIVE: Final = "/live"
EVERY_S: Final = 2.0
LONGEST_S: Final = 600.0
"""A stream ends then; the browser comes again, and its session is looked at anew."""
STREAMS: Final = 64
"""At once; each renders a page every two seconds."""
AS_OF: Final = re.compile(r'<time id="as-of">([^<]*)</time>')
"""In a page that shows a look, which may be older than the page."""
PER_USER: Final = 16
"""Of these, so that one user leaves some to others."""


def is_live(request: Request) -> bool:
    """Whether a request is for live parts; a topic may have that name, too."""
    return bool(request.scope["path"].removeprefix(request.scope.get("root_path", "")) == LIVE)


class LivePages:
    """Streams of pages."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self.stopping = False
        self._open: Counter[str] = Counter()

    def stream(self, user: str, render: Callable[[], str | None]) -> Response:
        """Answer with a page each time it differs; it ends where `render` returns None."""
        if self._is_full(user):
            return Response("too many live pages", 503, {"Retry-After": "30"})
        return StreamingResponse(self._events(user, render), media_type="text/event-stream")

    def _is_full(self, user: str) -> bool:
        return self._open[user] >= PER_USER or self._open.total() >= STREAMS

    async def _events(self, user: str, render: Callable[[], str | None]) -> AsyncIterator[str]:
        if self._is_full(user):
            # Many came at once.
            yield _event("trouble", "too many live pages")
            return
        self._open[user] += 1
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
                    if digest != sent:
                        yield _event("page", page)
                    looked = AS_OF.search(page)
                    yield _event("at", looked[1] if looked else clock(datetime.now(UTC)))
                    sent = digest
                await asyncio.sleep(self.every_s)
        finally:
            self._open[user] -= 1
            # Only users with streams.
            self._open += Counter()


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
