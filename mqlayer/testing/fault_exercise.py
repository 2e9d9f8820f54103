"""Run a handler under faults, and compare its effects with those without."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, Unpack

from mqlayer.consuming.api.app import App
from mqlayer.consuming.api.registration import ConsumerOptions
from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput
from mqlayer.testing.app_run import Kill, StopPastLease, Strike
from mqlayer.testing.faults import DeliverAgain, LoseNodes, SplitPartition
from mqlayer.testing.stack import TestStack

FAULTS: Final = ("deliver_again", "kill", "stop_past_lease", "split", "lose_nodes")
SHRINK_S: Final = 30.0
"""How long a shorter list is looked for."""
DRAIN_S: Final = 30.0

KeyedBody: TypeAlias = tuple[str | None, Any]
"""A message: its key and its body."""


@dataclass(frozen=True, slots=True)
class ExerciseReport:
    """The runs per fault, and the faults that these servers don't allow."""

    runs: dict[str, int]
    left_out: tuple[str, ...] = ()


class EffectsDiffer(AssertionError):
    """A handler whose effects are not the same under a fault.

    `fault` struck at the `at`-th run of the handler; `messages` is the shortest list found.
    """

    def __init__(self, fault: str, at: int, messages: Sequence[KeyedBody], expected: Any, found: Any) -> None:
        super().__init__(fault, at, messages, expected, found)
        self.fault, self.at, self.messages, self.expected, self.found = fault, at, messages, expected, found

    def __str__(self) -> str:
        listed = "\n".join(f"    key {key!r}, body {body!r}" for key, body in self.messages)
        return (
            f"the handler's effects differ under the fault {self.fault}, at the handler's run {self.at} of:\n{listed}\n"
            f"without it: {self.expected!r}\nwith it:    {self.found!r}\n"
            "Call ctx.fence or ctx.inbox first in the effect's transaction; "
            "see the page 'Apply effects once: fence and inbox'"
        )


def exercise(
    handler: Callable[..., Any],
    messages: Sequence[KeyedBody],
    *,
    stack: TestStack,
    effects: str | Callable[[], Any],
    reset: str | Callable[[], Any],
    faults: Sequence[str] = FAULTS,
    examples: int = 3,
    **options: Unpack[ConsumerOptions],
) -> ExerciseReport:
    """Run a handler on lists of these messages without and with each fault; its effects must be the same.

    `effects` reads them, `reset` removes them: statements for the stack's database, or functions. Rows count in their
    order if the statement has an ORDER BY. `examples`: lists per fault, the whole one first. `options`: of
    `App.consumer`. Hypothesis looks for the shortest list. Raises EffectsDiffer, ImportError without Hypothesis, and
    what the handler raises without a fault.
    """
    find = _hypothesis()
    if not messages:
        raise InvalidInput("give messages: a handler has no effects without any")
    if unknown := set(faults) - set(FAULTS):
        raise InvalidInput(f"no fault is called {min(unknown)!r}: there are {', '.join(FAULTS)}")
    left_out = () if stack.servers.own_nodes else tuple(name for name in faults if name == "lose_nodes")
    trial = _Trial(handler, stack, effects, reset, options)
    runs = {}
    for fault in (name for name in faults if name not in left_out):
        search = _EffectSearch(trial, fault, [*messages])
        search.tell_apart(range(1, len(messages) + 1))
        if search.shortest is None and examples > 1:
            # Hypothesis tries the empty list first.
            search.look(find, examples)
        if search.shortest is not None:
            search.look(find, 1_000)
            raise EffectsDiffer(fault, *search.shortest)
        runs[fault] = search.runs
    return ExerciseReport(runs, left_out)


