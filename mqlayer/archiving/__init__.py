"""The archive: what was published, kept in Postgres for as long as an operator wants, and snapshots of it.

See docs/archive.md.
"""

from mqlayer.archiving.archiver import ArchiveReport, archive_pass
from mqlayer.archiving.snapshots import (
    Snapshot,
    SnapshotTopic,
    create_snapshot,
    drop_snapshot,
    find_snapshot,
    list_snapshots,
    verify_snapshot,
)

__all__ = [
    "ArchiveReport",
    "Snapshot",
    "SnapshotTopic",
    "archive_pass",
    "create_snapshot",
    "drop_snapshot",
    "find_snapshot",
    "list_snapshots",
    "verify_snapshot",
]
