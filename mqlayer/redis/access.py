"""A process's login to nodes: user, password, TLS files, from `MQLAYER_REDIS_*` or Settings; one per process."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlsplit, urlunsplit

from mqlayer.env_file import variable
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.redaction import register_secrets
from mqlayer.settings import Settings

NODE: Final = "{node}"
"""In password files' paths: the node's name."""
VARIABLES: Final = tuple(f"MQLAYER_{name.upper()}" for name in Settings.model_fields if name.startswith("redis_"))

ServerKind = Literal["redis", "sentinel"]


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """A process's `redis_*` settings; repr hides passwords."""

    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    sentinel_password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    hosts: str = ""
    setting: str = "MQLAYER_REDIS_"

    def credentials(self, server: ServerKind, node: str = "") -> tuple[str, ...]:
        """Return AUTH's arguments: none, password, or user and password.

        Reads the file at each call. Raises InvalidInput for an unreadable file, or a user without password.
        """
        user, password, file = self.user, self.password, self.password_file
        if server == "sentinel":
            user, password, file = self.sentinel_user, self.sentinel_password, self.sentinel_password_file
        if file:
            password = read_secret(file.replace(NODE, node))
        register_secrets(password)
        if user and not password:
            name = f"{self.setting}{'SENTINEL_' if server == 'sentinel' else ''}PASSWORD"
            raise InvalidInput(f"Redis user {user!r} has no password: set {name}_FILE or {name}")
        return tuple(part for part in (user, password) if part)

    def logs_in(self, server: ServerKind) -> bool:
        """Whether credentials exist."""
        if server == "sentinel":
            return bool(self.sentinel_user or self.sentinel_password or self.sentinel_password_file)
        return bool(self.user or self.password or self.password_file)

    def tls(self) -> dict[str, Any]:
        """Return the driver's TLS arguments; verification is always on."""
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        return {"ssl_cert_reqs": "required", "ssl_check_hostname": True} | {k: v for k, v in files.items() if v}

    def check_host(self, host: str, port: int | None = None) -> None:
        """Raise InvalidInput for a server outside `hosts`.

        `*` in a pattern stands for a part without dot or colon; a pattern without port holds for all ports.
        """
        patterns = [pattern.strip().lower() for pattern in self.hosts.split(",") if pattern.strip()]
        host = host.lower()
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if patterns and not any(_fits(pattern, name) for pattern in patterns for name in (host, server)):
            raise InvalidInput(
                f"{server} is not among MQLAYER_REDIS_HOSTS, so it gets no login: add it, or correct the address"
            )

    def check_encrypted(self, *, secure: bool) -> None:
        """Raise InvalidInput for an address without TLS where TLS is set up."""
        if not secure and (self.ca_file or self.cert_file):
            raise InvalidInput(
                "its address has no TLS, and MQLAYER_REDIS_CA_FILE or MQLAYER_REDIS_CERT_FILE is set, so it gets no "
                "login: give the node an address at rediss:// or sentinels://, or unset them"
            )

    def check_files(self) -> None:
        """Raise InvalidInput for an unreadable TLS file."""
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise InvalidInput(f"{path} can't be read: see MQLAYER_REDIS_{name.upper()}")


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch("[^.:]*".join(map(re.escape, pattern.split("*"))), name) is not None


def read_secret(path: str) -> str:
    """Return a file's password. Raises InvalidInput, which never shows it."""
    try:
        found = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"password file {path} can't be read ({type(error).__name__}): see the setting") from None
    if not found:
        raise InvalidInput(f"password file {path} is empty: write the password into it")
    return found


def broker_access(settings: Settings) -> NodeAccess:
    """Return the broker's login."""
    return NodeAccess(
        user=settings.broker_user,
        password=settings.broker_password.get_secret_value(),
        password_file=settings.broker_password_file,
        ca_file=settings.redis_ca_file,
        cert_file=settings.redis_cert_file,
        key_file=settings.redis_key_file,
        setting="MQLAYER_BROKER_",
    )


def broker_url(settings: Settings) -> str:
    """Return the broker's URL with credentials, for Celery only. Raises InvalidInput."""
    url = settings.broker_url.get_secret_value()
    found = broker_access(settings).credentials("redis")
    if not found:
        return url
    parts = urlsplit(url)
    user, password = ["", *found][-2:]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{host}"))


def access_of(settings: Settings) -> NodeAccess:
    """Return the settings' login."""
    return NodeAccess(
        user=settings.redis_user,
        password=settings.redis_password.get_secret_value(),
        password_file=settings.redis_password_file,
        sentinel_user=settings.redis_sentinel_user,
        sentinel_password=settings.redis_sentinel_password.get_secret_value(),
        sentinel_password_file=settings.redis_sentinel_password_file,
        ca_file=settings.redis_ca_file,
        cert_file=settings.redis_cert_file,
        key_file=settings.redis_key_file,
        hosts=settings.redis_hosts,
    )


class _AccessOverride:
    def __init__(self) -> None:
        self.access: NodeAccess | None = None
        self.lock = threading.Lock()


_given = _AccessOverride()


def use_access(settings: Settings) -> None:
    """Use these settings' login in the whole process; without `redis_*`, change nothing.

    Raises Conflict if the program set another.
    """
    access = access_of(settings)
    if access == NodeAccess() or access == access_here():
        return
    with _given.lock:
        if _given.access is not None:
            raise Conflict(
                f"this process logs in to nodes as {_given.access.user or 'the default user'!r} already",
                "a process has one Redis user: give all its Settings the same redis_* values",
            )
        _given.access = access


def forget_access() -> None:
    """Use the environment's login."""
    with _given.lock:
        _given.access = None


@contextmanager
def acting_as(access: NodeAccess | None) -> Iterator[None]:
    """Use a login process-wide for the block; None: no change."""
    if access is None:
        yield
        return
    with _given.lock:
        before, _given.access = _given.access, access
    try:
        yield
    finally:
        with _given.lock:
            _given.access = before


def use_only(access: NodeAccess | None) -> None:
    """Replace the process's login; None: the environment's. For commands only."""
    with _given.lock:
        _given.access = access


def access_here() -> NodeAccess:
    """Return this process's login."""
    return _given.access or _from_environment(tuple(map(variable, VARIABLES)))


@lru_cache(maxsize=8)
def _from_environment(values: tuple[str | None, ...]) -> NodeAccess:
    # Not Settings(): it would also fail for unrelated wrong variables.
    present: Mapping[str, str] = {
        name.removeprefix("MQLAYER_REDIS_").lower(): value
        for name, value in zip(VARIABLES, values, strict=True)
        if value is not None
    }
    return NodeAccess(**present)
