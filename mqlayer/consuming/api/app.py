"""The application object: registers handlers and runs them as members.

```python
app = mqlayer.App()

@app.consumer("orders", group="store")
def book(order: Order, ctx: mqlayer.Context) -> None:
    with database.transaction() as connection:
        ctx.fence(connection)
        connection.execute(...)

app.run()                     # or: mqlayer consume module:app --processes 4
```
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, TypeVar, Unpack, get_type_hints, overload
from weakref import WeakSet

from mqlayer.arguments import explain_methods
from mqlayer.consuming.api.batch_handlers import BatchHandler, BatchShape, batch_shape
from mqlayer.consuming.api.batches import BatchOf
from mqlayer.consuming.api.context import Context
from mqlayer.consuming.api.dependencies import (
    NO_DEPENDENCIES,
    Dependencies,
    check_context,
    check_order,
    dependencies_of,
)
from mqlayer.consuming.api.registration import ConsumerOptions, TypedRegistration
from mqlayer.consuming.engine.events import Reporting
from mqlayer.consuming.engine.options import MemberOptions, MemberStats
from mqlayer.consuming.ordered.member import OrderedMember
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.workers import Handle
from mqlayer.consuming.shared.member import SharedMember
from mqlayer.domain.body_streams import STREAMS, AsyncBodyStream
from mqlayer.domain.codecs import AS_IS, Body, TypedBodies, decoder_for, type_name
from mqlayer.domain.large_bodies import BODY_MARK
from mqlayer.domain.message import Record
from mqlayer.domain.names import check_instance, check_name
from mqlayer.errors import Conflict, InvalidInput, SchemaMismatch
from mqlayer.events import Event, Hook, HookType, check_hook, emit
from mqlayer.groups.broadcast_instances import ensure_instance, host_instance
from mqlayer.groups.group import Balance, Group, GroupSettings, RetrySettings, check_settings, ensure_group, settings_of
from mqlayer.groups.members import Joining
from mqlayer.groups.start_positions import Start
from mqlayer.groups.wakeups import wakes
from mqlayer.health import Health, health_endpoint
from mqlayer.large_bodies import BodyReader
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.postgres.rights import Right, require
from mqlayer.redis.access import use_access
from mqlayer.runtime.error_text import Describe, ErrorTexts
from mqlayer.runtime.heartbeat_sender import HeartbeatSender
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.topics.schemas import store_schema

log = event_logger(__name__)

_started: Final[WeakSet[App]] = WeakSet()
CONNECTIONS: Final = 10
"""At most, to arm nodes."""
CONNECTIONS_OF_A_MEMBER: Final = 2
"""At most: reports, parking worker."""

Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered handler."""

    topic: str
    group: str
    handler: Callable[..., Any]
    body_type: Any
    decode: Callable[[bytes], Any]
    with_context: bool
    is_async: bool
    group_settings: GroupSettings
    options: MemberOptions
    batch: tuple[BatchOf, BatchShape] | None = None
    instance: str | None = None
    typed: TypedBodies[Any] | None = None
    dependencies: Dependencies = NO_DEPENDENCIES

    def bound(self) -> Consumer:
        """Return a consumer whose handler makes its own dependencies, and is over when they have ended."""
        if not self.dependencies.by_name:
            return self
        call = self.dependencies.acall if self.is_async else self.dependencies.call
        return replace(self, handler=partial(call, self.handler), dependencies=NO_DEPENDENCIES)


