"""The first users of a server that keeps its users in a file: one of its stack, and user default, which is off."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqlayer.redis.acl import password_rule
from mqlayer.stack.credentials import REDIS_DEFAULT_USER, Login
from mqlayer.stack.private_files import write_closed

FILE_NAME: Final = "users.acl"
ALL_RIGHTS: Final = ("~*", "&*", "+@all")
DEFAULT_OFF: Final = f"user {REDIS_DEFAULT_USER} off {' '.join(ALL_RIGHTS)}"
"""Its rights stay: Redis reads its append-only file with them, and leaves out what they don't cover."""


def keeps_users(login: Login) -> bool:
    """Return whether a server with this login has users by name; user default alone is a setting."""
    return bool(login.password) and login.user != REDIS_DEFAULT_USER


def holds(file: Path, login: Login) -> bool:
    """Return whether user default is off in a file, and the login lets in; also as the server itself wrote it."""
    if not file.exists():
        return False
    users = {words[1]: set(words[2:]) for words in map(str.split, file.read_text().splitlines()) if words[1:]}
    default, own = users.get(REDIS_DEFAULT_USER, set()), users.get(login.user, set())
    return default.issuperset(("off", *ALL_RIGHTS)) and own.issuperset(("on", password_rule(login.password)))


def write_first_users(file: Path, login: Login) -> None:
    """Write the file with the login, which may do all; others are added by it, and saved by the server."""
    own = f"user {login.user} on {password_rule(login.password)} {' '.join(ALL_RIGHTS)}"
    write_closed(file, f"{DEFAULT_OFF}\n{own}\n".encode())
