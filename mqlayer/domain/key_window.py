"""Which distinct keys failed lately, and which succeeded."""

from __future__ import annotations

from collections import Counter
from typing import Final

MOST_KEYS: Final = 5_000
"""Kept of either kind; a share of the newest is as good."""


class KeyWindow:
    """The last results of keys within `seconds`. A key counts once, by its last result."""

    def __init__(self) -> None:
        self._failing: dict[bytes, tuple[float, str]] = {}
        self._succeeded: dict[bytes, float] = {}

    @property
    def failing(self) -> int:
        """How many keys failed."""
        return len(self._failing)

    @property
    def tried(self) -> int:
        """How many keys were tried."""
        return len(self._failing) + len(self._succeeded)

    @property
    def cause(self) -> str:
        """The error that most keys had."""
        classes = Counter(cause for _, cause in self._failing.values())
        return max(classes, key=lambda cause: (classes[cause], cause), default="")

    def fails(self, share: float, keys: int) -> bool:
        """Whether at least so many keys fail, and so large a share."""
        return self.failing >= max(1, keys) and self.failing >= share * self.tried

    def fail(self, key: bytes, at: float, cause: str) -> None:
        """Note a key's failure."""
        self._succeeded.pop(key, None)
        self._failing.pop(key, None)
        self._failing[key] = at, cause
        if len(self._failing) > MOST_KEYS:
            del self._failing[next(iter(self._failing))]

    def succeed(self, key: bytes, at: float) -> None:
        """Note a key's success."""
        self._failing.pop(key, None)
        self._succeeded.pop(key, None)
        self._succeeded[key] = at
        if len(self._succeeded) > MOST_KEYS:
            del self._succeeded[next(iter(self._succeeded))]

    def forget(self, before: float) -> None:
        """Forget older results."""
        # By their order: each result was put last.
        while self._failing and next(iter(self._failing.values()))[0] < before:
            del self._failing[next(iter(self._failing))]
        while self._succeeded and next(iter(self._succeeded.values())) < before:
            del self._succeeded[next(iter(self._succeeded))]

    def clear(self) -> None:
        """Forget all results."""
        self._failing.clear()
        self._succeeded.clear()
