"""Every argument of the public API with values of wrong types: each works, or is refused by an error of mqlayer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from types import ModuleType
from typing import Any, Final

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import mqlayer
import mqlayer.testing
from mqlayer import outbox
from mqlayer.arguments import explain
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.groups.group import RetrySettings
from mqlayer.settings import Settings
from tests.proof.world import World

pytestmark = pytest.mark.world(partitions=1)

WRONG: Final = (object(), 5, -1.5, b"x", "x y", [5], {"x": 5}, None)
MADE_BY_MQLAYER: Final = {
    "AsyncBodyStream", "Batch", "BatchMessage", "BodyStream",
    "CloudEvent", "Context", "Delayed", "Event", "OutboxTransaction", "PopMessage",
    "PublishedMessage", "QuarantinedRow", "VersionGap", "VersionedEvent",
}  # fmt: skip
"""Their constructors are called by mqlayer alone."""
LEFT_OUT: Final = {
    "App.run": "consumes until a signal",
    "Batch.begin": "the engine's", "Batch.end": "the engine's", "BatchMessage.fill": "the engine's",
    "OutboxTransaction.add": "mqlayer's", "OutboxTransaction.keep": "mqlayer's",
    "OutboxTransaction.keep_traced": "mqlayer's",
    "ProducerOptions.check": "a producer's", "ProducerOptions.is_eager": "a producer's",
    "CloudEvents.headers": "a typed topic's", "Depends.make": "the engine's",
    "adopt": "an operator's, of a database", "renew": "an operator's, of a database",
    "rotate": "a worker's, of a database", "clean_dedup": "a worker's, of a database",
    "release_delayed": "a worker's, of a database", "audit_quarantine": "an operator's, of a database",
    "prepare_database": "takes an empty database", "exercise": "takes a stack of its own",
    "Topic.decode": "an engine's",
    "apublish": "as publish", "apublish_once": "as publish_once", "apublish_delayed": "as publish_delayed",
    "acancel_delayed": "as cancel_delayed", "OutboxTransaction.apublish": "as publish",
    "atransaction": "as transaction",
    "Topic.apublish": "as Topic.publish", "Topic.asend": "as Topic.send", "Topic.send_async": "as Topic.send",
    "Batch.afence": "as Batch.fence", "Context.afence": "as Context.fence", "Context.ainbox": "as Context.inbox",
    "Versions.atake": "as Versions.take", "apublished": "as published",
    "TestApp.arun": "as TestApp.run", "TestApp.arun_until_idle": "as TestApp.run_until_idle",
}  # fmt: skip
"""Public callables that are not tried, and why."""
ENGINES: Final = ("RealApp.", "TestStack.")
"""Real servers of a test; their arguments are a TestApp's."""


def public_callables(module: ModuleType) -> Iterator[str]:
    """Yield the names of a module's public functions, constructors and methods that take something."""
    for name in module.__all__:
        one = getattr(module, name)
        if inspect.isfunction(one):
            yield name
        if not inspect.isclass(one):
            continue
        for method, function in inspect.getmembers(one, inspect.isfunction):
            is_public = not method.startswith("_") or (method == "__init__" and name not in MADE_BY_MQLAYER)
            is_ours = function.__module__.startswith("mqlayer")
            if is_public and is_ours and len(inspect.signature(function).parameters) > 1:
                yield name if method == "__init__" else f"{name}.{method}"


