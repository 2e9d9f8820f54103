"""What keeps an effect from happening twice, or before its turn, in the effect's own transaction: inbox and versions.

The fence does that for ordered groups, see `Context.fence`; which to take says docs/explanation/idempotence.md.
"""

from mqlayer.effects.gaps import (
    HeldVersion,
    VersionGap,
    WaitingEntity,
    held_versions,
    set_version,
    version_gaps,
    watch_versions,
)
from mqlayer.effects.inbox import InboxEntry, anote, note
from mqlayer.effects.noted import InboxStats, Noted, inbox_stats, look_up
from mqlayer.effects.versions import Versioned, Versions

__all__ = [
    "HeldVersion",
    "InboxEntry",
    "InboxStats",
    "Noted",
    "VersionGap",
    "Versioned",
    "Versions",
    "WaitingEntity",
    "anote",
    "held_versions",
    "inbox_stats",
    "look_up",
    "note",
    "set_version",
    "version_gaps",
    "watch_versions",
]