@explain_methods
class App:
    """The consumers of an application in this process."""

    def __init__(self, settings: Settings | None = None, *, describe_error: Describe | None = None) -> None:
        """`describe_error` returns what logs, events and Postgres say of an exception in place of its message."""
        if settings is not None:
            use_access(settings)
        self._settings, self._describe_error = settings, describe_error
        self.consumers: list[Consumer] = []
        self.members: list[OrderedMember | SharedMember] = []
        self.hooks: list[Hook] = []
        self._open: list[Any] = []
        # Why it may not start, as in a TestApp.
        self.start_refused = ""
        # Number of this process among those of one command; each is an instance.
        self.process_number = 1
        # A supervisor's, which ends sessions of a dead process.
        self.joining: Joining | None = None

    @property
    def settings(self) -> Settings:
        """The given settings, or those of the environment."""
        if self._settings is None:
            self._settings = Settings()
        return self._settings

    @contextlib.contextmanager
    def with_settings(self, settings: Settings) -> Iterator[None]:
        """Use other settings for the block, as tests do. Raises Conflict while it runs."""
        if self.members:
            raise Conflict("the application is running", "stop it first")
        former, self._settings = self._settings, settings
        try:
            yield
        finally:
            self._settings = former

    def another(self) -> App:
        """Return an application with the same consumers, settings and hooks, which does not run."""
        made = App(self._settings, describe_error=self._describe_error)
        made.consumers, made.hooks, made.process_number = [*self.consumers], self.hooks, self.process_number
        return made

    @overload
    def consumer(
        self, topic: TypedBodies[Body], *, group: str, **options: Unpack[ConsumerOptions]
    ) -> TypedRegistration[Body]: ...

    @overload
    def consumer(
        self, topic: str, *, group: str, body: Any = None, **options: Unpack[ConsumerOptions]
    ) -> Callable[[Handler], Handler]: ...

    def consumer(
        self,
        topic: str | TypedBodies[Any],
        *,
        group: str,
        mode: Literal["exclusive", "shared", "broadcast"] = "exclusive",
        body: Any = None,
        start: Start | None = None,
        from_archive: bool = False,
        ordered: bool | None = None,
        balance: Balance | None = None,
        tag_filter: str | None = None,
        visibility_timeout_s: float | None = None,
        batch: BatchOf | None = None,
        rate_limit: float | None = None,
        rate_burst: float | None = None,
        options: MemberOptions | None = None,
        instance: str | None = None,
        instance_expiry_s: float | None = None,
        **rules: Unpack[RetrySettings],
    ) -> Any:
        """Register a handler, plain or `async def`, for a topic and a group.

        It takes the body, optionally the Context, then what `mqlayer.Depends` marks. A `mqlayer.Topic` knows the type
        of its bodies; else `body`, by default the first parameter's annotation, is the type to decode to: msgspec
        Struct, pydantic model, dataclass, bytes, str, or any type that msgspec reads from JSON; BodyStream, in async
        handlers AsyncBodyStream: a file that fetches a large body as it is read.
        An exception or undecodable body is a failed attempt: the group's backoff follows, the key waits, others
        continue. RetryLater, Reject, Skip and PauseKey decide otherwise.

        - `mode`: "exclusive": one member per partition, keys in order; "shared": any member, no order, redelivered
          after `visibility_timeout_s` (default 30) of silence; "broadcast": all messages to each `instance` (default:
          the settings', else the host's name), whose position is kept for `instance_expiry_s` of absence.
        - `start`, for the group's creation: "earliest" (default), "latest", or a datetime with time zone, by
          publishers' clocks; `from_archive`: the archive first.
        - `tag_filter`: `any_of(…)`, `all_of(…)` or "none"; other messages are settled unhandled.
        - `batch`: the handler takes a list of bodies and optionally the Batch, or only the Batch.
        - `rate_limit`, `rate_burst`: messages per second, and at once, of the whole group.

        The group stores all but `body`, `batch`, `options` and `instance`: omit them, or `start()` raises Conflict
        where they differ. See the page 'Group settings'.
        Raises InvalidInput for a bad value, Conflict for a group's second handler.
        """
        typed, topic = (None, topic) if isinstance(topic, str) else (topic, topic.name)
        check_name("topic", topic)
        check_name("group", group)
        if typed is not None and body is not None:
            raise InvalidInput(f"topic {topic!r} says what its bodies are: leave `body` out")
        if any((c.topic, c.group) == (topic, group) for c in self.consumers):
            raise Conflict(f"group {group!r} of topic {topic!r} has a handler already", "use another group")
        if instance is not None:
            check_instance(instance)
            if mode != "broadcast":
                raise InvalidInput("only a broadcast group has instances: say mode='broadcast'")
        said = settings_of(
            start, ordered=ordered, balance=balance, tag_filter=tag_filter, from_archive=from_archive, mode=mode,
            instance_expiry_s=instance_expiry_s, rate_limit=rate_limit, rate_burst=rate_burst, **rules,
        )  # fmt: skip
        group_settings = replace(said, visibility_timeout_s=visibility_timeout_s)
        check_settings(group_settings)
        member = options or MemberOptions()
        _check_batch(batch, member, mode=mode, ordered=ordered)
        _check_options(member, mode=mode)

        def register(handler: Handler) -> Handler:
            is_async = _is_async(handler)
            dependencies = dependencies_of(handler, is_async=is_async)
            shape = None
            if batch is None:
                body_type, with_context = _parameters(handler, body, dependencies)
            else:
                _check_no_dependencies(handler, dependencies)
                shape = batch_shape(handler, body)
                body_type, with_context = shape.body_type, shape.batch
            if typed is not None:
                body_type = _check_annotation(handler, typed, body_type)
            if body_type in STREAMS:
                _check_stream(handler, body_type, is_async=is_async, batch=batch)
            decode = decoder_for(body_type) if typed is None else typed.decode
            of = (topic, group, handler, body_type, decode, with_context, is_async, group_settings, member)
            pair = None if batch is None or shape is None else (batch, shape)
            extras: dict[str, Any] = {"instance": instance, "typed": typed, "dependencies": dependencies}
            self.consumers.append(Consumer(*of, batch=pair, **extras))
            return handler

        return register

    def on_event(self, hook: HookType) -> HookType:
        """Register a function for Events: messages that fail, are parked, continue, or leave a group.

        Runs in the causing thread: keep it short. Its exceptions are only logged.
        """
        self.hooks.append(check_hook(hook))
        return hook

    def counts(self) -> dict[tuple[str, str], MemberStats]:
        """Return each member's counts by (topic, group)."""
        return {(member.group.topic, member.group.name): replace(member.stats) for member in self.members}

    def counts_as_json(self) -> list[dict[str, Any]]:
        """Return `counts` as JSON objects."""
        return [
            {"topic": m.group.topic, "group": m.group.name, "member": m.member_id, **asdict(m.stats)}
            for m in list(self.members)
        ]

    def start(self) -> None:
        """Join all groups, start consuming, return. Raises InvalidInput, Conflict, or a store's error.

        Stores the schemas of typed topics. Raises IncompatibleSchema for one that breaks readers.
        """
        if self.start_refused:
            raise Conflict("the application can't start", self.start_refused)
        if not self.consumers:
            raise InvalidInput("the application has no consumers: register one with @app.consumer(topic, group=…)")
        if self.members:
            raise Conflict("the application is running", "stop it first")
        _warn_of_others(self)
        settings = self.settings
        size = CONNECTIONS + CONNECTIONS_OF_A_MEMBER * len(self.consumers)
        control, effects = settings.control_dsn(), settings.application_dsn()
        wait_s = settings.connect_timeout_s
        database = Database(control, application="mqlayer consumer", max_size=size, timeout_s=wait_s)
        # A heartbeat must never wait for a connection behind threads that arm nodes, nor all behind one that waits.
        beats = Database(control, application="mqlayer consumer", max_size=2, timeout_s=wait_s)
        application = Database(effects, application="mqlayer consumer", max_size=4, timeout_s=min(2.0, wait_s))
        routes = RouteCache(database)
        self._open = [routes, database, beats, application]
        try:
            with database.connection() as connection:
                for consumer in self.consumers:
                    require(connection, "control", Right.CONSUME, f"{consumer.topic}/{consumer.group}")
                served = check_schema(connection, "control", database.address)
            effects_at = application if _has_fence(application) else None
            runtime = Runtime(database, settings, effects_at, beats=beats, sender=HeartbeatSender(beats))
            runtime.in_force.note(served.in_force)
            _store_schemas(database, self.consumers)
            for consumer in self.consumers:
                member = self._member(consumer, runtime, routes)
                member.start()
                self.members.append(member)
            notices = NotificationListener(database, GROUP, self._wake_members)
            notices.start()
            self._open.insert(0, notices)
        except BaseException:
            self.stop()
            raise
        _started.add(self)
        log.info("consumers_started", extra={"members": len(self.members)})

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop all members as `Member.stop` does; return whether every handler ended."""
        ended: list[bool] = []
        threads = [threading.Thread(target=lambda m=member: ended.append(m.stop(timeout_s))) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.members:
            log.info("consumers_stopped", extra={"members": len(self.members), "handlers_ended": all(ended)})
        self.members = []
        for resource in self._open:
            resource.close()
        self._open = []
        return all(ended)

    def health(self) -> Health:
        """Report threads and members. Thread-safe."""
        members = list(self.members)
        joining = () if members and len(members) == len(self.consumers) else ("not all groups are joined",)
        named = (m.health().named(f"group {m.group.name} of topic {m.group.topic}") for m in members)
        return Health.of_all(Health(waits=joining), *named)

    def run(self, *, on_start: Callable[[], None] | None = None, health_port: int | None = None) -> bool:
        """Consume until SIGTERM or SIGINT, then stop; for the main thread.

        A second signal has its former effect. `on_start` runs once all groups are joined. Returns whether a signal
        ended it and every handler ended. Raises VersionRefused once drained, if the schema serves newer code only;
        Conflict for a health port in use.
        """
        # SimpleQueue.put is reentrant, so a signal handler may call it at any moment.
        signals: queue.SimpleQueue[int] = queue.SimpleQueue()

        def end(number: int, _frame: FrameType | None) -> None:
            signals.put(number)
            restore()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, end)
        try:
            with health_endpoint(self.settings, self.health, port=health_port, counts=self.counts_as_json):
                asked, in_order = self._run(on_start, signals)
        finally:
            restore()
        return asked and in_order

    def _run(self, on_start: Callable[[], None] | None, signals: queue.SimpleQueue[int]) -> tuple[bool, bool]:
        refused = None
        try:
            self.start()
            if on_start is not None:
                on_start()
            asked = self._wait(signals)
        finally:
            refused = next((member.refused for member in self.members if member.refused is not None), None)
            in_order = self.stop()
        if refused is not None:
            raise refused
        return asked, in_order

    @property
    def running(self) -> bool:
        """Whether any member consumes."""
        return any(member.running for member in self.members)

    def _wake_members(self, payload: str) -> None:
        for member in self.members:
            if wakes(payload, member.group.group_id, member.member_id):
                member.wake()

    def _wait(self, signals: queue.SimpleQueue[int]) -> bool:
        while self.running:
            with contextlib.suppress(queue.Empty):
                signals.get(timeout=0.5)
                return True
        return False

    def _member(self, consumer: Consumer, runtime: Runtime, routes: RouteCache) -> OrderedMember | SharedMember:
        group = ensure_group(
            runtime, routes, topic=consumer.topic, name=consumer.group, settings=consumer.group_settings
        )
        rejoin = None
        if group.mode == "broadcast":
            rejoin = partial(self._instance, consumer, group, runtime, routes)
            group = rejoin()
        facts: dict[str, Any] = {
            "runtime": runtime, "routes": routes, "group": group, "is_async": consumer.is_async,
            "options": consumer.options, "reporting": Reporting(self.hooks, self.error_texts(), self.joining),
        }  # fmt: skip
        if group.mode == "shared":
            return SharedMember(handle=_handle(consumer, group, BodyReader(runtime)), **facts)
        return OrderedMember(handle=call_of(consumer, group, BodyReader(runtime)), rejoin=rejoin, **facts)

    def error_texts(self) -> ErrorTexts:
        """Return how its errors are told."""
        return ErrorTexts(shown=self.settings.error_messages, describe=self._describe_error)

    def _instance(self, consumer: Consumer, group: Group, runtime: Runtime, routes: RouteCache) -> Group:
        instance, anew = ensure_instance(runtime, routes, group, self._instance_name(consumer))
        if anew:
            emit(Event("instance_reset", group.topic, instance.name, cause=str(group.start)), self.hooks)
        return instance

    def _instance_name(self, consumer: Consumer) -> str:
        if consumer.instance is not None:
            return consumer.instance
        name = self.settings.instance or host_instance()
        return name if self.process_number == 1 else f"{name}-{self.process_number}"


def _warn_of_others(app: App) -> None:
    """Log groups that another running application of this process reads as other bodies."""
    running = [other for other in _started if other is not app and other.members]
    known = {(one.topic, one.group): one.body_type for other in running for one in other.consumers}
    for consumer in app.consumers:
        there = known.get((consumer.topic, consumer.group), consumer.body_type)
        if there != consumer.body_type:
            bodies = f"{type_name(there)}, {type_name(consumer.body_type)}"
            named = {"topic": consumer.topic, "group": consumer.group, "bodies": bodies}
            log.warning("group_has_two_bodies", extra=named)


def _is_async(handler: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _parameters(handler: Callable[..., Any], body: Any, dependencies: Dependencies) -> tuple[Any, bool]:
    check_order(handler, dependencies)
    parameters = [
        p
        for p in inspect.signature(handler).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in dependencies.by_name
    ]
    if not 1 <= len(parameters) <= 2:
        raise InvalidInput(
            f"handler {type_name(handler)!r} must take the body, or the body and the context; mark a further parameter "
            "as Annotated[…, mqlayer.Depends(factory)]"
        )
    if len(parameters) == 2:
        check_context(handler, parameters[1].name)
    if body is None:
        function = handler if inspect.isroutine(handler) else type(handler).__call__
        body = get_type_hints(function).get(parameters[0].name, bytes)
    return body, len(parameters) == 2


def _check_no_dependencies(handler: Callable[..., Any], dependencies: Dependencies) -> None:
    if dependencies.by_name:
        raise InvalidInput(f"batch handler {type_name(handler)!r} depends on something: call it in the handler instead")


def _check_annotation(handler: Callable[..., Any], typed: TypedBodies[Any], annotated: Any) -> Any:
    # Without an annotation it is bytes.
    if annotated not in (bytes, Any, typed.body):
        raise InvalidInput(
            f"handler {type_name(handler)!r} takes {type_name(annotated)}, but the bodies of topic {typed.name!r} are "
            f"{type_name(typed.body)}"
        )
    return typed.body


def _check_stream(handler: Callable[..., Any], body_type: Any, *, is_async: bool, batch: BatchOf | None) -> None:
    name = type_name(handler)
    if batch is not None:
        raise InvalidInput(
            f"batch handler {name!r} takes streams, but a batch has whole bodies: take messages one by one"
        )
    if (body_type is AsyncBodyStream) is not is_async:
        fits = "AsyncBodyStream" if is_async else "BodyStream"
        raise InvalidInput(f"handler {name!r} takes a {type_name(body_type)}: let it take {fits}, which it can read")


def call_of(consumer: Consumer, group: Group, bodies: BodyReader | None = None) -> Handle | BatchHandler:
    """Return what a group's workers call."""
    if consumer.batch is None:
        return _handle(consumer, group, bodies)
    return _batch_handler(consumer, group, consumer.batch, bodies)


