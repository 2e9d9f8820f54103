"""`analytics`: Spark jobs on a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mqlayer.archive import find_snapshot
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import JsonOption, echo, format_key, show_rows
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database

if TYPE_CHECKING:
    from mqlayer.spark.jobs.job import JobResult

MAX_SHOWN: Final = 20


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(analytics)


def analytics(
    job: Annotated[str, typer.Argument(help="audit, latency, skew, failures, fairness, or all.")],
    snapshot: Annotated[str, typer.Option(metavar="NAME", help="The snapshot to look at: mqlayer snapshot list.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write what was found below it, as Parquet.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page with charts.")] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Of skew: balance for so many partitions; else for twice as many.")
    ] = None,
    split_report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of skew: write the splits for route split --from-report.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How Spark reads: jdbc or python; else jdbc where its driver is.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run Spark jobs on a snapshot; exit code 1 if the order audit fails."""
    settings = settings_here()
    dsn = settings.control_dsn()
    with Database(dsn) as database:
        find_snapshot(database, snapshot)
    given = _settings(conf or ())
    check_spark()
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.runner import as_json as json_of
    from mqlayer.spark.jobs.runner import borrowed_session, names_of, perform, tables_of

    jobs = names_of(job)
    for option, value in (("--split-report", split_report), ("--partitions", partitions)):
        if value is not None and "skew" not in jobs:
            raise InvalidInput(f"{option} goes with the job skew: leave it out, or run skew or all")

    def show(found: JobResult) -> None:
        if as_json:
            typer.echo(json_of(snapshot, found))
        else:
            _show(found)

    with borrowed_session("mqlayer analytics", **given) as spark:
        tables = tables_of(spark, snapshot, dsn=dsn, method=method, topics=topic or ())
        options = JobParams(partitions, split_report)
        done = perform(tables, jobs, params=options, out=out, html=html, show=show)
    if not all(found.good for found in done):
        raise typer.Exit(1)


def _settings(given: Any) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for name, equals, _ in pairs:
        if not equals or not name.startswith("spark."):
            raise InvalidInput(f"--conf takes a setting of Spark's, such as spark.driver.memory=4g, not {name!r}")
    return {name: value for name, _, value in pairs}


def _show(found: JobResult) -> None:
    for title, rows in found.rows.items():
        echo(title)
        shown = [{name: _format(name, value) for name, value in row.items()} for row in rows[:MAX_SHOWN]]
        show_rows(shown, as_json=False, nothing="none")
        if len(rows) > MAX_SHOWN:
            echo(f"{len(rows) - MAX_SHOWN} more: --json, --html or --out has them")
        echo()
    if found.job == "audit":
        echo(f"order audit: {found.facts['verdict']}")
        echo()


def _format(name: str, value: Any) -> Any:
    return format_key(value) if name == "key" else value
