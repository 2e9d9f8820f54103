"""The application object: handlers registered by a decorator, run as members of their groups.

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

import contextlib
import inspect
import logging
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, TypeVar, Unpack, get_type_hints

from mqlayer.consuming.api.batch_handlers import BatchHandler, BatchShape, batch_shape
from mqlayer.consuming.api.batches import BatchOf
from mqlayer.consuming.api.bodies import decoder_for, type_name
from mqlayer.consuming.api.context import Context
from mqlayer.consuming.ordered.member import Member, MemberOptions, MemberStats
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.shared.member import SharedMember
from mqlayer.domain.message import Record
from mqlayer.domain.names import check_instance, check_name
from mqlayer.errors import Conflict, InvalidInput, SchemaMismatch
from mqlayer.events import Event, Hook, HookType, emit
from mqlayer.groups.broadcast_instances import ensure_instance, host_instance
from mqlayer.groups.group import Balance, Group, GroupSettings, RetrySettings, check_settings, ensure_group, settings_of
from mqlayer.groups.start_positions import Start
from mqlayer.health import Health, health_endpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.postgres.rights import Right, require
from mqlayer.redis.access import use_access
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

CONNECTIONS_OF_A_MEMBER: Final = 12
"""At most, opened on demand: heartbeat and parking worker, and a thread for each node that is to be armed."""

Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Consumer:
    """A handler with what it consumes."""

    topic: str
    group: str
    handler: Callable[..., Any]
    body_type: Any
    with_context: bool
    is_async: bool
    group_settings: GroupSettings
    options: MemberOptions
    batch: tuple[BatchOf, BatchShape] | None = None
    instance: str | None = None


class App:
    """The consumers of an application, and their life in this process."""

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is not None:
            use_access(settings)
        self._settings = settings
        self.consumers: list[Consumer] = []
        self.members: list[Member | SharedMember] = []
        self.hooks: list[Hook] = []
        self._open: list[Any] = []
        # Which of several processes of one command this is: each is an instance of its own.
        self.process_number = 1

    @property
    def settings(self) -> Settings:
        """The settings given, or those of the environment."""
        if self._settings is None:
            self._settings = Settings()
        return self._settings

    def consumer(
        self,
        topic: str,
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
    ) -> Callable[[Handler], Handler]:
        """Register a handler, plain or `async def`, for a topic and a group.

        The handler takes the body and, if it has a second parameter, the Context. `body` is the type to decode to: a
        msgspec Struct, a pydantic model, a dataclass, bytes, str, or anything msgspec reads from JSON; the first
        parameter's annotation where it is not given. An exception of the handler is a failed attempt: the message is
        tried again after the group's backoff, its key waits, others go on. A body that does not fit is one too. It may
        raise RetryLater, Reject, Skip or PauseKey to say what is to become of the message. With `batch` it takes a list
        of bodies and, if it has a second parameter, the Batch; or the Batch alone.
        `mode`: "exclusive" gives each partition to one member, which keeps the order of keys; "shared" gives every
        message to whichever member has time, without order, and again after `visibility_timeout_s` (default 30) where
        nobody hears of that member; "broadcast" gives every message to each instance, where `instance` says which one
        this process is, else the settings, else the host's name, and `instance_expiry_s` for how long the position of
        one that is away is kept; said once. `start`, for the group's creation: "earliest" (the default: all that is
        kept, along the lineage of partitions), "latest" (what is published from then on) or a datetime with a time
        zone: the first message of that time or later, by the publishers' clocks; another one for a group that is there
        is refused, a seek moves it. `from_archive`: it is
        given what the archive of its topic holds from there on, then the streams. `tag_filter`: which messages the
        group wants, as `any_of("eu", "vip")` or `all_of("eu", "vip")` says, or "none" for all; others are settled
        unseen. `rate_limit`: messages by the second that the whole group begins at most, `rate_burst` at once after a
        rest. `ordered`, `balance`, `tag_filter`, `rate_limit`, `rate_burst` and the rules for messages that fail
        (`backoff_s`, `jitter`, `attempt_limit`, `policy`, `non_retryable_errors`, `retryable_errors`, `time_limit_s`,
        `max_time_limit_s`) live with the group too, see GroupSettings and Rules: what is said here must be what is in
        force there, else `start()` raises Conflict; leave them out to take
        what is there. Raises InvalidInput for a start or setting that there is not.
        """
        check_name("topic", topic)
        check_name("group", group)
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
            if batch is not None:
                shape = batch_shape(handler, body)
                of = (topic, group, handler, shape.body_type, shape.batch, is_async, group_settings, member)
                self.consumers.append(Consumer(*of, batch=(batch, shape), instance=instance))
                return handler
            body_type, with_context = _parameters(handler, body)
            self.consumers.append(
                Consumer(
                    topic, group, handler, body_type, with_context, is_async, group_settings, member, instance=instance
                )
            )
            return handler

        return register

    def on_event(self, hook: HookType) -> HookType:
        """Have a function called with each Event of messages that fail, are parked, go on, or leave a group.

        Called at once, in the thread that does it: keep it short. What it raises is logged, and changes nothing.
        """
        self.hooks.append(hook)
        return hook

    def counts(self) -> dict[tuple[str, str], MemberStats]:
        """Return what each group's member in this process has counted since its start, by topic and group."""
        return {(member.group.topic, member.group.name): replace(member.stats) for member in self.members}

    def counts_as_json(self) -> list[dict[str, Any]]:
        """Return the same as JSON has it: an object for each member, with its topic, group and member id."""
        return [
            {"topic": m.group.topic, "group": m.group.name, "member": m.member_id, **asdict(m.stats)}
            for m in list(self.members)
        ]

    def start(self) -> None:
        """Join all groups and start consuming; returns at once. Raises what a store answers that is not ready."""
        if not self.consumers:
            raise InvalidInput("the application has no consumers: register one with @app.consumer(topic, group=…)")
        if self.members:
            raise Conflict("the application is running", "stop it first")
        settings = self.settings
        # A member's heartbeat never waits for a connection behind the threads that see to nodes.
        size = 2 + CONNECTIONS_OF_A_MEMBER * len(self.consumers)
        control, effects = settings.control_dsn(), settings.application_dsn()
        wait_s = settings.connect_timeout_s
        database = Database(control, application="mqlayer consumer", max_size=size, timeout_s=wait_s)
        application = Database(effects, application="mqlayer consumer", max_size=4, timeout_s=min(2.0, wait_s))
        routes = RouteCache(database)
        self._open = [routes, database, application]
        try:
            with database.connection() as connection:
                for consumer in self.consumers:
                    require(connection, "control", Right.CONSUME, f"{consumer.topic}/{consumer.group}")
                check_schema(connection, "control", database.address)
            fenced = _has_fence(application)
            for consumer in self.consumers:
                member = self._member(consumer, database, routes, application if fenced else None)
                member.start()
                self.members.append(member)
            notices = NotificationListener(database, GROUP, self._wake_members)
            notices.start()
            self._open.insert(0, notices)
        except BaseException:
            self.stop()
            raise
        log.info("consumers_started", extra={"members": len(self.members)})

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop all members, side by side; True when every handler had ended. No message is handled after that.

        Handlers that run are waited for, up to the time given or else their member's `drain_timeout_s`.
        """
        ended: list[bool] = []
        threads = [threading.Thread(target=lambda m=member: ended.append(m.stop(timeout_s))) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.members = []
        for resource in self._open:
            resource.close()
        self._open = []
        return all(ended)

    def health(self) -> Health:
        """Say whether its threads turn, and whether all its members serve. For any thread, at any time."""
        members = list(self.members)
        joining = () if members and len(members) == len(self.consumers) else ("not all groups are joined",)
        named = (m.health().named(f"group {m.group.name} of topic {m.group.topic}") for m in members)
        return Health.of_all(Health(waits=joining), *named)

    def run(self, *, on_start: Callable[[], None] | None = None, health_port: int | None = None) -> bool:
        """Consume until SIGTERM or SIGINT, then stop in order. For the main thread.

        `on_start` is called when all groups are joined. `health_port` takes the place of the settings'. Returns True
        when a signal ended it and every handler had ended. A second signal does what it did before: it ends the
        process. Raises Conflict for a health port that is in use.
        """
        # Of the standard library's ways to wake a thread, the one that a signal handler may use at any moment.
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
        """Consume until a signal comes; say whether one did, and whether every handler ended."""
        try:
            self.start()
            if on_start is not None:
                on_start()
            asked = self._wait(signals)
        finally:
            in_order = self.stop()
        return asked, in_order

    @property
    def running(self) -> bool:
        """Whether anything is consumed: False before `start`, after `stop`, or when others took all members' ids."""
        return any(member.running for member in self.members)

    def _wake_members(self, group_id: str) -> None:
        """Have the members of a group whose assignments changed look at them now; all members, where none is named."""
        for member in self.members:
            if group_id in ("", str(member.group.group_id)):
                member.wake()

    def _wait(self, signals: queue.SimpleQueue[int]) -> bool:
        """Wait for a signal; False when all members ended by themselves."""
        while self.running:
            with contextlib.suppress(queue.Empty):
                signals.get(timeout=0.5)
                return True
        return False

    def _member(
        self, consumer: Consumer, database: Database, routes: RouteCache, application: Database | None
    ) -> Member | SharedMember:
        settings = self.settings
        group = ensure_group(
            database,
            routes,
            topic=consumer.topic,
            name=consumer.group,
            prefix=settings.key_prefix,
            settings=consumer.group_settings,
            unsafe=settings.allow_unsafe_redis,
        )
        rejoin = None
        if group.mode == "broadcast":
            rejoin = partial(self._instance, consumer, group, database, routes)
            group = rejoin()
        facts: dict[str, Any] = {
            "settings": settings, "database": database, "routes": routes, "group": group, "is_async": consumer.is_async,
            "options": consumer.options, "application": application, "hooks": self.hooks,
        }  # fmt: skip
        if group.mode == "shared":
            return SharedMember(handle=_handle(consumer, group), **facts)
        if consumer.batch is not None:
            return Member(handle=_batch_handler(consumer, group, *consumer.batch), rejoin=rejoin, **facts)
        return Member(handle=_handle(consumer, group), rejoin=rejoin, **facts)

    def _instance(self, consumer: Consumer, group: Group, database: Database, routes: RouteCache) -> Group:
        """Return the instance of a broadcast group that this process is; tell where it begins anew."""
        settings = self.settings
        instance, anew = ensure_instance(
            database,
            routes,
            group,
            self._instance_name(consumer),
            prefix=settings.key_prefix,
            unsafe=settings.allow_unsafe_redis,
        )
        if anew:
            emit(Event("instance_reset", group.topic, instance.name, cause=str(group.start)), self.hooks)
        return instance

    def _instance_name(self, consumer: Consumer) -> str:
        if consumer.instance is not None:
            return consumer.instance
        name = self.settings.instance or host_instance()
        return name if self.process_number == 1 else f"{name}-{self.process_number}"


