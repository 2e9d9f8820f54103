"""Strictly ordered, elastic messaging on the Redis and Postgres that teams already run.

PYTEST_DONT_REWRITE: pytest would want to read the package anew, for its plugin.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqlayer import outbox
    from mqlayer.consuming import App, Batch, BatchMessage, BatchOf, Context, Depends, MemberOptions
    from mqlayer.domain.body_streams import AsyncBodyStream, BodyStream
    from mqlayer.domain.cloud_events import CloudEvent, CloudEvents, cloud_event
    from mqlayer.domain.tags import all_of, any_of
    from mqlayer.domain.time_to_live import expires_after
    from mqlayer.errors import MqlayerError, PauseKey, Reject, RetryLater, Skip
    from mqlayer.events import Event, on_event
    from mqlayer.fenced_sessions import fenced
    from mqlayer.idempotency import VersionedEvent, VersionGap, Versions
    from mqlayer.logs import configure_logging
    from mqlayer.producing import AsyncProducer, Message, Producer, ProducerOptions, Receipt
    from mqlayer.receiving import AsyncReceiver, PopMessage, Receiver
    from mqlayer.settings import Settings
    from mqlayer.typed_topic import Topic

__version__ = "0.1.0"

__all__ = [
    "App",
    "AsyncBodyStream",
    "AsyncProducer",
    "AsyncReceiver",
    "Batch",
    "BatchMessage",
    "BatchOf",
    "BodyStream",
    "CloudEvent",
    "CloudEvents",
    "Context",
    "Depends",
    "Event",
    "MemberOptions",
    "Message",
    "MqlayerError",
    "PauseKey",
    "PopMessage",
    "Producer",
    "ProducerOptions",
    "Receipt",
    "Receiver",
    "Reject",
    "RetryLater",
    "Settings",
    "Skip",
    "Topic",
    "VersionGap",
    "VersionedEvent",
    "Versions",
    "__version__",
    "all_of",
    "any_of",
    "cloud_event",
    "configure_logging",
    "expires_after",
    "fenced",
    "on_event",
    "outbox",
]

_MODULES: Final = {
    "mqlayer.consuming": ("App", "Batch", "BatchMessage", "BatchOf", "Context", "Depends", "MemberOptions"),
    "mqlayer.domain.body_streams": ("AsyncBodyStream", "BodyStream"),
    "mqlayer.domain.cloud_events": ("CloudEvent", "CloudEvents", "cloud_event"),
    "mqlayer.domain.tags": ("all_of", "any_of"),
    "mqlayer.domain.time_to_live": ("expires_after",),
    "mqlayer.errors": ("MqlayerError", "PauseKey", "Reject", "RetryLater", "Skip"),
    "mqlayer.events": ("Event", "on_event"),
    "mqlayer.fenced_sessions": ("fenced",),
    "mqlayer.groups": (),
    "mqlayer.idempotency": ("VersionGap", "VersionedEvent", "Versions"),
    "mqlayer.logs": ("configure_logging",),
    "mqlayer.outbox": (),
    "mqlayer.producing": ("AsyncProducer", "Message", "Producer", "ProducerOptions", "Receipt"),
    "mqlayer.receiving": ("AsyncReceiver", "PopMessage", "Receiver"),
    "mqlayer.runtime": (),
    "mqlayer.settings": ("Settings",),
    "mqlayer.topics": (),
    "mqlayer.typed_topic": ("Topic",),
}
"""The public names by module. The first use of a name imports its module; a command's start stays short."""
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}

# Type checkers know the names from above; to them this function would make every other name valid too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name, or one of the modules themselves, as in `mqlayer.errors.StaleToken`."""
        if name in _MODULE_OF:
            found = getattr(import_module(_MODULE_OF[name]), name)
        elif (module := f"{__name__}.{name}") in _MODULES:
            found = import_module(module)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """Return all names, the public ones among them."""
        return sorted({*globals(), *__all__})
