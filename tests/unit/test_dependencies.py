"""Dependencies of handlers: what is refused when they are registered, and what type checkers find.

`mypy` reports an ignore that ignores nothing, so each ignored line below is a mistake that it finds.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, cast

import msgspec
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import mqlayer
from mqlayer import outbox
from mqlayer.cli.groups import groups as group_commands
from mqlayer.consuming.api.dependencies import dependencies_of
from mqlayer.errors import Conflict, HandlerFault, InvalidInput
from mqlayer.groups.group import RULES, SET_OPTIONS, refuse_others, settings_of
from mqlayer.postgres.dsn import parse_dsn
from mqlayer.testing import context
from mqlayer.testing.broker import TopicLog
from mqlayer.testing.group_runner import group_of


class Placed(msgspec.Struct):
    customer: str


class Store:
    pass


placed = mqlayer.Topic("orders", body=Placed)


def a_value() -> Store:
    return Store()


def a_generator(ctx: mqlayer.Context) -> Iterator[Store]:
    yield Store()


async def an_async_generator() -> AsyncIterator[Store]:
    yield Store()


def greedy(ctx: mqlayer.Context, other: int) -> Store:
    return Store()


Given = Annotated[Store, mqlayer.Depends(a_value)]
Opened = Annotated[Store, mqlayer.Depends(a_generator)]
Awaited = Annotated[Store, mqlayer.Depends(an_async_generator)]
Pooled = Annotated[Any, mqlayer.fenced(ConnectionPool("", open=False))]
AsyncPooled = Annotated[Any, mqlayer.fenced(AsyncConnectionPool("", open=False))]


def plain_with_async(body: bytes, ctx: mqlayer.Context, store: Awaited) -> None: ...
async def async_with_generator(body: bytes, ctx: mqlayer.Context, store: Opened) -> None: ...
def plain_with_async_session(body: bytes, ctx: mqlayer.Context, session: AsyncPooled) -> None: ...
async def async_with_plain_session(body: bytes, ctx: mqlayer.Context, session: Pooled) -> None: ...
def without_context(body: bytes, store: Given) -> None: ...
def before_context(store: Given, body: bytes, ctx: mqlayer.Context) -> None: ...
def unmarked(body: bytes, ctx: mqlayer.Context, store: Store) -> None: ...
def uncalled(body: bytes, ctx: mqlayer.Context, store: Annotated[Store, mqlayer.Depends]) -> None: ...
def twice(body: bytes, ctx: mqlayer.Context, store: Annotated[Given, mqlayer.Depends(a_value)]) -> None: ...
def unknown(body: bytes, ctx: mqlayer.Context, store: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (plain_with_async, "'plain_with_async' is plain, and its parameter 'store' depends on an async factory"),
    (async_with_generator, "'async_with_generator' is async, and its parameter 'store' depends on a plain generator"),
    (plain_with_async_session, "parameter 'session' depends on an async factory"),
    (async_with_plain_session, "parameter 'session' depends on a plain generator"),
    (without_context, "must take the body and the context before what it depends on"),
    (before_context, "must take the body and the context before what it depends on"),
    (unmarked, r"mark a further parameter as Annotated\[…, mqlayer.Depends\(factory\)\]"),
    (uncalled, r"depends on one factory: Annotated\[…, mqlayer.Depends\(factory\)\]"),
    (twice, "depends on one factory"),
    (unknown, "an annotation of handler 'unknown' names what is not there: name 'Nowhere'"),
]


@pytest.mark.parametrize(("handler", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_can_t_be_given_is_refused_when_it_is_registered(handler: Callable[..., Any], message: str) -> None:
    app = mqlayer.App(mqlayer.Settings())
    with pytest.raises(InvalidInput, match=message):
        app.consumer("orders", group="g")(handler)
    assert app.consumers == []


def test_a_factory_takes_nothing_or_the_context() -> None:
    with pytest.raises(InvalidInput, match="factory 'greedy' must take nothing, or the context"):
        mqlayer.Depends(greedy)
    with pytest.raises(InvalidInput, match=r"mqlayer.Depends takes a function, not a Store"):
        mqlayer.Depends(Store())  # type: ignore[arg-type]
    assert repr(mqlayer.Depends(a_value)) == "Depends(a_value)"


@pytest.mark.parametrize(
    "source", [Session(), scoped_session(sessionmaker()), object(), 7], ids=lambda s: type(s).__name__
)
def test_what_opens_no_transaction_is_refused(source: object) -> None:
    with pytest.raises(InvalidInput, match="opens no transactions: give SQLAlchemy's sessionmaker"):
        mqlayer.fenced(source)


def test_a_batch_handler_has_no_dependencies() -> None:
    def several(orders: list[bytes], batch: Given) -> None: ...

    app = mqlayer.App(mqlayer.Settings())
    with pytest.raises(InvalidInput, match="batch handler 'several' depends on something"):
        app.consumer("orders", group="g", batch=mqlayer.BatchOf("distinct"))(several)


def test_a_session_does_not_commit_what_nobody_awaits() -> None:
    """A plain handler that returns a coroutine has done nothing: its fenced session must not say that it has."""
    seen: list[str] = []

    def session() -> Iterator[Store]:
        try:
            yield Store()
        except HandlerFault:
            seen.append("rolled back")
            raise
        seen.append("committed")

    async def later() -> None: ...

    def handle(body: bytes, ctx: Any, store: Any) -> Any:
        return later()

    handle.__annotations__["store"] = Annotated[Store, mqlayer.Depends(session)]
    dependencies = dependencies_of(handle, is_async=False)
    context: Any = None
    with pytest.raises(HandlerFault, match="returned an awaitable that nobody awaits"):
        dependencies.call(handle, b"", context)
    assert seen == ["rolled back"]


def test_type_checkers_see_the_body_and_the_context_before_dependencies() -> None:
    app = mqlayer.App(mqlayer.Settings())

    @app.consumer(placed, group="one")
    def right(order: Placed, ctx: mqlayer.Context, store: Given, *, other: Opened) -> None: ...

    @app.consumer(placed, group="two")
    async def async_right(order: Placed, ctx: mqlayer.Context, store: Awaited, session: AsyncPooled) -> None: ...

    with pytest.raises(InvalidInput):

        @app.consumer(placed, group="three")  # type: ignore[arg-type]
        def wrong_body(order: Store, ctx: mqlayer.Context, store: Given) -> None: ...

    with pytest.raises(InvalidInput):

        @app.consumer(placed, group="four")  # type: ignore[arg-type]
        def no_context(order: Placed, store: Given) -> None: ...

    assert [list(consumer.dependencies.by_name) for consumer in app.consumers] == [
        ["store", "other"],
        ["store", "session"],
    ]


def test_a_second_parameter_of_another_type_is_refused_where_it_gets_the_context() -> None:
    """Without Annotated, the handler would call a session's methods on the Context."""
    app = mqlayer.App()

    def book(order: Placed, session: Session) -> None: ...
    def anything(order: Placed, ctx: object) -> None: ...
    def perhaps(order: Placed, ctx: mqlayer.Context | None) -> None: ...

    refused = r"'book' takes a Session as 'session', where it gets the mqlayer.Context: .* session: Annotated\[Session"
    with pytest.raises(InvalidInput, match=refused):
        app.consumer("orders", group="ledger")(book)
    for number, handler in enumerate((anything, perhaps)):
        app.consumer("orders", group=f"g-{number}")(handler)


