"""Strictly ordered, elastic messaging on the Redis and Postgres that teams already run."""

from mqlayer import outbox
from mqlayer.consuming import App, Context, MemberOptions
from mqlayer.errors import MqlayerError
from mqlayer.popping import PopMessage, Receiver
from mqlayer.producing import Message, Producer, Receipt
from mqlayer.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "App",
    "Context",
    "MemberOptions",
    "Message",
    "MqlayerError",
    "PopMessage",
    "Producer",
    "Receipt",
    "Receiver",
    "Settings",
    "__version__",
    "outbox",
]
