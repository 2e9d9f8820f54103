"""Samples by instrument. The number of statements and of node calls does not depend on partitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.inspect import GroupStatus, group_statuses
from mqlayer.maintenance import late_jobs
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.metrics import Measurement
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery import FailureCounts, failure_counts
from mqlayer.runtime.runtime import Runtime

COUNTED_EVENTS: Final = ("failed", "timed_out", "parked", "dead", "skipped", "redriven")
RARE_EVENTS: Final = ("dropped", "expired")

Samples = dict[str, list[Measurement]]
GroupName = tuple[str, str]


def control_samples(runtime: Runtime, *, by_partition: bool = False) -> Samples:
    """Return samples of groups, nodes, route changes, archive, jobs. Raises StoreUnavailable, PermissionDenied."""
    found: Samples = defaultdict(list)
    statuses = [one for one in group_statuses(runtime) if one.facts.state == "live" and one.facts.mode != "broadcast"]
    _add_groups(found, statuses)
    if by_partition:
        _add_partitions(found, statuses)
    _add_failures(found, failure_counts(runtime.control), {_name(one) for one in statuses})
    lag_target_s = runtime.settings.lag_target_s
    for topic, group, wanted in _rows(runtime.control, "metrics_members_wanted", lag_target_s=lag_target_s):
        if wanted is not None:
            found["mqlayer.group.members_wanted"].append((wanted, _labels((topic, group))))
    _add_commit_wait(found, runtime.control, "control")
    _add_nodes(found, _row(runtime.control, "metrics_nodes"), statuses)
    _add_changes(found, _row(runtime.control, "metrics_route_changes"))
    for topic, changes, stopped, hot in _rows(runtime.control, "metrics_autopilot"):
        found["mqlayer.autopilot.changes"].append((changes, {"topic": topic}))
        found["mqlayer.autopilot.stopped"].append((stopped, {"topic": topic}))
        found["mqlayer.autopilot.hot_lps"].append((hot, {"topic": topic}))
    _add_archive(found, runtime.control)
    for name, state, _, _, _, overdue_s in _rows(runtime.control, "check_schedules"):
        found["mqlayer.schedule.faults"].append((int(state == "faults"), {"schedule": name}))
        found["mqlayer.schedule.failed"].append((int(state == "failed"), {"schedule": name}))
        found["mqlayer.schedule.overdue"].append((overdue_s, {"schedule": name}))
    for name, age_s in _rows(runtime.control, "metrics_jobs", names=[job.name for job in PERIODIC_JOBS]):
        found["mqlayer.jobs.age"].append((age_s, {"name": name}))
    found["mqlayer.jobs.late"].append((len(late_jobs(runtime.control)), {}))
    for kind, version, most, count in _rows(runtime.control, "living_counts"):
        found["mqlayer.processes"].append((count, {"kind": kind, "version": version, "protocol": str(most)}))
    _, in_force, prepared, *_ = _row(runtime.control, "protocol_control")
    found["mqlayer.protocol"] += [(in_force, {"state": "in_force"}), (prepared, {"state": "prepared"})]
    return found


def _add_archive(found: Samples, database: Database) -> None:
    for topic, gaps, passed_s, _ in _rows(database, "check_archive"):
        found["mqlayer.archive.gaps"].append((gaps, {"topic": topic}))
        if passed_s is not None:
            found["mqlayer.archive.delay"].append((passed_s, {"topic": topic}))
    for location, topic, *_, behind_s in _rows(database, "lake_statuses"):
        found["mqlayer.archive.export_delay"].append((behind_s, {"topic": topic, "export": location}))


def outbox_samples(database: Database) -> Samples:
    """Return samples of the outbox and its relays. Raises as above."""
    waiting, oldest_s = _row(database, "check_outbox")
    living, unowned = _row(database, "check_relays")
    values = {
        "mqlayer.outbox.backlog": waiting,
        "mqlayer.outbox.age": oldest_s,
        "mqlayer.outbox.quarantined": _row(database, "check_quarantine")[0],
        "mqlayer.outbox.voided": _row(database, "check_voided")[0],
        "mqlayer.relays": living,
        "mqlayer.relays.unowned_lp_sets": unowned,
        "mqlayer.versions.overdue": _row(database, "check_versions")[0],
    }
    found: Samples = defaultdict(list, {name: [(value, {})] for name, value in values.items()})
    _add_commit_wait(found, database, "application")
    found["mqlayer.large_bodies.stored"] = [
        (size, {"state": state, "store": store})
        for store, *sizes in _rows(database, "metrics_large_bodies")
        for state, size in zip(("kept", "removing"), sizes, strict=True)
    ]
    return found


def _name(status: GroupStatus) -> GroupName:
    # Instances of a broadcast group come and go with their hosts: they count as their group.
    return status.facts.topic, status.facts.name.partition("@")[0]


def _labels(name: GroupName, **more: str) -> Mapping[str, str]:
    return {"topic": name[0], "group": name[1], **more}


def _add_groups(found: Samples, statuses: Iterable[GroupStatus]) -> None:
    of_name: dict[GroupName, list[GroupStatus]] = defaultdict(list)
    for status in statuses:
        of_name[_name(status)].append(status)
    for name, ones in of_name.items():
        partitions = [partition for one in ones for partition in one.undrained]
        values = {
            "mqlayer.group.lag": sum(one.lag for one in ones),
            "mqlayer.group.lag.age": max((one.age_s or 0.0 for one in ones), default=0.0),
            "mqlayer.group.unknown_partitions": sum(one.lag is None for one in partitions),
            "mqlayer.group.partitions": len(partitions),
            "mqlayer.group.breaker.open": max(_open_s(one) for one in ones),
        }
        if ones[0].facts.mode != "pop":
            # Receivers are no members.
            values["mqlayer.group.members"] = sum(one.facts.alive for one in ones)
            for deployment, count in _living(ones).items():
                found["mqlayer.group.deployment.members"].append((count, _labels(name, deployment=deployment)))
        for instrument, value in values.items():
            found[instrument].append((value, _labels(name)))
        reasons = Counter(one.stall.reason for one in partitions if one.stall is not None)
        for reason, count in reasons.items():
            found["mqlayer.group.stuck_partitions"].append((count, _labels(name, reason=reason)))


def _living(ones: Sequence[GroupStatus]) -> Counter[str]:
    """Return members by deployment; the one in force also without any."""
    living = Counter({ones[0].facts.deployments.in_force: 0})
    for one in ones:
        living.update(one.facts.living)
    return living


def _open_s(status: GroupStatus) -> float:
    breaker = status.facts.breaker
    return 0.0 if breaker is None else max(0.0, (datetime.now(UTC) - breaker.opened_at).total_seconds())


def _add_partitions(found: Samples, statuses: Iterable[GroupStatus]) -> None:
    lags: Counter[tuple[GroupName, int]] = Counter()
    ages: dict[tuple[GroupName, int], float] = {}
    for status in statuses:
        for one in status.undrained:
            place = _name(status), one.facts.partition
            lags[place] += one.lag or 0
            ages[place] = max(ages.get(place, 0.0), one.age_s or 0.0)
    for (name, partition), lag in lags.items():
        labels = _labels(name, partition=str(partition))
        found["mqlayer.partition.lag"].append((lag, labels))
        found["mqlayer.partition.lag.age"].append((ages[name, partition], labels))


def _add_failures(found: Samples, counts: Iterable[FailureCounts], live: set[GroupName]) -> None:
    sums: dict[GroupName, Counter[str]] = defaultdict(Counter)
    overdue: dict[GroupName, float] = {}
    for one in counts:
        name = one.topic, one.group.partition("@")[0]
        if name not in live:
            continue
        sums[name].update({"keys": one.keys, "messages": one.messages, "waiting": one.waiting, "dead": one.dead})
        sums[name].update({f"ever {event}": one.totals.get(event, 0) for event in (*COUNTED_EVENTS, *RARE_EVENTS)})
        overdue[name] = max(overdue.get(name, 0.0), one.overdue_s or 0.0)
    for name, total in sums.items():
        labels = _labels(name)
        found["mqlayer.group.parked.keys"].append((total["keys"], labels))
        found["mqlayer.group.parked.messages"].append((total["messages"], labels))
        found["mqlayer.group.parked.waiting_keys"].append((total["waiting"], labels))
        found["mqlayer.group.parked.overdue"].append((overdue[name], labels))
        found["mqlayer.group.dead"].append((total["dead"], labels))
        for event in COUNTED_EVENTS:
            found["mqlayer.group.events"].append((total[f"ever {event}"], _labels(name, outcome=event)))
        for event in RARE_EVENTS:
            if total[f"ever {event}"]:
                # Of few groups, and series are bounded.
                found["mqlayer.group.events"].append((total[f"ever {event}"], _labels(name, outcome=event)))


def _add_commit_wait(found: Samples, database: Database, schema: str) -> None:
    # Without that right, all waits of others look like none.
    if _row(database, "check_statistics_allowed")[0]:
        _, _, waited_s = _row(database, "check_synchronous")
        found["mqlayer.postgres.commit_wait"].append((waited_s, {"schema": schema}))


def _add_nodes(found: Samples, row: tuple[Any, ...], statuses: Iterable[GroupStatus]) -> None:
    unreachable = {name for one in statuses for name in one.unreachable}
    for state, count in zip(
        ("armed", "unarmed", "lost", "draining", "unreachable"), (*row, len(unreachable)), strict=True
    ):
        found["mqlayer.nodes"].append((count, {"state": state}))


def _add_changes(found: Samples, row: tuple[Any, ...]) -> None:
    done, dropped, unfinished, age_s, pause_s = row
    found["mqlayer.route_changes"] += [(done, {"outcome": "done"}), (dropped, {"outcome": "dropped"})]
    found["mqlayer.route_changes.unfinished"].append((unfinished, {}))
    found["mqlayer.route_changes.age"].append((age_s, {}))
    found["mqlayer.route_changes.longest_pause"].append((pause_s, {}))


def _rows(database: Database, name: str, **facts: Any) -> list[tuple[Any, ...]]:
    with database.connection() as connection:
        return connection.execute(query(name), facts).fetchall()


def _row(database: Database, name: str) -> tuple[Any, ...]:
    (found,) = _rows(database, name)
    return found
