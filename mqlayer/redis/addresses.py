"""Addresses of nodes: a Redis itself, or Sentinels that know which Redis is the primary now.

```text
redis://host[:port][/db][?option=value]
rediss://…                                                the same over TLS
sentinel://host[:port][,host[:port]…]/service[/db][?option=value]
sentinels://…                                             the same over TLS, Sentinels too
```

An address is no secret, and is the same for all processes: users, passwords and certificates are settings of each
process (see `access`). Celery's broker is no node: its URL is a setting, and may hold a user and a password.
`redis+sentinel://` and `rediss+sentinel://` are other names of the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from mqlayer.errors import InvalidInput
from mqlayer.redaction import register_secrets
from mqlayer.redis.access import NodeAccess, ServerKind, access_here

SENTINEL_PORT: Final = 26379
SCHEMES: Final = {
    "sentinel": "redis",
    "sentinels": "rediss",
    "redis+sentinel": "redis",
    "rediss+sentinel": "rediss",
}
SECRET_OPTIONS: Final = frozenset(
    {"username", "password", "credential_provider", "sentinel_username", "sentinel_password", "ssl_password"}
)
UNVERIFIED_OPTIONS: Final = frozenset({"ssl_cert_reqs", "ssl_check_hostname"})
"""TLS without them is TLS with whoever answers: an address can't turn it off for all processes."""
FORM: Final = "use redis://host:port/db, rediss://… or sentinel://host:26379,host2:26379/service/db"

ENCODE: Final = "write @ : / ? # % and blanks in a password as %40 %3A %2F %3F %23 %25 %20"
PLAIN_SCHEMES: Final = ("redis", "rediss")

Host = tuple[str, int]


class Sentinels(NamedTuple):
    """Who is asked for the primary of a service."""

    hosts: tuple[Host, ...]
    service: str


class Address(NamedTuple):
    """An address taken apart. `url`: where the Redis is and how it is spoken to; its host is void with `sentinels`."""

    url: str
    sentinels: Sentinels | None


def parse_address(url: str) -> Address:
    """Take a node's URL apart. Raises InvalidInput, which never shows the URL.

    One whose parts could be meant otherwise is refused too: with a bare `/` in its password, a part of that would be
    taken for the host, and shown as such.
    """
    address = _parsed(url)
    if address is None:
        raise InvalidInput(f"bad Redis URL: {FORM}; {ENCODE}")
    register_secrets(*_secrets_in(url))
    return address


def display_url(url: str) -> str:
    """Return where a Redis is, for messages: scheme, hosts and database; no user, no password, no option."""
    if _parsed(url) is None:
        return "a Redis (its URL can't be parsed)"
    return _place(url)


def check_broker_url(url: str) -> str:
    """Return the URL of Celery's broker, or several with semicolons. Raises InvalidInput, which never shows it."""
    for part in url.split(";"):
        if not _is_clear_broker(part):
            raise InvalidInput(
                f"MQLAYER_BROKER_URL can't be parsed: give redis://host:port/db; {ENCODE}, or set "
                "MQLAYER_BROKER_PASSWORD_FILE"
            )
        register_secrets(*_secrets_in(part))
    return url


def display_broker_url(url: str) -> str:
    """Return where the broker is, for messages: no user, no password, no option."""
    parts = url.split(";")
    return ";".join(_place(part) if _is_clear_broker(part) else "(a URL that can't be parsed)" for part in parts)


def _is_clear_broker(url: str) -> bool:
    if url.startswith(("redis://", "rediss://", "unix://")):
        return _parsed(url) is not None
    try:
        # Asking for the port parses it.
        return _is_clear(url) and bool(urlsplit(url).scheme) and urlsplit(url).port != 0
    except ValueError:
        return False


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _parsed(url: str) -> Address | None:
    try:
        address = _parse(url) if _is_clear(url) else None
        if address is not None:
            # Connects to nothing; an option that the driver does not know is a TypeError.
            redis.ConnectionPool.from_url(address.url).make_connection()
    except (ValueError, TypeError, redis.RedisError):
        # The driver's words may hold a part of the URL.
        return None
    return address


def _is_clear(url: str) -> bool:
    """Return whether the parts of a URL end where they seem to."""
    parts = urlsplit(url)
    if "#" in url or "@" in parts.path + parts.query or parts.netloc.count("@") > 1:
        return False
    if parts.query and not parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True):
        return False
    return parts.scheme not in PLAIN_SCHEMES or not parts.path.strip("/") or parts.path.strip("/").isdecimal()


