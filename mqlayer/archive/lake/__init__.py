"""The archive in tables of a lake: docs/design/lake.md."""

from mqlayer.archive.lake.export import LakeReport, export_archive
from mqlayer.archive.lake.reading import read_snapshot
from mqlayer.archive.lake.state import LakeStatus, forget_lake, lake_statuses
from mqlayer.archive.lake.verification import LakeCheck, verify_export

__all__ = [
    "LakeCheck",
    "LakeReport",
    "LakeStatus",
    "export_archive",
    "forget_lake",
    "lake_statuses",
    "read_snapshot",
    "verify_export",
]
