"""At which failpoints tests kill a process, read from the tests themselves.

A kill is armed by a text like `room.place=kill`, in a test function: with the name in it, or with a name that the test
is parametrized by.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Final

from _pytest.mark import ParameterSet

KILL: Final = "=kill"
LITERAL: Final = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=kill")
GIVEN: Final = re.compile(r"\{\w+\}=kill")
NAME: Final = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)(?:@\d+)?")
UNIT: Final = "unit"
"""Unit tests kill at names of their own making."""


def killed_at(tests: Path) -> set[str]:
    """Return the failpoints at which some test kills a process."""
    return {name for function in _test_functions(tests) for name in kills_in(function)}


def kills_in(function: Callable[..., Any]) -> set[str]:
    """Return the failpoints at which one test kills."""
    if not _mentions_a_kill(function):
        return set()
    source = inspect.getsource(function)
    return set(LITERAL.findall(source)) | (_names_given(function) if GIVEN.search(source) else set())


def _mentions_a_kill(function: Callable[..., Any]) -> bool:
    """Say whether a kill is in its texts or marks: to find its source takes far longer."""
    return KILL in repr(getattr(function, "pytestmark", [])) or KILL in "".join(_texts_of(function.__code__))


def _texts_of(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts_of(constant)
        else:
            yield repr(constant)


def _names_given(function: Callable[..., Any]) -> set[str]:
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    texts = (text for mark in marks for value in mark.args[1] for text in _texts(value))
    return {match[1] for text in texts if (match := NAME.fullmatch(text))}


def _texts(value: object) -> list[str]:
    values = value.values if isinstance(value, ParameterSet) else value if isinstance(value, tuple) else (value,)
    return [text for text in values if isinstance(text, str)]


def _test_functions(tests: Path) -> Iterator[Callable[..., Any]]:
    for path in sorted(tests.rglob("test_*.py")):
        if KILL in path.read_text("utf-8") and path.parent.name != UNIT:
            module = importlib.import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if name.startswith("test_"):
                    yield function
