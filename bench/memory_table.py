"""`python -m bench.memory_table [FILE]`: the table of docs/how-to/size.md, out of the record or one saved run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from bench import recording
from bench.recording import Recording, all_of, read
from bench.registry import Line

BENCHES: Final = ("node_memory", "process_memory")
MEGABYTE: Final = 1_000_000
TEXTS: Final[Mapping[str, Mapping[str, str]]] = {
    "node": {
        "node_memory[node without messages]": "node without messages",
        "node_memory[record of 0]": "record of 0 bytes",
        "node_memory[record of 256]": "record of 256 bytes",
        "node_memory[record of 1024]": "record of 1,024 bytes",
        "node_memory[record of 5000]": "record of 5,000 bytes",
        "node_memory[partition without records]": "partition without records",
        "node_memory[partition with a record]": "partition with a record",
        "node_memory[group on a partition]": "group, per partition",
        "node_memory[mark, 64 partitions]": "mark (the last number of a source in an LP), up to 512 of a partition",
        "node_memory[mark, 1 partitions]": "mark, where a partition has more",
        "node_memory[failed message]": "failed message that waits in place",
    },
    "Postgres, with indexes": {
        "node_memory[outbox row]": "outbox row, beside its body",
        "node_memory[archived record]": "archived record, beside its body",
        "node_memory[fenced key]": "fenced key",
        "node_memory[inbox row]": "inbox message",
        "node_memory[parked message]": "parked message, beside its body",
        "node_memory[parked key]": "parked key",
    },
    "consumer": {
        "process_memory[consumer]": "process with one consumer",
        "process_memory[next consumer of a process]": "each further consumer of the process",
        "process_memory[partition of a consumer]": "partition that it owns",
        "process_memory[parked key]": "parked key of its partitions",
        "process_memory[message read ahead]": "message read ahead, beside its body",
    },
    "relay": {
        "process_memory[relay]": "process without messages",
        "process_memory[relay out of a backlog]": "process, whatever number of messages waits",
        "process_memory[partition of a relay]": "partition",
        "process_memory[LP of a relay]": "LP that it sent to",
    },
    "direct producer": {
        "process_memory[producer]": "process without messages",
        "process_memory[partition of a producer]": "partition",
        "process_memory[LP of a producer]": "LP that it sent to",
        "process_memory[message that waits in a producer]": "waiting message with its future, beside its body",
    },
}
"""What a line measures, by where the bytes are."""


def table(runs: Sequence[Recording]) -> str:
    """Return the table in Markdown: of each line, the last run that has it. Raises KeyError without one."""
    found = {one.name: one.median() for run in runs for one in run.lines if one.bench in BENCHES}
    rows = ["| where | what | measured | computed with |", "|---|---|---|---|"]
    for place, lines in TEXTS.items():
        rows += [f"| {place} | {text} | {cells(found[name])} |" for name, text in lines.items()]
    return "\n".join(rows) + "\n"


def cells(line: Line) -> str:
    """Return the measured bytes and the figure of `mqlayer size`."""
    return " | ".join(size(one) for one in (line.value, line.baseline or 0.0))


def size(count: float) -> str:
    """Return bytes for reading."""
    return f"{count / MEGABYTE:,.1f} MB" if count >= MEGABYTE else f"{count:,.0f} B"


def main(file: Annotated[Path | None, typer.Argument(help="A saved run; the record without it.")] = None) -> None:
    """Print the table."""
    typer.echo(table([read(file)] if file else all_of(recording.RESULTS)), nl=False)


if __name__ == "__main__":
    typer.run(main)
