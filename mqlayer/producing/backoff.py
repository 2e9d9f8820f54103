"""How long to leave alone what refused or failed: tenacity's exponential wait with full jitter."""

from __future__ import annotations

from typing import Final

from tenacity import RetryCallState, Retrying
from tenacity.wait import wait_random_exponential

_RETRYING: Final = Retrying()
_WAIT: Final = wait_random_exponential(multiplier=0.02, max=1.0)
_WAIT_FOR_ROUTE: Final = wait_random_exponential(multiplier=0.005, max=1.0)


def backoff_s(failures: int) -> float:
    """Return the wait in seconds after so many failures or refusals in a row; at most 1 s."""
    return _WAIT(_state(failures))


def route_backoff_s(refusals: int) -> float:
    """Return the wait before a route is asked for again: shorter, because a route change takes milliseconds."""
    return _WAIT_FOR_ROUTE(_state(refusals))


def _state(attempt_number: int) -> RetryCallState:
    state = RetryCallState(_RETRYING, None, (), {})
    state.attempt_number = attempt_number
    return state
