"""`python -m bench.growth [FILE]`: draw the curves of a JSON file, by default the kept one, into the documents."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Final

from bench.growth.drawing import draw
from bench.growth.points import CURVES_FILE, Curve, Point, read_curves
from bench.model.__main__ import main as predicted

DOCS: Final = Path(__file__).parents[2] / "docs"
PICTURES: Final = DOCS / "pictures"
PAGE: Final = DOCS / "explanation" / "scaling.md"
PLACE: Final = re.compile(r"(<!-- points: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUTPUT: Final = re.compile(r"(```bash\npython -m bench\.model (.*?)\n```\n\n```text\n).*?(```\n)", re.DOTALL)
HEAD: Final = "published/s | handled/s | p50, p99 ms | us: producer, nodes | us: consumers, nodes |"


def main() -> None:
    """Write pictures, tables and predictions."""
    curves = read_curves(Path(sys.argv[1]) if len(sys.argv) > 1 else CURVES_FILE)
    for name, curve in curves.items():
        (PICTURES / f"scale-{name}.svg").write_text(draw(curve), "utf-8")
    PAGE.write_text(with_outputs(with_tables(PAGE.read_text("utf-8"), curves)), "utf-8")


def with_tables(page: str, curves: dict[str, Curve]) -> str:
    """Return the page with the tables of the curves."""
    return PLACE.sub(lambda found: f"{found[1]}{table(curves[found[2]])}{found[3]}", page)


def with_outputs(page: str) -> str:
    """Return the page with the outputs of its commands of the model."""
    return OUTPUT.sub(lambda found: f"{found[1]}{predicted(shlex.split(found[2]))}\n{found[3]}", page)


def table(curve: Curve) -> str:
    """Return the points as a table."""
    many = len(curve.series) > 1
    rows = [
        f"| {getattr(point.setup, curve.axis):,}{f', {series.name}' if many else ''} | {row(point)} |"
        for series in curve.series
        for point in series.points
    ]
    head = [f"| {curve.title.lower()} | {HEAD}", "|---|---|---|---|---|---|"]
    foot = [
        "",
        f"Curve `{curve.name}`: measured on {curve.measured_at}, {curve.machine}, load {curve.load:g} before it.",
        "",
    ]
    return "\n".join(["", *head, *rows, *foot, ""])


def row(point: Point) -> str:
    """Return the figures of a point."""
    publish, consume = point.publish_cpu_us, point.consume_cpu_us
    return " | ".join(
        (
            f"{point.publish:,.0f}",
            f"{point.consume:,.0f}",
            f"{point.p50_ms:.1f}, {point.p99_ms:.1f}",
            f"{publish['producer']:,.1f}, {publish['nodes']:,.1f}",
            f"{consume['consumers']:,.1f}, {consume['nodes']:,.1f}",
        )
    )


if __name__ == "__main__":
    main()
