"""Strictly ordered, elastic messaging on the Redis and Postgres that teams already run."""

from mqlayer import outbox
from mqlayer.consuming import App, Context, MemberOptions
from mqlayer.errors import MqlayerError
from mqlayer.settings import Settings

__version__ = "0.1.0"

__all__ = ["App", "Context", "MemberOptions", "MqlayerError", "Settings", "__version__", "outbox"]
