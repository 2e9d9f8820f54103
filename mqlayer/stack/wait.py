"""Wait for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

POLL_INTERVAL_S: Final = 0.005


def comes_true(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True