class Trial:
    """Calls with one wrong argument each; `raw`: the errors that are not mqlayer's."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self.tried: set[str] = set()
        self.raw: list[str] = []

    def __call__(self, name: str, call: Callable[..., Any], /, **right: Any) -> None:
        """Try each wrong value for each argument; `right`: all of them."""
        self.tried.add(name)
        for argument in right:
            for value in wrong_values(argument):
                self._one(f"{name}({argument}: {type(value).__name__})", lambda: call(**{**right, argument: value}))  # noqa: B023

    async def awaited(self, name: str, call: Callable[..., Awaitable[Any]], /, **right: Any) -> None:
        """Try a coroutine function."""
        self.tried.add(name)
        for argument in right:
            for value in wrong_values(argument):
                try:
                    await call(**{**right, argument: value})
                except MqlayerError:
                    continue
                except Exception as error:  # noqa: BLE001
                    self.raw.append(f"{name}({argument}: {type(value).__name__}): {error!r}")

    def _one(self, what: str, call: Callable[[], Any]) -> None:
        try:
            made = call()
            if isinstance(made, AbstractContextManager) and inspect.isgenerator(getattr(made, "gen", None)):
                with made:
                    pass
        except MqlayerError:
            return
        except Exception as error:  # noqa: BLE001
            # Django's, for a text as the alias of a connection.
            if type(error).__name__ != "ImproperlyConfigured":
                self.raw.append(f"{what}: {error!r}")
        finally:
            if self._connection.info.transaction_status is TransactionStatus.INERROR:
                self._connection.rollback()


def wrong_values(argument: str) -> Iterator[object]:
    """Yield the values; none that makes a call wait."""
    return (value for value in WRONG if not (argument == "wait_s" and value == 5))


def defaults(function: Callable[..., Any], **others: Any) -> dict[str, Any]:
    """Return a function's arguments: its defaults, and others."""
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not one.empty} | others


MESSAGE: Final[Mapping[str, Any]] = {"key": "k", "body": b"b", "headers": {"a": "b"}, "tags": ["x"], "dedup_id": "d"}


def try_producer(trial: Trial, settings: Settings) -> None:
    common, send = {"topic": "orders", **MESSAGE}, {"timeout_s": 1.0, "on_backlog": "wait"}
    with mqlayer.Producer(settings, name="direct") as producer:
        trial("Producer.send", producer.send, **common, **send)
        trial("Producer.send_async", producer.send_async, **common, **send)
        trial("Producer.send_oneway", producer.send_oneway, **common)
        trial("Producer.send_many", producer.send_many, topic="orders", messages=[mqlayer.Message("k", b"b")], **send)
        trial("Message", lambda **facts: producer.send_many("orders", [mqlayer.Message(**facts)]), **MESSAGE)
        trial("Producer.flush", producer.flush, timeout_s=1.0)
        orders = mqlayer.Topic("orders", body=dict)
        trial("Topic.send", orders.send, producer=producer, timeout_s=1.0, **{**MESSAGE, "body": {}})
    trial("Producer.close", producer.close, timeout_s=1.0)
    trial("Producer", mqlayer.Producer, settings=0, name="direct", options=0)
    for one in fields(mqlayer.ProducerOptions):
        trial("ProducerOptions", lambda **facts: mqlayer.ProducerOptions(**facts).check(settings), **{one.name: 1})


async def try_async(trial: Trial, settings: Settings) -> None:
    send = {"topic": "orders", "timeout_s": 1.0, "on_backlog": "wait"}
    trial("AsyncProducer", mqlayer.AsyncProducer, settings=0, name="direct", options=0)
    async with mqlayer.AsyncProducer(settings, name="async") as producer:
        await trial.awaited("AsyncProducer.send", producer.send, **send, **MESSAGE)
        await trial.awaited(
            "AsyncProducer.send_many", producer.send_many, messages=[mqlayer.Message("k", b"b")], **send
        )
        await trial.awaited("AsyncProducer.flush", producer.flush, timeout_s=1.0)
        await trial.awaited("AsyncProducer.stop", producer.stop, timeout_s=1.0)
    trial("AsyncReceiver", mqlayer.AsyncReceiver, **RECEIVER)
    async with mqlayer.AsyncReceiver("orders", group="pop", settings=settings) as receiver:
        (message,) = await receiver.receive(1, wait_s=5)
        await trial.awaited("AsyncReceiver.receive", receiver.receive, **defaults(receiver.receive, wait_s=0.0))
        await trial.awaited("AsyncReceiver.ack", receiver.ack, messages=[message])
        await trial.awaited("AsyncReceiver.nack", receiver.nack, message=message, delay_s=0.0, error=None)
        await trial.awaited("AsyncReceiver.extend", receiver.extend, message=message, seconds=5.0)
        await trial.awaited("AsyncReceiver.fetch_body", receiver.fetch_body, message=message)
        trial("AsyncReceiver.open_body", receiver.open_body, message=message)
        await trial.awaited("AsyncBodyStream.read", receiver.open_body(message).read, size=1)
        await trial.awaited("AsyncReceiver.fence", receiver.fence, connection=0, message=message)
        await trial.awaited("AsyncReceiver.inbox", receiver.inbox, connection=0, message=message, name="n")


