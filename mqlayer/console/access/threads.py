"""Threads of logins: pages and logins never wait for each other's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from mqlayer.console.access.password_file import Busy

Given = ParamSpec("Given")
Result = TypeVar("Result")


class FewThreads:
    """Runs calls in `threads` of its own, while `waiting` more wait. The threads end with the last call."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name, self._threads = name, threads
        self._room = threading.BoundedSemaphore(threads + waiting)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._calls = 0

    async def run(self, call: Callable[Given, Result], *args: Given.args, **more: Given.kwargs) -> Result:
        """Return a call's result. Raises Busy where too many wait."""
        if not self._room.acquire(blocking=False):
            raise Busy
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
            self._calls += 1
            future = self._pool.submit(call, *args, **more)
        future.add_done_callback(self._note_end)
        return await asyncio.wrap_future(future)

    def _note_end(self, _: Future[Any]) -> None:
        self._room.release()
        with self._lock:
            self._calls -= 1
            if self._pool is not None and not self._calls:
                self._pool.shutdown(wait=False)
                self._pool = None
