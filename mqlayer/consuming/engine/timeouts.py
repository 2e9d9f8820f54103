"""Time limits of handlers.

A deadline leaves the running ones exactly once: by its worker, or by the watcher. That decides who ends it; an
interrupted handler could leave a lock locked.

- Plain handlers: a watcher raises HandlerInterrupt in their thread. The worker waits for that, so it never hits
later code. Blocking C calls end first.
- Async handlers: the event loop cancels them at their next await.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, ParamSpec

from mqlayer.consuming.engine.clock import clock
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import InvalidInput, MessageTimeout
from mqlayer.logs import event_logger
from mqlayer.runtime.error_text import where

log = event_logger(__name__)

Facts = ParamSpec("Facts")

LONGEST_SLEEP_S: Final = 600.0
RETRY_S: Final = 0.1

_raise_in_thread: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise_in_thread.restype = ctypes.c_int


class HandlerInterrupt(BaseException):
    """Ends a plain handler, past its `except Exception`; reported as MessageTimeout."""


class HandlerDeadline:
    """A handler's deadline, by this process's clock."""

    __slots__ = ("_began", "_last", "_moved", "_step_s", "raised", "thread", "until")

    def __init__(self, rules: RetryRules, moved: Callable[[float], None] | None = None) -> None:
        limit_s, cap_s = rules.time_limit_s, rules.max_time_limit_s
        self._began = clock()
        self._step_s = min(math.inf if limit_s is None else limit_s, math.inf if cap_s is None else cap_s)
        self.until = self._began + self._step_s
        self._last = self.until if cap_s is None else self._began + cap_s
        self._moved = moved
        self.thread = threading.get_ident()
        # Set by the watcher once HandlerInterrupt was raised.
        self.raised = False

    def extend(self, seconds: float | None) -> float:
        """Extend to `seconds` from now (default: a whole limit), at most to the cap."""
        step_s = self._step_s if seconds is None else seconds
        if not step_s >= 0:
            raise InvalidInput(f"a handler can be given 0 seconds or more, not {seconds}")
        self.until = max(self.until, min(clock() + step_s, self._last))
        if self._moved is not None:
            self._moved(self.until)
        return self.remaining_s

    @property
    def remaining_s(self) -> float:
        """Seconds left."""
        return max(0.0, self.until - clock())

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return round(self.until - self._began, 3)


current_deadline: Final[ContextVar[HandlerDeadline | None]] = ContextVar("mqlayer_timer", default=None)
"""The deadline of this thread's or task's message, or None."""


def timed_out(end: HandlerInterrupt) -> MessageTimeout:
    """Return the error to report, with the handler's position."""
    deadline = current_deadline.get()
    return MessageTimeout(math.nan if deadline is None else deadline.total_s).with_traceback(end.__traceback__)


def limited(rules: RetryRules) -> bool:
    """Whether handlers have a time limit."""
    return rules.time_limit_s is not None or rules.max_time_limit_s is not None


