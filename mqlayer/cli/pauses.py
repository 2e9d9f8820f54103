"""What commands that pause and resume have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mqlayer.cli.showing import counted, say

PartitionOption = Annotated[
    list[int] | None, typer.Option("--partition", help="Only this partition; may be said several times.")
]
WaitOption = Annotated[
    float, typer.Option(min=0.0, metavar="S", help="Wait up to so many seconds until nothing of it runs any more.")
]


def say_partitions(wanted: Sequence[int], changed: Sequence[int], done: str, already: str) -> None:
    """Say of each partition what became of it."""
    for partition in wanted:
        say(f"partition {partition} {done if partition in changed else already}")


def say_under_way(left: int) -> None:
    """Say whether something of what was paused still runs."""
    if left:
        say(f"what runs in {counted(left, 'partition')} is being finished: --wait S waits for that", err=True)
