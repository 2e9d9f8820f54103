"""Curves of the samples that the job `sample` takes each minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import msgspec

from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

CurveKind = Literal["group", "topic", "node"]

POINTS_LIMIT: Final = 1_000
LONGEST: Final = timedelta(days=7)
MINUTE_S: Final = 60.0
_COLUMNS: Final = (
    "lag", "oldest_s", "parked", "dead", "committed_per_s", "relayed_per_s", "stored_per_s", "memory_bytes", "ops_per_s"
)  # fmt: skip
CURVES: Final[Mapping[CurveKind, Sequence[str]]] = {
    "group": ("lag", "oldest_s", "parked", "dead"),
    "topic": ("committed_per_s", "relayed_per_s", "stored_per_s"),
    "node": ("memory_bytes", "ops_per_s"),
}
"""The curves of each kind."""


class CurvePoint(msgspec.Struct, frozen=True):
    """A step of a curve that begins at `at`, with `samples` minutes. None: not known."""

    at: datetime
    samples: int
    mean: float | None
    highest: float | None


class Curve(msgspec.Struct, frozen=True):
    """A curve. Steps without any sample have no point."""

    name: str
    step_s: float
    points: Sequence[CurvePoint]


def curves(
    database: Database,
    kind: CurveKind,
    name: str,
    *,
    topic: str | None = None,
    last: timedelta = timedelta(hours=24),
    points: int = 60,
) -> list[Curve]:
    """Return the curves of a group (of `topic`), topic or node, in at most `points` points each.

    Rates are per second. Raises NotFound, InvalidInput.
    """
    if not 1 <= points <= POINTS_LIMIT:
        raise InvalidInput(f"{points} points are no curve: 1 to {POINTS_LIMIT:,}")
    if not timedelta(minutes=1) <= last <= LONGEST:
        raise InvalidInput("samples are kept for a week: name a minute to 7 days")
    step_s = max(MINUTE_S, last.total_seconds() / points)
    with database.connection() as connection:
        row = connection.execute(query("sampled_object"), {"kind": kind, "topic": topic, "name": name}).fetchone()
        if row is None:
            raise NotFound(kind, name if topic is None else f"{topic}/{name}", f"mqlayer {kind} list")
        facts = {"kind": kind, "object_id": row[0], "last_s": last.total_seconds(), "step_s": step_s}
        rows = connection.execute(query("sampled_curve"), facts).fetchall()
    return [Curve(one, step_s, _points(rows, 2 + 2 * _COLUMNS.index(one))) for one in CURVES[kind]]


def _points(rows: Sequence[Any], column: int) -> list[CurvePoint]:
    return [CurvePoint(row[0], row[1], row[column], row[column + 1]) for row in rows]
