"""The archive: what was published, kept in Postgres for as long as an operator wants. See docs/archive.md."""

from mqlayer.archiving.archiver import ArchiveReport, archive_pass
from mqlayer.archiving.gaps import ArchiveGap, accept_gaps, list_gaps
from mqlayer.archiving.retention import DayDropped, retain
from mqlayer.archiving.standing import ArchiveStanding, archive_status

__all__ = [
    "ArchiveGap",
    "ArchiveReport",
    "ArchiveStanding",
    "DayDropped",
    "accept_gaps",
    "archive_pass",
    "archive_status",
    "list_gaps",
    "retain",
]
