"""What a part of a process says of itself, in reasons for people."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

from mqlayer.settings import Settings

STUCK_LEASES: Final = 5
STUCK_FLOOR_S: Final = 30.0
"""A loop may wait for a connection to a store and for a lock in it; what takes longer than this waits for nothing."""


@dataclass(frozen=True, slots=True)
class Health:
    """Why a process does not live, and why it does not serve.

    `stuck` is repaired by starting the process again, what is in `waits` passes by itself.
    """

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
        """Return the health of what consists of these parts."""
        return cls(
            tuple(reason for part in parts for reason in part.stuck),
            tuple(reason for part in parts for reason in part.waits),
        )

    def named(self, name: str) -> Health:
        """Say in each reason whose it is."""
        return Health(
            tuple(f"{name}: {reason}" for reason in self.stuck), tuple(f"{name}: {reason}" for reason in self.waits)
        )


class Liveness:
    """When a loop turned last. Noted by its thread, looked at by others."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.monotonic()

    def note_turn(self) -> None:
        """Note a turn."""
        self._at = time.monotonic()

    def stuck(self, what: str, limit_s: float) -> tuple[str, ...]:
        """Return the reason, if the last turn was longer ago than that."""
        ago_s = time.monotonic() - self._at
        return (f"{what} has not turned for {ago_s:.0f} s",) if ago_s > limit_s else ()


def stuck_after_s(settings: Settings) -> float:
    """Return how long a loop may take for one turn, whatever its stores do."""
    return max(STUCK_FLOOR_S, STUCK_LEASES * settings.lease_s) + settings.socket_timeout_s