def test_an_unknown_setting_of_a_group_is_refused_with_the_nearest() -> None:
    app: Any = mqlayer.App()
    with pytest.raises(InvalidInput, match="no setting of a group is called atempt_limit: did you mean attempt_limit"):
        app.consumer("orders", group="ledger", atempt_limit=3)


def test_other_settings_than_the_servers_are_named_with_the_whole_command() -> None:
    app, log = mqlayer.App(), cast("TopicLog", SimpleNamespace(partition=1, name="orders"))
    app.consumer("orders", group="ledger")(anything)
    stored = group_of(app.consumers[0], 1, log)
    rules: Any = {
        "attempt_limit": 3,
        "backoff_s": (60, 3600),
        "non_retryable_errors": [ValueError],
        "time_limit_s": 1.5,
    }
    refuse_others(stored, settings_of(attempt_limit=stored.rules.attempt_limit))
    with pytest.raises(Conflict) as found:
        refuse_others(stored, settings_of(**rules))
    assert "attempt_limit = 3, " in str(found.value)
    command = (
        "mqlayer group set orders ledger --backoff 60,3600 --attempts 3 --non-retryable ValueError --time-limit 1.5"
    )
    assert str(found.value).endswith(command)
    with pytest.raises(Conflict, match=r"brings False: leave it out of the program, or ordered can't be changed"):
        refuse_others(stored, settings_of(ordered=False))


def test_the_settings_of_a_group_have_options_that_are_there() -> None:
    (command,) = [one for one in group_commands.registered_commands if one.name == "set"]
    assert command.callback is not None
    parameters = inspect.signature(command.callback).parameters
    assert {option.removeprefix("--").replace("-", "_") for option in SET_OPTIONS.values()} <= parameters.keys()
    assert {*SET_OPTIONS} == {*RULES, "balance", "tag_filter", "instance_expiry_s", "rate_limit", "rate_burst"}


def anything(body: bytes) -> None:
    """Handle a message."""


def test_another_database_than_postgres_is_named() -> None:
    engine = create_engine("sqlite://")
    # Python 3.13 warns of a database that is left open.
    with ExitStack() as cleanup:
        cleanup.callback(engine.dispose)
        session = cleanup.enter_context(Session(engine))
        for use in (partial(outbox.publish, topic="orders", key="a"), context(connection=object()).fence):
            with pytest.raises(
                InvalidInput, match="this is a connection to sqlite: outbox, fence and inbox are in Post"
            ):
                use(session)


def test_a_dsn_of_sqlalchemy_says_what_to_leave_out() -> None:
    with pytest.raises(InvalidInput, match=r"begins with postgresql\+psycopg://: leave out \+psycopg"):
        parse_dsn("postgresql+psycopg://ann:secret@db/shop")
    with pytest.raises(InvalidInput, match=r"begins with mysql://: give postgresql://"):
        parse_dsn("mysql://db/shop")
