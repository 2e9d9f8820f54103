"""Threads of logins: pages and logins never wait for each other's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from mqlayer.console.access.password_file import Busy

Given = ParamSpec("Given")
Result = TypeVar("Result")


class FewThreads:
    """Runs calls in `threads` of its own, while `waiting` more wait."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._room = threading.BoundedSemaphore(threads + waiting)

    async def run(self, call: Callable[Given, Result], *args: Given.args, **more: Given.kwargs) -> Result:
        """Return a call's result. Raises Busy where too many wait."""
        if not self._room.acquire(blocking=False):
            raise Busy
        future = self._pool.submit(call, *args, **more)
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)