class _EffectSearch:
    """Looks for the shortest list that tells a fault apart."""

    def __init__(self, trial: _Trial, fault: str, messages: list[KeyedBody]) -> None:
        self._trial, self._fault, self._messages = trial, fault, messages
        self._until = time.monotonic() + SHRINK_S
        self.shortest: tuple[int, list[KeyedBody], Any, Any] | None = None
        self.runs = 0

    def tell_apart(self, places: Sequence[int]) -> None:
        """Try the whole list, at the middle run first."""
        middle = places[len(places) // 2]
        self.differs((middle, [True] * len(self._messages)))

    def look(self, find: Callable[..., Any], examples: int) -> None:
        """Try parts of the list."""
        find(self, len(self._messages), examples)

    def differs(self, case: tuple[int, Sequence[bool]]) -> bool:
        """Whether a part of the list, and a run of the handler, tell the fault apart."""
        messages = [message for message, taken in zip(self._messages, case[1], strict=True) if taken]
        at = min(case[0], len(messages))
        if not messages or (self.shortest is not None and time.monotonic() > self._until):
            return False
        expected = self._trial.without(messages)
        found, struck = self._trial.under(self._fault, at, messages)
        self.runs += 1
        if not struck or found == expected:
            return False
        if self.shortest is None:
            self._until = time.monotonic() + SHRINK_S
        if self.shortest is None or (len(messages), at) <= (len(self.shortest[1]), self.shortest[0]):
            self.shortest = at, messages, expected, found
        return True


class _Trial:
    """Runs the handler on new topics."""

    def __init__(
        self,
        handler: Callable[..., Any],
        stack: TestStack,
        effects: str | Callable[[], Any],
        reset: str | Callable[[], Any],
        options: ConsumerOptions,
    ) -> None:
        self._handler, self._stack, self._options = handler, stack, options
        self._effects = partial(_rows, stack, effects) if isinstance(effects, str) else effects
        self._reset = partial(stack.execute, reset) if isinstance(reset, str) else reset
        self._numbers = itertools.count(1)
        self._known: dict[str, Any] = {}

    def without(self, messages: Sequence[KeyedBody]) -> Any:
        """Return the effects without a fault."""
        named = repr(messages)
        if named not in self._known:
            self._known[named], _ = self._run(messages, None, 0)
        return self._known[named]

    def under(self, fault: str, at: int, messages: Sequence[KeyedBody]) -> tuple[Any, bool]:
        """Return the effects under a fault, or the handler's error; whether the fault struck."""
        strike = self._strike(fault)
        try:
            return self._run(messages, strike, at)
        except Exception as error:
            if not strike.struck or isinstance(error, InvalidInput):
                raise
            return error, True

    def _run(self, messages: Sequence[KeyedBody], strike: Strike | None, at: int) -> tuple[Any, bool]:
        with contextlib.ExitStack() as given:
            for app in _apps_of(self._handler):
                given.enter_context(app.with_settings(self._stack.settings))
            return self._run_anew(messages, strike, at)

    def _run_anew(self, messages: Sequence[KeyedBody], strike: Strike | None, at: int) -> tuple[Any, bool]:
        self._reset()
        app, topic = App(), check_name("topic", f"exercise-{next(self._numbers)}")
        app.consumer(topic, group="exercise", **self._options)(self._handler)
        self._stack.add_topic(topic)
        for key, body in messages:
            self._stack.publish(topic, body, key=key)
        if strike is not None:
            self._stack.faults.arm(app, strike, at)
        with self._stack.run(app):
            self._stack.drain(app, timeout_s=DRAIN_S)
        return self._effects(), strike is not None and strike.struck

    def _strike(self, fault: str) -> Strike:
        faults = self._stack.faults
        made: dict[str, Callable[[], Strike]] = {
            "deliver_again": lambda: DeliverAgain(fault),
            "kill": lambda: Kill(fault),
            "stop_past_lease": lambda: StopPastLease(fault),
            "split": lambda: SplitPartition(fault, faults),
            "lose_nodes": lambda: LoseNodes(fault, faults, [*self._stack.servers.urls]),
        }
        return made[fault]()


def _apps_of(handler: Callable[..., Any]) -> list[App]:
    """Return the applications of the handler's module: it may ask them for the DSN."""
    names = getattr(inspect.unwrap(handler), "__globals__", {})
    return [found for found in names.values() if isinstance(found, App)]


def _rows(stack: TestStack, statement: str) -> list[tuple[Any, ...]]:
    rows = stack.execute(statement)
    return rows if "order by" in statement.lower() else sorted(rows, key=repr)


def _hypothesis() -> Callable[[_EffectSearch, int, int], None]:
    """Return a function that has Hypothesis try cases, and shrink one that differs."""
    try:
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis import find as find_case
        from hypothesis import strategies as st
        from hypothesis.errors import HypothesisException
    except ModuleNotFoundError as error:
        raise ImportError("exercise needs Hypothesis: pip install 'mqlayer[testing]'") from error

    def find(search: _EffectSearch, count: int, examples: int) -> None:
        cases = st.tuples(st.integers(1, count), st.tuples(*[st.booleans()] * count))
        limits = settings(
            max_examples=examples, deadline=None, database=None, derandomize=True,
            suppress_health_check=[*HealthCheck], phases=[Phase.generate, Phase.shrink],
        )  # fmt: skip
        # It finds none, or one differs only at times: what differed is noted.
        with contextlib.suppress(HypothesisException):
            find_case(cases, search.differs, settings=limits)

    return find
