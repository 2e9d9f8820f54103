"""Passwords of a stack's own servers, per kind of process."""

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
REDIS_ADMIN: Final = "mqlayer-admin"
"""Creates the other users of nodes and broker; no process runs as it."""

ProcessKind = Literal["owner", "operator", "relay", "worker", "consumer", "publisher", "viewer"]
NODE_ROLES: Final[dict[ProcessKind, tuple[RedisRole, ...]]] = {
    # Commands, and programs that use the addresses of `env`.
    "operator": GRANTED,
    "relay": (RedisRole.RELAY,),
    # Workers may host consumers, and publish for ordered tasks.
    "worker": (RedisRole.WORKER, RedisRole.CONSUMER, RedisRole.PUBLISHER),
    "consumer": (RedisRole.CONSUMER,),
    "publisher": (RedisRole.PUBLISHER,),
    "viewer": (RedisRole.VIEWER,),
}
BROKER_KINDS: Final[tuple[ProcessKind, ...]] = ("operator", "worker")
"""Commands send tasks, and workers take them; no other kind gets the broker's address."""


@dataclass(frozen=True, slots=True)
class Login:
    """A user with its password, "" for none."""

    user: str
    password: str = field(default="", repr=False)

    def in_dsn(self, dsn: str) -> str:
        """Return a Postgres DSN or URL with this login."""
        if not self.password:
            return dsn
        return self.in_url(dsn) if "://" in dsn else make_conninfo(dsn, user=self.user, password=self.password)

    def in_url(self, url: str) -> str:
        """Return a URL with this login."""
        if not self.password:
            return url
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{login}@{place}"))

    @property
    def access(self) -> NodeAccess | None:
        """Login for nodes; None: as in the settings."""
        return NodeAccess(user=self.user, password=self.password) if self.password else None


@dataclass(frozen=True, slots=True)
class Logins:
    """Logins of one kind of process."""

    postgres: Login = Login(SUPERUSER)
    node: Login = Login(REDIS_DEFAULT_USER)
    broker: Login = Login(REDIS_DEFAULT_USER)


@dataclass(frozen=True, slots=True)
class StackCredentials:
    """Logins by kind of process; `owner` creates the servers."""

    kinds: dict[ProcessKind, Logins] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the file; without it, no passwords. Raises DirectoryRefused."""
        try:
            return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except PermissionError:
            raise DirectoryRefused(directory, "belongs to another account of this machine") from None
        except msgspec.MsgspecError as error:
            # The error's text holds no content.
            raise DirectoryRefused(directory, f"{FILE_NAME} is not readable ({error}): remove it") from error

    @classmethod
    def load_or_make(cls, directory: Path) -> Self:
        """Read the file, and create missing logins."""
        found = cls.load(directory)
        owner = _with_admin(found.kinds.get("owner") or _random_logins())
        own = {kind: _of_kind(owner, kind) for kind in NODE_ROLES} | found.kinds
        made = cls(
            {kind: _with_broker(kind, _with_role(kind, logins)) for kind, logins in own.items()} | {"owner": owner}
        )
        if made == found:
            return found
        write_closed(directory / FILE_NAME, msgspec.json.format(msgspec.json.encode(made)))
        return made

    def of(self, kind: ProcessKind) -> Logins:
        """Return a kind's logins, else the owner's."""
        return self.kinds.get(kind) or self.kinds.get("owner") or Logins()


def _of_kind(owner: Logins, kind: ProcessKind) -> Logins:
    return replace(owner, node=_random_login(f"mqlayer-{kind}"))


def _with_admin(owner: Logins) -> Logins:
    """Earlier versions used `default` on nodes and broker."""
    if owner.node.user == REDIS_DEFAULT_USER:
        owner = replace(owner, node=_random_login(REDIS_ADMIN))
    if owner.broker.user == REDIS_DEFAULT_USER:
        owner = replace(owner, broker=_random_login(REDIS_ADMIN))
    return owner


def _with_broker(kind: ProcessKind, logins: Logins) -> Logins:
    """Earlier versions gave the administrator's password to all."""
    if kind not in BROKER_KINDS:
        return replace(logins, broker=Login(REDIS_DEFAULT_USER))
    user = f"mqlayer-{kind}"
    return logins if logins.broker.user == user else replace(logins, broker=_random_login(user))


def _with_role(kind: ProcessKind, logins: Logins) -> Logins:
    """Earlier versions used the superuser for all."""
    if kind == "owner" or logins.postgres.user != SUPERUSER:
        return logins
    return replace(logins, postgres=_random_login(f"mqlayer_{kind}"))


def _random_logins() -> Logins:
    return Logins(postgres=_random_login(SUPERUSER), node=_random_login(REDIS_ADMIN), broker=_random_login(REDIS_ADMIN))


def _random_login(user: str) -> Login:
    return Login(user, secrets.token_urlsafe(PASSWORD_BYTES))
