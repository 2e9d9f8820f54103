"""The way from browsers to the console: its public address, and proxies before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

from starlette.requests import Request

from mqlayer.errors import InvalidInput

IpNetwork = IPv4Network | IPv6Network
IpAddress = IPv4Address | IPv6Address

OWN: Final = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site` of own pages; none: typed by a person."""


class Site:
    """`url`: the address in browsers, as in https://mq.example.com/mq. `proxies`: networks (CIDR) whose headers count.

    Raises InvalidInput.
    """

    def __init__(self, url: str = "", proxies: Sequence[str] = ()) -> None:
        parts = _split(url)
        if url and (parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment):
            raise InvalidInput(f"{url!r} is no address of a console: give one as https://mq.example.com/mq")
        self.url = url.rstrip("/")
        self.root = parts.path.rstrip("/")
        self._scheme, self._host = parts.scheme, parts.netloc.lower()
        self._networks = tuple(_network(text) for text in proxies)

    @property
    def has_proxies(self) -> bool:
        """Whether any proxy is trusted."""
        return bool(self._networks)

    def is_proxied(self, request: Request) -> bool:
        """Whether the direct peer is a trusted proxy."""
        return self._trusts(_peer(request))

    def address(self, request: Request) -> str:
        """Return the client's address: behind trusted proxies, the last one that they did not add themselves."""
        found = _peer(request)
        for text in reversed(_listed(request, "x-forwarded-for")):
            if not self._trusts(found):
                break
            found = _address(text) or found
        return str(found or "")

    def is_secure(self, request: Request) -> bool:
        """Whether the browser speaks TLS."""
        if self._scheme:
            return self._scheme == "https"
        told = _listed(request, "x-forwarded-proto") if self.is_proxied(request) else []
        return (told[-1] if told else request.url.scheme) == "https"

    def host(self, request: Request) -> str:
        """Return the host, with a port, that the browser shows."""
        return self._host or request.headers.get("host", "").lower()

    def is_own_form(self, request: Request) -> bool:
        """Whether the browser says that a form came from this site, or says nothing."""
        if request.headers.get("sec-fetch-site", "same-origin") not in OWN:
            return False
        origin = request.headers.get("origin")
        if origin is None:
            return True
        parts = _split(origin)
        # Without a public address, a proxy may have ended TLS unseen.
        return parts.netloc.lower() == self.host(request) != "" and self._scheme in {"", parts.scheme}

    def _trusts(self, address: IpAddress | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def address_group(address: str) -> str:
    """Return an address, of IPv6 its /64, which one person may have whole."""
    found = _address(address)
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine's own."""
    name = _split(f"//{host}").hostname or ""
    found = _address(name)
    return name == "localhost" if found is None else found.is_loopback


def one_header(request: Request, name: str) -> str | None:
    """Return a header's text; None where it is missing, empty, no UTF-8, or there twice: a proxy sets it once."""
    found = [value for key, value in request.headers.raw if key == name.lower().encode()]
    try:
        return (found[0].decode().strip() or None) if len(found) == 1 else None
    except UnicodeDecodeError:
        return None


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _network(text: str) -> IpNetwork:
    try:
        return ip_network(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no network of proxies: give one as 10.0.0.0/8, or an address") from None


def _address(text: str) -> IpAddress | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _peer(request: Request) -> IpAddress | None:
    return None if request.client is None else _address(request.client.host)


def _listed(request: Request, name: str) -> list[str]:
    return _words(request.headers.getlist(name))


def _words(lines: Iterable[str]) -> list[str]:
    return [word.strip() for line in lines for word in line.split(",") if word.strip()]
