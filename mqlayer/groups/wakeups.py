"""Whom a notification of a group is for: payloads of the channel `mqlayer_group`.

`12`: every member and receiver of group 12. `12 a b`: its members a and b.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

NAMED: Final = 100
"""Members per payload: Postgres takes 8,000 bytes, an id has 63 at most."""


def wakeups(group_id: int, members: Collection[str]) -> list[str]:
    """Return the payloads that wake these members of a group."""
    names = sorted(members)
    return [" ".join([str(group_id), *names[at : at + NAMED]]) for at in range(0, len(names), NAMED)]


def wakes(payload: str, group_id: int, member_id: str | None = None) -> bool:
    """Say whether a payload is for a member, or for a receiver of the group; `""` is for all."""
    if not payload:
        return True
    group, *members = payload.split(" ")
    return group == str(group_id) and (not members or member_id in members)
