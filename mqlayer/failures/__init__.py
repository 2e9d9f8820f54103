"""What operators do with parked keys and dead messages: list, show, release, discard, pass over, give back."""

from mqlayer.failures.counting import FailureCounts, failure_counts
from mqlayer.failures.filters import DeadFilter, ParkedFilter, ReplayFilter
from mqlayer.failures.jobs import new_worker
from mqlayer.failures.listing import (
    PAGE_LIMIT,
    DeadMessage,
    ParkedKey,
    ParkedMessage,
    dead_messages,
    parked_keys,
    parked_line,
)
from mqlayer.failures.pausing import pause_key, resume_key
from mqlayer.failures.reclaiming import reclaim_shared
from mqlayer.failures.redriving import (
    Redrive,
    RedriveResult,
    cancel_redrive,
    count_dead,
    redrive_results,
    redrives,
    resume_redrive,
    start_redrive,
    work_on,
)
from mqlayer.failures.replaying import (
    Replay,
    ReplayResult,
    cancel_replay,
    count_archived,
    replay_of,
    replay_results,
    replays,
    resume_replay,
    start_replay,
    work_on_replay,
)
from mqlayer.failures.ruling import discard_dead, discard_parked, release_all, release_parked
from mqlayer.failures.scanning import clean_attempts, retry_scan
from mqlayer.failures.showing import Attempt, Shown, find_dead, show_dead, show_parked
from mqlayer.failures.skipping import Skipped, skip_head

__all__ = [
    "PAGE_LIMIT",
    "Attempt",
    "DeadFilter",
    "DeadMessage",
    "FailureCounts",
    "ParkedFilter",
    "ParkedKey",
    "ParkedMessage",
    "Redrive",
    "RedriveResult",
    "Replay",
    "ReplayFilter",
    "ReplayResult",
    "Shown",
    "Skipped",
    "cancel_redrive",
    "cancel_replay",
    "clean_attempts",
    "count_archived",
    "count_dead",
    "dead_messages",
    "discard_dead",
    "discard_parked",
    "failure_counts",
    "find_dead",
    "new_worker",
    "parked_keys",
    "parked_line",
    "pause_key",
    "reclaim_shared",
    "redrive_results",
    "redrives",
    "release_all",
    "release_parked",
    "replay_of",
    "replay_results",
    "replays",
    "resume_key",
    "resume_redrive",
    "resume_replay",
    "retry_scan",
    "show_dead",
    "show_parked",
    "skip_head",
    "start_redrive",
    "start_replay",
    "work_on",
    "work_on_replay",
]
