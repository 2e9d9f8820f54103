"""Logins by password or by a provider of OpenID Connect, with sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from mqlayer.console.access.cookies import drop_cookie, read_cookie, send_cookie
from mqlayer.console.access.forms import check_form, form_token
from mqlayer.console.access.openid import LoginRefused, OpenId
from mqlayer.console.access.password_file import AT_ONCE, Busy, PasswordFile
from mqlayer.console.access.paths import safe_path
from mqlayer.console.access.sessions import Session, Sessions
from mqlayer.console.access.site import Site
from mqlayer.console.access.threads import FewThreads
from mqlayer.console.access.throttle import Throttle
from mqlayer.console.live import is_live
from mqlayer.console.render import rendered
from mqlayer.console.users import User
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.logs import event_logger

COOKIE: Final = "mqlayer-session"
PROVIDED: Final = "openid"
WRONG: Final = "The name or the password is wrong."
OLD_FORM: Final = "This form is too old, or of another site. Try again."
NAME_LENGTH: Final = 100
"""More than any name of a file has."""
LATER: Final = "Too many logins are under way. Try again."
NOT_NOW: Final = "Logins fail now: the log of the console says why."
WAITING: Final = 32
"""Logins that wait for a thread; further ones are told to try again."""

log = event_logger(__name__)


class LoginAccess:
    """Users by `passwords`, by `openid`, or both. Raises InvalidInput without either."""

    def __init__(
        self,
        site: Site | None = None,
        *,
        passwords: PasswordFile | None = None,
        openid: OpenId | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        if passwords is None and openid is None:
            raise InvalidInput("no login is set up: give a password file, or a provider of OpenID Connect")
        if openid is not None and not (site and site.url):
            raise InvalidInput("the provider sends browsers back to the console: say its address, with --url")
        self.routes: Sequence[BaseRoute] = (
            Route("/login", self._show, methods=["GET"]),
            Route("/login", self._login, methods=["POST"]),
            Route("/login/openid", self._begin, methods=["GET"]),
            Route("/login/openid/callback", self._finish, methods=["GET"]),
            Route("/logout", self._logout, methods=["POST"]),
        )
        self._site, self._sessions = site or Site(), sessions or Sessions()
        self._passwords, self._openid = passwords, openid
        self._throttle = Throttle()
        self._hashing = FewThreads("console-login", AT_ONCE, WAITING)
        # Those that passed don't wait for guesses.
        self._keeping = FewThreads("console-session", AT_ONCE, WAITING)

    def user_of(self, request: Request) -> User | None:
        """Return the user of the session. Live parts don't keep it from ending."""
        token = self._token(request)
        session = self._sessions.find(request, token, use=not is_live(request)) if token else None
        if session is None:
            return None
        if session.proof == PROVIDED:
            return None if self._openid is None else session.user
        return None if self._passwords is None else self._passwords.user_of(session.user.name, session.proof)

    def ask(self, request: Request) -> Response:
        """Return the way to the login page, and from there to the page that was asked for."""
        if request.method not in {"GET", "HEAD"}:
            return _redirect(request, "/login")
        root = request.scope.get("root_path", "")
        path = request.url.path.removeprefix(root) + (f"?{request.url.query}" if request.url.query else "")
        return _redirect(request, "/login", next=safe_path(path))

    def form_token(self, request: Request) -> str:
        """Return a token of the session."""
        return form_token(request, self._site, self._token(request))

    def check_form(self, request: Request, token: str) -> bool:
        """Compare token and origin."""
        return check_form(request, self._site, token, self._token(request))

    async def _show(self, request: Request) -> Response:
        return self._page(request, request.query_params.get("next", ""))

    async def _login(self, request: Request) -> Response:
        if self._passwords is None:
            return PlainTextResponse("Not Found", HTTPStatus.NOT_FOUND)
        form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
        path, name, address = form.get("next", ""), form.get("name", "").strip(), self._site.address(request)
        # Before the login there is no session whose token it could be.
        if not check_form(request, self._site, form.get("token", "")):
            return self._page(request, path, OLD_FORM, HTTPStatus.FORBIDDEN)
        name = name[:NAME_LENGTH]
        if (wait_s := self._throttle.attempt(name, address)) > 0:
            return self._too_many(request, path, wait_s)
        try:
            entry = await self._hashing.run(self._passwords.login, name, form.get("password", ""))
        except Busy:
            self._throttle.undo(name, address)
            return self._page(request, path, LATER, HTTPStatus.SERVICE_UNAVAILABLE)
        except MqlayerError as error:
            return self._not_now(request, path, error)
        if entry is None:
            return self._failed(request, path, name, address)
        self._throttle.passed(name, address)
        return await self._enter(request, Session(entry.user, entry.proof), path)

    async def _begin(self, request: Request) -> Response:
        if self._openid is None:
            return PlainTextResponse("Not Found", HTTPStatus.NOT_FOUND)
        path = safe_path(request.query_params.get("next", ""))
        try:
            return await self._openid.begin(request, self._site, path)
        except LoginRefused as error:
            return self._refused(request, error)

    async def _finish(self, request: Request) -> Response:
        if self._openid is None:
            return PlainTextResponse("Not Found", HTTPStatus.NOT_FOUND)
        try:
            user, path = await self._openid.finish(request, self._site)
        except LoginRefused as error:
            return self._refused(request, error)
        return await self._enter(request, Session(user, PROVIDED), path)

    async def _logout(self, request: Request) -> Response:
        form = await request.form()
        token, given = self._token(request), form.get("token", "")
        if not check_form(request, self._site, str(given), token):
            return self._page(request, "", OLD_FORM, HTTPStatus.FORBIDDEN)
        try:
            await self._keeping.run(self._sessions.end, request, token)
        except (MqlayerError, Busy) as error:
            log.warning("console_logout_failed", extra={"error": str(error)})
            return PlainTextResponse("You are still logged in: Postgres does not answer. Try again.", 503)
        drop_cookie(request, self._site, COOKIE)
        return _redirect(request, "/login", out="1")

    async def _enter(self, request: Request, session: Session, path: str) -> Response:
        try:
            token = await self._keeping.run(self._renewed, request, session)
        except Busy:
            return self._page(request, path, LATER, HTTPStatus.SERVICE_UNAVAILABLE)
        except MqlayerError as error:
            return self._not_now(request, path, error)
        send_cookie(request, self._site, COOKIE, token)
        user, address = session.user, self._site.address(request)
        log.info("console_login", extra={"user": user.name, "level": user.level.value, "address": address})
        return _redirect(request, safe_path(path))

    def _renewed(self, request: Request, session: Session) -> str:
        # Never a token that a browser brought: another person may know it.
        if former := self._token(request):
            self._sessions.end(request, former)
        return self._sessions.begin(request, session)

    def _failed(self, request: Request, path: str, name: str, address: str) -> Response:
        # An unknown name may be a password in the wrong field.
        log.warning("console_login_failed", extra={"user": name if self._knows(name) else "?", "address": address})
        return self._page(request, path, WRONG, HTTPStatus.FORBIDDEN)

    def _too_many(self, request: Request, path: str, wait_s: float) -> Response:
        text = f"Too many logins failed. Try again in {math.ceil(wait_s / 60)} min."
        answer = self._page(request, path, text, HTTPStatus.TOO_MANY_REQUESTS)
        answer.headers["Retry-After"] = str(math.ceil(wait_s))
        return answer

    def _refused(self, request: Request, error: LoginRefused) -> Response:
        log.warning("console_login_refused", extra={"error": str(error), "address": self._site.address(request)})
        return self._page(request, "", error.shown, HTTPStatus.FORBIDDEN)

    def _not_now(self, request: Request, path: str, error: MqlayerError) -> Response:
        log.error("console_login_broken", extra={"error": str(error)})
        return self._page(request, path, NOT_NOW, HTTPStatus.SERVICE_UNAVAILABLE)

    def _knows(self, name: str) -> bool:
        return self._passwords is not None and name in self._passwords.entries()

    def _token(self, request: Request) -> str:
        return read_cookie(request, self._site, COOKIE)

    def _page(self, request: Request, path: str, error: str = "", status: int = HTTPStatus.OK) -> Response:
        variables: dict[str, Any] = {
            "title": "Log in",
            "root": request.scope.get("root_path", ""),
            "here": "/login",
            "user": None,
            "live": False,
            "token": form_token(request, self._site),
            "next": safe_path(path),
            "error": error,
            "out": request.query_params.get("out", ""),
            "by_password": self._passwords is not None,
            "by_provider": self._openid is not None,
            "provider_logout": "" if self._openid is None else self._openid.logout_url(),
        }
        return HTMLResponse(rendered("login.html", variables), status)


def _redirect(request: Request, path: str, **query: str) -> Response:
    root = request.scope.get("root_path", "")
    return RedirectResponse(f"{root}{path}" + (f"?{urlencode(query)}" if query else ""), HTTPStatus.SEE_OTHER)
