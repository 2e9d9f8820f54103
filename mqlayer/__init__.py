"""Strictly ordered, elastic messaging on the Redis and Postgres that teams already run."""

from mqlayer import outbox
from mqlayer.consuming import App, Batch, BatchMessage, BatchOf, Context, MemberOptions
from mqlayer.domain.tags import all_of, any_of
from mqlayer.errors import MqlayerError, PauseKey, Reject, RetryLater, Skip
from mqlayer.events import Event, on_event
from mqlayer.idempotency import VersionedEvent, VersionGap, Versions
from mqlayer.logs import configure_logging
from mqlayer.producing import AsyncProducer, Message, Producer, ProducerOptions, Receipt
from mqlayer.receiving import AsyncReceiver, PopMessage, Receiver
from mqlayer.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "App",
    "AsyncProducer",
    "AsyncReceiver",
    "Batch",
    "BatchMessage",
    "BatchOf",
    "Context",
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
    "VersionGap",
    "VersionedEvent",
    "Versions",
    "__version__",
    "all_of",
    "any_of",
    "configure_logging",
    "on_event",
    "outbox",
]
