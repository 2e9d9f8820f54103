"""Health as reasons for people."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

from mqlayer.settings import Settings

STUCK_LEASES: Final = 5
STUCK_FLOOR_S: Final = 30.0
"""Longer than any wait for a connection or lock."""


@dataclass(frozen=True, slots=True)
class Health:
    """Why a process is not live or ready. `stuck` needs a restart, `waits` passes by itself."""

    stuck: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether its loops turn."""
        return not self.stuck

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.live and not self.waits

    @classmethod
    def of_all(cls, *parts: Health) -> Self:
        """Combine parts."""
        return cls(
            tuple(reason for part in parts for reason in part.stuck),
            tuple(reason for part in parts for reason in part.waits),
        )

    def named(self, name: str) -> Health:
        """Prefix each reason."""
        return Health(
            tuple(f"{name}: {reason}" for reason in self.stuck), tuple(f"{name}: {reason}" for reason in self.waits)
        )


class Liveness:
    """A loop's last turn; any thread may read it."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.monotonic()

    def note_turn(self) -> None:
        """Note a turn."""
        self._at = time.monotonic()

    def stuck(self, what: str, limit_s: float) -> tuple[str, ...]:
        """Return a reason if the last turn is too old."""
        ago_s = time.monotonic() - self._at
        return (f"{what} has been stuck for {ago_s:.0f} s",) if ago_s > limit_s else ()


def stuck_after_s(settings: Settings) -> float:
    """Return the limit of a turn."""
    return max(STUCK_FLOOR_S, STUCK_LEASES * settings.lease_s) + settings.socket_timeout_s
