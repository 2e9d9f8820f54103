"""Addresses of nodes: a Redis itself, or Sentinels that know which Redis is the primary now.

```text
redis://[user:password@]host[:port][/db][?option=value]
rediss://…                                                              the same over TLS
sentinel://[user:password@]host[:port][,host[:port]…]/service[/db][?option=value]
sentinels://…                                                           the same over TLS, Sentinels too
```

User and password are the Redis's; the Sentinels' own are the options `sentinel_username` and `sentinel_password`.
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

SENTINEL_PORT: Final = 26379
SCHEMES: Final = {
    "sentinel": "redis",
    "sentinels": "rediss",
    "redis+sentinel": "redis",
    "rediss+sentinel": "rediss",
}
OWN_OPTIONS: Final = {"sentinel_username": "username", "sentinel_password": "password"}
FORM: Final = "use redis://host:port/db, rediss://… or sentinel://host:26379,host2:26379/service/db"

Host = tuple[str, int]


class Sentinels(NamedTuple):
    """Who is asked for the primary of a service, and how."""

    hosts: tuple[Host, ...]
    service: str
    options: dict[str, str]


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


class Line:
    """How the driver connects to a node's address: `connection` is its connection, `aim` directs it before a connect.

    The primary is asked for at each connect: Sentinels may have promoted another Redis since.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, timeout_s: float) -> None:
        address = parse_address(url)
        self._sentinels, self._connect_timeout_s = address.sentinels, connect_timeout_s
        pool = redis.ConnectionPool.from_url(
            address.url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=connect_timeout_s,
            socket_keepalive=True,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
        )
        # The driver's connections are not typed.
        self.connection: Any = pool.make_connection()
        self._tls = {k: v for k, v in pool.connection_kwargs.items() if k.startswith("ssl")}
        self._secure = address.url.startswith("rediss:")

    def aim(self) -> None:
        """Ask Sentinels, where the address names such, which Redis is the primary. Raises the driver's errors."""
        found = self._sentinels
        if found is None:
            return
        options: dict[str, Any] = {
            **found.options,
            "socket_timeout": self._connect_timeout_s,
            "socket_connect_timeout": self._connect_timeout_s,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
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


def _parse(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return Address(url, None)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    options = parse_qsl(parts.query)
    own = {OWN_OPTIONS[name]: value for name, value in options if name in OWN_OPTIONS}
    others = urlencode([(name, value) for name, value in options if name not in OWN_OPTIONS])
    if not service or service.isdecimal() or (db and not db.isdecimal()):
        raise ValueError(url)
    found = tuple(_host(text) for text in hosts.split(","))
    before = f"{credentials}@" if credentials else ""
    plain = f"{SCHEMES[parts.scheme]}://{before}{_service_host(found)}/{db or 0}"
    return Address(plain + (f"?{others}" if others else ""), Sentinels(found, service, own))


def _service_host(hosts: tuple[Host, ...]) -> str:
    # Stands for the primary until a Sentinel named it.
    host, port = hosts[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host(text: str) -> Host:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    return parts.hostname, parts.port or SENTINEL_PORT
