"""Curves on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mqlayer.cli.output import echo, format_value, show_rows
from mqlayer.cli.runtime import runtime_here

if TYPE_CHECKING:
    from mqlayer.inspect.curves import Curve, CurveKind, CurvePoint

LEVELS: Final = "▁▂▃▄▅▆▇█"

HoursOption = Annotated[float, typer.Option(min=0.02, max=168, help="The last so many hours.")]
PointsOption = Annotated[int, typer.Option(min=1, max=1_000, help="Points of a curve, at most.")]


def show_history(kind: CurveKind, name: str, topic: str | None, hours: float, points: int, *, as_json: bool) -> None:
    """Print the curves of a group, topic or node."""
    # Only this command of a node's needs it.
    from mqlayer.inspect.curves import curves

    with runtime_here() as runtime:
        found = curves(runtime.control, kind, name, topic=topic, last=timedelta(hours=hours), points=points)
    if as_json:
        show_rows([{"name": one.name, **msgspec.to_builtins(one)} for one in found], as_json=True, nothing="")
        return
    known = [one for one in found if one.points]
    show_rows(map(_row, known), as_json=False, nothing="no sample of it: the worker's job `sample` takes one a minute")
    for one in known[:1]:
        first, last = one.points[0].at, one.points[-1].at + timedelta(seconds=one.step_s)
        echo(f"from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, a point for {one.step_s / 60:.3g} min")


def sparkline(values: Sequence[float | None]) -> str:
    """Return a curve as blocks; a space for an unknown value."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(" " if value is None else LEVELS[_level(value, most)] for value in values)


def _level(value: float, most: float) -> int:
    return 0 if most <= 0 else min(len(LEVELS) - 1, int(value / most * len(LEVELS)))


def _row(one: Curve) -> dict[str, Any]:
    highest = [point.highest for point in one.points if point.highest is not None]
    last = next((point.mean for point in reversed(one.points) if point.mean is not None), None)
    return {
        "curve": one.name.replace("_per_s", " per second").removesuffix("_s").replace("_", " "),
        "last": _shown(one.name, last),
        "highest": _shown(one.name, max(highest, default=None)),
        "over_time": sparkline(list(_filled(one.points, one.step_s))),
    }


def _shown(name: str, value: float | None) -> str:
    return "" if value is None else format_value("per_s" if name.endswith("per_s") else name, round(value, 2))


def _filled(points: Iterable[CurvePoint], step_s: float) -> Iterator[float | None]:
    """Yield the highest value of each step, None for steps without a sample."""
    before = None
    for point in points:
        if before is not None:
            yield from [None] * (round((point.at - before).total_seconds() / step_s) - 1)
        yield point.highest
        before = point.at
