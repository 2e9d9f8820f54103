"""The promise of each access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from mqlayer.console.users import User


class Access(Protocol):
    """Finds the user of a request, and guards forms."""

    routes: Sequence[BaseRoute]
    """Login, logout."""

    def user_of(self, request: Request) -> User | None:
        """Return the user, None without a login; may read a database, so it runs in a thread."""
        ...

    def ask(self, request: Request) -> Response:
        """Return the answer to a request without a user: a login page or a refusal."""
        ...

    def form_token(self, request: Request) -> str:
        """Return the token that forms of this user carry."""
        ...

    def check_form(self, request: Request, token: str) -> bool:
        """Whether a form comes from a page of this console."""
        ...
