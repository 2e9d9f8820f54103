"""Test programs that publish and consume: in memory, in the test's own transaction, or against real servers.

See the pages 'Test handlers' and 'Test with real servers'.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from mqlayer.testing.waiting import wait_until

if TYPE_CHECKING:
    from mqlayer.testing.contexts import MessageFacts, batch, context
    from mqlayer.testing.fault_exercise import exercise
    from mqlayer.testing.in_memory import TestApp
    from mqlayer.testing.messages import PublishedMessage
    from mqlayer.testing.outbox_table import prepare_database
    from mqlayer.testing.real import RealApp, engine_for
    from mqlayer.testing.stack import TestStack
    from mqlayer.testing.transactions import apublished, assert_not_published, assert_published, published

__all__ = [
    "MessageFacts",
    "PublishedMessage",
    "RealApp",
    "TestApp",
    "TestStack",
    "apublished",
    "assert_not_published",
    "assert_published",
    "batch",
    "context",
    "engine_for",
    "exercise",
    "prepare_database",
    "published",
    "wait_until",
]

_MODULES: Final = {
    "contexts": ("MessageFacts", "batch", "context"),
    "fault_exercise": ("exercise",),
    "in_memory": ("TestApp",),
    "messages": ("PublishedMessage",),
    "outbox_table": ("prepare_database",),
    "real": ("RealApp", "engine_for"),
    "stack": ("TestStack",),
    "transactions": ("apublished", "assert_not_published", "assert_published", "published"),
}
"""Names whose modules cost an import of the engine; the first use imports them."""
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return found
