"""The periodic jobs. Workers make their tasks and the schedule from `PERIODIC_JOBS`; the doctor reports late ones.

A run must be idempotent and safe beside another one: a worker that was stopped after its claim may run beside the next.
Each row names what fences its changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqlayer.archive import archive_pass, index_days, retain_by_topics
from mqlayer.archive.scheduled_runs import start_due
from mqlayer.autopilot import auto_routes
from mqlayer.groups import balance_by_rate, rebalance_groups
from mqlayer.groups.retirement import forget_instances, forget_retired, retire_absent
from mqlayer.idempotency import watch_versions
from mqlayer.maintenance.fence_cleanup import clean_fence
from mqlayer.maintenance.inbox_cleanup import clean_inbox
from mqlayer.maintenance.large_bodies_cleanup import clean_large_bodies
from mqlayer.maintenance.marks_cleanup import drop_closed_marks
from mqlayer.maintenance.trim import trim_pass
from mqlayer.maintenance.upgrades import finalize_when_due
from mqlayer.outbox import clean_dedup, release_delayed, rotate
from mqlayer.redelivery import clean_attempts, clean_bulk, reclaim_shared, retry_scan
from mqlayer.relay import relay_once
from mqlayer.routes import finish_changes, rearm_lost_nodes, retire_partitions
from mqlayer.runtime.runtime import Runtime

LATE_AFTER_INTERVALS: Final = 3
LATE_AFTER_AT_LEAST_S: Final = 30.0
ARCHIVE_PART: Final = 0.8
"""Part of the interval in which a pass of the archive may start batches."""
CLEANING_PART: Final = 0.5
"""Part of the interval for which a job deletes more than a million rows."""


@dataclass(frozen=True, slots=True)
class PeriodicJob:
    """A periodic job. `run` gets the interval too, as the limit of a run's length where it needs one.

    `per_application`: it runs for each application database.
    """

    name: str
    every_s: float
    run: Callable[[Runtime, float], object]
    fenced_by: str
    per_application: bool = False

    @property
    def late_after_s(self) -> float:
        """Seconds without a run that mean a missing worker, beat or broker."""
        return max(LATE_AFTER_INTERVALS * self.every_s, LATE_AFTER_AT_LEAST_S)


def _relay(runtime: Runtime, every_s: float) -> None:
    """Relay LPs whose relays died."""
    relay_once(runtime.settings, at_most_s=every_s)


def _trim(runtime: Runtime, _: float) -> None:
    """Trim records that all groups settled."""
    trim_pass(runtime)


def _rotate_outbox(runtime: Runtime, _: float) -> None:
    """Empty old outbox slots that are relayed."""
    rotate(runtime.outbox)


def _clean_fence(runtime: Runtime, every_s: float) -> None:
    """Delete applied seqs beyond redelivery."""
    clean_fence(runtime.outbox, at_most_s=CLEANING_PART * every_s, every_s=every_s)


def _clean_marks(runtime: Runtime, _: float) -> None:
    """Remove closed direct producers' marks."""
    drop_closed_marks(runtime)


def _repair_routes(runtime: Runtime, _: float) -> None:
    """Finish abandoned route changes; retire drained partitions."""
    finish_changes(runtime)
    retire_partitions(runtime)


def _auto_routes(runtime: Runtime, _: float) -> None:
    """Split hot partitions and merge cold ones of topics with automatic routes."""
    auto_routes(runtime)


def _rearm_nodes(runtime: Runtime, _: float) -> None:
    """Arm returned nodes that no other process arms."""
    rearm_lost_nodes(runtime)


def _rebalance(runtime: Runtime, _: float) -> None:
    """Rebalance groups of dead members."""
    rebalance_groups(runtime.control)


def _balance_by_rate(runtime: Runtime, _: float) -> None:
    """Measure partitions' rates; balance groups by them."""
    balance_by_rate(runtime)


def _retry_scan(runtime: Runtime, every_s: float) -> None:
    """Notify groups of overdue keys; continue bulk actions; reclaim dead shared members' messages."""
    reclaim_shared(runtime)
    retry_scan(runtime.control, at_most_s=every_s)


def _clean_attempts(runtime: Runtime, _: float) -> None:
    """Delete old failed attempts, except of parked or dead messages."""
    clean_attempts(runtime.control)


def _clean_bulk(runtime: Runtime, _: float) -> None:
    """Delete expired plans of bulk actions, and old bulk actions."""
    clean_bulk(runtime.control)


def _archive(runtime: Runtime, every_s: float) -> None:
    """Archive the streams of archived topics."""
    archive_pass(runtime, at_most_s=ARCHIVE_PART * every_s)


