"""The archive: what was published, kept in Postgres for as long as an operator wants. See docs/archive.md."""

from mqlayer.archiving.archiver import ArchiveReport, archive_pass

__all__ = ["ArchiveReport", "archive_pass"]
