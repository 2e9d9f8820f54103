"""An application's consumers in one thread, in memory, under a clock that the test turns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Self

from mqlayer.arguments import explain_methods
from mqlayer.consuming import App
from mqlayer.consuming.engine.events import Reporting
from mqlayer.domain.retention import Retention
from mqlayer.domain.time_to_live import ExpiredRule, TimeToLive
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, NotFound
from mqlayer.outbox.transaction_sources import stand_in
from mqlayer.randomness import RNG
from mqlayer.testing import producers
from mqlayer.testing.broker import MemoryBroker
from mqlayer.testing.clock import TestClock, installed
from mqlayer.testing.failures import Failure
from mqlayer.testing.group_runner import GroupRunner
from mqlayer.testing.messages import PublishedMessage, TopicOrName, topic_name
from mqlayer.testing.outbox_table import OutboxTable, settings_on
from mqlayer.testing.publishing import Publishing
from mqlayer.testing.sessions import AsyncMemorySession, MemoryEffects, MemorySession

MOST_TURNS: Final = 100_000
DAY_S: Final = 86_400.0

_START_REFUSED: Final = (
    "a TestApp handles its messages, without members; leave the start out, as of a web application's lifespan "
    "(TestClient(web) without `with`), or test with mqlayer_stack"
)
_active: Final[list[object]] = []


@explain_methods
class TestApp(Publishing):
    """Publishes and handles in this thread, without servers, in order per key; retries and policies are the engine's.

    ```python
    with TestApp(app) as test:
        test.publish(orders, OrderPlaced("ann", 10))
        test.run()
        test.assert_published(receipts, key="ann")
    ```

    While it is open, every Producer of this process sends to it. Its limits are in
    the page 'Test handlers'. Raises Conflict for a second one at a time.
    """

    __test__ = False

    def __init__(self, *apps: App, database: str | None = None, topics: Sequence[TopicOrName] = ()) -> None:
        """`database`: address of a database of tests, for code that opens transactions there: the applications'
        settings name it, messages that it commits are handled too, and effects elsewhere are refused. `topics`: those
        that it publishes to, besides the consumers' own.
        """
        self.clock = TestClock()
        self._apps, self._broker, self._effects = apps, MemoryBroker(self.clock), MemoryEffects()
        self._runners: dict[int, GroupRunner] = {}
        named = [*map(topic_name, topics), *(consumer.topic for app in apps for consumer in app.consumers)]
        self._database = database
        self._table = None if database is None else OutboxTable(database, self._broker, named)
        # Of this test alone, so that a database that outlives it knows none of its effects.
        self._group_ids = RNG.randrange(2**40, 2**52)
        self._cleanup = ExitStack()
        self._loop: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        if _active:
            raise Conflict("a TestApp is open", "leave it first, or give both applications to one: TestApp(one, two)")
        if any(app.members for app in self._apps):
            raise Conflict("the application is running", "stop it first: a TestApp handles its messages itself")
        with ExitStack() as cleanup:
            cleanup.enter_context(installed(self.clock))
            cleanup.enter_context(producers.installed(self._broker))
            _active.append(self)
            cleanup.callback(_active.clear)
            cleanup.enter_context(stand_in(self) if self._table is None else self._table)
            for app in dict.fromkeys(self._apps):
                cleanup.enter_context(self._borrowed(app))
            self._join()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    # -- publishing ---------------------------------------------------------------------------------------------------

    def session(self) -> MemorySession:
        """Return a transaction, for code that takes a connection; it runs no SQL."""
        return MemorySession(self._broker, self._effects)

    def asession(self) -> AsyncMemorySession:
        """Return a transaction for async code."""
        return AsyncMemorySession(self._broker, self._effects)

    def published(self, topic: TopicOrName | None = None) -> list[PublishedMessage]:
        """Return the published messages, in order, also handlers'; delayed messages from the start."""
        if self._table is not None and self in _active:
            self._table.read()
        if topic is None:
            return list(self._broker.published)
        name = topic_name(topic)
        return [message for message in self._broker.published if message.topic == name]

    def set_time_to_live(self, topic: TopicOrName, seconds: int, *, expired: ExpiredRule = "settle") -> None:
        """Say how old a message may be when a handler gets it, as `mqlayer topic set --message-ttl` does."""
        Retention(message_ttl_s=seconds, expired=expired).check()
        self._broker.log(topic_name(topic)).time_to_live = TimeToLive(seconds, expired)

    # -- handling -----------------------------------------------------------------------------------------------------

    def run(self, *, raises: bool = True) -> Self:
        """Handle all that is due, and all that follows from it.

        Raises a handler's own error, its attempt counted; with `raises=False`, the group's policy applies to that too.
        RetryLater, Reject, Skip and PauseKey always go by the policy.
        """
        for awaitable in self._turns(raises=raises):
            self._run_loop(awaitable)
        return self

    async def arun(self, *, raises: bool = True) -> Self:
        """`run`, in the event loop of the test."""
        for awaitable in self._turns(raises=raises):
            await awaitable
        return self

    def run_until_idle(self, *, raises: bool = True, limit_s: float = DAY_S) -> Self:
        """`run`, and turn the clock to each next retry or delayed message, at most `limit_s` seconds in all."""
        self.run(raises=raises)
        while self._turn_clock(limit_s):
            limit_s -= self._turned_s
            self.run(raises=raises)
        return self

    async def arun_until_idle(self, *, raises: bool = True, limit_s: float = DAY_S) -> Self:
        """`run_until_idle`, in the event loop of the test."""
        await self.arun(raises=raises)
        while self._turn_clock(limit_s):
            limit_s -= self._turned_s
            await self.arun(raises=raises)
        return self

    # -- what became of messages --------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[Failure]:
        """What handlers raised, with what followed."""
        return [failure for runner in self._runners.values() for failure in runner.failures]

    def handled(self, topic: TopicOrName, *, group: str | None = None) -> list[PublishedMessage]:
        """Return a group's handled messages, in order."""
        return self._runner(topic, group).handled

    def dead(self, topic: TopicOrName, *, group: str | None = None) -> list[PublishedMessage]:
        """Return messages that left a group without an effect: dead, or passed over."""
        return self._runner(topic, group).dead

    def parked(self, topic: TopicOrName, *, group: str | None = None) -> list[str | None]:
        """Return a group's parked keys."""
        return self._runner(topic, group).parked_keys

    def release(self, topic: TopicOrName, key: str | None = None, *, group: str | None = None) -> None:
        """Have a parked key, or all, tried at the next `run`, as `mqlayer parked release` does. Raises NotFound."""
        runner = self._runner(topic, group)
        if key is None:
            runner.release_all()
        else:
            runner.release(key)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        for app in self._apps:
            for consumer in app.consumers:
                if id(consumer) not in self._runners:
                    log, group_id = self._broker.log(consumer.topic), self._group_ids + len(self._runners)
                    reporting = Reporting(app.hooks, app.error_texts())
                    self._runners[id(consumer)] = GroupRunner(consumer, group_id, log, self.clock, reporting)

    @contextmanager
    def _borrowed(self, app: App) -> Iterator[None]:
        with ExitStack() as cleanup:
            if self._database is not None:
                cleanup.enter_context(app.with_settings(settings_on(app.settings, self._database)))
            app.start_refused = _START_REFUSED
            cleanup.callback(setattr, app, "start_refused", "")
            yield

    def _turns(self, *, raises: bool) -> Iterator[Awaitable[None]]:
        if self not in _active:
            raise InvalidInput("the TestApp is not open: use it as `with TestApp(app) as test:`")
        self._join()
        seen = {name: len(runner.failures) for name, runner in self._runners.items()}
        for _ in range(MOST_TURNS):
            if self._table is not None:
                self._table.read()
            progressed = self._broker.release_due()
            for name, runner in self._runners.items():
                yield from runner.step()
                progressed |= runner.progressed
                new, seen[name] = runner.failures[seen[name] :], len(runner.failures)
                for failure in new:
                    if raises and not failure.wanted:
                        raise failure.error
            if not progressed:
                return
        raise MqlayerError(f"no end after {MOST_TURNS} turns: does a handler publish to the topic that it handles?")

    def _turn_clock(self, limit_s: float) -> bool:
        due_s = min([self._broker.next_due_s(), *(runner.next_due_s() for runner in self._runners.values())])
        if due_s > limit_s or due_s == math.inf:
            return False
        self._turned_s = due_s
        self.clock.advance(due_s)
        return True

    def _run_loop(self, awaitable: Awaitable[None]) -> None:
        if self._loop is None:
            self._loop = asyncio.Runner()
            self._cleanup.callback(self._loop.close)

        async def wait() -> None:
            await awaitable

        self._loop.run(wait())

    def _runner(self, topic: TopicOrName, group: str | None) -> GroupRunner:
        self._join()
        name = topic_name(topic)
        found = [r for r in self._runners.values() if r.group.topic == name and group in (None, r.group.name)]
        if not found:
            known = sorted(f"{r.group.topic}/{r.group.name}" for r in self._runners.values())
            raise NotFound("group", f"{name}/{group or '…'}", f"the application has {', '.join(known) or 'none'}")
        if len(found) > 1:
            groups = ", ".join(sorted(r.group.name for r in found))
            raise InvalidInput(f"topic {name!r} has the groups {groups}: say group=…")
        return found[0]