def _handle(consumer: Consumer, group: Group, bodies: BodyReader | None) -> Callable[[OwnedPartition, Record], Any]:
    call = _plain_handle(consumer, group)
    if bodies is None:
        return call
    if consumer.body_type in STREAMS:
        return _stream_handle(consumer, group, bodies)
    filled = bodies.filled
    if consumer.body_type is bytes and consumer.decode is AS_IS and not (consumer.with_context or consumer.is_async):
        handler = consumer.bound().handler
        # One call less for each message.
        return lambda _, record: handler(record[3] if BODY_MARK not in record[1] else filled(record).body)

    async def acall_filled(owned: OwnedPartition, record: Record) -> Any:
        answer = call(owned, await asyncio.to_thread(filled, record))
        return await answer if inspect.isawaitable(answer) else answer

    def call_filled(owned: OwnedPartition, record: Record) -> Any:
        if BODY_MARK not in record[1]:
            return call(owned, record)
        return acall_filled(owned, record) if consumer.is_async else call(owned, filled(record))

    return call_filled


def _plain_handle(consumer: Consumer, group: Group) -> Callable[[OwnedPartition, Record], Any]:
    handler, decode = consumer.bound().handler, consumer.decode
    context = partial(Context, consumer.topic, consumer.group, group.group_id)
    if consumer.with_context:
        return lambda owned, record: handler(decode(record.body), context(owned, record))
    if consumer.body_type is bytes and consumer.decode is AS_IS:
        return lambda _, record: handler(record.body)
    return lambda _, record: handler(decode(record.body))


