"""Configurations, the measured points of curves, and the file that keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

CURVES_FILE: Final = Path(__file__).with_name("curves.json")
"""The measured curves that the documents show."""


LATE: Final = 1_000_000
"""Above this many messages, processes start behind the publishing: their leases would end meanwhile."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration.

    `messages`: how many wait when consumption begins. `rate`: messages/s of the latency part, which with `late_group`
    is of another group that starts at the end of the log.
    """

    processes: int = 1
    concurrency: int = 8
    wait_ms: float = 0.0
    nodes: int = 1
    partitions: int = 16
    groups: int = 1
    keys: int = 1_000
    body_bytes: int = 256
    messages: int = 100_000
    rate: float = 500.0
    late_group: bool = False

    @property
    def deliveries(self) -> int:
        """Handler calls for all messages."""
        return self.messages * self.groups


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step.

    Rates are messages per second, of consumption over all groups. `publish_cpu_us`, `consume_cpu_us`: processor time
    per message or delivery, by part. `cores`: processors in use while messages were consumed, by part. `p99_ms`: the
    median of five successive parts.
    """

    setup: Setup
    publish: float
    consume: float
    p50_ms: float
    p99_ms: float
    publish_cpu_us: dict[str, float]
    consume_cpu_us: dict[str, float]
    cores: dict[str, float]


class Series(msgspec.Struct, kw_only=True):
    """The points of a curve with a name, in order of the axis."""

    name: str
    points: list[Point]


class Curve(msgspec.Struct, kw_only=True):
    """One measured curve; `axis` is the field of Setup that grows."""

    name: str
    axis: str
    title: str
    series: list[Series]
    machine: str
    measured_at: str
    load: float
    """Processes that waited for a processor before the run."""


def read_curves(path: Path = CURVES_FILE) -> dict[str, Curve]:
    """Return the kept curves by name."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Curve]) if path.exists() else {}


def keep_curve(curve: Curve, path: Path, *, add: bool = False) -> None:
    """Put a curve into the file in place of the former one of its name, or add its points to that one."""
    kept = read_curves(path)
    if add and curve.name in kept:
        for former, series in zip(kept[curve.name].series, curve.series, strict=True):
            new = {getattr(point.setup, curve.axis) for point in series.points}
            former.points = [p for p in former.points if getattr(p.setup, curve.axis) not in new] + series.points
    else:
        kept[curve.name] = curve
    path.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items()))), indent=1) + b"\n")
