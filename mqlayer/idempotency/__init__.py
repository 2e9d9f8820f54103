"""Effects once (inbox) and in order (versions); see the page 'Idempotence: four ways to apply an effect once'."""

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