def _stream_handle(consumer: Consumer, group: Group, bodies: BodyReader) -> Callable[[OwnedPartition, Record], Any]:
    handler, opened = consumer.bound().handler, partial(bodies.stream_of, consumer.body_type)
    context = partial(Context, consumer.topic, consumer.group, group.group_id)
    if consumer.with_context:
        return lambda owned, record: handler(opened(record), context(owned, record))
    return lambda _, record: handler(opened(record))


def _check_batch(batch: BatchOf | None, options: MemberOptions, *, mode: str, ordered: bool | None) -> None:
    if batch is None:
        return
    if mode == "shared":
        raise InvalidInput("a shared group gives messages one by one: leave `batch` out, or use an unordered group")
    if batch.limit > options.prefetch_count or batch.limit_bytes > options.prefetch_bytes:
        raise InvalidInput("a batch is larger than what its member reads ahead: raise prefetch_count or prefetch_bytes")
    if batch.kind == "key" and ordered is False:
        raise InvalidInput("a group without order has no batches of one key: use BatchOf('distinct')")


def _check_options(options: MemberOptions, *, mode: str) -> None:
    if mode != "shared" and options.extend_limit_s != MemberOptions().extend_limit_s:
        raise InvalidInput("extend_limit_s is of shared groups: leave it out, and limit handlers by time_limit_s")
    if mode == "shared" and options.parked_keys is not None:
        raise InvalidInput("a shared group parks no keys: leave parked_keys out")


def _batch_handler(
    consumer: Consumer, group: Group, batch: tuple[BatchOf, BatchShape], bodies: BodyReader | None
) -> BatchHandler:
    batch_of, shape = batch
    if batch_of.kind == "key" and not (group.ordered and group.strategy == "strict"):
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} keeps no order, so it has no batches of one key",
            "use BatchOf('distinct')",
        )
    return BatchHandler(consumer.topic, group, batch_of, consumer.handler, shape, consumer.decode, bodies)


def _store_schemas(database: Database, consumers: Sequence[Consumer]) -> None:
    for consumer in consumers:
        schema = None if consumer.typed is None else consumer.typed.schema
        if schema is not None:
            store_schema(database, consumer.topic, schema, actor=f"group {consumer.group} on {socket.gethostname()}")


def _has_fence(application: Database) -> bool:
    try:
        with application.connection() as connection:
            check_schema(connection, "application", application.address)
    except SchemaMismatch as error:
        log.info("no_fence", extra={"reason": str(error)})
        return False
    return True
