"""The same tests on real servers: a relay and the application's members beside the test, used as a TestApp is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import psycopg

from mqlayer.arguments import explain, explain_methods
from mqlayer.consuming import App, Batch, Consumer, Context
from mqlayer.domain.codecs import Decode
from mqlayer.domain.message import Identity
from mqlayer.domain.time_to_live import ExpiredRule
from mqlayer.errors import AlreadyApplied, BodyMismatch, InvalidInput
from mqlayer.inspect import group_statuses
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader
from mqlayer.postgres.queries import query
from mqlayer.redelivery import dead_messages, parked_keys, release_parked
from mqlayer.redelivery.filters import ParkedFilter
from mqlayer.redelivery.lists import PAGE_LIMIT, ParkedKey
from mqlayer.relay import Relay, RelayLimits
from mqlayer.runtime.runtime import open_runtime
from mqlayer.settings import Settings
from mqlayer.testing.failures import Failure
from mqlayer.testing.in_memory import DAY_S, TestApp
from mqlayer.testing.messages import PublishedMessage, TopicOrName, topic_name
from mqlayer.testing.outbox_table import effects_in
from mqlayer.testing.publishing import Publishing
from mqlayer.topics import create_topic, list_topics, set_stream_retention

EngineKind = Literal["memory", "real"]
Attempted: TypeAlias = list[tuple[PublishedMessage, int]]
"""Messages with the number of their attempt."""
IDLE_S: Final = 60.0
"""How long a run may take."""
POLL_S: Final = 0.05
QUICK: Final = RelayLimits(sweep_s=0.05, late_s=0.5)


class MachineClock:
    """The machine's time: `advance` waits."""

    def advance(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return datetime.now(UTC)


@explain_methods
class RealApp(Publishing):
    """An application on the servers of `settings`, with the topics that it needs, as a TestApp is used.

    `run` waits until nothing is due: it waits also for retries of up to 10 seconds, which the engine makes in place.
    """

    def __init__(self, app: App, settings: Settings, *, topics: Sequence[TopicOrName] = ()) -> None:
        self.clock = MachineClock()
        self._settings, self._topics = settings, dict.fromkeys([*map(topic_name, topics)])
        # Another App, on these settings: the program's own one goes by the environment.
        self._app = App(settings)
        self._app.hooks = app.hooks
        self._observed = Observed()
        for consumer in app.consumers:
            self._topics[consumer.topic] = None
            self._app.consumers.append(self._observed.consumer(consumer))
        self._relay = Relay(settings, limits=QUICK)
        self._readers: dict[str, TopicReader] = {}
        self._read: dict[tuple[str, Identity], PublishedMessage] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            self._runtime = cleanup.enter_context(open_runtime(self._settings, name="mqlayer test"))
            with self._runtime.outbox.connection() as connection:
                connection.execute(query("topics_of_tests_drop"))
            cleanup.enter_context(effects_in(self._runtime.outbox))
            for name in self._topics:
                self._ready(name)
            self._published_before = self._numbered()
            thread = threading.Thread(target=self._relay.run, name="mqlayer-test-relay", daemon=True)
            thread.start()
            cleanup.callback(thread.join, IDLE_S)
            cleanup.callback(self._relay.stop)
            if self._app.consumers:
                self._app.start()
                cleanup.callback(self._app.stop)
            cleanup.callback(self._close_readers)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    # -- publishing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a psycopg connection; its block is a transaction."""
        with psycopg.connect(self._settings.application_dsn()) as connection:
            yield connection

    @asynccontextmanager
    async def asession(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend an async psycopg connection; its block is a transaction."""
        async with await psycopg.AsyncConnection.connect(self._settings.application_dsn()) as connection:
            yield connection

    def published(self, topic: TopicOrName | None = None) -> list[PublishedMessage]:
        """Return what reached a topic, in order per key; delayed messages once they are due."""
        for name, reader in self._readers.items():
            for stored in _rest(reader):
                self._read[name, stored.identity] = PublishedMessage(
                    name, stored.key, stored.body, stored.headers, stored.tags
                )
        name_wanted = None if topic is None else topic_name(topic)
        return [message for message in self._read.values() if name_wanted in (None, message.topic)]

    def set_time_to_live(self, topic: TopicOrName, seconds: int, *, expired: ExpiredRule = "settle") -> None:
        """Say how old a message may be when a handler gets it; members follow within a second."""
        set_stream_retention(self._runtime, topic_name(topic), message_ttl_s=seconds, expired=expired)

    # -- handling -----------------------------------------------------------------------------------------------------

    def run(self, *, raises: bool = True) -> Self:
        """Wait until nothing is due. Raises a handler's own error, unless `raises=False`."""
        return self.run_until_idle(raises=raises, limit_s=0.0)

    async def arun(self, *, raises: bool = True) -> Self:
        """`run`, in the event loop of the test."""
        return await asyncio.to_thread(self.run, raises=raises)

    def run_until_idle(self, *, raises: bool = True, limit_s: float = DAY_S) -> Self:
        """`run`, and wait for retries and delayed messages that are due within `limit_s` seconds."""
        seen, until = len(self._observed.failures), time.monotonic() + limit_s
        deadline = time.monotonic() + IDLE_S + min(limit_s, DAY_S)
        while True:
            idle = self._is_idle(until - time.monotonic())
            error = self._raised(seen) if raises else None
            if error is not None:
                raise error
            if idle:
                return self
            if time.monotonic() > deadline:
                raise TimeoutError(f"something is due after {IDLE_S:g} s: `mqlayer group lag` says what waits")
            time.sleep(POLL_S)

    async def arun_until_idle(self, *, raises: bool = True, limit_s: float = DAY_S) -> Self:
        """`run_until_idle`, in the event loop of the test."""
        return await asyncio.to_thread(self.run_until_idle, raises=raises, limit_s=limit_s)

    # -- what became of messages --------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[Failure]:
        """What handlers raised."""
        return list(self._observed.failures)

    def handled(self, topic: TopicOrName, *, group: str | None = None) -> list[PublishedMessage]:
        """Return a group's handled messages, in order per key."""
        wanted = topic_name(topic)
        return [m for of, m in self._observed.handled if m.topic == wanted and group in (None, of)]

    def dead(self, topic: TopicOrName, *, group: str | None = None) -> list[PublishedMessage]:
        """Return messages that left a group without an effect: dead, or passed over."""
        self.published()
        rows = dead_messages(self._runtime.control, topic=topic_name(topic), group=group, limit=PAGE_LIMIT)
        return [self._read[row.topic, row.identity] for row in reversed(rows)]

    def parked(self, topic: TopicOrName, *, group: str | None = None) -> list[str | None]:
        """Return a group's parked keys."""
        return [row.key for row in self._parked(ParkedFilter(topic_name(topic), group))]

    def release(self, topic: TopicOrName, key: str | None = None, *, group: str | None = None) -> None:
        """Have a parked key, or all, tried now. Raises NotFound."""
        for row in self._parked(ParkedFilter(topic_name(topic), group, key)):
            release_parked(self._runtime, row.topic, row.group, key=row.key)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _ready(self, name: str) -> None:
        if name not in self._readers:
            if name not in {topic.name for topic in list_topics(self._runtime.control)}:
                create_topic(self._runtime, name, partitions=2)
            self._readers[name] = TopicReader(self._runtime, name, start="latest")

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _numbered(self) -> int:
        return self._asked("outbox_numbered")

    def _delayed_within(self, seconds: float) -> int:
        return self._asked("delayed_count_due", within_s=min(seconds, DAY_S))

    def _asked(self, name: str, **facts: float) -> int:
        with self._runtime.outbox.connection() as connection:
            row = connection.execute(query(name), facts).fetchone()
        return int(row[0]) if row else 0

    def _parked(self, wanted: ParkedFilter) -> list[ParkedKey]:
        return parked_keys(self._runtime.control, wanted, limit=PAGE_LIMIT)

    def _is_idle(self, within_s: float) -> bool:
        within_s = max(0.0, within_s)
        # In the order in which messages go: what a later question finds nothing of was not on its way before.
        if self._delayed_within(within_s) or self._numbered() - self._published_before > self._relay.appended_count:
            return False
        known = {(consumer.topic, consumer.group) for consumer in self._app.consumers}
        groups = [one for one in group_statuses(self._runtime) if (one.facts.topic, one.facts.name) in known]
        if any(one.lag or one.unreachable or any(p.lag is None for p in one.undrained) for one in groups):
            return False
        waiting = [row for row in self._parked(ParkedFilter()) if (row.topic, row.group) in known]
        if any(row.due_in_s is not None and row.due_in_s <= within_s for row in waiting):
            return False
        # A handler that settled its message meanwhile may have published.
        return self._numbered() - self._published_before <= self._relay.appended_count

    def _raised(self, seen: int) -> BaseException | None:
        return next((one.error for one in self._observed.failures[seen:] if not one.wanted), None)


class Observed:
    """The messages that handlers returned from, and the errors that they raised."""

    def __init__(self) -> None:
        self.handled: list[tuple[str, PublishedMessage]] = []
        self.failures: list[Failure] = []

    def consumer(self, consumer: Consumer) -> Consumer:
        """Return a consumer whose handler is observed."""
        if consumer.batch is not None:
            options, shape = consumer.batch
            call = _batch_call(consumer.handler, bodies=shape.bodies, batch=shape.batch)
            observed = self._observed(consumer, call, _messages_of_batch)
            return replace(consumer, handler=observed, batch=(options, shape._replace(bodies=False, batch=False)))
        # Handled is what has committed: at the end of a fenced session.
        consumer = consumer.bound()
        call = consumer.handler if consumer.with_context else _without_context(consumer.handler)
        observed = self._observed(consumer, _refusing(call), lambda facts: [_delivered(facts[1])])
        # A body that does not fit is observed with its message, so the handler raises it.
        return replace(consumer, handler=observed, with_context=True, decode=partial(_decoded, consumer.decode))

    def _observed(
        self,
        consumer: Consumer,
        call: Callable[..., Any],
        messages: Callable[[Any], list[tuple[PublishedMessage, int]]],
    ) -> Callable[..., Any]:
        def note(facts: Any, error: BaseException | None) -> None:
            if error is None or isinstance(error, AlreadyApplied):
                self.handled += [(consumer.group, message) for message, _ in messages(facts)]
                return
            for message, attempt in messages(facts)[:1]:
                self.failures.append(Failure(consumer.topic, consumer.group, message, error, attempt))

        def handle(*facts: Any) -> Any:
            try:
                answer = call(*facts)
            except BaseException as error:
                note(facts, error)
                raise
            note(facts, None)
            return answer

        async def ahandle(*facts: Any) -> Any:
            try:
                answer = await call(*facts)
            except BaseException as error:
                note(facts, error)
                raise
            note(facts, None)
            return answer

        return ahandle if consumer.is_async else handle


Engine: TypeAlias = TestApp | RealApp


@explain
def engine_for(
    app: App, kind: EngineKind, settings: Settings | None = None, *, topics: Sequence[TopicOrName] = ()
) -> Engine:
    """Return what a test uses with `with`: a TestApp, or the same on the servers of `settings`.

    `topics`: further ones that handlers publish to. Raises InvalidInput.
    """
    if kind == "memory":
        return TestApp(app, topics=topics)
    if kind != "real":
        raise InvalidInput(f"an engine is 'memory' or 'real', not {kind!r}")
    return RealApp(app, settings or Settings(), topics=topics)


def _rest(reader: TopicReader) -> Iterator[StoredMessage]:
    yield from reader.read()
    while not reader.at_end:
        yield from reader.read()


class Misfit(NamedTuple):
    """A body that could not be decoded."""

    error: BodyMismatch


def _decoded(decode: Decode, body: bytes) -> Any:
    try:
        return decode(body)
    except BodyMismatch as error:
        return Misfit(error)


def _refusing(handler: Callable[..., Any]) -> Callable[..., Any]:
    def call(body: Any, ctx: Context) -> Any:
        if isinstance(body, Misfit):
            raise body.error
        return handler(body, ctx)

    return call


def _without_context(handler: Callable[..., Any]) -> Callable[..., Any]:
    return lambda body, _: handler(body)


def _batch_call(handler: Callable[..., Any], *, bodies: bool, batch: bool) -> Callable[..., Any]:
    if not bodies:
        return handler
    return (lambda b: handler(b.values, b)) if batch else (lambda b: handler(b.values))


def _delivered(ctx: Context) -> tuple[PublishedMessage, int]:
    return PublishedMessage(ctx.topic, ctx.key, ctx.body, ctx.headers, ctx.tags), ctx.attempt


def _messages_of_batch(facts: tuple[Batch[Any]]) -> Attempted:
    return [
        (PublishedMessage(m.topic, m.key, m.body, m.headers, m.tags), m.attempt) for m in facts[0] if m.error is None
    ]
