"""The archive: what was published, kept in Postgres for as long as an operator wants. See docs/archive.md."""

from mqlayer.archiving.archiver import ArchiveReport, archive_pass
from mqlayer.archiving.outcomes import OutcomeReport, archive_outcomes

__all__ = ["ArchiveReport", "OutcomeReport", "archive_outcomes", "archive_pass"]
