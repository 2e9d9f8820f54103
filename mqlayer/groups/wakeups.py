"""Payloads of `mqlayer_group`. `12`: all of group 12; `12 a b`: its members a and b."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

NAMED: Final = 100
"""Members per payload of 8,000 bytes; an id has 63."""


def wakeups(group_id: int, members: Collection[str]) -> list[str]:
    """Return payloads that wake these members."""
    names = sorted(members)
    return [" ".join([str(group_id), *names[at : at + NAMED]]) for at in range(0, len(names), NAMED)]


def wakes(payload: str, group_id: int, member_id: str | None = None) -> bool:
    """Say whether a payload wakes a member, or a receiver."""
    if not payload:  # listening begins
        return True
    group, *members = payload.split(" ")
    return group == str(group_id) and (not members or member_id in members)
