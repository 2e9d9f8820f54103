"""Node URLs: a Redis, Sentinels that name the primary, or servers of a cluster.

```text
redis://host[:port][/db][?option=value]
rediss://…                                                over TLS
sentinel://host[:port][,host[:port]…]/service[/db][?option=value]
sentinels://…                                             over TLS, Sentinels too
cluster://host[:port][,host[:port]…][?option=value]       some servers of a Redis Cluster
clusters://…                                              over TLS
```

`redis+sentinel://`, `rediss+sentinel://`, `redis+cluster://` and `rediss+cluster://` are aliases. A node's URL holds no
credentials; the broker's may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

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
CLUSTER_PORT: Final = 6379
CLUSTER_SCHEMES: Final = {
    "cluster": "redis",
    "clusters": "rediss",
    "redis+cluster": "redis",
    "rediss+cluster": "rediss",
}
SECRET_OPTIONS: Final = frozenset(
    {"username", "password", "credential_provider", "sentinel_username", "sentinel_password", "ssl_password"}
)
UNVERIFIED_OPTIONS: Final = frozenset({"ssl_cert_reqs", "ssl_check_hostname"})
"""They turn TLS verification off for all processes."""
FORM: Final = "use redis://host:port/db, rediss://…, sentinel://host:26379,host2:26379/service/db or cluster://host:6379,host2:6379"

ENCODE: Final = "write @ : / ? # % and blanks in a password as %40 %3A %2F %3F %23 %25 %20"
PLAIN_SCHEMES: Final = ("redis", "rediss")

Host = tuple[str, int]


class Sentinels(NamedTuple):
    """A service's Sentinels."""

    hosts: tuple[Host, ...]
    service: str


class Address(NamedTuple):
    """`url`: for the driver; with `sentinels` or `seeds` its host is a placeholder."""

    url: str
    sentinels: Sentinels | None
    seeds: tuple[Host, ...] = ()
    """Servers of a cluster."""


def parse_address(url: str) -> Address:
    """Parse a node's URL. Raises InvalidInput, which never shows it.

    Refuses ambiguous URLs: behind a bare `/`, a password would show as the host.
    """
    address = _parsed(url)
    if address is None:
        raise InvalidInput(f"bad Redis URL: {FORM}; {ENCODE}")
    register_secrets(*_secrets_in(url))
    return address


def is_cluster_url(url: str) -> bool:
    """Whether a node's URL names a cluster."""
    return url.partition("://")[0] in CLUSTER_SCHEMES


def shard_url(url: str, host: Host) -> str:
    """Return the URL of one server of a cluster, with the cluster's options."""
    parts = _split(url)
    credentials = parts.netloc.rpartition("@")[0]
    before = f"{credentials}@" if credentials else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{CLUSTER_SCHEMES[parts.scheme]}://{before}{_service_host((host,))}/0{query}"


def display_url(url: str) -> str:
    """Return scheme, hosts, database."""
    if _parsed(url) is None:
        return "a Redis (its URL can't be parsed)"
    return _place(url)


def check_broker_url(url: str) -> str:
    """Check the broker's URLs, divided by semicolons. Raises InvalidInput, which never shows them."""
    for part in url.split(";"):
        if not _is_clear_broker(part):
            raise InvalidInput(
                f"MQLAYER_BROKER_URL can't be parsed: give redis://host:port/db; {ENCODE}, or set "
                "MQLAYER_BROKER_PASSWORD_FILE"
            )
        register_secrets(*_secrets_in(part))
    return url


def display_broker_url(url: str) -> str:
    """Return the broker's address without secrets."""
    parts = url.split(";")
    return ";".join(_place(part) if _is_clear_broker(part) else "(a URL that can't be parsed)" for part in parts)


def _is_clear_broker(url: str) -> bool:
    if url.startswith(("redis://", "rediss://", "unix://")):
        return _parsed(url) is not None
    try:
        # Reading the port parses it.
        return _is_clear(url) and bool(urlsplit(url).scheme) and urlsplit(url).port != 0
    except ValueError:
        return False


def _place(url: str) -> str:
    parts = _split(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _parsed(url: str) -> Address | None:
    try:
        address = _parse(url) if _is_clear(url) else None
        if address is not None:
            # Does not connect; an unknown option is a TypeError. Without a driver's info: that reads files.
            redis.ConnectionPool.from_url(address.url, driver_info=None).make_connection()
    except (ValueError, TypeError, redis.RedisError):
        # The driver's message may hold a part of the URL.
        return None
    return address


def _is_clear(url: str) -> bool:
    parts = _split(url)
    if "#" in url or "@" in parts.path + parts.query or parts.netloc.count("@") > 1:
        return False
    if parts.query and not parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True):
        return False
    return parts.scheme not in PLAIN_SCHEMES or not parts.path.strip("/") or parts.path.strip("/").isdecimal()


