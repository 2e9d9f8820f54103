"""Logins by a provider of OpenID Connect: authorization code with PKCE, state and nonce. Needs the extra `oidc`."""

from __future__ import annotations

import base64
import hmac
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mqlayer.console.access.cookies import drop_cookie, read_cookie, send_cookie
from mqlayer.console.access.forms import new_secret
from mqlayer.console.access.groups import LevelGroups
from mqlayer.console.access.paths import safe_path
from mqlayer.console.access.site import Site, is_loopback
from mqlayer.console.users import User
from mqlayer.errors import InvalidInput, MqlayerError

COOKIE: Final = "mqlayer-openid"
WITHIN_S: Final = 600
TIMEOUT_S: Final = 10.0
CALLBACK: Final = "/login/openid/callback"
AGAIN: Final = "This login took too long, or began in another browser. Try again."
NOT_HERE: Final = "Your account has no level here: ask for a group of this console."
DENIED: Final = "The provider of logins did not let you in."
NOT_NOW: Final = "The provider of logins gave no valid answer: the log of the console says why."


class LoginRefused(MqlayerError):
    """A login that failed. `shown`: its reason for the browser."""

    def __init__(self, reason: str, shown: str) -> None:
        super().__init__(reason)
        self.shown = shown


class Claims(NamedTuple):
    """Names of claims: a user's name, and groups. With dots, as in realm_access.roles, of an inner object."""

    name: str = "email"
    groups: str = "groups"


class OpenId:
    """Users of a provider. `scope`: scopes with blanks between. Raises InvalidInput."""

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: str | None,
        groups: LevelGroups,
        *,
        claims: Claims | None = None,
        scope: str = "openid email profile",
    ) -> None:
        scheme, _, rest = issuer.partition("://")
        if scheme != "https" and not (scheme == "http" and is_loopback(rest.partition("/")[0])):
            raise InvalidInput(f"the issuer {issuer!r} is no address of TLS: give it as https://id.example.com")
        if "openid" not in scope.split():
            raise InvalidInput("the scope lacks openid: without it the provider names no user")
        # It would log each verifier.
        logging.getLogger("authlib").setLevel(logging.INFO)
        from authlib.integrations.starlette_client import OAuth

        self._issuer, self._client_id, self._groups, self._claims = issuer, client_id, groups, claims or Claims()
        self._client: Any = OAuth().register(
            "console",
            client_id=client_id,
            client_secret=client_secret,
            server_metadata_url=f"{issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs={"scope": scope, "code_challenge_method": "S256", "timeout": TIMEOUT_S, "leeway": 0},
        )

    async def begin(self, request: Request, site: Site, path: str) -> Response:
        """Send the browser to the provider. `path`: to go to after the login. Raises LoginRefused."""
        secret = new_secret()
        with _faults_refused():
            self._check_issuer(await self._client.load_server_metadata())
            made = await self._client.create_authorization_url(
                site.url + CALLBACK,
                state=_derived(secret, "state"),
                nonce=_derived(secret, "nonce"),
                code_verifier=_derived(secret, "verifier"),
            )
        # All that the way back is checked with comes from it. From another site, so not strict.
        value = f"{secret}.{base64.urlsafe_b64encode(path.encode()).decode().rstrip('=')}"
        send_cookie(request, site, COOKIE, value, seconds=WITHIN_S)
        return RedirectResponse(made["url"], 303)

    async def finish(self, request: Request, site: Site) -> tuple[User, str]:
        """Return the user whom the provider sent back, and the path to go to. Raises LoginRefused."""
        secret, _, path = read_cookie(request, site, COOKIE).partition(".")
        drop_cookie(request, site, COOKIE)
        given = request.query_params
        state = _derived(secret, "state")
        if not secret or not hmac.compare_digest(state.encode(), given.get("state", "").encode()):
            raise LoginRefused("state differs", AGAIN)
        if given.get("error") or not given.get("code"):
            raise LoginRefused(f"the provider says {given.get('error', 'no code')[:200]}", DENIED)
        user = await self._user(secret, given["code"], site)
        if user is None:
            raise LoginRefused("the user has no name, or no group with a level", NOT_HERE)
        return user, _decoded(path)

    def logout_url(self) -> str:
        """Return the provider's own logout, empty without one."""
        found = str(self._client.server_metadata.get("end_session_endpoint", ""))
        # A link may run a script.
        return f"{found}?{urlencode({'client_id': self._client_id})}" if found.startswith(("https:", "http:")) else ""

    async def _user(self, secret: str, code: str, site: Site) -> User | None:
        nonce = _derived(secret, "nonce")
        with _faults_refused():
            self._check_issuer(await self._client.load_server_metadata())
            token = await self._client.fetch_access_token(
                redirect_uri=site.url + CALLBACK, code=code, code_verifier=_derived(secret, "verifier")
            )
            issuer = {"iss": {"essential": True, "value": self._issuer}}
            claims = dict(await self._client.parse_id_token(token, nonce=nonce, claims_options=issuer))
            self._check(claims, nonce)
            if _claim(claims, self._claims.groups) is None:
                claims = await self._completed(claims, token)
        return self._named(claims)

    def _check(self, claims: Mapping[str, Any], nonce: str) -> None:
        # The library lets a provider leave some of it out.
        audience = claims.get("aud")
        if self._client_id not in (audience if isinstance(audience, list) else [audience]):
            raise ValueError("the token is for another audience")
        if claims.get("nonce") != nonce:
            raise ValueError("the token is of another login")

    async def _completed(self, claims: dict[str, Any], token: Any) -> dict[str, Any]:
        if not self._client.server_metadata.get("userinfo_endpoint"):
            return claims
        more = dict(await self._client.userinfo(token=token))
        if more.get("sub") != claims["sub"]:
            raise ValueError("the facts are of another user")
        return {**more, **claims}

    def _named(self, claims: Mapping[str, Any]) -> User | None:
        name, groups = _claim(claims, self._claims.name), _claim(claims, self._claims.groups)
        if not isinstance(name, str) or (self._claims.name == "email" and claims.get("email_verified") is False):
            return None
        among = groups if isinstance(groups, Sequence) and not isinstance(groups, str) else [groups]
        return self._groups.user(name, [one for one in among if isinstance(one, str)])

    def _check_issuer(self, metadata: Mapping[str, Any]) -> None:
        if metadata.get("issuer") != self._issuer:
            raise ValueError(f"the provider calls itself {str(metadata.get('issuer'))[:200]!r}")


@contextmanager
def _faults_refused() -> Iterator[None]:
    import httpx2
    from authlib.common.errors import AuthlibBaseError
    from joserfc.errors import JoseError

    try:
        yield
    except (AuthlibBaseError, JoseError, httpx2.HTTPError, RuntimeError, TypeError, ValueError, KeyError) as error:
        raise LoginRefused(f"{type(error).__name__}: {str(error)[:500]}", NOT_NOW) from error


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _derived(secret: str, use: str) -> str:
    return hmac.digest(secret.encode(), use.encode(), "sha256").hex()


def _decoded(path: str) -> str:
    try:
        return safe_path(base64.urlsafe_b64decode(path + "=" * (-len(path) % 4)).decode())
    except ValueError:
        return "/"
