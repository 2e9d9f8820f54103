"""What keeps an effect from happening twice, or before its turn, in the effect's own transaction: inbox and versions.

The fence does that for ordered groups, see `Context.fence`; which to take says docs/explanation/idempotence.md.
"""

from mqlayer.idempotency.inbox import InboxEntry, arecord_effect, record_effect
from mqlayer.idempotency.inbox_status import AppliedEffect, InboxStats, find_effect, inbox_stats
from mqlayer.idempotency.version_gaps import (
    HeldVersion,
    VersionGap,
    WaitingEntity,
    held_versions,
    set_version,
    version_gaps,
    watch_versions,
)
from mqlayer.idempotency.versions import VersionedEvent, Versions

__all__ = [
    "AppliedEffect",
    "HeldVersion",
    "InboxEntry",
    "InboxStats",
    "VersionGap",
    "VersionedEvent",
    "Versions",
    "WaitingEntity",
    "arecord_effect",
    "find_effect",
    "held_versions",
    "inbox_stats",
    "record_effect",
    "set_version",
    "version_gaps",
    "watch_versions",
]
