"""Wait for a condition in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from mqlayer.arguments import explain

_POLL_INTERVAL_S: Final = 0.01

T = TypeVar("T")


@explain
def wait_until(condition: Callable[[], T], *, timeout_s: float = 20.0) -> T:
    """Return the first true value of `condition`. Raises TimeoutError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the condition was not true within {timeout_s:g} s; its last value was {value!r}")
        time.sleep(_POLL_INTERVAL_S)
    return value
