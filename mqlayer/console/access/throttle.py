"""Limits of failed logins, in this process. Attempts count before their hash: many at once get no further."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mqlayer.console.access.site import address_group

SPAN_S: Final = 300.0
PER_PAIR: Final = 5
PER_ADDRESS: Final = 30
PER_USER: Final = 100
"""Failures within the span. The last one is high: it locks a person out everywhere."""
ROOM: Final = 10_000
"""Addresses, and pairs of address and user, that are remembered; then the longest silent ones go."""


@dataclass(slots=True)
class Throttle:
    """Counts failures by user and address, by address, and by user. `now_s`: a steady clock."""

    now_s: Callable[[], float] = time.monotonic
    room: int = ROOM
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failures: OrderedDict[tuple[str, ...], deque[float]] = field(default_factory=OrderedDict)

    def attempt(self, user: str, address: str) -> float:
        """Count a login, as a failure until it passes, or return the seconds until this user may try from this address.

        Of unknown users too, or limits would tell who is known.
        """
        with self._lock:
            keys = list(_keys(user, address))
            if (wait_s := max(self._wait_s(key, limit) for key, limit in keys)) > 0:
                return wait_s
            for key, limit in keys:
                self._failures.setdefault(key, deque(maxlen=limit)).append(self.now_s())
                self._failures.move_to_end(key)
            while len(self._failures) > self.room:
                self._failures.popitem(last=False)
            return 0.0

    def undo(self, user: str, address: str) -> None:
        """Take the last attempt back."""
        with self._lock:
            for key, _ in _keys(user, address):
                if times := self._failures.get(key):
                    times.pop()

    def passed(self, user: str, address: str) -> None:
        """Forget failures of a user from an address."""
        self.undo(user, address)
        with self._lock:
            self._failures.pop((user, address_group(address)), None)

    def _wait_s(self, key: tuple[str, ...], limit: int) -> float:
        times = self._failures.get(key)
        return max(0.0, times[0] + SPAN_S - self.now_s()) if times is not None and len(times) >= limit else 0.0


def _keys(user: str, address: str) -> Iterator[tuple[tuple[str, ...], int]]:
    group = address_group(address)
    yield (user, group), PER_PAIR
    yield (group,), PER_ADDRESS
    yield ("user", user, ""), PER_USER