def _is_async(handler: Callable[..., Any]) -> bool:
    """Say whether calling it gives a coroutine; an object with an async `__call__` does so too."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _parameters(handler: Callable[..., Any], body: Any) -> tuple[Any, bool]:
    """Return the body type a handler wants, and whether it takes a context."""
    parameters = [
        p
        for p in inspect.signature(handler).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not 1 <= len(parameters) <= 2:
        raise InvalidInput(f"handler {type_name(handler)!r} must take the body, or the body and the context")
    if body is None:
        function = handler if inspect.isroutine(handler) else type(handler).__call__
        body = get_type_hints(function).get(parameters[0].name, bytes)
    return body, len(parameters) == 2


def _handle(consumer: Consumer, group: Group) -> Callable[[OwnedPartition, Record], Any]:
    """Return what a worker calls for a record: decode, then the handler."""
    handler, decode = consumer.handler, decoder_for(consumer.body_type)
    context = partial(Context, consumer.topic, consumer.group, group.group_id)
    if consumer.with_context:
        return lambda owned, record: handler(decode(record.body), context(owned, record))
    if consumer.body_type is bytes:
        return lambda _, record: handler(record.body)
    return lambda _, record: handler(decode(record.body))


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
    """Raise InvalidInput for an option that the mode has no use for."""
    if mode != "shared" and options.extend_limit_s != MemberOptions().extend_limit_s:
        raise InvalidInput("extend_limit_s is of shared groups: leave it out, and limit handlers by time_limit_s")
    if mode == "shared" and options.parked_keys is not None:
        raise InvalidInput("a shared group parks no keys: leave parked_keys out")


def _batch_handler(consumer: Consumer, group: Group, batch_of: BatchOf, shape: BatchShape) -> BatchHandler:
    """Return what workers call for a batch. Raises Conflict where the group can't have such."""
    if batch_of.kind == "key" and not (group.ordered and group.strategy == "strict"):
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} keeps no order, so it has no batches of one key",
            "use BatchOf('distinct')",
        )
    return BatchHandler(consumer.topic, group, batch_of, consumer.handler, shape)


def _has_fence(application: Database) -> bool:
    try:
        with application.connection() as connection:
            check_schema(connection, "application", application.address)
    except SchemaMismatch as error:
        log.info("no_fence", extra={"reason": str(error)})
        return False
    return True
