"""Ordered pop: receivers without membership (docs/design/ordered-pop.md)."""

from mqlayer.receiving.async_receiver import AsyncReceiver
from mqlayer.receiving.pop_message import PopMessage, Token
from mqlayer.receiving.receiver import Receiver

__all__ = ["AsyncReceiver", "PopMessage", "Receiver", "Token"]
