"""First users in a Redis ACL file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqlayer.redis.acl import password_rule
from mqlayer.stack.credentials import REDIS_DEFAULT_USER, Login
from mqlayer.stack.private_files import write_closed

FILE_NAME: Final = "users.acl"
ALL_RIGHTS: Final = ("~*", "&*", "+@all")
CELERY_RIGHTS: Final = (*ALL_RIGHTS, "-@admin", "-@dangerous", "+info")
"""On the broker, for all that use its queues."""
DEFAULT_OFF: Final = f"user {REDIS_DEFAULT_USER} off {' '.join(ALL_RIGHTS)}"
"""Keeps its rights: Redis loads the append-only file with them."""


def keeps_users(login: Login) -> bool:
    """Return whether a login needs an ACL file."""
    return bool(login.password) and login.user != REDIS_DEFAULT_USER


def holds(file: Path, login: Login) -> bool:
    """Return whether `default` is off and this login on."""
    if not file.exists():
        return False
    users = {words[1]: set(words[2:]) for words in map(str.split, file.read_text().splitlines()) if words[1:]}
    default, own = users.get(REDIS_DEFAULT_USER, set()), users.get(login.user, set())
    return default.issuperset(("off", *ALL_RIGHTS)) and own.issuperset(("on", password_rule(login.password)))


def write_first_users(file: Path, login: Login) -> None:
    """Write the file with this login, all rights."""
    own = f"user {login.user} on {password_rule(login.password)} {' '.join(ALL_RIGHTS)}"
    write_closed(file, f"{DEFAULT_OFF}\n{own}\n".encode())
