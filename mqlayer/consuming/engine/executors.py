"""Run workers, on threads or one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.timeouts import AsyncioTimeouts, ThreadTimeouts
from mqlayer.errors import HandlerFault
from mqlayer.metrics import MemberMeters

IDLE_WAIT_S: Final = 0.25
"""Idle poll interval."""

Timeouts = ThreadTimeouts | AsyncioTimeouts


class Worker(ABC):
    """One worker's strategy. It raises nothing."""

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether to end."""

    @abstractmethod
    def take(self, timeout_s: float) -> bool:
        """Take work; say whether there is any."""

    @abstractmethod
    def run(self) -> None:
        """Handle it, plain."""

    @abstractmethod
    async def arun(self) -> None:
        """Handle it, async."""

    def idle_s(self) -> float:
        """Return a coroutine's longest wait."""
        return IDLE_WAIT_S


MakeWorker = Callable[[Timeouts], Worker]


class Executor(ABC):
    """A member's workers."""

    @abstractmethod
    def start(self) -> None:
        """Start the threads."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether no thread has ended."""

    @abstractmethod
    def join(self, timeout_s: float) -> bool:
        """Wait; say whether all ended."""


class ThreadExecutor(Executor):
    """A thread per worker."""

    def __init__(self, make_worker: MakeWorker, *, count: int, name: str, meters: MemberMeters | None = None) -> None:
        self._limits = ThreadTimeouts(name)
        self._make_worker, self._meters = make_worker, meters
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
        worker = self._make_worker(self._limits)
        run = worker.run if self._meters is None else self._meters.turn_timer().timed(worker.run)
        while not worker.stopping:
            if worker.take(IDLE_WAIT_S):
                run()


class AsyncioExecutor(Executor):
    """A coroutine per worker, on one event loop."""

    def __init__(self, make_worker: MakeWorker, *, count: int, name: str, meters: MemberMeters | None = None) -> None:
        self._make_worker, self._count, self._meters = make_worker, count, meters
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

    def _run_loop(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        limits = AsyncioTimeouts()
        await asyncio.gather(*(self._work(self._make_worker(limits), self._ready) for _ in range(self._count)))

    async def _work(self, worker: Worker, ready: asyncio.Event) -> None:
        run = worker.arun if self._meters is None else self._meters.turn_timer().timed_async(worker.arun)
        while not worker.stopping:
            if worker.take(0.0):
                await run()
                continue
            ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ready.wait(), worker.idle_s())


def executor_of(
    make_worker: MakeWorker,
    *,
    is_async: bool,
    count: int,
    name: str,
    on_ready: Callable[[Callable[[], None]], None],
    meters: MemberMeters | None = None,
) -> Executor:
    """Return the executor; `on_ready` gets what wakes coroutines."""
    if not is_async:
        return ThreadExecutor(make_worker, count=count, name=name, meters=meters)
    executor = AsyncioExecutor(make_worker, count=count, name=name, meters=meters)
    on_ready(executor.wake)
    return executor


def not_awaited(answer: Any) -> HandlerFault:
    """Return the fault of a plain handler that returns an awaitable."""
    if hasattr(answer, "close"):
        answer.close()
    return HandlerFault("the handler returned an awaitable that nobody awaits: make it `async def` itself")
