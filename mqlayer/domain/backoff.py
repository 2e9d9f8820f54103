"""How long a failed message waits before its next attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

DEFAULT_BACKOFF_S: Final[tuple[float, ...]] = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
"""The table of the system's sources: 1 s to 2 h."""


def backoff_s(table: Sequence[float], failed_attempts: int) -> float:
    """Return the wait in seconds after so many failed attempts; the last entry serves for all beyond it."""
    return table[min(failed_attempts, len(table)) - 1]
