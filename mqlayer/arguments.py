"""Say which argument of a public call has a wrong type.

Annotations are compared only once a call failed, so a call that works costs nothing more.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, get_args, get_origin

from mqlayer.errors import InvalidInput, MqlayerError

P = ParamSpec("P")
R = TypeVar("R")
Public = TypeVar("Public", bound=type)

MISFITS: Final = (TypeError, AttributeError, ValueError)
"""Errors that a wrong type causes somewhere inside."""
CONTAINERS: Final = (list, tuple, set, frozenset)
OWN: Final = "mqlayer"


def explain(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call that fails for an argument's type raise InvalidInput with its name."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def explained(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return await function(*args, **kwargs)
            except MISFITS as error:
                _refuse_call(function, args, kwargs, error)
                raise

    else:

        @wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return function(*args, **kwargs)
            except MISFITS as error:
                _refuse_call(function, args, kwargs, error)
                raise

    return typing.cast("Callable[P, R]", explained)


def explain_methods(public: Public) -> Public:
    """Do as `explain` for a class's constructor and public methods."""
    for name, member in list(vars(public).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(public, name, explain(member))
    return public


def check_fields(value: object) -> None:
    """Raise InvalidInput for a field with a wrong type."""
    kind = type(value)
    hints = _hints(kind)
    for name in _field_names(kind):
        if not _fits(getattr(value, name), hints.get(name, Any)):
            raise _misfit(name, kind.__name__, getattr(value, name), _text_of(kind, name, hints))


def refuse_misfit(function: Callable[..., Any], arguments: Mapping[str, Any], error: Exception) -> None:
    """Raise InvalidInput for an argument of a failed call with a wrong type; other entries of `arguments` don't matter.

    For functions on the hot path, which `explain` would slow down: they pass `locals()`.
    """
    if isinstance(error, MqlayerError):
        return
    hints = _hints(function)
    for name, value in _named(function, arguments, hints):
        if not _fits(value, hints.get(name, Any)):
            place = function.__qualname__.removesuffix(".__init__")
            raise _misfit(name, place, value, _text_of(function, name, hints)) from error
        for one in value if isinstance(value, CONTAINERS) else (value,):
            if type(one).__module__.partition(".")[0] == OWN and _field_names(type(one)):
                check_fields(one)


def _refuse_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        # Python's own words name the missing or unknown argument.
        return
    refuse_misfit(function, bound.arguments, error)


def _named(
    function: Callable[..., Any], arguments: Mapping[str, Any], hints: dict[str, Any]
) -> typing.Iterator[tuple[str, Any]]:
    """Yield the arguments by name; those of `*names` and `**names` each."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in arguments:
            continue
        value = arguments[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, one) for one in value)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            hints.update(_hints_of_options(hints.pop(name, Any)))
            yield from value.items()
        else:
            yield name, value


def _hints_of_options(hint: Any) -> dict[str, Any]:
    options = get_args(hint)[0] if get_origin(hint) is typing.Unpack else None
    return {} if options is None else _hints(options)


def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of)
    except NameError:
        # A name for type checkers only.
        return {}


def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(getattr(kind, "__dataclass_fields__", getattr(kind, "__struct_fields__", ())))


def _text_of(of: Any, name: str, hints: dict[str, Any]) -> str:
    for kind in getattr(of, "__mro__", (of,)):
        found = getattr(kind, "__annotations__", {}).get(name)
        if found is not None:
            return str(found)
    # An option of `**options`.
    return re.sub(r"\b(typing|collections\.abc)\.", "", str(hints.get(name, "")))


def _misfit(name: str, place: str, value: object, wanted: str) -> InvalidInput:
    # The type only: a value may be a payload.
    of = f" of {', '.join(sorted({type(one).__name__ for one in value}))}" if isinstance(value, CONTAINERS) else ""
    takes = f"{place} takes {wanted}" if wanted else f"look at {place}"
    return InvalidInput(f"{name} is a {type(value).__name__}{of if value else ''}: {takes}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value may be of an annotated type; true where that is not known."""
    hint = getattr(hint, "__supertype__", getattr(hint, "__value__", hint))
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in args)
    if origin is typing.Literal:
        # Each such argument has its own words for a wrong value.
        return any(isinstance(value, type(one)) for one in args)
    if origin is typing.Annotated:
        return _fits(value, args[0])
    if origin is type:
        return isinstance(value, type)
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for base in kind.__mro__ if base.__module__ != "typing" for name in vars(base)
                   if not name.startswith("_"))  # fmt: skip
    return isinstance(value, (int, float) if kind is float else kind) and _elements_fit(value, args)


def _elements_fit(value: Any, args: tuple[Any, ...]) -> bool:
    if isinstance(value, Mapping) and len(args) == 2:
        return all(_fits(one, args[0]) and _fits(of, args[1]) for one, of in value.items())
    if isinstance(value, tuple) and len(args) > 1 and args[-1] is not Ellipsis:
        return len(args) == len(value) and all(map(_fits, value, args))
    # A text or a mapping is iterable too.
    iterable = isinstance(value, (*CONTAINERS, str, bytes, Mapping)) and args
    return not iterable or all(_fits(one, args[0]) for one in value)