RECEIVER: Final[Mapping[str, Any]] = {
    "topic": "orders", "group": "pop", "settings": None, "scope": "key", "start": "earliest", "tag_filter": "none",
    "attempt_limit": 3, "policy": "park",
}  # fmt: skip


def try_receiver(trial: Trial, settings: Settings, connection: Any) -> None:
    trial("Receiver", mqlayer.Receiver, **RECEIVER)
    with mqlayer.Receiver("orders", group="pop", settings=settings) as receiver:
        (message,) = receiver.receive(1, wait_s=5)
        trial("Receiver.receive", receiver.receive, **defaults(receiver.receive, wait_s=0.0))
        trial("Receiver.ack", receiver.ack, messages=[message])
        trial("Receiver.nack", receiver.nack, message=message, delay_s=0.0, error=None)
        trial("Receiver.extend", receiver.extend, message=message, seconds=5.0)
        trial("Receiver.fetch_body", receiver.fetch_body, message=message)
        trial("Receiver.open_body", receiver.open_body, message=message)
        trial("Receiver.fence", receiver.fence, connection=connection, message=message)
        trial("Receiver.inbox", receiver.inbox, connection=connection, message=message, name="n")
        trial("cloud_event", mqlayer.cloud_event, message=message)


def try_outbox(trial: Trial, world: World, connection: Any) -> None:
    # Pending transactions of the calls before must not lock each other out.
    common = {"connection": connection, "topic": "orders", **MESSAGE}
    later = {name: value for name, value in common.items() if name != "dedup_id"}
    trial("publish", outbox.publish, **common)
    trial("publish_once", outbox.publish_once, **common)
    trial("publish_delayed", outbox.publish_delayed, **later, delay_s=60.0)
    trial("publish_delayed", outbox.publish_delayed, **later, at=datetime.now(UTC))
    trial("cancel_delayed", outbox.cancel_delayed, connection=connection, delayed_id=7)
    with outbox.transaction(connection) as collecting:
        trial("OutboxTransaction.publish", collecting.publish, **{**MESSAGE, "topic": "orders"})
    trial("transaction", outbox.transaction, connection=connection)
    trial("published", mqlayer.testing.published, topic="orders", on=connection)
    wanted = {"topic": "orders", "on": connection, "key": "k", "body": b"b", "headers": {"a": "b"}, "tags": ["x"]}
    trial_asserts(trial, "", mqlayer.testing.assert_published, mqlayer.testing.assert_not_published, wanted)
    trial("list_delayed", outbox.list_delayed, application=world.database, topic="orders", limit=5)
    trial("list_quarantined", outbox.list_quarantined, application=world.database, limit=5)
    trial("discard_quarantined", outbox.discard_quarantined, application=world.database, number=1)
    trial("retry_quarantined", outbox.retry_quarantined, application=world.database, topic="orders", lp=1)
    orders = mqlayer.Topic("orders", body=dict)
    typed = {"session": connection, **MESSAGE, "body": {}}
    trial("Topic.publish", orders.publish, **typed)
    trial("Topic.publish_once", orders.publish_once, **typed)
    del typed["dedup_id"]
    trial("Topic.publish_delayed", orders.publish_delayed, **typed, delay_s=60.0)


