"""An account for servers that refuse root."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CANDIDATES: Final = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine."""

    name: str
    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """Return an account for Postgres, None unless root."""
    if os.geteuid() != 0:
        return None
    for name in CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    return Account("65534", 65534, 65534)


def can_enter(directory: Path, account: Account) -> bool:
    """Return whether mode bits let the account enter a directory."""
    resolved = directory.resolve()
    return all(_may_pass(part, account) for part in (resolved, *resolved.parents))


def chown(directory: Path, account: Account | None) -> None:
    """Give a directory to the account alone."""
    if account is not None:
        os.chown(directory, account.uid, account.gid)
    directory.chmod(0o700)


def run_as(account: Account | None) -> dict[str, Any]:
    """Return `subprocess` arguments for the account."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def _may_pass(directory: Path, account: Account) -> bool:
    facts = directory.stat()
    if facts.st_uid == account.uid:
        return bool(facts.st_mode & stat.S_IXUSR)
    if facts.st_gid == account.gid:
        return bool(facts.st_mode & stat.S_IXGRP)
    return bool(facts.st_mode & stat.S_IXOTH)
