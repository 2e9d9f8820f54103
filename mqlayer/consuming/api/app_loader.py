"""Find an application object by its path."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mqlayer.consuming.api.app import App, Consumer
from mqlayer.errors import InvalidInput, NotFound

UNREGISTERED: Final = "debug"
"""The group of a handler that no App has for the topic."""
_PATH: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def load_app(path: str) -> App:
    """Import `module:name`, also from the working directory, and return its App.

    Raises InvalidInput or NotFound for a bad path; errors of the module's import pass through.
    """
    _, found = _load(path, "application", "app")
    if not isinstance(found, App):
        raise InvalidInput(f"{path!r} is a {type(found).__name__}: give the name of a mqlayer.App")
    return found


def load_consumer(path: str, topic: str) -> Consumer:
    """Import a handler; return it as its module's App has it for the topic, else in a group of its own.

    Raises as `load_app`.
    """
    module, handler = _load(path, "handler", "book")
    if not callable(handler):
        raise InvalidInput(f"{path!r} is a {type(handler).__name__}: give the name of a handler")
    for app in (found for found in vars(module).values() if isinstance(found, App)):
        for consumer in app.consumers:
            if consumer.handler is handler and consumer.topic == topic:
                return consumer
    app = App()
    app.consumer(topic, group=UNREGISTERED)(handler)
    return app.consumers[0]


def _load(path: str, kind: str, example: str) -> tuple[ModuleType, Any]:
    match = _PATH.fullmatch(path)
    if match is None:
        article = "an" if kind[0] in "aeiou" else "a"
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
        return module, attrgetter(name)(module)
    except AttributeError:
        raise NotFound(kind, path, f"module {module_name!r} has no {name!r}") from None
