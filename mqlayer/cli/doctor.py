"""`doctor` and `verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.output import JsonOption, echo, pluralize, show_facts, show_rows
from mqlayer.cli.runtime import runtime_here
from mqlayer.doctor import CheckStatus, Finding, diagnose
from mqlayer.doctor.verify import verify as verify_stores

EXIT_UNKNOWN: Final = 3
"""Nothing differs, but not everything was compared."""
SEVERITY: Final = (CheckStatus.BROKEN, CheckStatus.WARNING, CheckStatus.UNKNOWN, CheckStatus.OK)
NODES: Final = "nodes"


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(doctor)
    app.command()(verify)


@excludes("--all", "--json", why="--json has all findings")
def doctor(
    every: Annotated[bool, typer.Option("--all", help="Show what is fine, too.")] = False, as_json: JsonOption = False
) -> None:
    """Check servers, settings, schemas and waiting work; exit code 1 if something is broken.

    Shows problems with their repairs, and how much was checked. Changes nothing.
    """
    found = diagnose(settings_here())
    if as_json:
        _show_json(found)
    else:
        _show([one for one in found if every or one.verdict is not CheckStatus.OK])
        _summarize(found)
    _end(found)


def verify(
    topic: Annotated[str | None, typer.Argument(help="All topics where none is named.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every record's identity on the nodes, and count the archive.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare Postgres, nodes and archive; exit code 1 for differences, 3 if some could not be compared.

    Changes nothing; safe on a live system.
    """
    with runtime_here() as runtime:
        found = verify_stores(runtime, topic, deep=deep)
    if as_json:
        _show_json(found)
    else:
        _show(found)
    if not (found or as_json):
        echo("no topic to verify")
    _end(found)
    if any(finding.verdict is CheckStatus.UNKNOWN for finding in found):
        raise typer.Exit(EXIT_UNKNOWN)


def _show_json(found: Iterable[Finding]) -> None:
    rows = ({name: str(value) for name, value in asdict(finding).items()} for finding in found)
    show_rows(rows, as_json=True, nothing="")


def _show(found: Iterable[Finding]) -> None:
    for one in sorted(found, key=lambda finding: SEVERITY.index(finding.verdict)):
        about = f"{one.verdict}: {one.check}, {_server(one)}"
        if one.verdict is CheckStatus.OK:
            echo(f"{about}: {one.seen}")
        else:
            echo(about)
            show_facts({"seen": one.seen, "repair": one.fix}, indent="  ")


def _summarize(found: Sequence[Finding]) -> None:
    counts = Counter(finding.verdict for finding in found)
    problems = [
        pluralize(counts[verdict], str(verdict)) if verdict is CheckStatus.WARNING else f"{counts[verdict]} {verdict}"
        for verdict in SEVERITY[:-1]
        if counts[verdict]
    ]
    echo(", ".join([f"{pluralize(len(found), 'check')}: {counts[CheckStatus.OK]} fine", *problems]))
    fine = Counter(_area(finding) for finding in found if finding.verdict is CheckStatus.OK)
    areas = Counter(map(_area, found))
    places = {_area(finding): finding.subject.removeprefix(_server(finding)) for finding in found}
    show_facts(
        {area: f"{fine[area]} of {count} fine{'' if area == NODES else places[area]}" for area, count in areas.items()},
        indent="  ",
    )


def _server(finding: Finding) -> str:
    """The summary has the addresses of databases; nodes have names."""
    return finding.subject.partition(" (")[0]


def _area(finding: Finding) -> str:
    """All nodes are one."""
    server = _server(finding)
    return NODES if server.startswith("node") else server


def _end(found: Iterable[Finding]) -> None:
    if any(finding.verdict is CheckStatus.BROKEN for finding in found):
        raise typer.Exit(1)