def _secrets_in(url: str) -> Iterator[str]:
    parts = _split(url)
    login = parts.netloc.rpartition("@")[0]
    yield unquote(login.partition(":")[2])
    yield from (value for name, value in parse_qsl(parts.query) if "password" in name)


def refuse_secrets(url: str) -> None:
    """Raise InvalidInput for credentials or unverified TLS in a node's URL."""
    parts = _split(url)
    named = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
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
    """Reads credentials at each connect: files may change."""

    def __init__(self, access: NodeAccess, server: ServerKind, node: str) -> None:
        self._access, self._server, self._node = access, server, node

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return AUTH's arguments."""
        *user, password = self._access.credentials(self._server, self._node)
        return (user[0], password) if user else (password,)


class ConnectionFactory:
    """The driver's `connection` to a URL; call `resolve_primary` before each connect.

    `access`: the login, default this process's; replaces the URL's, which a node's URL must not add. `anonymous`: TLS
    without client certificate.
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
        of_node = self._of_node = access is None
        access = access_here() if access is None else access
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
            # No CLIENT SETINFO: each user would need one more right.
            driver_info=None,
            **self._tls,
        )
        login = _logs_in(access, "redis", node)
        self._refused = bool(login) and _drop_credentials(pool.connection_kwargs) and of_node
        pool.connection_kwargs.update(login)
        # Untyped in the driver.
        self.connection: Any = pool.make_connection()

    def resolve_primary(self) -> None:
        """Ask Sentinels, if any, for the primary. Raises the driver's errors; InvalidInput for an unreadable TLS file,
        two logins, or a server that must not get the login."""
        if self._refused:
            raise InvalidInput(
                "its URL holds a user or a password, and MQLAYER_REDIS_* say how to log in: give the node an address "
                "without them, or unset MQLAYER_REDIS_USER and MQLAYER_REDIS_PASSWORD_FILE"
            )
        if self._of_node:
            self._check_place()
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
        # Untyped in the driver.
        asked: Any = redis.sentinel.Sentinel(list(found.hosts), sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        try:
            host, port = asked.discover_master(found.service)
        finally:
            for client in asked.sentinels:
                client.close()
        if self._of_node:
            self._access.check_host(host, port)
        self.connection.host, self.connection.port = host, port

    def _check_place(self) -> None:
        """A role that may change addresses must not get the login sent to a server of its own."""
        self._access.check_encrypted(secure=self._secure)
        at: Any = self.connection
        places = (
            self._sentinels.hosts
            if self._sentinels
            else ((getattr(at, "host", None) or at.path, getattr(at, "port", None)),)
        )
        for host, port in places:
            self._access.check_host(host, port)


def _logs_in(access: NodeAccess, server: ServerKind, node: str) -> dict[str, Any]:
    return {"credential_provider": ReadCredentials(access, server, node)} if access.logs_in(server) else {}


def _drop_credentials(options: dict[str, Any]) -> bool:
    dropped = [options.pop(name, None) for name in ("username", "password", "credential_provider")]
    return any(dropped)


def _split(url: str) -> SplitResult:
    # Later Pythons refuse several hosts one of which is in brackets.
    scheme, mark, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}{mark}h{rest.removeprefix(hosts)}")._replace(netloc=hosts) if mark else urlsplit(url)


def _parse(url: str) -> Address:
    parts = _split(url)
    if parts.scheme in CLUSTER_SCHEMES:
        return _parse_cluster(url)
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


def _parse_cluster(url: str) -> Address:
    parts = _split(url)
    if parts.path.strip("/") not in ("", "0"):
        # A cluster has one database.
        raise ValueError(url)
    seeds = tuple(_host(text, CLUSTER_PORT) for text in parts.netloc.rpartition("@")[2].split(","))
    return Address(shard_url(url, seeds[0]), None, seeds)


def _service_host(hosts: tuple[Host, ...]) -> str:
    # A placeholder until a Sentinel names the primary.
    host, port = hosts[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host(text: str, port: int = SENTINEL_PORT) -> Host:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    return parts.hostname, parts.port or port
