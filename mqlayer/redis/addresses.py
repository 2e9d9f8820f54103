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

from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from mqlayer.errors import InvalidInput
from mqlayer.redis.access import NodeAccess, Server, access_here

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
    """Take a node's URL apart. Raises InvalidInput, which never shows the URL."""
    try:
        address = _parse(url)
        redis.ConnectionPool.from_url(address.url)
    except ValueError:
        # The driver's words may hold a part of the URL.
        raise InvalidInput(f"bad Redis URL: {FORM}") from None
    return address


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

    def __init__(self, access: NodeAccess, server: Server, node: str) -> None:
        self._access, self._server, self._node = access, server, node

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what AUTH takes."""
        *user, password = self._access.credentials(self._server, self._node)
        return (user[0], password) if user else (password,)


class Line:
    """How the driver connects to a node's address: `connection` is its connection, `aim` directs it before a connect.

    The primary is asked for at each connect: Sentinels may have promoted another Redis since. `access`: how to log in,
    as this process does where not given; `node`: the node's name.
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
        access = access_here() if access is None else access
        self._secure = address.url.startswith("rediss:")
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
            **_logs_in(access, "redis", node),
        )
        # The driver's connections are not typed.
        self.connection: Any = pool.make_connection()

    def aim(self) -> None:
        """Ask Sentinels, where the address names such, which Redis is the primary. Raises the driver's errors,
        and InvalidInput for a file of TLS that can't be read."""
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


def _logs_in(access: NodeAccess, server: Server, node: str) -> dict[str, Any]:
    return {"credential_provider": ReadCredentials(access, server, node)} if access.logs_in(server) else {}


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
