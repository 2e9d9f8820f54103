"""`analytics effects`: the effect audit."""

from __future__ import annotations

from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.analytics import (
    ConfOption,
    ExportOption,
    HtmlOption,
    JobRequest,
    MethodOption,
    OutOption,
    SnapshotOption,
    TopicsOption,
    run_jobs,
)
from mqlayer.cli.output import JsonOption
from mqlayer.cli.panels import LOOK
from mqlayer.cli.spark_requirements import check_spark


def add_effects(group: typer.Typer) -> None:
    """Add the command."""
    group.command("effects", rich_help_panel=LOOK)(effects)


def effects(
    snapshot: SnapshotOption,
    topic: TopicsOption = None,
    application_dsn: Annotated[
        str | None, typer.Option(metavar="DSN", help="The database of the effects; else MQLAYER_APP_DSN.")
    ] = None,
    out: OutOption = None,
    html: HtmlOption = None,
    method: MethodOption = None,
    export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare fence and inbox rows with outcomes; exit code 1 for an effect without handling, or the reverse."""
    settings = settings_here()
    dsn = settings.control_dsn()
    effects_dsn = application_dsn or settings.application_dsn()
    check_spark()
    from mqlayer.spark.effect_reader import effects_reader

    asked = JobRequest(snapshot, topic, out, html, method, export, conf, as_json)
    run_jobs("effects", asked, effects=effects_reader(snapshot, dsn=dsn, application_dsn=effects_dsn))
