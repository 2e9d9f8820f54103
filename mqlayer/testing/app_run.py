"""An application on a test's servers, through the lives of its process.

A fault ends a life as a kill or a long stop of its process does: to the group and to the nodes it is the same. The next
life is an application of the same consumers.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from mqlayer.consuming.api.app import App, Consumer
from mqlayer.domain.codecs import AS_IS
from mqlayer.errors import FenceError, HandlerControl, InvalidInput, NotFound
from mqlayer.groups.admin import evict_member
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

POLL_S: Final = 0.01
OTHERS_END_S: Final = 10.0
NEXT_LIFE_S: Final = 15.0
"""How long a stopped process sleeps at most, until another one has handled everything."""


class Life:
    """One life of an application's process."""

    def __init__(self, run: AppRun, app: App) -> None:
        self.run, self.app, self.running = run, app, 0

    def go_silent(self, *, settle: bool) -> None:
        """Be stopped, or killed."""
        for member in self.app.members:
            member.go_silent(settle=settle)


class Strike:
    """A fault that strikes at one run of a handler."""

    def __init__(self, name: str) -> None:
        self.name, self.at = name, 1
        self.struck = False

    def before(self, life: Life, /) -> None:
        """Act before the handler, in its thread."""

    def after(self, life: Life, /) -> None:
        """Act after its effects are committed."""

    def refuse(self, app: App, /) -> None:
        """Raise InvalidInput for an application that it can't strike."""


class LifeStrike(Strike):
    """Ends a life."""

    def refuse(self, app: App, /) -> None:
        """Refuse shared groups: their messages go by visibility timeouts, not by members."""
        for consumer in app.consumers:
            if consumer.group_settings.mode == "shared":
                raise InvalidInput(
                    f"group {consumer.group!r} is shared, so none of its members owns what {self.name} would take: "
                    "use deliver_again"
                )


class Kill(LifeStrike):
    """Between the effect and settling."""

    def after(self, life: Life, /) -> None:
        """Be killed."""
        life.go_silent(settle=False)
        life.run.begin_next_life(life)


class StopPastLease(LifeStrike):
    """Before the effect, until another process has handled the message."""

    def before(self, life: Life, /) -> None:
        """Be stopped, and wake up late."""
        life.go_silent(settle=True)
        woken = threading.Event()
        life.run.begin_next_life(life, woken)
        woken.wait(OTHERS_END_S + NEXT_LIFE_S)


class AppRun:
    """What a stack knows of an application: its lives, the runs of its handlers, their errors, the faults to come."""

    def __init__(self, app: App, settings: Settings, runtime: Runtime, is_drained: Callable[[AppRun], bool]) -> None:
        self._app, self._settings, self._runtime, self._is_drained = app, settings, runtime, is_drained
        self._consumers: list[Consumer] = []
        self._lives: list[Life] = []
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._faults: list[BaseException] = []
        self._strikes: list[Strike] = []
        self._runs = self._changing = 0
        self._given, self._ending = contextlib.ExitStack(), threading.Event()

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Topic and group of each consumer."""
        return [(consumer.topic, consumer.group) for consumer in self._consumers or self._app.consumers]

    def arm(self, strike: Strike, at: int) -> None:
        """Have a fault strike at the handlers' n-th run from now on."""
        if at < 1:
            raise InvalidInput(f"at={at}: the first run of a handler is 1")
        strike.refuse(self._app)
        with self._lock:
            strike.at = self._runs + at
            self._strikes.append(strike)

    def start(self) -> None:
        """Begin the first life, in the application itself."""
        self._ending.clear()
        self._given.enter_context(self._app.with_settings(self._settings))
        self._consumers = [*self._app.consumers]
        self._begin(Life(self, self._app))

    def stop(self) -> None:
        """End all lives."""
        self._ending.set()
        _wait(lambda: not self._changing, OTHERS_END_S + NEXT_LIFE_S)
        for life in self._lives:
            life.app.stop()
        if self._consumers:
            self._app.consumers[:] = self._consumers
        self._lives, self._consumers = [], []
        self._given.close()

    def check(self, *, raise_errors: bool) -> None:
        """Raise what went wrong in a fault; the first error of a handler, which counts once."""
        with self._lock:
            faults, self._faults = self._faults, []
            errors, self._errors = self._errors, []
        for error in (*faults, *(errors if raise_errors else ())):
            raise error

    def unfinished(self) -> list[str]:
        """Return what faults are doing."""
        with self._lock:
            return ["a fault strikes"] if self._changing else []

    def begin_next_life(self, life: Life, woken: threading.Event | None = None) -> None:
        """Have another process take over; then wake the stopped one."""
        with self._lock:
            self._changing += 1
        work = threading.Thread(target=self._take_over, args=(life, woken), name="mqlayer-take-over", daemon=True)
        work.start()

    def _take_over(self, life: Life, woken: threading.Event | None) -> None:
        try:
            # A dead process's other handlers are dead, too; one that sleeps has this one left.
            _wait(lambda: life.running <= (0 if woken is None else 1), OTHERS_END_S)
            for member in life.app.members:
                # As the end of its lease does, at once.
                with contextlib.suppress(NotFound):
                    evict_member(self._runtime, member.group.topic, member.group.name, member.member_id)
            self._begin(Life(self, life.app.another()))
            if woken is not None:
                _wait(lambda: self._ending.is_set() or bool(self._errors) or self._is_drained(self), NEXT_LIFE_S)
                woken.set()
                _wait(lambda: life.running == 0, OTHERS_END_S)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._faults.append(error)
        finally:
            if woken is not None:
                woken.set()
            with self._lock:
                self._changing -= 1

    def _begin(self, life: Life) -> None:
        life.app.consumers[:] = [self._watched(consumer, life) for consumer in self._consumers]
        self._lives.append(life)
        life.app.start()

    def _watched(self, consumer: Consumer, life: Life) -> Consumer:
        # A fault strikes when a fenced session has committed.
        consumer = consumer.bound()
        watched = self._watched_async(consumer, life) if consumer.is_async else self._watched_plain(consumer, life)
        decode = consumer.decode if consumer.decode is AS_IS else self._noting(consumer.decode)
        return replace(consumer, handler=watched, decode=decode)

    def _watched_plain(self, consumer: Consumer, life: Life) -> Callable[..., Any]:
        handle = self._noting(consumer.handler)

        def watched(*arguments: Any) -> Any:
            with self._counted(life) as strike:
                if strike is not None:
                    strike.before(life)
                answer = handle(*arguments)
                if strike is not None and not inspect.isawaitable(answer):
                    strike.after(life)
            return answer

        return watched

    def _watched_async(self, consumer: Consumer, life: Life) -> Callable[..., Any]:
        from asyncio import to_thread

        async def watched(*arguments: Any) -> Any:
            with self._counted(life) as strike:
                if strike is not None:
                    await to_thread(strike.before, life)
                try:
                    answer = await consumer.handler(*arguments)
                except Exception as error:
                    self._note(error)
                    raise
                if strike is not None:
                    await to_thread(strike.after, life)
            return answer

        return watched

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                self._note(error)
                raise

        return noting

    def _note(self, error: Exception) -> None:
        if not isinstance(error, HandlerControl | FenceError):
            with self._lock:
                self._errors.append(error)

    @contextlib.contextmanager
    def _counted(self, life: Life) -> Any:
        with self._lock:
            self._runs += 1
            life.running += 1
            due = next((one for one in self._strikes if not one.struck and one.at == self._runs), None)
            if due is not None:
                due.struck = True
        try:
            yield due
        finally:
            with self._lock:
                life.running -= 1


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(POLL_S)
