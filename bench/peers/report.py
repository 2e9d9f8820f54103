"""The rows of a run, as a table in Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

HEAD: Final = (
    "system",
    "messages",
    "publish, msg/s",
    "consume, msg/s",
    "p50, ms",
    "p99, ms",
    "worst, ms",
    "order of a key",
    "CPU s per million",
    "stored means",
    "versions",
)


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A system's figures, or the reason for having none (`skipped`)."""

    name: str
    skipped: str = ""
    messages: int = 0
    publish_per_s: float = math.nan
    consume_per_s: float = math.nan
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    worst_ms: float = math.nan
    ordered: int = 0
    out_of_order: int = 0
    promises_order: bool = True
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
    return (
        row.name,
        number(row.messages),
        number(row.publish_per_s),
        number(row.consume_per_s),
        number(row.p50_ms, digits=1),
        number(row.p99_ms, digits=1),
        number(row.worst_ms),
        order_of(row),
        number(row.cpu_s_per_million),
        row.stored,
        row.versions,
    )


def order_of(row: PeerRow) -> str:
    """Return whether a key's order was kept, and whether the system promises that."""
    promised = "kept" if row.promises_order and not row.out_of_order else "not promised"
    if not row.out_of_order:
        return promised
    broken = f"{row.out_of_order:,} of {row.ordered:,} early"
    return broken if row.promises_order else f"{promised}: {broken}"


def number(value: float, *, digits: int = 0) -> str:
    """Return a figure as text; a dash for one that is not there."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def line_of(values: Sequence[str]) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(values) + " |"
