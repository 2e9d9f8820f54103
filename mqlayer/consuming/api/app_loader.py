"""Find an application object by its path."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeVar

from mqlayer.consuming.api.app import App
from mqlayer.errors import InvalidInput, NotFound

_PATH: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


Named = TypeVar("Named")


def load_app(path: str) -> App:
    """Import `module:name`, also from the working directory, and return its App.

    Raises InvalidInput or NotFound for a bad path; errors of the module's import pass through.
    """
    return load_named(path, App, "application")


def load_named(path: str, kind: type[Named], what: str) -> Named:
    """`load_app` for what is of another type."""
    match = _PATH.fullmatch(path)
    if match is None:
        article = "an" if what == "application" else "a"
        raise InvalidInput(f"{path!r} is no path of {article} {what}: give module:name, such as shop.consumers:app")
    found = _imported(match["module"], match["name"], path, what)
    if not isinstance(found, kind):
        raise InvalidInput(f"{path!r} is a {type(found).__name__}: give the name of a mqlayer.{kind.__name__}")
    return found


def _imported(module_name: str, name: str, path: str, what: str) -> object:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = "run the command in the directory that the import starts from, or set PYTHONPATH"
        raise NotFound("module", module_name, hint) from error
    try:
        found: object = attrgetter(name)(module)
    except AttributeError:
        raise NotFound(what, path, f"module {module_name!r} has no {name!r}") from None
    return found
