"""`console`: the system in the browser."""

from __future__ import annotations

from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import echo
from mqlayer.errors import InvalidInput

PORT: Final = 9480


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(console)


def console(
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a login.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535)] = PORT,
    prefix: Annotated[str, typer.Option(help="Path that a proxy puts before the console's paths, as in /mq.")] = "",
    viewer_role: Annotated[str, typer.Option(help="Postgres role of viewers; else the login of MQLAYER_DSN.")] = "",
    operator_role: Annotated[str, typer.Option(help="Postgres role of operators.")] = "",
) -> None:
    """Show the system in the browser, until SIGTERM or SIGINT: lag, routes, keys, messages, parked and dead."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None or find_spec("jinja2") is None:
        raise InvalidInput("the console needs an extra: pip install 'mqlayer[console]'")
    if not _is_loopback(host):
        raise InvalidInput(f"{host} is not a loopback address, and no login is set up")
    import uvicorn

    from mqlayer.console import Level, console_app

    roles = {Level.VIEWER: viewer_role, Level.OPERATOR: operator_role}
    web = console_app(settings_here(), roles=roles)
    echo(f"console: http://{host}:{port}{prefix}/")
    uvicorn.run(web, host=host, port=port, root_path=prefix, log_level="warning", server_header=False)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
