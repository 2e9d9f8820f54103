"""A stack's addresses on disk: `stack.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec

from mqlayer.postgres.dsn import parse_dsn
from mqlayer.stack.addresses import Addresses, GivenAddresses
from mqlayer.stack.credentials import Logins
from mqlayer.stack.errors import DirectoryRefused
from mqlayer.stack.private_files import write_closed

FILE_NAME: Final = "stack.json"


@dataclass(frozen=True, slots=True)
class StackFile:
    """Addresses of a stack; `given`: servers that it does not run."""

    addresses: Addresses
    given: tuple[str, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """Read the file; None before the first `up`. Raises DirectoryRefused."""
        try:
            return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise DirectoryRefused(directory, "belongs to another account of this machine") from None
        except msgspec.MsgspecError as error:
            raise DirectoryRefused(directory, f"{FILE_NAME} is not readable ({error}): remove it") from error

    def save(self, directory: Path) -> None:
        """Write the file for its owner only: it holds passwords."""
        write_closed(directory / FILE_NAME, msgspec.json.format(msgspec.json.encode(self)))

    @property
    def nodes_given(self) -> bool:
        """Whether the nodes are given."""
        return bool(set(self.addresses.nodes) & set(self.given))

    def addresses_for(self, logins: Logins) -> Addresses:
        """Return the addresses with these logins on own servers."""
        known = self.addresses
        return Addresses(
            dsn=known.dsn if "postgres" in self.given else logins.postgres.in_dsn(known.dsn),
            nodes=known.nodes,
            broker_url=known.broker_url if "broker" in self.given else logins.broker.in_url(known.broker_url),
            node_login=known.node_login if self.nodes_given else logins.node,
        )

    def names(self) -> list[str]:
        """Return the servers' names."""
        return ["postgres", *self.addresses.nodes, "broker"]

    def address(self, name: str) -> str:
        """Return a server's address, passwords included."""
        known = {"postgres": self.addresses.dsn, "broker": self.addresses.broker_url, **self.addresses.nodes}
        return known[name]

    def truly_given(self, given: GivenAddresses) -> GivenAddresses:
        """Drop the stack's own addresses from given ones."""
        own = {self.address(name) for name in self.names() if name not in self.given}
        return GivenAddresses(
            dsn="" if self._is_own(given.dsn) else given.dsn,
            redis_urls=tuple(url for url in given.redis_urls if url not in own),
            broker_url="" if given.broker_url in own else given.broker_url,
        )

    def _is_own(self, dsn: str) -> bool:
        return bool(dsn) and "postgres" not in self.given and _place(dsn) == _place(self.addresses.dsn)


def _place(dsn: str) -> dict[str, str]:
    return {name: value for name, value in parse_dsn(dsn).items() if name not in ("user", "password")}
