"""The rows of a run, as a table in Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

HEAD: Final = (
    "system",
    "publish, msg/s",
    "consume, msg/s",
    "p50, ms",
    "p99, ms",
    "order of a key",
    "CPU s per million",
    "stored means",
    "versions",
)


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a system, or the reason why it was not (`skipped`)."""

    name: str
    skipped: str = ""
    messages: int = 0
    publish_per_s: float = math.nan
    consume_per_s: float = math.nan
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    ordered: int = 0
    out_of_order: int = 0
    cpu_s_per_million: float = math.nan
    stored: str = ""
    shape: str = ""
    versions: str = ""
    sources: tuple[str, ...] = ()


def table(rows: Sequence[PeerRow]) -> str:
    """Return the table, and below it a line for each system that was left out."""
    measured = [row for row in rows if not row.skipped]
    lines = [line_of(HEAD), "|" + "---|" * len(HEAD), *(line_of(cells(row)) for row in measured)] if measured else []
    lines += [f"Left out: {row.name}: {row.skipped}" for row in rows if row.skipped]
    return "\n".join(lines)


def cells(row: PeerRow) -> tuple[str, ...]:
    """Return the cells of a row."""
    order = f"{row.out_of_order:,} of {row.ordered:,} early" if row.out_of_order else "kept"
    return (
        row.name,
        number(row.publish_per_s),
        number(row.consume_per_s),
        number(row.p50_ms, digits=1),
        number(row.p99_ms, digits=1),
        order,
        number(row.cpu_s_per_million),
        row.stored,
        row.versions,
    )


def number(value: float, *, digits: int = 0) -> str:
    """Return a figure as text; a dash for one that is not there."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def line_of(values: Sequence[str]) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(values) + " |"
