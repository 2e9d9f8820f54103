"""How long a handler has for a message, and what ends it when that is over.

A timer is *running* from before the handler is called until it is taken out of the running ones, once: by its worker,
when the handler has ended, or by the watcher, when the time is up. So who takes it out is who decides, and nothing else
has to be locked: a plain handler may be interrupted anywhere, also where it would hold a lock of ours.

- Plain handlers: the watcher, one thread for all workers of a member, raises HandlerInterrupt in the handler's thread.
  A worker
  whose timer the watcher took waits until that has come, so it never comes after: not in the worker, not in the next
  message. It comes when the thread runs Python code again: a blocking call into C ends first.
- Async handlers: the event loop cancels them, at their next await.

No thread runs and nothing is called where the group has no limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, ParamSpec

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import InvalidInput, MessageTimeout

log = logging.getLogger(__name__)

Facts = ParamSpec("Facts")

LONGEST_SLEEP_S: Final = 600.0
RETRY_S: Final = 0.1

_raise_in_thread: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise_in_thread.restype = ctypes.c_int


class HandlerInterrupt(BaseException):
    """Ends a plain handler from outside, past its `except Exception`; what is reported is MessageTimeout."""


class HandlerDeadline:
    """Until when a handler has for its message, by this machine's clock."""

    __slots__ = ("_began", "_last", "_moved", "_step_s", "raised", "thread", "until")

    def __init__(self, rules: RetryRules, moved: Callable[[float], None] | None = None) -> None:
        limit_s, cap_s = rules.time_limit_s, rules.max_time_limit_s
        self._began = clock()
        self._step_s = min(math.inf if limit_s is None else limit_s, math.inf if cap_s is None else cap_s)
        self.until = self._began + self._step_s
        self._last = self.until if cap_s is None else self._began + cap_s
        self._moved = moved
        self.thread = threading.get_ident()
        # By the watcher, when HandlerInterrupt is on its way.
        self.raised = False

    def extend(self, seconds: float | None) -> float:
        """Have it end so many seconds from now, a whole time limit by default, but not beyond the cap; never sooner."""
        step_s = self._step_s if seconds is None else seconds
        if not step_s >= 0:
            raise InvalidInput(f"a handler can be given 0 seconds or more, not {seconds}")
        self.until = max(self.until, min(clock() + step_s, self._last))
        if self._moved is not None:
            self._moved(self.until)
        return self.remaining_s

    @property
    def remaining_s(self) -> float:
        """How many seconds are left."""
        return max(0.0, self.until - clock())

    @property
    def total_s(self) -> float:
        """How many seconds it has in all."""
        return round(self.until - self._began, 3)


current_deadline: Final[ContextVar[HandlerDeadline | None]] = ContextVar("mqlayer_timer", default=None)
"""The timer of the message that this thread or task handles; None where it has no limit."""


def timed_out(end: HandlerInterrupt) -> MessageTimeout:
    """Return what is reported of a plain handler that was ended, with the place where it was."""
    deadline = current_deadline.get()
    return MessageTimeout(math.nan if deadline is None else deadline.total_s).with_traceback(end.__traceback__)


def limited(rules: RetryRules) -> bool:
    """Say whether handlers have a limit of time."""
    return rules.time_limit_s is not None or rules.max_time_limit_s is not None


class ThreadTimeouts:
    """Ends plain handlers of a member when their time is up. For any number of threads."""

    def __init__(self, name: str) -> None:
        self._running: dict[HandlerDeadline, HandlerDeadline] = {}
        # A lock that is held while HandlerInterrupt comes would stay held; what this queue does is one step in C.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Whoever begins with less time than this wakes the watcher.
        self._next_check = math.inf
        self._usual_s = math.inf
        self._used = self._stopping = False
        self._thread = threading.Thread(target=self._watch, name=f"{name}-limits", daemon=True)
        self._starting = threading.Lock()

    def wrap(self, handle: Callable[Facts, Any], rules: RetryRules) -> Callable[Facts, Any]:
        """Return what to call for a handler's messages: the handler itself where there is no limit."""
        if not limited(rules):
            return handle
        if self._thread.ident is None:
            self._start()
        return partial(self._handle, handle, rules)

    @property
    def alive(self) -> bool:
        """Whether limits are kept."""
        return self._thread.ident is None or self._thread.is_alive()

    def stop(self) -> None:
        """End the watcher when no handler runs any more."""
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
        """Return when nothing can interrupt any more. Raises HandlerInterrupt where that comes meanwhile."""
        if self._running.pop(deadline, None) is not None:
            return
        while not deadline.raised:
            time.sleep(0.0001)
        # It may have come, in the handler, or not. To clear it would leave the interpreter looking for it, so it is
        # raised for another time, which takes the place of one that has not come, and received here.
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
        """End whose time is up; return when to look again."""
        # Whoever begins while it looks has it look again.
        self._next_check = math.inf
        now = clock()
        # Whoever begins after this has the usual time; with nobody about there is nothing to look at.
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
    """Ends async handlers of a member when their time is up."""

    def wrap(self, handle: Callable[Facts, Awaitable[Any]], rules: RetryRules) -> Callable[Facts, Awaitable[Any]]:
        """Return what to call for a handler's messages: the handler itself where there is no limit."""
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
    """Have a scope end at another time, from any thread."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        _move_here(scope, until)
    else:
        # The loop is closed when nothing runs there any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_move_here, scope, until)


def _move_here(scope: asyncio.Timeout, until: float) -> None:
    # What has expired, or ended, can't be moved any more.
    with contextlib.suppress(RuntimeError):
        scope.reschedule(asyncio.get_running_loop().time() + (until - clock()))
