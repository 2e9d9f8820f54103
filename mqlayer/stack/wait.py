"""Waiting for a condition, never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

POLL_INTERVAL_S: Final = 0.005


def comes_true(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Return whether ``condition`` came true within the time given; it is asked at least once."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True
