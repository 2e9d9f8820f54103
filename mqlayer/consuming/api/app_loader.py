"""Find an application object by its path."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from mqlayer.consuming.api.app import App
from mqlayer.errors import InvalidInput, NotFound

_PATH: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def load_app(path: str) -> App:
    """Import `module:name`, also from the working directory, and return its App.

    Raises InvalidInput or NotFound for a bad path; errors of the module's import pass through.
    """
    found = load_named(path, "application")
    if not isinstance(found, App):
        raise InvalidInput(f"{path!r} is a {type(found).__name__}: give the name of a mqlayer.App")
    return found


def load_named(path: str, kind: str) -> Any:
    """Import `module:name`, also from the working directory, and return what it names; raises as `load_app`."""
    match = _PATH.fullmatch(path)
    if match is None:
        article, example = ("an", "app") if kind == "application" else ("a", "book")
        hint = f"give module:name, such as shop.consumers:{example}"
        raise InvalidInput(f"{path!r} is not the path of {article} {kind}: {hint}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module_name, name = match["module"], match["name"]
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = "run the command in the directory that the import starts from, or set PYTHONPATH"
        raise NotFound("module", module_name, hint) from error
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise NotFound(kind, path, f"module {module_name!r} has no {name!r}") from None
