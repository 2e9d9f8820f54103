"""Refuse conflicting options: decorate a RuledCommand with `excludes` and `needs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand

from mqlayer.errors import InvalidInput

RULES: Final = "__option_rules__"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Excludes:
    """Two conflicting options; arguments in capitals."""

    one: str
    other: str
    why: str

    def check(self, said: frozenset[str]) -> None:
        """Raise InvalidInput if both are given."""
        if {self.one, self.other} <= said:
            raise InvalidInput(f"choose one: {self.one} or {self.other}; {self.why}")


@dataclass(frozen=True, slots=True)
class Needs:
    """An option that needs another."""

    one: str
    other: str
    why: str

    def check(self, said: frozenset[str]) -> None:
        """Raise InvalidInput without the other."""
        if self.one in said and self.other not in said:
            raise InvalidInput(f"{self.one} goes with {self.other}: {self.why}; say both, or leave {self.one} out")


Rule = Excludes | Needs


class RuledCommand(TyperCommand):
    """A command that checks its option rules first."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # its context class is private
        """Check the options, then run the command."""
        said = frozenset(_options_given(self, ctx))
        for rule in rules_of(self.callback):
            rule.check(said)
        return super().invoke(ctx)


def excludes(one: str, *others: str, why: str) -> Callable[[Function], Function]:
    """Refuse the first option beside any other."""
    return _ruled([Excludes(one, other, why) for other in others])


def needs(one: str, other: str, *, why: str) -> Callable[[Function], Function]:
    """Refuse the first option without the second."""
    return _ruled([Needs(one, other, why)])


def planned(function: Function) -> Function:
    """Mark a command that is large or destroys: it plans unless --yes is given."""
    return excludes("--plan", "--yes", why="--plan changes nothing, --yes does it")(function)


def rules_of(function: Callable[..., Any] | None) -> list[Rule]:
    """Return a command's rules."""
    return list(getattr(function, RULES, ()))


def option_name(parameter: Any) -> str:
    """Return an option as typed, an argument in capitals."""
    return str(parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper())


def _ruled(rules: list[Rule]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        setattr(function, RULES, [*rules, *rules_of(function)])
        return function

    return decorate


def _options_given(command: TyperCommand, ctx: typer.Context) -> Iterator[str]:
    for parameter in command.params:
        name = str(parameter.name)
        source, value = ctx.get_parameter_source(name), ctx.params.get(name)
        nothing = value is None or value is False or (isinstance(value, list | tuple) and not value)
        if source is not None and source.name != "DEFAULT" and not nothing:
            yield option_name(parameter)
