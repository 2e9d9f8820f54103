"""The console as an ASGI application: `docs/design/console.md`."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from mqlayer.console.access import Access, Anyone, Guard
from mqlayer.console.access.paths import safe_path
from mqlayer.console.headers import SafeHeaders
from mqlayer.console.live import LIVE, LivePages, is_live
from mqlayer.console.page import Action, Page, Visit
from mqlayer.console.render import clock, rendered
from mqlayer.console.runtimes import Runtimes
from mqlayer.console.users import Level, User
from mqlayer.console.views import ACTIONS, PAGES
from mqlayer.errors import InvalidInput, MqlayerError, NotFound, PermissionDenied, StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.settings import Settings

Result = TypeVar("Result")

log = event_logger(__name__)

REASON_BYTES: Final = 500
OUTCOME_CHARS: Final = 1_000
UNKNOWN: Final = "who you are can't be found out now: try again; the log of the console says why"
STATUSES: Final[Mapping[type[MqlayerError], HTTPStatus]] = {
    InvalidInput: HTTPStatus.BAD_REQUEST,
    NotFound: HTTPStatus.NOT_FOUND,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}


def console_app(
    settings: Settings | None = None, *, access: Access | None = None, roles: Mapping[Level, str] | None = None
) -> Starlette:
    """Return the console as an application to serve or to mount.

    `access`: logins; None lets in browsers on this machine alone. `roles`: the Postgres role of each level. Mounted in
    another application, it needs that one to enter its lifespan.
    """
    runtimes = Runtimes(settings or Settings(), roles or {})
    console = Console(runtimes, access or Anyone())
    app = Starlette(
        routes=[
            *(Route(page.path, partial(console.show, page)) for page in PAGES),
            *(Route(f"/actions/{one.name}", partial(console.ask_first, one), methods=["GET"]) for one in ACTIONS),
            *(Route(f"/actions/{one.name}", partial(console.act, one), methods=["POST"]) for one in ACTIONS),
            *(Route(f"/actions/{one.name}/done", partial(console.tell, one)) for one in ACTIONS),
            Route(LIVE, console.live),
            *console.access.routes,
            Mount("/static", StaticFiles(packages=[("mqlayer.console", "static")])),
        ],
        middleware=[Middleware(SafeHeaders), Middleware(Guard)],
        exception_handlers={HTTPStatus.NOT_FOUND: console.not_found},
        lifespan=console.lifespan,
    )
    app.state.runtimes, app.state.stop_live = runtimes, console.stop_live
    return app


class Console:
    """Answers requests: finds the user, loads the page in a thread, renders it."""

    def __init__(self, runtimes: Runtimes, access: Access) -> None:
        self.access = access
        self._runtimes = runtimes
        self._live = LivePages()
        self._has_logout = any(getattr(route, "path", "") == "/logout" for route in access.routes)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Close all pools at the end."""
        try:
            yield
        finally:
            await run_in_threadpool(self._runtimes.close)

    def stop_live(self) -> None:
        """End all live parts soon."""
        self._live.stopping = True

    async def show(self, page: Page, request: Request) -> Response:
        """Answer with a page."""
        user = await self._known(request)
        if isinstance(user, Response):
            return user
        visit = Visit(self._runtimes.of(user), user, request.path_params, dict(request.query_params))
        if page.media_type:
            return await self._answer(request, user, lambda: _file(page, page.load(visit)))
        return await self._answer(request, user, lambda: self._page(request, user, page, visit))

    async def ask_first(self, action: Action, request: Request) -> Response:
        """Show what an action would do."""
        return await self._operated(request, dict(request.query_params), partial(self._planned, action))

    async def act(self, action: Action, request: Request) -> Response:
        """Run an action."""
        sent = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
        request.state.back = sent.pop("back", "")
        form = _query(sent.pop("fields", "")) | sent
        if not await run_in_threadpool(self.access.check_form, request, form.pop("token", "")):
            return self._message(request, None, HTTPStatus.FORBIDDEN, "this form is not of a page of this console")
        return await self._operated(request, form, partial(self._done, action))

    async def tell(self, action: Action, request: Request) -> Response:
        """Show the outcome of an action, which its own answer signed."""
        user = await self._known(request)
        if isinstance(user, Response):
            return user
        told = dict(request.query_params)
        token = self.access.form_token(request)
        if not hmac.compare_digest(told.pop("sig", "").encode(), _signature(token, action, told).encode()):
            why = "another session made this outcome: the audit lists all acts"
            return self._message(request, user, HTTPStatus.NOT_FOUND, why)
        ways = [(safe_path(told.get(name, ""))) for name in ("path", "back")]
        shown = {"text": told.get("text", ""), "ways": [(path, _title_of(path)) for path in dict.fromkeys(ways)]}
        return HTMLResponse(rendered("done.html", self._common(request, user, action.title) | shown))

    async def live(self, request: Request) -> Response:
        """Answer with a page's parts as they change."""
        path, _, query = request.query_params.get("path", "/").partition("?")
        page, parameters = _page_at(path)
        if page is None or not page.live:
            return Response(status_code=HTTPStatus.NOT_FOUND)

        def render() -> str | None:
            user = self._user_of(request)
            if user is None:
                return None
            visit = Visit(self._runtimes.of(user), user, parameters, _query(query))
            return self._page(request, user, page, visit)

        user = await self._known(request)
        return self._live.stream(user.name if isinstance(user, User) else "", render)

    async def not_found(self, request: Request, _: Exception) -> Response:
        """Answer for a path without a page."""
        user = await self._known(request)
        if isinstance(user, Response):
            return user
        return self._message(request, user, HTTPStatus.NOT_FOUND, "no page has this address")

    async def _known(self, request: Request) -> User | Response:
        try:
            user = await run_in_threadpool(self._user_of, request)
        except MqlayerError as error:
            return self._message(request, None, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        return self.access.ask(request) if user is None else user

    def _user_of(self, request: Request) -> User | None:
        try:
            return self.access.user_of(request)
        except MqlayerError as error:
            # Its text has addresses, and the browser may be anyone's.
            log.warning("console_user_unknown", extra={"error": str(error)})
            raise MqlayerError(UNKNOWN) from None

    def _page(self, request: Request, user: User, page: Page, visit: Visit) -> str:
        found = page.load(visit)
        title = page.title.format(**visit.path)
        # In a stream it would make each page differ.
        at = "" if is_live(request) else clock(datetime.now(UTC))
        return rendered(
            page.template, self._common(request, user, title) | {"live": page.live, "as_of": at} | dict(found)
        )

    async def _operated(
        self,
        request: Request,
        fields: Mapping[str, str],
        work: Callable[[Request, User, Mapping[str, str]], str | Response],
    ) -> Response:
        user = await self._known(request)
        if isinstance(user, Response):
            return user
        if not user.may_act:
            why = f"{user.name} is a viewer: an operator may do this"
            return self._message(request, user, HTTPStatus.FORBIDDEN, why)
        return await self._answer(request, user, lambda: work(request, user, fields))

    def _planned(self, action: Action, request: Request, user: User, fields: Mapping[str, str]) -> str:
        plan = action.plan(Visit(self._runtimes.of(user), user, {}, fields))
        told = {**fields, **plan.fields}
        reason = told.pop("reason", "")
        # As one word in ASCII: browsers change the ends of lines in a field, and pages escape characters.
        shown = {"action": action, "plan": plan, "fields": urlencode(told), "reason": reason}
        return rendered("action.html", self._common(request, user, action.title) | shown)

    def _done(self, action: Action, request: Request, user: User, fields: Mapping[str, str]) -> Response:
        reason = fields.get("reason", "").strip()
        if not reason or len(reason.encode()) > REASON_BYTES:
            raise InvalidInput(f"say why, in at most {REASON_BYTES} bytes: the audit keeps it")
        outcome = action.run(Visit(self._runtimes.of(user, reason), user, {}, fields))
        path = outcome.path
        if not outcome.goes_on:
            told = {"text": outcome.text[:OUTCOME_CHARS], "path": path, "back": _back(request)}
            signed = told | {"sig": _signature(self.access.form_token(request), action, told)}
            path = f"/actions/{action.name}/done?{urlencode(signed)}"
        # Another address than the form's: Back and Refresh of a browser would send the form again.
        return RedirectResponse(request.scope.get("root_path", "") + path, HTTPStatus.SEE_OTHER)

    async def _answer(
        self,
        request: Request,
        user: User,
        render: Callable[[], str | Response],
        answer: Callable[[str], Response] = HTMLResponse,
    ) -> Response:
        try:
            made = await run_in_threadpool(render)
            return made if isinstance(made, Response) else answer(made)
        except MqlayerError as error:
            status = next((found for kind, found in STATUSES.items() if isinstance(error, kind)), HTTPStatus.CONFLICT)
            return self._message(request, user, _status_of(error, status), str(error))

    def _message(self, request: Request, user: User | None, status: HTTPStatus, text: str) -> Response:
        variables = self._common(request, user, status.phrase) | {"text": text}
        return HTMLResponse(rendered("message.html", variables), status)

    def _common(self, request: Request, user: User | None, title: str) -> dict[str, Any]:
        root = request.scope.get("root_path", "")
        path = request.query_params.get("path", "") if is_live(request) else _own_path(request)
        return {
            "title": title,
            "root": root,
            "here": path,
            "back": _back(request),
            "user": user,
            "menu": MENU,
            "live": False,
            "as_of": "",
            "logout": self._has_logout,
            "token": "" if user is None else self.access.form_token(request),
        }


def _file(page: Page, found: Mapping[str, Any]) -> Response:
    if "text" in found:
        headers = {"Content-Disposition": f'attachment; filename="{page.title.lower()}.jsonl"'}
        return Response(str(found["text"]), media_type=page.media_type, headers=headers)
    # With its length, a browser keeps no file that ended early.
    headers = {
        "Content-Disposition": f'attachment; filename="{found["file"]}"',
        "Content-Length": str(found["bytes"]),
    }
    return StreamingResponse(found["pieces"], media_type=page.media_type, headers=headers)


MENU: Final = tuple((page.path, page.menu) for page in PAGES if page.menu)


def _status_of(error: MqlayerError, found: HTTPStatus) -> HTTPStatus:
    # It is a kind of StoreUnavailable.
    return HTTPStatus.FORBIDDEN if isinstance(error, PermissionDenied) else found


def _signature(token: str, action: Action, told: Mapping[str, str]) -> str:
    text = urlencode([("name", action.name), *sorted(told.items())])
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _title_of(path: str) -> str:
    page, parameters = _page_at(path.partition("?")[0].partition("#")[0])
    if page is None:
        return "the overview"
    return page.title.format(**{name: unquote(value) for name, value in parameters.items()})


def _own_path(request: Request) -> str:
    path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
    return f"{path}?{request.url.query}" if request.url.query else path


def _back(request: Request) -> str:
    """Return the path in this console that an action's plan was asked for on."""
    given = getattr(request.state, "back", None)
    if given is None:
        try:
            came = urlsplit(request.headers.get("referer", ""))
        except ValueError:
            return "/"
        root = request.scope.get("root_path", "")
        path = f"{came.path}?{came.query}" if came.query else came.path
        given = path.removeprefix(root) if path.startswith(f"{root}/") else "/"
    found = safe_path(given)
    return "/" if found.startswith("/actions/") else found


def _query(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True))


def _page_at(path: str) -> tuple[Page | None, dict[str, str]]:
    for page in PAGES:
        route = Route(page.path, lambda _: Response())
        match, scope = route.matches({"type": "http", "path": path, "method": "GET", "root_path": ""})
        if match.value == 2:
            return page, scope["path_params"]
    return None, {}
