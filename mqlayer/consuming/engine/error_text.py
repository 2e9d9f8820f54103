"""What a log may say of an exception that is not mqlayer's own."""

from __future__ import annotations

import traceback
from typing import Final

from mqlayer.errors import BodyMismatch, HandlerControl, HandlerFault, redact

TEXT_LIMIT: Final = 1_000
WHOLE_LIMIT: Final = 8_000
"""With type and place. Its bytes stay below those that the tables take: what they refuse would be sent for ever."""


def described(error: BaseException) -> str:
    """Return an exception as it is kept with its message, in Postgres: type, text and place. Not for logs."""
    text = _storable(redact(str(error)))[:TEXT_LIMIT]
    if isinstance(error, HandlerControl | HandlerFault):
        return text
    return (f"{where(error)}: {text}" if text else where(error))[:WHOLE_LIMIT]


def where(error: BaseException) -> str:
    """Return an exception's type and place, never its text: that may hold what a message holds."""
    if isinstance(error, BodyMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _storable(text: str) -> str:
    """Return a text that Postgres takes: one that it refuses would be sent for ever, and nothing else be parked."""
    return text.replace("\x00", " ").encode("utf-8", "replace").decode()
