"""Tokens of forms: made of a secret in a cookie, which other sites can't read."""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from starlette.requests import Request

from mqlayer.console.access.cookies import read_cookie, send_cookie
from mqlayer.console.access.site import Site

COOKIE: Final = "mqlayer-form"
SECRET_BYTES: Final = 32


def form_token(request: Request, site: Site, session: str = "") -> str:
    """Return the token of a session's forms; without a session, of this browser's."""
    return _token(session or _secret(request, site))


def check_form(request: Request, site: Site, token: str, session: str = "") -> bool:
    """Whether a form has the token, and comes from this site."""
    secret = session or read_cookie(request, site, COOKIE)
    return bool(secret) and hmac.compare_digest(_token(secret).encode(), token.encode()) and site.is_own_form(request)


def new_secret() -> str:
    """Return a secret for a cookie."""
    return secrets.token_urlsafe(SECRET_BYTES)


def _secret(request: Request, site: Site) -> str:
    found = read_cookie(request, site, COOKIE)
    if len(found) >= SECRET_BYTES:
        return found
    # Once for a request, whatever number of forms its page has.
    if COOKIE not in request.scope:
        request.scope[COOKIE] = new_secret()
        send_cookie(request, site, COOKIE, request.scope[COOKIE], same_site="strict")
    return str(request.scope[COOKIE])


def _token(secret: str) -> str:
    return hmac.digest(secret.encode(), b"form", "sha256").hex()
