"""Addresses of a stack's servers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from mqlayer.postgres.dsn import address_of
from mqlayer.redis.access import NodeAccess
from mqlayer.redis.addresses import display_broker_url, display_url
from mqlayer.stack.credentials import REDIS_DEFAULT_USER, Login

NO_LOGIN: Final = Login(REDIS_DEFAULT_USER)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a stack; `repr` hides passwords."""

    dsn: str
    nodes: dict[str, str]
    broker_url: str
    """"" for processes that need none."""
    node_login: Login = NO_LOGIN
    """For the stack's own nodes, whose addresses hold no password."""

    def __repr__(self) -> str:
        nodes = {name: display_url(url) for name, url in self.nodes.items()}
        broker = display_broker_url(self.broker_url)
        return f"Addresses(dsn={address_of(self.dsn)!r}, nodes={nodes!r}, broker_url={broker!r})"

    def environment(self) -> dict[str, str]:
        """Return environment variables for processes of this stack."""
        found = {"MQLAYER_DSN": self.dsn}
        if self.broker_url:
            found["MQLAYER_BROKER_URL"] = self.broker_url
        if self.node_login.password:
            found |= {
                "MQLAYER_REDIS_USER": self.node_login.user,
                "MQLAYER_REDIS_PASSWORD": self.node_login.password,
            }
        return found

    def node_url(self, name: str) -> str:
        """Return a node's address, password included."""
        return self.node_login.in_url(self.nodes[name])

    @property
    def node_access(self) -> NodeAccess | None:
        """Login for own nodes; None: as in the settings."""
        return self.node_login.access

    def exports(self) -> str:
        """Return the environment as shell lines for `source`."""
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment().items())


@dataclass(frozen=True, slots=True)
class GivenAddresses:
    """Servers that the stack uses and does not run."""

    dsn: str = field(default="", repr=False)
    redis_urls: tuple[str, ...] = field(default=(), repr=False)
    broker_url: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read MQLAYER_DSN, MQLAYER_REDIS_URL (comma-separated), MQLAYER_BROKER_URL."""
        source = os.environ if environment is None else environment
        urls = tuple(url.strip() for url in source.get("MQLAYER_REDIS_URL", "").split(",") if url.strip())
        return cls(source.get("MQLAYER_DSN", ""), urls, source.get("MQLAYER_BROKER_URL", ""))

    @property
    def complete(self) -> bool:
        """Whether all servers are given."""
        return bool(self.dsn and self.redis_urls and self.broker_url)

    def names(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the given servers' names."""
        singles = (("postgres", self.dsn), ("broker", self.broker_url))
        return (*(name for name, address in singles if address), *(nodes if self.redis_urls else ()))
