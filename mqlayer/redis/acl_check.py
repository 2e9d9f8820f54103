"""Checks the user's rights on a node early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from mqlayer.redis.acl import ANY, CommandAccess, needs_of, pattern, probes
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.scripts import HEADERS_SINCE

Ask = Callable[[Sequence[Sequence[Any]]], list[Any]]
"""Sends commands; returns replies or errors."""
MAX_SHOWN: Final = 6
DEFAULT_USER_ADVICE: Final = (
    "user default off ~* &* +@all: Redis reads its append-only file with the rights of that user, "
    "also where it is off, and a restart would lose what they don't cover"
)


class RequiredAccess(NamedTuple):
    """A connection's role and key prefix."""

    role: RedisRole
    prefix: str
    cluster: bool = False


class AccessReport(NamedTuple):
    """Missing rights; None: unknown (before Redis 7, or not allowed to ask)."""

    user: str
    missing: tuple[CommandAccess, ...] | None

    def describe(self, required: RequiredAccess) -> str:
        """Name missing rights, and the command that prints the rules."""
        missing = self.missing or ()
        named = ", ".join(
            f"+{need.command}" + (f" on {pattern(required.prefix, need.key or ANY)}" if need.key else "")
            for need in missing[:MAX_SHOWN]
        )
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        role = "worker" if required.role is RedisRole.ARMING else required.role
        command = f"mqlayer node acl {role} --user {self.user}{' --cluster' if required.cluster else ''}"
        return f"user {self.user!r} lacks {named}{more}: {command} prints its rules"


def access_of(ask: Ask, required: RequiredAccess, version: tuple[int, int, int], user: str = "") -> AccessReport:
    """Check a role's rights by ACL DRYRUN; `user` '': the connection's."""
    if version < HEADERS_SINCE:
        return AccessReport(user, None)
    if not user:
        (me,) = ask([("ACL", "WHOAMI")])
        if isinstance(me, Exception):
            return AccessReport("", None)
        user = me.decode()
    wanted = probes(needs_of(required.role, cluster=required.cluster), required.prefix)
    replies = ask([("ACL", "DRYRUN", user, *call) for call in wanted.values()])
    if any(isinstance(reply, Exception) for reply in replies):
        return AccessReport(user, None)
    return AccessReport(user, tuple(need for need, reply in zip(wanted, replies, strict=True) if reply != b"OK"))


def loses_transactions(ask: Ask, required: RequiredAccess, version: tuple[int, int, int]) -> bool:
    """Whether a restart would lose writes of scripts.

    Redis 7 replays its append-only file with user default's rights, even if off, and silently skips forbidden
    commands in transactions.
    """
    found = access_of(ask, required._replace(role=RedisRole.WORKER), version, "default")
    return bool(found.missing)


class _CheckedAccess:
    """The last run at each address whose rights are confirmed, per user and need."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, RequiredAccess], str] = {}

    def has(self, url: str, run_id: str, user: str, required: RequiredAccess) -> bool:
        with self._lock:
            return self._known.get((url, user, required)) == run_id

    def add(self, url: str, run_id: str, user: str, required: RequiredAccess) -> None:
        with self._lock:
            self._known[url, user, required] = run_id


CHECKED: Final = _CheckedAccess()
