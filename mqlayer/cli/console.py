"""`console`: the system in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.output import echo
from mqlayer.errors import InvalidInput, PermissionDenied
from mqlayer.redis.access import read_secret
from mqlayer.settings import Settings

if TYPE_CHECKING:
    from mqlayer.console import Access, Level, LevelGroups, Site

PORT: Final = 9480
STOP_S: Final = 5
CONNECTIONS: Final = 500
ANOTHER: Final = "logins are the proxy's"
OF_PROVIDER: Final = "it is for logins by a provider"
OF_PROXY: Final = "it is for logins by a proxy"
NO_LOGIN: Final = (
    "{host} is not a loopback address, and no login is set up: give --password-file, --oidc-issuer or "
    "--proxy-user-header, or leave --host out"
)

GroupsOption = Annotated[list[str], typer.Option(metavar="GROUP", help="A proxy's or provider's group; * is everyone.")]


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(console)
    app.command()(console_password)


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """Options about logins."""

    password_file: Path | None
    proxy_user_header: str
    proxy_groups_header: str
    issuer: str
    client_id: str
    secret_file: Path | None
    name_claim: str
    groups_claim: str
    scope: str
    idle_minutes: int
    session_hours: int


@excludes("--url", "--prefix", why="the address has the prefix")
@excludes("--proxy-user-header", "--password-file", "--oidc-issuer", why=ANOTHER)
@excludes("--proxy-user-header", "--idle-minutes", "--session-hours", why=ANOTHER)
@needs("--proxy-user-header", "--proxy-from", why="headers from other addresses are not believed")
@needs("--proxy-groups-header", "--proxy-user-header", why=OF_PROXY)
@needs("--oidc-issuer", "--oidc-client-id", why="the provider knows the console by it")
@needs("--oidc-client-id", "--oidc-issuer", why=OF_PROVIDER)
@needs("--oidc-secret-file", "--oidc-issuer", why=OF_PROVIDER)
@needs("--oidc-name-claim", "--oidc-issuer", why=OF_PROVIDER)
@needs("--oidc-groups-claim", "--oidc-issuer", why=OF_PROVIDER)
@needs("--oidc-scope", "--oidc-issuer", why=OF_PROVIDER)
def console(
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a login.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535)] = PORT,
    url: Annotated[str, typer.Option(help="Address in browsers, as https://example.com/mq")] = "",
    prefix: Annotated[str, typer.Option(help="Path that a proxy puts before the console's paths, as in /mq.")] = "",
    viewer_role: Annotated[str, typer.Option(help="Postgres role of viewers; else the login of MQLAYER_DSN.")] = "",
    operator_role: Annotated[str, typer.Option(help="Postgres role of operators.")] = "",
    password_file: Annotated[
        Path | None, typer.Option(help="Users with passwords; `mqlayer console-password` makes its lines.")
    ] = None,
    proxy_from: Annotated[
        list[str], typer.Option(metavar="CIDR", help="Addresses of proxies whose headers are believed.")
    ] = [],  # noqa: B006 - typer copies it
    proxy_user_header: Annotated[str, typer.Option(help="Header in which the proxy names the user.")] = "",
    proxy_groups_header: Annotated[str, typer.Option(help="And the groups.")] = "X-Forwarded-Groups",
    oidc_issuer: Annotated[str, typer.Option(help="A provider of OpenID Connect, as https://id.example.com.")] = "",
    oidc_client_id: Annotated[str, typer.Option(help="The console's name at the provider.")] = "",
    oidc_secret_file: Annotated[Path | None, typer.Option(help="The file that holds the client's secret.")] = None,
    oidc_name_claim: Annotated[str, typer.Option(help="Claim of the user's name.")] = "email",
    oidc_groups_claim: Annotated[str, typer.Option(help="Claim of groups; dots lead into objects.")] = "groups",
    oidc_scope: Annotated[str, typer.Option(help="Scopes to ask for.")] = "openid email profile",
    viewers: GroupsOption = [],  # noqa: B006 - typer copies it
    operators: GroupsOption = [],  # noqa: B006 - typer copies it
    body_readers: GroupsOption = [],  # noqa: B006 - typer copies it
    idle_minutes: Annotated[int, typer.Option(min=1, help="A session ends after so long without a request.")] = 60,
    session_hours: Annotated[int, typer.Option(min=1, max=720, help="And after so long.")] = 12,
) -> None:
    """Show the system in the browser, until SIGTERM or SIGINT: lag, routes, keys, messages, parked and dead."""
    if any(find_spec(name) is None for name in ("argon2", "jinja2", "starlette", "uvicorn")):
        raise InvalidInput("the console needs an extra: pip install 'mqlayer[console]'")
    from mqlayer.console import Anyone, Level, LevelGroups, Site, console_app
    from mqlayer.console.access import is_loopback
    from mqlayer.console.prefix import Prefixed

    logins = LoginOptions(
        password_file, proxy_user_header, proxy_groups_header, oidc_issuer, oidc_client_id, oidc_secret_file,
        oidc_name_claim, oidc_groups_claim, oidc_scope, idle_minutes, session_hours,
    )  # fmt: skip
    settings, site = settings_here(), Site(url, proxy_from)
    root = site.root or _root(prefix)
    roles = {Level.VIEWER: viewer_role, Level.OPERATOR: operator_role}
    if proxy_user_header or oidc_issuer:
        groups: LevelGroups | None = LevelGroups(viewers, operators, body_readers)
    elif viewers or operators or body_readers:
        raise InvalidInput("groups are a proxy's or a provider's: the password file has the levels of its users")
    else:
        groups = None
    access = _login(logins, site, groups)
    if access is None and not is_loopback(_in_url(host)):
        raise InvalidInput(NO_LOGIN.format(host=host))
    level = _checked(settings, roles, needs_operator=access is not None and _has_operators(logins, groups))
    web = console_app(settings, access=access or Anyone(level), roles=roles)
    echo(f"console: {site.url or f'http://{_in_url(host)}:{port}{root}'}/")
    if not is_loopback(_in_url(host)) and not url.startswith("https:"):
        echo("warning: without TLS before it, passwords and sessions can be read on the way: see --url")
    _serve(Prefixed(web, root), web, host, port)


def console_password(
    name: Annotated[str, typer.Argument(help="The user's name.")],
    operator: Annotated[bool, typer.Option("--operator", help="Acts too; else a viewer.")] = False,
    bodies: Annotated[bool, typer.Option("--bodies", help="Sees bodies and headers of messages.")] = False,
    password_stdin: Annotated[bool, typer.Option("--password-stdin", help="Read the password from stdin.")] = False,
) -> None:
    """Print a user's line for the password file of `mqlayer console`; asks for the password."""
    if find_spec("argon2") is None or find_spec("starlette") is None:
        raise InvalidInput("the console needs an extra: pip install 'mqlayer[console]'")
    from mqlayer.console import Level
    from mqlayer.console.access import password_line

    if password_stdin:
        password = typer.get_text_stream("stdin").readline().rstrip("\r\n")
    else:
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    echo(password_line(name, Level.OPERATOR if operator else Level.VIEWER, password, bodies=bodies))


