"""`asyncapi`: the document of an application."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mqlayer.asyncapi import asyncapi_document
from mqlayer.cli.addresses import use_stack_here
from mqlayer.cli.output import echo
from mqlayer.cli.runtime import control_here
from mqlayer.consuming.api.app_loader import load_app
from mqlayer.errors import InvalidInput
from mqlayer.topics import list_nodes
from mqlayer.typed_topic import Topic


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(asyncapi)


def asyncapi(
    application: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the program's mqlayer.App is.")],
    output: Annotated[Path | None, typer.Option(help="Write it to this file; else it is printed.")] = None,
    title: Annotated[str | None, typer.Option(help="The application's name; without it MODULE:APP.")] = None,
    app_version: Annotated[str, typer.Option(metavar="TEXT", help="The application's version.")] = "0.1.0",
    nodes: Annotated[bool, typer.Option("--nodes", help="Name the registered nodes as servers, too.")] = False,
) -> None:
    """Write the AsyncAPI document of MODULE:APP: topics, groups, bodies.

    It has the topics that the App consumes, and the typed topics of its module as those it publishes to. No server is
    asked, but with --nodes the control database. It holds no credentials.
    """
    use_stack_here()
    app = load_app(application)
    module = vars(sys.modules[application.partition(":")[0]])
    topics = {id(value): value for value in module.values() if isinstance(value, Topic)}
    found = []
    if nodes:
        with control_here() as database:
            found = list_nodes(database)
    document = asyncapi_document(
        app, title=title or application, version=app_version, topics=topics.values(), nodes=found
    )
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if output is None:
        echo(text, lines=True)
        return
    try:
        output.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise InvalidInput(f"{output} can't be written: {error.strerror}") from None
    echo(f"{output} has {len(document.get('channels', {}))} channels, {len(document.get('operations', {}))} operations")
