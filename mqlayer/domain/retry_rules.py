"""What becomes of a message that failed: how long it waits, which errors are final, and who decides in the end."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from mqlayer.errors import HandlerControl, HandlerFault, InvalidInput

Policy = Literal["park", "block", "dead_letter", "skip"]
"""What is done with a message whose attempts ran out, that failed for good, or that its handler rejected."""

POLICIES: Final[tuple[str, ...]] = get_args(Policy)

DEFAULT_BACKOFF_S: Final[tuple[float, ...]] = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
"""The table of the system's sources: 1 s to 2 h."""

DEFAULT_ATTEMPT_LIMIT: Final = 17
GIB: Final = 1 << 30
PARKING_LIMITS: Final = (
    "parked_keys_limit", "parked_messages_limit", "parked_bytes_limit", "key_messages_limit", "key_bytes_limit",
)  # fmt: skip
LONGEST_TABLE: Final = 1_000

_ERROR_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class RetryRules:
    """A group's settings for messages that fail. In the order of the columns that hold them.

    `backoff_s`: waits in seconds between attempts, the last one for all further; up to the part `jitter` of each is
    left out by chance. `attempt_limit`: failed attempts after which `policy` decides. `non_retryable_errors` and
    `retryable_errors`: names of exceptions, see `is_final`. `time_limit_s`: how long a handler has for a message, and
    `max_time_limit_s`: up to which it may extend that; None for no limit.

    What may wait in Postgres: `parked_keys_limit` keys of a partition; `parked_messages_limit` messages and
    `parked_bytes_limit` bytes (of bodies, keys and headers) of the group, `key_messages_limit` and `key_bytes_limit` of
    each of its keys. A group's may be passed by what its members write at that moment, 500 messages or 1 MB each, and
    any of bytes by one message. What finds no room waits in the stream.
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

    @classmethod
    def of(cls, columns: Sequence[Any]) -> RetryRules:
        """Return the rules that a row holds."""
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in columns]
        return cls(*values)

    def wait_s(self, failed_attempts: int, share: float) -> float:
        """Return the wait in seconds after so many failed attempts. `share`: a random number from 0 to 1."""
        whole_s = self.backoff_s[min(failed_attempts, len(self.backoff_s)) - 1]
        return whole_s * (1.0 - self.jitter * share)

    def is_final(self, error: BaseException) -> bool:
        """Say whether an error is not worth another attempt.

        The nearest of its class and that class's bases decides that is named as final or as retried; one that is named
        as both is final. Where none is: it is final if only those that are named are retried, unless mqlayer reports it
        itself (HandlerFault). What a handler asks for (HandlerControl) is no error, and never final by a name.
        """
        if isinstance(error, HandlerControl):
            return False
        for kind in type(error).__mro__:
            name = error_name(kind)
            if name in self.non_retryable_errors:
                return True
            if name in self.retryable_errors:
                return False
        return bool(self.retryable_errors) and not isinstance(error, HandlerFault)


RULES_COUNT: Final = len(RetryRules.__slots__)
"""How many columns hold the rules of a group."""


def exponential(first_s: float, factor: float, limit_s: float) -> tuple[float, ...]:
    """Return the table of waits that grow by a factor, from the first one up to a limit. Raises InvalidInput."""
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
    """Return the name by which settings know a class: module.Class, or Class alone for Python's own."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_error_name(name: str) -> None:
    """Raise InvalidInput for a name that no exception can have."""
    if _ERROR_NAME.fullmatch(name) is None:
        raise InvalidInput(f"{name!r} names no exception: say module.Class, or Class alone for Python's own")
    own = getattr(builtins, name, None)
    if "." not in name and not (isinstance(own, type) and issubclass(own, BaseException)):
        raise InvalidInput(f"Python has no exception {name!r} of its own: say module.Class")