def _login(logins: LoginOptions, site: Site, groups: LevelGroups | None) -> Access | None:
    from mqlayer.console import Claims, LoginAccess, OpenId, PasswordFile, ProxyAccess, Sessions

    if logins.proxy_user_header and groups is not None:
        headers = {"user_header": logins.proxy_user_header, "groups_header": logins.proxy_groups_header}
        return ProxyAccess(site, groups, **headers)
    openid = None
    if logins.issuer and groups is not None:
        if find_spec("authlib") is None or find_spec("httpx2") is None:
            raise InvalidInput("logins by a provider need another extra: pip install 'mqlayer[console,oidc]'")
        secret = read_secret(str(logins.secret_file)) if logins.secret_file else None
        claims = Claims(logins.name_claim, logins.groups_claim)
        openid = OpenId(logins.issuer, logins.client_id, secret, groups, claims=claims, scope=logins.scope)
    if logins.password_file is None and openid is None:
        return None
    passwords = PasswordFile(logins.password_file) if logins.password_file else None
    sessions = Sessions(logins.idle_minutes * 60, logins.session_hours * 3_600)
    return LoginAccess(site, passwords=passwords, openid=openid, sessions=sessions)


def _has_operators(logins: LoginOptions, groups: LevelGroups | None) -> bool:
    from mqlayer.console import PasswordFile

    in_file = PasswordFile(logins.password_file).entries().values() if logins.password_file else ()
    return bool(groups and groups.operators) or any(entry.user.may_act for entry in in_file)


def _checked(settings: Settings, roles: Mapping[Level, str], *, needs_operator: bool) -> Level:
    """Return the highest level that the Postgres roles allow."""
    from mqlayer.console import Level
    from mqlayer.console.runtimes import Runtimes

    runtimes = Runtimes(settings, roles)
    runtimes.check(Level.VIEWER)
    try:
        runtimes.check(Level.OPERATOR)
    except PermissionDenied:
        if needs_operator or roles[Level.OPERATOR]:
            raise
        return Level.VIEWER
    return Level.OPERATOR


def _serve(app: Any, web: Any, host: str, port: int) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002 - as of the base class
            """End; a second signal does it at once."""
            web.state.stop_live()
            self.force_exit = self.should_exit
            self.should_exit = True

    # The proxies whose headers count are the console's own matter: it needs the peer's address.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
    )
    Server(config).run()


def _root(prefix: str) -> str:
    root = prefix.rstrip("/")
    if root and not root.startswith("/"):
        raise InvalidInput(f"{prefix!r} is no path: give one as /mq")
    return root


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
