"""Pages and actions: what a module of `views` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from mqlayer.console.users import User
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.runtime.runtime import Runtime

Value = TypeVar("Value")

ROWS: Final = 50
"""Rows of a list's page."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request to a page: `runtime` has the Postgres role of the user's level, and the user as its actor.

    `path`: parameters of the page's path; `query`: those behind the question mark, or a form's fields.
    """

    runtime: Runtime
    user: User
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter without blanks around it."""
        return (self.path.get(name) or self.query.get(name) or default).strip()

    def number(self, name: str, default: int | None = None) -> int:
        """Return a parameter as a number from 0 on. Raises InvalidInput."""
        found = self.text(name)
        if not found and default is not None:
            return default
        if not (found.isascii() and found.isdigit() and len(found) <= 18):
            raise InvalidInput(f"{name} is no number: {found!r}" if found else f"{name} is missing: give a number")
        return int(found)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: `load` returns the variables of its template; runs in a thread.

    `menu`: its place in the menu, empty for none. `live`: parts marked with `data-live` are sent again as they change.
    `media_type`: of a file to keep; then there is no template. It is the variable `text`, or `pieces` of so many
    `bytes`, with a name `file`.
    """

    path: str
    title: str
    template: str
    load: Callable[[Visit], Mapping[str, Any]]
    menu: str = ""
    live: bool = True
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """An action before it runs: what will happen, line by line. `danger`: it can't be taken back."""

    lines: Sequence[str]
    danger: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that the plan adds, such as a set's number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An action that ran: its effect in words, and the page to look at next, as a path within the console.

    `goes_on`: that page says it all, and comes at once; else the outcome has a page of its own.
    """

    text: str
    path: str = "/"
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """An act of an operator at `/actions/NAME`: its plan is shown, then it runs with a reason; both run in a thread.

    `run` calls a command of the library, whose audit row has the user and the reason.
    """

    name: str
    title: str
    plan: Callable[[Visit], Plan]
    run: Callable[[Visit], Outcome]
    button: str = "Do it"


@dataclass(frozen=True, slots=True)
class PagePart(Generic[Value]):
    """A part of a page: its value, or why it can't be shown."""

    value: Value | None = None
    error: str = ""


def part(load: Callable[[], Value]) -> PagePart[Value]:
    """Load a part of a page: an error of one leaves the others."""
    try:
        return PagePart(load())
    except MqlayerError as error:
        return PagePart(error=str(error))
