"""Rules that members follow while they run: for failed messages, waits, final errors, policies; key classes."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from mqlayer.domain.key_classes import NO_CLASSES
from mqlayer.errors import BodyMismatch, HandlerControl, HandlerFault, InvalidInput, MessageTimeout

Policy = Literal["park", "block", "dead_letter", "skip"]
"""For a message out of attempts, with a final error, or rejected."""

POLICIES: Final[tuple[str, ...]] = get_args(Policy)

DEFAULT_BACKOFF_S: Final[tuple[float, ...]] = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip

DEFAULT_ATTEMPT_LIMIT: Final = 17
GIB: Final = 1 << 30
DEFAULT_BREAKER_KEYS: Final = 10
DEFAULT_BREAKER_WINDOW_S: Final = 10.0
BREAKER_RULES: Final = ("breaker_share", "breaker_keys", "breaker_window_s", "breaker_errors")
CLASS_RULES: Final = ("key_class", "class_concurrency", "class_rate")
PARKING_LIMITS: Final = (
    "parked_keys_limit", "parked_messages_limit", "parked_bytes_limit", "key_messages_limit", "key_bytes_limit",
)  # fmt: skip
LONGEST_TABLE: Final = 1_000

_ERROR_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class RetryRules:
    """A group's settings for failing messages and key classes, in column order: the page 'Group settings'.

    Times in seconds, None for no limit; bytes count bodies, keys and headers. Concurrent writes may exceed parking
    limits by 500 messages or 1 MB per member, any byte limit by one message. Excess waits in the stream.
    """

    backoff_s: tuple[float, ...] = DEFAULT_BACKOFF_S
    jitter: float = 0.0
    attempt_limit: int = DEFAULT_ATTEMPT_LIMIT
    policy: Policy = "park"
    non_retryable_errors: tuple[str, ...] = ()
    retryable_errors: tuple[str, ...] = ()
    time_limit_s: float | None = None
    max_time_limit_s: float | None = None
    parked_keys_limit: int = 10_000
    parked_messages_limit: int = 10_000_000
    parked_bytes_limit: int = 10 * GIB
    key_messages_limit: int = 2_000_000
    key_bytes_limit: int = 2 * GIB
    breaker_share: float | None = None
    breaker_keys: int = DEFAULT_BREAKER_KEYS
    breaker_window_s: float = DEFAULT_BREAKER_WINDOW_S
    breaker_errors: tuple[str, ...] = ()
    key_class: str = NO_CLASSES
    class_concurrency: int | None = None
    class_rate: float | None = None

    @classmethod
    def of(cls, columns: Sequence[Any]) -> RetryRules:
        """Return a row's rules."""
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in columns]
        return cls(*values)

    def wait_s(self, failed_attempts: int, share: float) -> float:
        """Return the wait after failed attempts. `share`: random, 0 to 1."""
        whole_s = self.backoff_s[min(failed_attempts, len(self.backoff_s)) - 1]
        return whole_s * (1.0 - self.jitter * share)

    def is_final(self, error: BaseException) -> bool:
        """Whether an error gets no further attempt.

        The nearest named class in its MRO decides, final before retried. Without one, a BodyMismatch is final, as it
        will not fit later; others are if `retryable_errors` are set, except a HandlerFault. A HandlerControl is never
        final.
        """
        if isinstance(error, HandlerControl):
            return False
        for kind in type(error).__mro__:
            name = error_name(kind)
            if name in self.non_retryable_errors:
                return True
            if name in self.retryable_errors:
                return False
        return isinstance(error, BodyMismatch) or (bool(self.retryable_errors) and not isinstance(error, HandlerFault))

    def may_trip(self, error: BaseException) -> bool:
        """Whether an error counts for the circuit breaker: never a final one, or a HandlerControl.

        Of HandlerFaults a MessageTimeout alone: others are faults of the program.
        """
        if isinstance(error, HandlerControl) or self.is_final(error):
            return False
        if isinstance(error, HandlerFault) and not isinstance(error, MessageTimeout):
            return False
        names = self.breaker_errors
        return not names or any(error_name(kind) in names for kind in type(error).__mro__)


RULES_COUNT: Final = len(RetryRules.__slots__)


def exponential(first_s: float, factor: float, limit_s: float) -> tuple[float, ...]:
    """Return growing waits up to a limit. Raises InvalidInput."""
    if not (0 < first_s <= limit_s < math.inf and 1 < factor < math.inf):
        raise InvalidInput(
            "an exponential backoff needs a first wait over 0, a factor over 1, and a limit not below it"
        )
    table = [first_s]
    while table[-1] < limit_s:
        table.append(min(limit_s, table[-1] * factor))
        if len(table) > LONGEST_TABLE:
            raise InvalidInput(f"an exponential backoff of more than {LONGEST_TABLE} waits: use a larger factor")
    return tuple(table)


def error_name(kind: type) -> str:
    """Return a class's name in settings: module.Class, or a builtin's Class."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_error_name(name: str) -> None:
    """Raise InvalidInput for an impossible exception name."""
    if _ERROR_NAME.fullmatch(name) is None:
        raise InvalidInput(f"{name!r} names no exception: say module.Class, or Class alone for Python's own")
    own = getattr(builtins, name, None)
    if "." not in name and not (isinstance(own, type) and issubclass(own, BaseException)):
        raise InvalidInput(f"Python has no exception {name!r} of its own: say module.Class")
