"""`up`, `down`, `status`: the local stack."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.settings import Settings
from mqlayer.stack import ComponentStatus, GivenAddresses, Stack

DirectoryOption = Annotated[Path, typer.Option("--directory", "-d", help="Where the stack keeps its data and logs.")]

DEFAULT_DIRECTORY: Final = Path(".mqlayer")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    directory: DirectoryOption = DEFAULT_DIRECTORY,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=16, help="How many partition nodes to run; 2, or as many as there are.")
    ] = None,
    servers_only: Annotated[
        bool, typer.Option("--servers-only", help="Leave the relay and the Celery worker out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the stack, or its stopped parts, and print its addresses.

    Uses servers of MQLAYER_DSN, MQLAYER_REDIS_URL (comma-separated) and MQLAYER_BROKER_URL as given. The directory
    holds its own servers' passwords.
    """
    stack = _stack(directory, node_count=nodes)
    stack.up(servers_only=servers_only)
    _show(stack.status(), as_json=as_json)
    if not as_json:
        echo(f"data and logs: {directory}")
        echo(f"to use it from a program: source {shlex.quote(str(directory / stack.environment_file.name))}")
        others = " ".join(path.name for path in stack.files_of_kinds if path.exists())
        if others:
            echo(f"to use it as one kind of process: {others} in the same folder")


def down(
    directory: DirectoryOption = DEFAULT_DIRECTORY,
    erase: Annotated[bool, typer.Option("--erase", help="Remove the data too.")] = False,
) -> None:
    """Stop the stack; data stay for the next `up`."""
    if erase:
        _stack(directory).erase()
    else:
        _stack(directory).down()


def status(directory: DirectoryOption = DEFAULT_DIRECTORY, as_json: JsonOption = False) -> None:
    """Show every part; exit code 1 if one is not running."""
    parts = _stack(directory).status()
    if not parts:
        echo(f"no stack in {directory}: start one with `mqlayer up`", err=True)
        raise typer.Exit(1)
    _show(parts, as_json=as_json)
    if any(part.state != "running" for part in parts):
        raise typer.Exit(1)


def _stack(directory: Path, *, node_count: int | None = None) -> Stack:
    settings = Settings()
    return Stack(
        directory,
        node_count=node_count,
        given=GivenAddresses.from_environment(),
        key_prefix=settings.key_prefix,
        allow_unsafe_redis=settings.allow_unsafe_redis,
    )


def _show(parts: list[ComponentStatus], *, as_json: bool) -> None:
    if as_json:
        show_rows(map(_facts, parts), as_json=True, nothing="")
        return
    rows = ({"part": part.name, "state": part.state, "pid": part.pid, "address": part.address} for part in parts)
    show_rows(rows, as_json=False, nothing="")


def _facts(part: ComponentStatus) -> dict[str, object]:
    return {
        "name": part.name,
        "state": part.state,
        "pid": part.pid,
        "address": part.address,
        "log": str(part.log or ""),
    }