def trial_asserts(
    trial: Trial, of: str, positive: Callable[..., Any], negative: Callable[..., Any], wanted: dict[str, Any]
) -> None:
    def unless_other(check: Callable[..., Any], **facts: Any) -> None:
        # An assertion is the answer.
        with suppress(AssertionError):
            check(**facts)

    trial(f"{of}assert_published", lambda **facts: unless_other(positive, **facts), **wanted, count=1)
    trial(f"{of}assert_not_published", lambda **facts: unless_other(negative, **facts), **wanted)


def try_registration(trial: Trial, settings: Settings) -> None:
    app, numbers = mqlayer.App(settings), iter(range(10_000))

    def register(**facts: Any) -> None:
        if facts["group"] == "g":
            facts["group"] = f"g{next(numbers)}"
        app.consumer(**facts)(lambda body: None)

    said = defaults(app.consumer, topic="orders", group="g") | dict.fromkeys(RetrySettings.__annotations__)
    trial("App.consumer", register, **said)
    for one in fields(mqlayer.MemberOptions):
        trial("MemberOptions", mqlayer.MemberOptions, **{one.name: 1})
    trial("BatchOf", mqlayer.BatchOf, kind="key", limit=1, limit_bytes=1, linger_s=0.0)
    trial("App", mqlayer.App, settings=settings, describe_error=None)
    trial("App.on_event", app.on_event, hook=print)
    trial("App.stop", app.stop, timeout_s=1.0)
    trial("App.with_settings", app.with_settings, settings=settings)
    trial("Depends", mqlayer.Depends, factory=dict)
    trial("fenced", mqlayer.fenced, source="default")
    trial("on_event", mqlayer.on_event, hook=5)
    trial("any_of", lambda tag: mqlayer.any_of(tag), tag="x")  # noqa: PLW0108
    trial("all_of", lambda tag: mqlayer.all_of(tag), tag="x")  # noqa: PLW0108
    trial("expires_after", mqlayer.expires_after, seconds=1.0)
    trial("CloudEvents", mqlayer.CloudEvents, source="/shop", type="t", **defaults(mqlayer.CloudEvents, extensions={}))
    trial("Topic", mqlayer.Topic, **defaults(mqlayer.Topic, name="orders", body=dict))
    orders = mqlayer.Topic("orders", body=dict)
    trial("Topic.encode", orders.encode, body={})
    trial("Topic.key_of", mqlayer.Topic("orders", body=dict).key_of, body={})
    for control in (mqlayer.RetryLater, mqlayer.Reject, mqlayer.Skip, mqlayer.PauseKey):
        takes = inspect.signature(control).parameters
        trial(control.__name__, control, **{"reason": "r", **({"seconds": 1.0} if "seconds" in takes else {})})


def try_versions(trial: Trial, connection: Any) -> None:
    trial("Versions", mqlayer.Versions, **defaults(mqlayer.Versions, name="accounts"))
    versions, context = mqlayer.Versions("accounts"), mqlayer.testing.context(b"b")
    trial("Versions.take", versions.take, connection=connection, message=context, entity="e", version=1)
    trial("Versions.set", versions.set, connection=connection, entity="e", version=1)
    trial("Versions.take_released", versions.take_released, connection=connection)


