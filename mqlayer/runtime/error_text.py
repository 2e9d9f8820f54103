"""Texts of exceptions, for logs and for Postgres."""

from __future__ import annotations

import traceback
from typing import Final

from mqlayer.errors import BodyMismatch, HandlerControl, HandlerFault, redact

TEXT_LIMIT: Final = 1_000
WHOLE_LIMIT: Final = 8_000
"""Below the tables' limits: a refused row would be sent endlessly."""


def described(error: BaseException) -> str:
    """Return type, text and place, for storage with the message; not for logs."""
    text = _storable(redact(str(error)))[:TEXT_LIMIT]
    if isinstance(error, HandlerControl | HandlerFault):
        return text
    return (f"{where(error)}: {text}" if text else where(error))[:WHOLE_LIMIT]


def where(error: BaseException) -> str:
    """Return type and place, without the text, which may hold message data."""
    if isinstance(error, BodyMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _storable(text: str) -> str:
    return text.replace("\x00", " ").encode("utf-8", "replace").decode()
