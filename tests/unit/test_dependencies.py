"""Dependencies of handlers: what is refused when they are registered, and what type checkers find.

`mypy` reports an ignore that ignores nothing, so each ignored line below is a mistake that it finds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import msgspec
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import mqlayer
from mqlayer.consuming.api.dependencies import dependencies_of
from mqlayer.errors import HandlerFault, InvalidInput


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
