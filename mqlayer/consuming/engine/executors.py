"""Run handlers on threads, or on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.timeouts import ThreadTimeouts


class ThreadExecutor:
    """Threads that each run `_work`."""

    def __init__(self, *, count: int, name: str) -> None:
        self._limits = ThreadTimeouts(name)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-worker-{i}", daemon=True) for i in range(count)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether no thread has ended."""
        return self._limits.alive and all(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        """Wait; say whether all ended."""
        until = clock() + timeout_s
        self._limits.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        raise NotImplementedError


class AsyncioExecutor:
    """A loop's thread; coroutines run `_work`."""

    def __init__(self, *, count: int, name: str) -> None:
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run_loop, name=f"{name}-loop", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait; say whether all ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Wake idle coroutines. Thread-safe."""
        loop, ready = self._loop, self._ready
        if loop is not None and ready is not None:
            # If the loop was closed meanwhile, no coroutine waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ready.set)

    async def wait(self, ready: asyncio.Event, longest_s: float) -> None:
        """Wait for `wake`, or `longest_s`."""
        ready.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), longest_s)

    def _run_loop(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.gather(*(self._work(self._ready) for _ in range(self._count)))

    async def _work(self, ready: asyncio.Event) -> None:
        raise NotImplementedError
