"""Test programs that publish and consume: in memory, in the test's own transaction, or against real servers.

See `docs/how-to/test-handlers.md`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from mqlayer.testing.waiting import wait_until

if TYPE_CHECKING:
    from mqlayer.testing.in_memory import TestApp

__all__ = ["TestApp", "wait_until"]

_MODULES: Final = {"TestApp": "in_memory"}
"""Where names come from that cost an import of the engine; the first use imports it."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return found
