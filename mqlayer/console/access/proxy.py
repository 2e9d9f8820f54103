"""Users that a reverse proxy names."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from mqlayer.console.access.forms import check_form, form_token
from mqlayer.console.access.groups import LevelGroups
from mqlayer.console.access.site import Site, one_header
from mqlayer.console.users import User
from mqlayer.errors import InvalidInput


class ProxyAccess:
    """Believes the proxies of `site` in whom they name, and no other peer. A header that is there twice counts as none.

    `groups_header`: names with commas between. Raises InvalidInput.
    """

    routes: Sequence[BaseRoute] = ()

    def __init__(
        self,
        site: Site,
        groups: LevelGroups,
        *,
        user_header: str = "X-Forwarded-User",
        groups_header: str = "X-Forwarded-Groups",
    ) -> None:
        if not site.has_proxies:
            raise InvalidInput("headers of a proxy are believed from its address only: name it with --proxy-from")
        self._site, self._groups = site, groups
        self._user_header, self._groups_header = user_header, groups_header

    def user_of(self, request: Request) -> User | None:
        """Return the user whom the proxy names."""
        if not self._site.is_proxied(request):
            return None
        groups = (one_header(request, self._groups_header) or "").split(",")
        return self._groups.user(one_header(request, self._user_header), [group.strip() for group in groups])

    def ask(self, request: Request) -> Response:
        """Return a refusal."""
        if not self._site.is_proxied(request):
            return PlainTextResponse("This console answers its proxy only: use the proxy's address.", 403)
        return PlainTextResponse("The proxy named no user with a level here: ask for a group of this console.", 403)

    def form_token(self, request: Request) -> str:
        """Return a token of this browser."""
        return form_token(request, self._site)

    def check_form(self, request: Request, token: str) -> bool:
        """Compare token and origin."""
        return check_form(request, self._site, token)
