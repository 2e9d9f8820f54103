"""The archive: what was published and what became of it; snapshots of it."""

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
    "Snapshot",
    "SnapshotTopic",
    "create_snapshot",
    "drop_snapshot",
    "find_snapshot",
    "list_snapshots",
    "verify_snapshot",
]