def _retain(runtime: Runtime, _: float) -> None:
    """Drop archive days past retention; index those that ended."""
    retain_by_topics(runtime)
    index_days(runtime)


def _run_schedules(runtime: Runtime, _: float) -> None:
    """Start the run of the schedule that is due; end lost runs."""
    start_due(runtime)


def _release_delayed(runtime: Runtime, every_s: float) -> None:
    """Publish due delayed messages."""
    release_delayed(runtime.outbox, at_most_s=every_s)


def _clean_dedup(runtime: Runtime, _: float) -> None:
    """Delete dedup ids past their window."""
    clean_dedup(runtime.outbox, window_s=runtime.settings.dedup_window_s)


def _clean_inbox(runtime: Runtime, every_s: float) -> None:
    """Delete inbox rows beyond redelivery."""
    clean_inbox(runtime, horizon_s=runtime.settings.inbox_horizon_s, at_most_s=CLEANING_PART * every_s)


def _clean_large_bodies(runtime: Runtime, _: float) -> None:
    """Remove large bodies that no message names."""
    clean_large_bodies(runtime)


def _watch_versions(runtime: Runtime, _: float) -> None:
    """Report versions missing too long."""
    watch_versions(runtime.outbox)


def _retire_groups(runtime: Runtime, _: float) -> None:
    """Retire absent instances; clean up retired groups."""
    retire_absent(runtime)
    forget_retired(runtime)
    forget_instances(runtime.control)


def _sample(runtime: Runtime, _: float) -> None:
    """Take a sample of each group, topic and node, for curves."""
    # No other job looks at groups: commands that run one job load no more than that needs.
    from mqlayer.maintenance.sampling import take_samples

    take_samples(runtime)


def _finalize_upgrade(runtime: Runtime, _: float) -> None:
    """Finalize an upgrade where the setting says so."""
    finalize_when_due(runtime)


def _note_problems(runtime: Runtime, _: float) -> None:
    """Look at the whole system; note which problems began and ended."""
    # The look is at the jobs too, so its package is above this one.
    from mqlayer.doctor.health import note_problems

    note_problems(runtime)


PERIODIC_JOBS: Final = (
    PeriodicJob("relay", 10, _relay, "the chain; LP sets by lease", per_application=True),
    PeriodicJob("trim", 10, _trim, "each group's position, in the trimming script"),
    PeriodicJob("rotate_outbox", 60, _rotate_outbox, "the slot's exclusive lock", per_application=True),
    PeriodicJob("clean_fence", 300, _clean_fence, "rows by age", per_application=True),
    PeriodicJob("clean_marks", 300, _clean_marks, "closed sources"),
    PeriodicJob("repair_routes", 2, _repair_routes, "the change's row and seal id"),
    PeriodicJob("auto_routes", 5, _auto_routes, "the route's version; the change's row"),
    PeriodicJob("rearm_nodes", 5, _rearm_nodes, "the node's row; the armed run"),
    PeriodicJob("rebalance", 2, _rebalance, "the group's lock, and epochs"),
    PeriodicJob("balance_by_rate", 10, _balance_by_rate, "the group's lock, and epochs"),
    PeriodicJob("retry_scan", 5, _retry_scan, "the redrive's row; claims of shared messages"),
    PeriodicJob("clean_attempts", 300, _clean_attempts, "rows by age"),
    PeriodicJob("clean_bulk", 300, _clean_bulk, "rows by age"),
    PeriodicJob("archive", 5, _archive, "the topic's lock and marks"),
    PeriodicJob("retain", 300, _retain, "days by age; snapshots keep theirs"),
    PeriodicJob("run_schedules", 60, _run_schedules, "the run's row and lease"),
    PeriodicJob("release_delayed", 5, _release_delayed, "the message's row", per_application=True),
    PeriodicJob("clean_dedup", 60, _clean_dedup, "rows by age", per_application=True),
    PeriodicJob("clean_inbox", 300, _clean_inbox, "rows by age", per_application=True),
    PeriodicJob(
        "clean_large_bodies",
        300,
        _clean_large_bodies,
        "the body's row: cut, free since, removing",
        per_application=True,
    ),
    PeriodicJob("watch_versions", 10, _watch_versions, "the alarm's row", per_application=True),
    PeriodicJob("retire_groups", 10, _retire_groups, "the group's lock"),
    PeriodicJob("sample", 60, _sample, "one row a minute and thing"),
    PeriodicJob("finalize_upgrade", 60, _finalize_upgrade, "the protocol's row"),
    PeriodicJob("note_problems", 60, _note_problems, "the time of the look"),
)
