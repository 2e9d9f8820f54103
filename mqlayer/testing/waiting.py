"""Wait for a condition in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

_POLL_INTERVAL_S: Final = 0.01

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, timeout_s: float = 20.0) -> T:
    """Return the first true value of `condition`. Raises TimeoutError after `timeout_s` seconds."""
    _check(condition, timeout_s)
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the condition was not true within {timeout_s:g} s; its last value was {value!r}")
        time.sleep(_POLL_INTERVAL_S)
    return value


def _check(condition: object, timeout_s: object) -> None:
    if callable(condition) and isinstance(timeout_s, int | float):
        return
    # Pytest imports this module with its plugin, also where nothing else of mqlayer is used.
    from mqlayer.errors import InvalidInput

    kinds = f"{type(condition).__name__} and {type(timeout_s).__name__}"
    raise InvalidInput(f"wait_until takes a function as condition, and seconds as timeout_s, not {kinds}")
