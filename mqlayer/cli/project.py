"""`init`: write a small project."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from mqlayer.cli.output import echo
from mqlayer.errors import InvalidInput

TEMPLATES: Final = Path(__file__).parents[1] / "templates"
ENDING: Final = ".tmpl"


class ProjectKind(StrEnum):
    """A template's name."""

    PLAIN = "plain"
    FASTAPI = "fastapi"
    DJANGO = "django"
    CELERY = "celery"


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(init)


def init(
    kind: Annotated[ProjectKind, typer.Argument(help="What it is built with.")] = ProjectKind.PLAIN,
    directory: Annotated[Path, typer.Argument(help="Where to write it; created if missing.")] = Path(),
) -> None:
    """Write a small project: tables, a consumer, tests, a compose file.

    Overwrites nothing: where one of its files exists, none is written. Its README has the next commands.
    """
    files = dict(_files(kind))
    there = sorted(str(name) for name in files if (directory / name).exists())
    if there:
        raise InvalidInput(f"{directory} has {', '.join(there)} already: nothing is written; name another directory")
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        echo(str(path))
    echo(f"next: {directory / 'README.md'}")


def _files(kind: ProjectKind) -> Iterator[tuple[Path, str]]:
    for folder in (TEMPLATES / "common", TEMPLATES / kind):
        for source in sorted(folder.rglob(f"*{ENDING}")):
            name = source.relative_to(folder)
            target = source.name.removesuffix(ENDING).replace("dot-", ".", 1)
            yield name.with_name(target), source.read_text("utf-8")