def try_testing(trial: Trial, settings: Settings) -> None:
    facts = {"group": "g", "headers": {"a": "b"}, "tags": ["x"]}
    trial("context", mqlayer.testing.context, body=b"b", topic="orders", key="k", connection=None, **facts)
    trial("batch", mqlayer.testing.batch, **defaults(mqlayer.testing.batch, bodies=[b"b"]))
    context, batch = mqlayer.testing.context(b"b"), mqlayer.testing.batch([b"b", b"c"])
    trial("Context.fence", context.fence, connection=None)
    trial("Context.inbox", context.inbox, connection=None, name="n")
    trial("Context.extend", context.extend, seconds=1.0)
    trial("Batch.extend", batch.extend, seconds=1.0)
    trial("Batch.fence", batch.fence, connection=None, messages=None)
    trial("Batch.done", lambda message: batch.done(message), message=batch[0])  # noqa: PLW0108
    trial("Batch.fail", batch.fail, messages=batch[0], error="failed")
    app = mqlayer.App(settings)
    app.consumer("orders", group="g", body=bytes)(lambda body: None)
    trial("TestApp", lambda app, **others: mqlayer.testing.TestApp(app, **others), app=app, database=None, topics=())  # noqa: PLW0108
    trial("engine_for", mqlayer.testing.engine_for, app=app, kind="memory", settings=None, topics=())
    trial("wait_until", mqlayer.testing.wait_until, condition=lambda: True, timeout_s=1.0)
    with mqlayer.testing.TestApp(app) as test:
        trial("TestApp.publish", test.publish, topic="orders", delay_s=None, **MESSAGE)
        trial("TestApp.set_time_to_live", test.set_time_to_live, topic="orders", seconds=60, expired="settle")
        trial("TestApp.published", test.published, topic="orders")
        trial("TestApp.deliver", lambda message: test.deliver(message), message=test.published("orders")[0])  # noqa: PLW0108
        trial("PublishedMessage.value", test.published("orders")[0].value, topic="orders")
        trial("TestApp.run", test.run, raises=False)
        trial("TestApp.run_until_idle", test.run_until_idle, raises=False, limit_s=1.0)
        for name in ("handled", "dead", "parked"):
            trial(f"TestApp.{name}", getattr(test, name), topic="orders", group="g")
        trial("TestApp.release", test.release, topic="orders", key=None, group="g")
        wanted = {"topic": "orders", "key": "k", "body": b"b", "headers": {"a": "b"}, "tags": ["x"]}
        trial_asserts(trial, "TestApp.", test.assert_published, test.assert_not_published, wanted)
    trial("configure_logging", mqlayer.configure_logging, level=5, style="text")


def test_no_wrong_type_ends_in_an_error_deep_inside(world: World) -> None:
    settings = world.settings()
    with world.database.connection() as connection:
        trial = Trial(connection)
        try_producer(trial, settings)
        try_receiver(trial, settings, connection)
        asyncio.run(try_async(trial, settings))
        connection.rollback()
        try_outbox(trial, world, connection)
        connection.rollback()
        try_registration(trial, settings)
        try_versions(trial, connection)
        try_testing(trial, settings)
        connection.rollback()
    assert trial.raw == []
    names = {name for module in (mqlayer, outbox, mqlayer.testing) for name in public_callables(module)}
    untried = {name for name in names - trial.tried - set(LEFT_OUT) if not name.startswith(ENGINES)}
    assert untried - {"RealApp", "TestStack"} == set(), "try them, or say why not"
    assert set(LEFT_OUT) <= names


def test_the_error_names_argument_place_and_type() -> None:
    with pytest.raises(InvalidInput, match=r"^concurrency is a str: MemberOptions takes int$"):
        mqlayer.MemberOptions(concurrency="8")  # type: ignore[arg-type]
    app = mqlayer.App(Settings())
    with pytest.raises(InvalidInput, match=r"^backoff_s is a list of str: App.consumer takes "):
        app.consumer("orders", group="g", backoff_s=["soon"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="unexpected keyword argument 'limit_s'"):
        mqlayer.configure_logging(limit_s=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="of the application"):
        # Another error passes where the arguments are right.
        explain(raise_value_error)()


def raise_value_error() -> bool:
    raise ValueError("of the application")
