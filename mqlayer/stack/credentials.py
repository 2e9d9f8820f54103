"""The passwords of a stack's own servers: random, made at the first start, kept in one file for its owner only.

Each kind of process has its logins there; whatever connects, and the environment of each child, is made from them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from psycopg.conninfo import make_conninfo

from mqlayer.redis.access import NodeAccess
from mqlayer.redis.roles import GRANTED, RedisRole
from mqlayer.stack.errors import DirectoryRefused
from mqlayer.stack.private_files import write_closed

FILE_NAME: Final = "credentials.json"
PASSWORD_BYTES: Final = 24
SUPERUSER: Final = "postgres"
REDIS_DEFAULT_USER: Final = "default"
NODE_ADMIN: Final = "mqlayer-admin"
"""The stack's own user on its nodes: it makes the others. No process runs as it."""

ProcessKind = Literal["owner", "operator", "relay", "worker", "consumer", "publisher", "viewer"]
NODE_ROLES: Final[dict[ProcessKind, tuple[RedisRole, ...]]] = {
    # The commands here, and the programs that are given this stack's addresses.
    "operator": GRANTED,
    "relay": (RedisRole.RELAY,),
    # It may host consumers, and publish what ordered tasks ask for.
    "worker": (RedisRole.WORKER, RedisRole.CONSUMER, RedisRole.PUBLISHER),
    "consumer": (RedisRole.CONSUMER,),
    "publisher": (RedisRole.PUBLISHER,),
    "viewer": (RedisRole.VIEWER,),
}
"""What the processes of a stack may do on its nodes; the owner's user is the one that nodes are made with.

Each has a role of its own in Postgres, too; the owner's is the superuser, as which no process runs.
"""


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a server with its password; without a password the server asks for none."""

    user: str
    password: str = field(default="", repr=False)

    def in_dsn(self, dsn: str) -> str:
        """Return a DSN of Postgres with this login in the place of any other; a URL stays one."""
        if not self.password:
            return dsn
        return self.in_url(dsn) if "://" in dsn else make_conninfo(dsn, user=self.user, password=self.password)

    def in_url(self, url: str) -> str:
        """Return a URL with this login in the place of any other."""
        if not self.password:
            return url
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{login}@{place}"))

    @property
    def access(self) -> NodeAccess | None:
        """How a process logs in to nodes like this; None where it does as its settings say."""
        return NodeAccess(user=self.user, password=self.password) if self.password else None


@dataclass(frozen=True, slots=True)
class Logins:
    """As whom one kind of process reaches the servers of a stack."""

    postgres: Login = Login(SUPERUSER)
    node: Login = Login(REDIS_DEFAULT_USER)
    broker: Login = Login(REDIS_DEFAULT_USER)


@dataclass(frozen=True, slots=True)
class StackCredentials:
    """Logins by kind of process. The owner's are those that the servers are made with."""

    kinds: dict[ProcessKind, Logins] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return what the directory holds; before the first start of a server, logins without passwords."""
        try:
            return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except PermissionError:
            raise DirectoryRefused(directory, "belongs to another account of this machine") from None
        except msgspec.MsgspecError as error:
            # The error's text names the place, never the content.
            raise DirectoryRefused(directory, f"{FILE_NAME} is not readable ({error}): remove it") from error

    @classmethod
    def load_or_make(cls, directory: Path) -> Self:
        """Return what the directory holds; make and keep new passwords where it holds none.

        An owner who is user default on the nodes, as an earlier version left it, becomes a user of its own.
        """
        found = cls.load(directory)
        owner = _with_admin(found.kinds.get("owner") or _random_logins())
        own = {kind: _of_kind(owner, kind) for kind in NODE_ROLES} | found.kinds
        made = cls({kind: _with_role(kind, logins) for kind, logins in own.items()} | {"owner": owner})
        if made == found:
            return found
        write_closed(directory / FILE_NAME, msgspec.json.format(msgspec.json.encode(made)))
        return made

    def of(self, kind: ProcessKind) -> Logins:
        """Return the logins of a kind of process; the owner's where it has none of its own."""
        return self.kinds.get(kind) or self.kinds.get("owner") or Logins()


def _of_kind(owner: Logins, kind: ProcessKind) -> Logins:
    """Return the logins of a kind of process: a user of its own on the nodes."""
    return replace(owner, node=Login(f"mqlayer-{kind}", secrets.token_urlsafe(PASSWORD_BYTES)))


def _with_admin(owner: Logins) -> Logins:
    """Return the owner's logins with another user on the nodes than default."""
    if owner.node.user != REDIS_DEFAULT_USER:
        return owner
    return replace(owner, node=Login(NODE_ADMIN, secrets.token_urlsafe(PASSWORD_BYTES)))


def _with_role(kind: ProcessKind, logins: Logins) -> Logins:
    """Return the logins of a kind of process with a role of its own in Postgres; the owner's stay the superuser's."""
    if kind == "owner" or logins.postgres.user != SUPERUSER:
        return logins
    return replace(logins, postgres=Login(f"mqlayer_{kind}", secrets.token_urlsafe(PASSWORD_BYTES)))


def _random_logins() -> Logins:
    return Logins(
        postgres=Login(SUPERUSER, secrets.token_urlsafe(PASSWORD_BYTES)),
        node=Login(NODE_ADMIN, secrets.token_urlsafe(PASSWORD_BYTES)),
        broker=Login(REDIS_DEFAULT_USER, secrets.token_urlsafe(PASSWORD_BYTES)),
    )
