"""Ordered pop: receivers without membership or assignment."""

from mqlayer.popping.messages import PopMessage, Token
from mqlayer.popping.receiver import Receiver

__all__ = ["PopMessage", "Receiver", "Token"]
