"""Split reports: files with LPs whose splits balance a topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from mqlayer.domain.names import check_name
from mqlayer.domain.route_changes import ChangePlan
from mqlayer.domain.routing import RouteVersion
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.routes.planner import planned_split
from mqlayer.runtime.route_cache import load_route
from mqlayer.runtime.runtime import Runtime

KIND: Final = "mqlayer split report 1"


class PartitionSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A partition and its split points; `loads`: records per part."""

    partition: int
    lp_from: int
    lp_to: int
    records: int
    at: tuple[int, ...]
    loads: tuple[int, ...]


class SplitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Splits of a route version into `wanted` partitions, or as many as help."""

    kind: str = KIND
    snapshot: str
    topic: str
    version: int
    wanted: int
    partitions: tuple[PartitionSplit, ...]

    @property
    def splits(self) -> tuple[PartitionSplit, ...]:
        """The partitions with splits."""
        return tuple(one for one in self.partitions if one.at)


def write_split_report(path: Path, report: SplitReport) -> None:
    """Write a file for `mqlayer route split --from-report`. Raises InvalidInput."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise InvalidInput(f"can't write the split report to {path}: {error.strerror}") from error


def read_split_report(path: Path) -> SplitReport:
    """Read a report. Raises InvalidInput."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=SplitReport)
    except OSError as error:
        raise InvalidInput(f"can't read the split report {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is no split report ({error}): {_made_by(None)}") from error
    if report.kind != KIND:
        raise InvalidInput(f"{path} is a {report.kind!r}, not a {KIND!r}: {_made_by(report)}")
    return report


def planned_splits(
    runtime: Runtime,
    topic: str,
    report: SplitReport,
    *,
    partition: int | None = None,
    to: Sequence[str] = (),
    done: int = 0,
) -> list[ChangePlan]:
    """Plan a report's splits, or one partition's, each on top of the previous one.

    `to`: see `planned_split`. `done`: splits already applied. Raises InvalidInput for another topic or a partition
    without split, Conflict for another route version, and as `planned_split`.
    """
    if report.topic != topic:
        raise InvalidInput(f"the report is of topic {report.topic!r}, not of {topic!r}: {_made_by(report, topic)}")
    chosen = [one for one in report.splits if partition in (None, one.partition)]
    if not chosen:
        raise InvalidInput(_nothing(report, partition))
    version = report.version + done
    at_version = load_route(runtime.control, check_name("topic", topic)).version
    if at_version != version:
        raise Conflict(
            f"topic {topic!r} is at route version {at_version}, the report is of {version}",
            f"its loads are old; {_made_by(report)}",
        )
    plans = []
    for place, one in enumerate(chosen[done:]):
        plan = planned_split(runtime, topic, one.partition, at=one.at, to=to, if_version=version)  # fmt: skip
        plans.append(replace(plan, base=RouteVersion(version + place)))
    return plans


def _nothing(report: SplitReport, partition: int | None) -> str:
    split = ", ".join(str(one.partition) for one in report.splits)
    if not split:
        return f"the report splits nothing: no split makes the heaviest partition of topic {report.topic!r} lighter"
    return f"the report does not split partition {partition}, but {split}"


def _made_by(report: SplitReport | None, topic: str | None = None) -> str:
    of, wanted = topic or (report.topic if report else "TOPIC"), report.wanted if report else "N"
    return (
        f"take a snapshot, then mqlayer analytics skew --snapshot NAME --topic {of} --partitions {wanted} "
        "--split-report FILE"
    )
