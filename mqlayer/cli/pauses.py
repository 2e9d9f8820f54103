"""Common parts of pause commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mqlayer.cli.output import echo, pluralize

PartitionOption = Annotated[
    list[int] | None, typer.Option("--partition", help="Only this partition; may be said several times.")
]
WaitOption = Annotated[
    float, typer.Option(min=0.0, metavar="S", help="Wait for the end of running handlers, so many seconds at most.")
]


def print_partitions(wanted: Sequence[int], changed: Sequence[int], done: str, already: str) -> None:
    """Print each partition's result."""
    for partition in wanted:
        echo(f"partition {partition} {done if partition in changed else already}")


def print_running(left: int) -> None:
    """Print how many partitions still run handlers."""
    if left:
        echo(f"handlers still run in {pluralize(left, 'partition')}: --wait S waits for their end", err=True)
