"""What a log may say of an exception that is not mqlayer's own."""

from __future__ import annotations

import traceback

from mqlayer.errors import BodyMismatch


def where(error: BaseException) -> str:
    """Return an exception's type and place, never its text: that may hold what a message holds."""
    if isinstance(error, BodyMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
