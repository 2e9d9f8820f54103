"""`python -m bench.model`: predict a layout.

`--check` prints the errors against the measured curves, with `--points` of each figure; `--ladder` prints layouts for
each power of ten."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields

from bench.growth.points import read_curves
from bench.model.check import by_curve, compare, summary
from bench.model.ladder import ladder
from bench.model.predict import Layout, predict


def main(arguments: Sequence[str]) -> str:
    """Return what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description="Predict throughput, lag, bottleneck.")
    parser.add_argument("--check", action="store_true", help="errors of predictions of the measured curves")
    parser.add_argument("--points", action="store_true", help="with --check: each prediction too")
    parser.add_argument("--ladder", action="store_true", help="layouts for each power of ten of messages per second")
    for field in fields(Layout):
        kind: type = {"int": int, "float": float, "str": str}[str(field.type)]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args(arguments))
    check, points, climb = given.pop("check"), given.pop("points"), given.pop("ladder")
    if check or points:
        found = compare(read_curves())
        heads = ("step", "figure", "predicted", "measured", "error", "bottleneck")
        shown = aligned([heads, *(one.row() for one in found)]) + "\n\n" if points else ""
        return shown + aligned(summary(found)) + "\n\n" + aligned(by_curve(found))
    return aligned(ladder()) if climb else described(Layout(**given))


def described(layout: Layout) -> str:
    """Return a layout's prediction as text."""
    found = predict(layout)
    rows = [("part", "us per message", "units", "messages/s at most", "busy")]
    for part in found.parts:
        busy = f"{layout.rate / part.capacity:.0%}" if layout.rate else ""
        rows.append((part.name, f"{part.us:,.1f}", f"{part.units:,.10g}", f"{part.capacity:,.0f}", busy))
    lag = f"p50 {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms"
    if found.growth:
        lag = f"grows by {found.growth:,.0f} messages each second"
    return (
        f"{aligned(rows)}\nthroughput {found.throughput:,.0f} messages/s, first bottleneck: {found.bottleneck}\n"
        f"lag at {layout.rate:,.0f} messages/s: {lag}\nheartbeats: {found.control:.2f} cores of Postgres"
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows in columns."""
    all_rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in all_rows)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
