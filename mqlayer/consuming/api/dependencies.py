"""Dependencies: further parameters of a handler, made for each message."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from mqlayer.consuming.api.context import Context
from mqlayer.consuming.engine.executors import not_awaited
from mqlayer.domain.codecs import type_name
from mqlayer.errors import InvalidInput

Factory = Callable[..., Any]


class Depends:
    """Marks a handler's parameter as made by `factory` for each message.

    ```python
    def store() -> Iterator[Store]:
        with Store.open() as store:
            yield store

    @app.consumer("orders", group="ledger")
    def book(order: Order, ctx: mqlayer.Context, store: Annotated[Store, mqlayer.Depends(store)]) -> None: ...
    ```

    The factory takes nothing or the Context, and returns the value, or is a generator that yields it once. After the
    `yield`, it runs when the handler has ended, before the message is settled: its exception fails the attempt, and
    the handler's exception is raised at its `yield`. Raises InvalidInput for another factory.
    """

    __slots__ = ("_make", "_takes_context", "factory", "is_async", "yields")

    def __init__(self, factory: Factory) -> None:
        if not callable(factory):
            raise InvalidInput(f"mqlayer.Depends takes a function, not a {type(factory).__name__}")
        self.factory = factory
        self.yields = _is(factory, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        self.is_async = _is(factory, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        self._takes_context = _takes_context(factory)
        self._make = factory
        if self.yields:
            self._make = (asynccontextmanager if self.is_async else contextmanager)(factory)

    def __repr__(self) -> str:
        return f"Depends({type_name(self.factory)})"

    def make(self, context: Context) -> Any:
        """Return the value; a context manager or an awaitable of it, as the factory is."""
        return self._make(context) if self._takes_context else self._make()


class Dependencies(NamedTuple):
    """A handler's dependencies, by parameter."""

    by_name: dict[str, Depends]

    def call(self, handler: Callable[..., Any], body: Any, context: Context) -> Any:
        """Call a plain handler."""
        with ExitStack() as stack:
            made = {name: _enter(stack, one, context) for name, one in self.by_name.items()}
            answer = handler(body, context, **made)
            if inspect.isawaitable(answer):
                # Before a session commits that nothing was done with.
                raise not_awaited(answer)
            return answer

    async def acall(self, handler: Callable[..., Any], body: Any, context: Context) -> Any:
        """Call an async one."""
        async with AsyncExitStack() as stack:
            made = {name: await _aenter(stack, one, context) for name, one in self.by_name.items()}
            return await handler(body, context, **made)


NO_DEPENDENCIES: Final = Dependencies({})


def dependencies_of(handler: Callable[..., Any], *, is_async: bool) -> Dependencies:
    """Return what a handler's parameters depend on. Raises InvalidInput for one that can't be given."""
    hints = _hints(handler)
    found = {name: mark for name in inspect.signature(handler).parameters if (mark := _mark(hints.get(name)))}
    for name, mark in found.items():
        _check(type_name(handler), name, mark, is_async=is_async)
    return Dependencies(found)


def _hints(handler: Callable[..., Any]) -> dict[str, Any]:
    function = handler if inspect.isroutine(handler) else type(handler).__call__
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        # Of one that has body and context alone, the decorator may say the body's type.
        if len(inspect.signature(handler).parameters) > 2:
            name = type_name(handler)
            raise InvalidInput(f"an annotation of handler {name!r} names what is not there: {error}") from error
        return {}


def check_order(handler: Callable[..., Any], dependencies: Dependencies) -> None:
    """Check that body and context come first. Raises InvalidInput."""
    first = list(inspect.signature(handler).parameters)[:2]
    if dependencies.by_name and (len(first) < 2 or set(first) & set(dependencies.by_name)):
        raise InvalidInput(
            f"handler {type_name(handler)!r} must take the body and the context before what it depends on"
        )


def check_context(handler: Callable[..., Any], name: str) -> None:
    """Check that the parameter for the Context may take one. Raises InvalidInput."""
    hint = _hints(handler).get(name)
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return
    if not (issubclass(hint, Context) or issubclass(Context, hint)):
        given = type_name(hint)
        raise InvalidInput(
            f"handler {type_name(handler)!r} takes a {given} as {name!r}, where it gets the mqlayer.Context: take that "
            f"second, and behind it {name}: Annotated[{given}, mqlayer.Depends(factory)], or mqlayer.fenced(sessions)"
        )


def _check(handler: str, name: str, mark: Depends, *, is_async: bool) -> None:
    if mark.is_async and not is_async:
        raise InvalidInput(
            f"handler {handler!r} is plain, and its parameter {name!r} depends on an async factory: make the handler "
            "`async def`, or the factory a plain function"
        )
    if is_async and mark.yields and not mark.is_async:
        raise InvalidInput(
            f"handler {handler!r} is async, and its parameter {name!r} depends on a plain generator, which would block "
            "the event loop: make it `async def`"
        )


def _mark(hint: Any) -> Depends | None:
    if get_origin(hint) is not Annotated:
        return None
    marks = [one for one in get_args(hint)[1:] if isinstance(one, Depends) or one is Depends]
    if not marks:
        return None
    if len(marks) > 1 or not isinstance(marks[0], Depends):
        raise InvalidInput("a parameter depends on one factory: Annotated[…, mqlayer.Depends(factory)]")
    return marks[0]


def _takes_context(factory: Factory) -> bool:
    try:
        needed = [
            one
            for one in inspect.signature(factory).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
    except ValueError:
        # A class of C code that says nothing of its parameters.
        return False
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise InvalidInput(f"factory {type_name(factory)!r} must take nothing, or the context")
    return bool(needed)


def _is(factory: Factory, *questions: Callable[[Any], bool]) -> bool:
    called = type(factory).__call__
    return any(ask(factory) or (not inspect.isclass(factory) and ask(called)) for ask in questions)


def _enter(stack: ExitStack, mark: Depends, context: Context) -> Any:
    made = mark.make(context)
    return stack.enter_context(made) if mark.yields else made


async def _aenter(stack: AsyncExitStack, mark: Depends, context: Context) -> Any:
    made = mark.make(context)
    if mark.yields:
        return await stack.enter_async_context(made)
    return await made if mark.is_async else made
