"""Retry intervals: an exponential wait with full jitter."""

from __future__ import annotations

from typing import Final

from tenacity import RetryCallState, Retrying

from mqlayer.randomness import FullJitter

_RETRYING: Final = Retrying()
_WAIT: Final = FullJitter(multiplier=0.02, max=1.0)
_WAIT_FOR_ROUTE: Final = FullJitter(multiplier=0.005, max=1.0)


def backoff_s(failures: int) -> float:
    """Return seconds to wait after consecutive failures; at most 1."""
    return _WAIT(_state(failures))


def route_backoff_s(refusals: int) -> float:
    """As `backoff_s` before reading a route; shorter: route changes take milliseconds."""
    return _WAIT_FOR_ROUTE(_state(refusals))


def _state(attempt_number: int) -> RetryCallState:
    state = RetryCallState(_RETRYING, None, (), {})
    state.attempt_number = attempt_number
    return state