def _secrets_in(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    yield unquote(login.partition(":")[2])
    yield from (value for name, value in parse_qsl(parts.query) if "password" in name)


def refuse_secrets(url: str) -> None:
    """Raise InvalidInput for a node's URL that holds more than an address; it never shows the URL."""
    parts, named = urlsplit(url), [name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
    if "@" in parts.netloc or SECRET_OPTIONS & set(named):
        raise InvalidInput(
            "a node's URL is an address and stands in Postgres for every process to read: give it without user and "
            "password, and set MQLAYER_REDIS_USER and MQLAYER_REDIS_PASSWORD_FILE for each process"
        )
    if UNVERIFIED_OPTIONS & set(named):
        raise InvalidInput(
            f"a node's URL has no {', '.join(sorted(UNVERIFIED_OPTIONS & set(named)))}: certificates are always "
            "verified; set MQLAYER_REDIS_CA_FILE to the authority that signed the node's"
        )


class ReadCredentials(redis.CredentialProvider):
    """Asks for user and password at each connection: a file may have another password by then."""

    def __init__(self, access: NodeAccess, server: ServerKind, node: str) -> None:
        self._access, self._server, self._node = access, server, node

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what AUTH takes."""
        *user, password = self._access.credentials(self._server, self._node)
        return (user[0], password) if user else (password,)


class ConnectionFactory:
    """How the driver connects to a node's address: `connection` is its connection, `resolve_primary` directs it before
    a connect.

    The primary is asked for at each connect: Sentinels may have promoted another Redis since. `access`: how to log in,
    as this process does where not given; `node`: the node's name. A node's URL must not hold credentials where the
    process logs in by its settings (`resolve_primary` refuses it); those of another server's give way to `access`.
    `anonymous`: it speaks TLS without a certificate of its own.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        timeout_s: float,
        node: str = "",
        access: NodeAccess | None = None,
    ) -> None:
        address = parse_address(url)
        of_node, access = access is None, access_here() if access is None else access
        self._secure = address.url.startswith("rediss:")
        self.anonymous = self._secure and not access.cert_file
        self._access, self._node = access, node
        self._tls = access.tls() if self._secure else {}
        self._sentinels, self._connect_timeout_s = address.sentinels, connect_timeout_s
        pool = redis.ConnectionPool.from_url(
            address.url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=connect_timeout_s,
            socket_keepalive=True,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            # Its name at the server: one more right that each user would need.
            driver_info=None,
            **self._tls,
        )
        login = _logs_in(access, "redis", node)
        self._refused = bool(login) and _drop_credentials(pool.connection_kwargs) and of_node
        pool.connection_kwargs.update(login)
        # The driver's connections are not typed.
        self.connection: Any = pool.make_connection()

    def resolve_primary(self) -> None:
        """Ask Sentinels, where the address names such, which Redis is the primary. Raises the driver's errors,
        and InvalidInput for a file of TLS that can't be read, or for credentials in the URL besides the settings'."""
        if self._refused:
            raise InvalidInput(
                "its URL holds a user or a password, and MQLAYER_REDIS_* say how to log in: give the node an address "
                "without them, or unset MQLAYER_REDIS_USER and MQLAYER_REDIS_PASSWORD_FILE"
            )
        if self._secure:
            self._access.check_files()
        found = self._sentinels
        if found is None:
            return
        options: dict[str, Any] = {
            "socket_timeout": self._connect_timeout_s,
            "socket_connect_timeout": self._connect_timeout_s,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "driver_info": None,
            **_logs_in(self._access, "sentinel", self._node),
        }
        if self._secure:
            options |= self._tls | {"ssl": True}
        # Not typed by the driver.
        asked: Any = redis.sentinel.Sentinel(list(found.hosts), sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        try:
            host, port = asked.discover_master(found.service)
        finally:
            for client in asked.sentinels:
                client.close()
        self.connection.host, self.connection.port = host, port


def _logs_in(access: NodeAccess, server: ServerKind, node: str) -> dict[str, Any]:
    return {"credential_provider": ReadCredentials(access, server, node)} if access.logs_in(server) else {}


def _drop_credentials(options: dict[str, Any]) -> bool:
    """Take out how a URL itself logs in, which the driver wants alone; return whether it did."""
    dropped = [options.pop(name, None) for name in ("username", "password", "credential_provider")]
    return any(dropped)


def _parse(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return Address(url, None)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    others = urlencode(parse_qsl(parts.query))
    if not service or service.isdecimal() or (db and not db.isdecimal()):
        raise ValueError(url)
    found = tuple(_host(text) for text in hosts.split(","))
    before = f"{credentials}@" if credentials else ""
    plain = f"{SCHEMES[parts.scheme]}://{before}{_service_host(found)}/{db or 0}"
    return Address(plain + (f"?{others}" if others else ""), Sentinels(found, service))


def _service_host(hosts: tuple[Host, ...]) -> str:
    # Stands for the primary until a Sentinel named it.
    host, port = hosts[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host(text: str) -> Host:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    return parts.hostname, parts.port or SENTINEL_PORT
