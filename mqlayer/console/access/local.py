"""Without a login: for browsers on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from mqlayer.console.access.forms import check_form, form_token
from mqlayer.console.access.site import Site, is_loopback
from mqlayer.console.users import Level, User

FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
REFUSED: Final = "This console has no login, so it answers browsers on its own machine only, at http://127.0.0.1 or http://localhost."


class Anyone:
    """Lets in who reaches the loopback address by a name of it: another name may be an attacker's, for this address."""

    routes: Sequence[BaseRoute] = ()

    def __init__(self, level: Level = Level.OPERATOR) -> None:
        self._user = User("local", level, bodies=True)
        self._site = Site()

    def user_of(self, request: Request) -> User | None:
        """Return the one user."""
        near = request.client is not None and is_loopback(_in_url(request.client.host))
        named = is_loopback(request.headers.get("host", ""))
        forwarded = any(name in request.headers for name in FORWARDED)
        return self._user if near and named and not forwarded else None

    def ask(self, request: Request) -> Response:  # noqa: ARG002 - as of Access
        """Return a refusal."""
        return PlainTextResponse(REFUSED, 403)

    def form_token(self, request: Request) -> str:
        """Return a token of this browser."""
        return form_token(request, self._site)

    def check_form(self, request: Request, token: str) -> bool:
        """Compare token and origin."""
        return check_form(request, self._site, token)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
