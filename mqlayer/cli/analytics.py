"""`analytics`: Spark jobs on a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mqlayer.archive import find_snapshot
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import JsonOption, echo, format_key, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.schedules import schedule
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database

if TYPE_CHECKING:
    from mqlayer.spark.jobs.job import JobResult

MAX_SHOWN: Final = 20
PLAIN: Final = {
    "audit": "Check each source and LP for order, gaps, duplicates, places; exit code 1 unless clean.",
    "latency": "Measure messages per minute, and the time from publishing to handling.",
    "failures": "Count retries, parked and dead messages by error and member.",
    "fairness": "Compare the members of each group: messages, busy time, Gini coefficients.",
}
"""The jobs without options of their own, and their help."""

analytics = typer.Typer(no_args_is_help=True, help="Spark jobs on a snapshot of the archive.")

SnapshotOption = Annotated[str, typer.Option(metavar="NAME", help="The snapshot to look at: mqlayer snapshot list.")]
TopicsOption = Annotated[list[str] | None, typer.Option(help="Only this topic; may be repeated.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write what was found below it, as Parquet.")]
HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page with charts.")]
MethodOption = Annotated[
    str | None, typer.Option(help="How Spark reads: jdbc or python; else jdbc where its driver is.")
]
ExportOption = Annotated[
    str | None,
    typer.Option(
        "--from-export", metavar="PATH", help="Take days that Postgres dropped from this export of the archive."
    ),
]
ConfOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.")
]
PartitionsOption = Annotated[
    int | None, typer.Option(min=1, help="Balance a topic for so many partitions; else for twice as many.")
]
ConsoleOption = Annotated[
    str | None, typer.Option(metavar="URL", help="The console's address: keys and messages link to its pages.")
]
SplitReportOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the splits for route split --from-report.")
]


class JobRequest(NamedTuple):
    """What every job is asked with; `topics`: all, where none is named."""

    snapshot: str
    topics: Sequence[str] | None
    out: Path | None
    html: Path | None
    method: str | None
    export: str | None
    conf: Sequence[str] | None
    as_json: bool


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    # They need the group's options from here.
    from mqlayer.cli.certify import add_certify
    from mqlayer.cli.effects import add_effects
    from mqlayer.cli.shadow import add_shadow
    from mqlayer.cli.what_if import add_what_if

    analytics.add_typer(schedule, name="schedule", rich_help_panel=CHANGE)
    add_certify(analytics)
    add_effects(analytics)
    add_what_if(analytics)
    add_shadow(analytics)
    app.add_typer(analytics, name="analytics")


def _plain(job: str) -> Callable[..., None]:
    def run(
        snapshot: SnapshotOption,
        topic: TopicsOption = None,
        out: OutOption = None,
        html: HtmlOption = None,
        method: MethodOption = None,
        export: ExportOption = None,
        conf: ConfOption = None,
        as_json: JsonOption = False,
    ) -> None:
        run_jobs(job, JobRequest(snapshot, topic, out, html, method, export, conf, as_json))

    return run


for _job, _help in PLAIN.items():
    analytics.command(_job, help=_help, rich_help_panel=LOOK)(_plain(_job))


@analytics.command("skew", rich_help_panel=LOOK)
def skew(
    snapshot: SnapshotOption,
    topic: TopicsOption = None,
    out: OutOption = None,
    html: HtmlOption = None,
    partitions: PartitionsOption = None,
    split_report: SplitReportOption = None,
    method: MethodOption = None,
    export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure LPs, hottest keys and partitions; plan the splits that balance a topic."""
    asked = JobRequest(snapshot, topic, out, html, method, export, conf, as_json)
    run_jobs("skew", asked, partitions=partitions, split_report=split_report)


@analytics.command("journeys", rich_help_panel=LOOK)
def journeys(
    snapshot: SnapshotOption,
    topic: TopicsOption = None,
    out: OutOption = None,
    html: HtmlOption = None,
    console: ConsoleOption = None,
    method: MethodOption = None,
    export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure stream, attempts and parking of keys and messages; name the slowest."""
    run_jobs("journeys", JobRequest(snapshot, topic, out, html, method, export, conf, as_json), console=console)


@analytics.command("all", rich_help_panel=LOOK)
def all_(
    snapshot: SnapshotOption,
    topic: TopicsOption = None,
    out: OutOption = None,
    html: HtmlOption = None,
    partitions: PartitionsOption = None,
    split_report: SplitReportOption = None,
    method: MethodOption = None,
    export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run all jobs that need no more than a snapshot; exit code 1 if one finds a fault."""
    asked = JobRequest(snapshot, topic, out, html, method, export, conf, as_json)
    run_jobs("all", asked, partitions=partitions, split_report=split_report)


def run_jobs(job: str, asked: JobRequest, **params: Any) -> None:
    """Run a job, or all; `params`: of JobParams. Exits with 1 for found faults."""
    dsn = settings_here().control_dsn()
    with Database(dsn) as database:
        find_snapshot(database, asked.snapshot)
    given = spark_settings(asked.conf or ())
    check_spark()
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.runner import as_json as json_of
    from mqlayer.spark.jobs.runner import borrowed_session, names_of, perform, tables_of

    def show(found: JobResult) -> None:
        if asked.as_json:
            typer.echo(json_of(asked.snapshot, found))
        else:
            _show(found)

    with borrowed_session("mqlayer analytics", **given) as spark:
        topics = asked.topics or ()
        tables = tables_of(spark, asked.snapshot, dsn=dsn, method=asked.method, export=asked.export, topics=topics)
        done = perform(tables, names_of(job), params=JobParams(**params), out=asked.out, html=asked.html, show=show)
    if not all(found.good for found in done):
        raise typer.Exit(1)


def spark_settings(given: Sequence[str]) -> dict[str, str]:
    """Return the settings of --conf, and Spark's master. Raises InvalidInput."""
    pairs = [one.partition("=") for one in given]
    for name, equals, _ in pairs:
        if not equals or not name.startswith("spark."):
            raise InvalidInput(f"--conf takes a setting of Spark's, such as spark.driver.memory=4g, not {name!r}")
    master = settings_here().spark_master
    return ({"spark.master": master} if master else {}) | {name: value for name, _, value in pairs}


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
