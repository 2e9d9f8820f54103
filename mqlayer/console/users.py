"""Users of the console and what each may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """A user's rights: a viewer looks, an operator acts too."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    """A person at the console. `bodies`: sees bodies and headers of messages."""

    name: str
    level: Level = Level.VIEWER
    bodies: bool = False

    @property
    def may_act(self) -> bool:
        """Whether it is an operator."""
        return self.level is Level.OPERATOR
