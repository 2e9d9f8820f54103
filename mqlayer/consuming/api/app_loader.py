"""Find an application object by its path."""

from __future__ import annotations

from mqlayer.consuming.api.app import App
from mqlayer.errors import InvalidInput
from mqlayer.runtime.named_objects import load_named


def load_app(path: str) -> App:
    """Import `module:name`, also from the working directory, and return its App.

    Raises InvalidInput or NotFound for a bad path; errors of the module's import pass through.
    """
    found = load_named(path, "application")
    if not isinstance(found, App):
        raise InvalidInput(f"{path!r} is a {type(found).__name__}: give the name of a mqlayer.App")
    return found