class ThreadTimeouts:
    """Ends plain handlers at their deadline. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._running: dict[HandlerDeadline, HandlerDeadline] = {}
        # A lock held when HandlerInterrupt arrives would stay held; this queue's operations are single C steps.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Handlers with an earlier deadline wake the watcher.
        self._next_check = math.inf
        self._usual_s = math.inf
        self._used = self._stopping = False
        self._thread = threading.Thread(target=self._watch, name=f"{name}-limits", daemon=True)
        self._starting = threading.Lock()

    def wrap(self, handle: Callable[Facts, Any], rules: RetryRules) -> Callable[Facts, Any]:
        """Return `handle`, limited if the rules say so."""
        if not limited(rules):
            return handle
        if self._thread.ident is None:
            self._start()
        return partial(self._handle, handle, rules)

    @property
    def alive(self) -> bool:
        """Whether limits are enforced."""
        return self._thread.ident is None or self._thread.is_alive()

    def stop(self) -> None:
        """End the watcher after the last handler."""
        self._stopping = True
        self._woken.put(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    # -- in the workers' threads ---------------------------------------------------------------------------------------

    def _handle(self, handle: Callable[..., Any], rules: RetryRules, *facts: Any) -> Any:
        deadline = HandlerDeadline(rules)
        token = current_deadline.set(deadline)
        try:
            try:
                self._enter(deadline)
                return handle(*facts)
            finally:
                self._leave(deadline)
        except HandlerInterrupt as end:
            raise timed_out(end) from None
        finally:
            current_deadline.reset(token)

    def _enter(self, deadline: HandlerDeadline) -> None:
        self._usual_s = deadline.until - clock()
        self._used = True
        self._running[deadline] = deadline
        if deadline.until < self._next_check:
            self._woken.put(None)

    def _leave(self, deadline: HandlerDeadline) -> None:
        """Return once no interrupt can follow; it may arrive here."""
        if self._running.pop(deadline, None) is not None:
            return
        while not deadline.raised:
            time.sleep(0.0001)
        # The interrupt may or may not have hit the handler. Clearing it would leave the interpreter's flag set, so
        # raise it again, which replaces a pending one, and catch it here.
        with contextlib.suppress(HandlerInterrupt):
            _raise_in_thread(deadline.thread, HandlerInterrupt)
            while True:
                time.sleep(0)

    # -- in the watcher's thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not (self._stopping and not self._running):
            try:
                self._sleep(self._check())
            except Exception as error:  # noqa: BLE001 - without it handlers had no limit any more
                log.error("timeouts_failed", extra={"error": where(error)})
                time.sleep(RETRY_S)

    def _check(self) -> float:
        # Handlers that begin during the check trigger another.
        self._next_check = math.inf
        now = clock()
        # Later handlers have the usual limit; without handlers there is nothing to check.
        at = now + self._usual_s if self._used else math.inf
        self._used = False
        for deadline in list(self._running):
            if deadline.until <= now:
                self._end(deadline)
            else:
                at = min(at, deadline.until)
        self._next_check = at
        return at

    def _end(self, deadline: HandlerDeadline) -> None:
        if self._running.pop(deadline, None) is not None:
            _raise_in_thread(deadline.thread, HandlerInterrupt)
            deadline.raised = True

    def _sleep(self, at: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._woken.get(timeout=min(LONGEST_SLEEP_S, max(0.0, at - clock())))
            while True:
                self._woken.get_nowait()


class AsyncioTimeouts:
    """Ends async handlers at their deadline."""

    def wrap(self, handle: Callable[Facts, Awaitable[Any]], rules: RetryRules) -> Callable[Facts, Awaitable[Any]]:
        """Return `handle`, limited if the rules say so."""
        return partial(self._handle, handle, rules) if limited(rules) else handle

    async def _handle(self, handle: Callable[..., Awaitable[Any]], rules: RetryRules, *facts: Any) -> Any:
        scope = asyncio.timeout(None)
        deadline = HandlerDeadline(rules, partial(_move, asyncio.get_running_loop(), scope))
        token = current_deadline.set(deadline)
        try:
            async with scope:
                _move_here(scope, deadline.until)
                return await handle(*facts)
        except TimeoutError as error:
            if not scope.expired():
                raise
            place = error.__cause__ or error
            raise MessageTimeout(deadline.total_s).with_traceback(place.__traceback__) from None
        finally:
            current_deadline.reset(token)


def _move(loop: asyncio.AbstractEventLoop, scope: asyncio.Timeout, until: float) -> None:
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        _move_here(scope, until)
    else:
        # A closed loop runs no handlers.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_move_here, scope, until)


def _move_here(scope: asyncio.Timeout, until: float) -> None:
    # An expired or ended scope can't move.
    with contextlib.suppress(RuntimeError):
        scope.reschedule(asyncio.get_running_loop().time() + (until - clock()))
