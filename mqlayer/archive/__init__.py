"""The archive of published messages in Postgres, and its snapshots: the page 'Archive a topic'."""

from mqlayer.archive.archiver import ArchiveReport, archive_pass
from mqlayer.archive.day_index import index_days
from mqlayer.archive.gaps import ArchiveGap, accept_gaps, list_gaps
from mqlayer.archive.outcome_archiver import OutcomeReport, archive_outcomes
from mqlayer.archive.retention import (
    DayDropped,
    old_days,
    retain,
    retain_by_topics,
    set_keep_until_exported,
    set_retention,
)
from mqlayer.archive.snapshots import (
    Snapshot,
    SnapshotTopic,
    create_snapshot,
    drop_snapshot,
    find_snapshot,
    list_snapshots,
    verify_snapshot,
)
from mqlayer.archive.status import ArchiveStatus, archive_status

__all__ = [
    "ArchiveGap",
    "ArchiveReport",
    "ArchiveStatus",
    "DayDropped",
    "OutcomeReport",
    "Snapshot",
    "SnapshotTopic",
    "accept_gaps",
    "archive_outcomes",
    "archive_pass",
    "archive_status",
    "create_snapshot",
    "drop_snapshot",
    "find_snapshot",
    "index_days",
    "list_gaps",
    "list_snapshots",
    "old_days",
    "retain",
    "retain_by_topics",
    "set_keep_until_exported",
    "set_retention",
    "verify_snapshot",
]
