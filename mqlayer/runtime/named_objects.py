"""Find an object of a program by its path."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Final

from mqlayer.errors import InvalidInput, NotFound

_PATH: Final = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def load_named(path: str, what: str) -> object:
    """Import `module:name`, also from the working directory, and return the object; `what` it is, for messages.

    Raises InvalidInput or NotFound for a bad path; errors of the module's import pass through.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        article, example = ("a", "book") if what == "handler" else ("an" if what == "application" else "a", "app")
        raise InvalidInput(
            f"{path!r} is not the path of {article} {what}: give module:name, such as shop.consumers:{example}"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    _set_up_django()
    module_name, name = match["module"], match["name"]
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


def _set_up_django() -> None:
    """Load a Django project's applications, whose models the module may import, as Celery does."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE") or find_spec("django") is None:
        return
    import django
    from django.apps import apps

    if not apps.ready:
        django.setup()
