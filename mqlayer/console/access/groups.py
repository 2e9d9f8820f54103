"""Levels by the groups that a proxy or a provider names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from mqlayer.console.users import Level, User
from mqlayer.errors import InvalidInput

ALL: Final = "*"
NAME_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class LevelGroups:
    """Groups of viewers, operators, and readers of bodies; `*` is everyone. Raises InvalidInput without any."""

    viewers: Collection[str] = ()
    operators: Collection[str] = ()
    readers: Collection[str] = ()

    def __post_init__(self) -> None:
        if not (self.viewers or self.operators):
            raise InvalidInput("no group may log in: name groups with --viewers or --operators; * is everyone")

    def user(self, name: str | None, groups: Collection[str]) -> User | None:
        """Return a user by his groups; None for one without a level, or a name that is none."""
        if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
            return None
        bodies = _among(self.readers, groups)
        if _among(self.operators, groups):
            return User(name, Level.OPERATOR, bodies)
        return User(name, Level.VIEWER, bodies) if _among(self.viewers, groups) else None


def _among(wanted: Collection[str], groups: Collection[str]) -> bool:
    return ALL in wanted or any(group in wanted for group in groups)
