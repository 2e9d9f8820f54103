"""Cookies: for scripts unseen, for this console's paths, over TLS only where it is there."""

from __future__ import annotations

from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from mqlayer.console.access.site import Site

SENT: Final = "mqlayer.cookies"
"""In the scope: lines that `Guard` adds to the answer."""


def read_cookie(request: Request, site: Site, name: str) -> str:
    """Return a cookie's value, empty without."""
    return request.cookies.get(_full_name(request, site, name), "")


def send_cookie(
    request: Request,
    site: Site,
    name: str,
    value: str,
    *,
    seconds: int | None = None,
    same_site: Literal["lax", "strict"] = "lax",
) -> None:
    """Set a cookie with the answer; None: until the browser ends."""
    response = Response()
    response.set_cookie(
        _full_name(request, site, name),
        value,
        max_age=seconds,
        path=_root(request) or "/",
        secure=site.is_secure(request),
        httponly=True,
        samesite=same_site,
    )
    request.scope.setdefault(SENT, []).append(response.headers["set-cookie"])


def drop_cookie(request: Request, site: Site, name: str) -> None:
    """Delete a cookie with the answer."""
    send_cookie(request, site, name, "", seconds=0)


def _full_name(request: Request, site: Site, name: str) -> str:
    # Browsers take such names over TLS only, and the first one from this very host only.
    if not site.is_secure(request):
        return name
    return f"__Secure-{name}" if _root(request) else f"__Host-{name}"


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", ""))
