"""Operators' work on parked keys and dead messages, and replays."""

from mqlayer.redelivery.failure_counts import FailureCounts, failure_counts
from mqlayer.redelivery.filters import DeadFilter, ParkedFilter, ReplayFilter
from mqlayer.redelivery.head_skip import SkippedHead, skip_head
from mqlayer.redelivery.key_pause import pause_key, resume_key
from mqlayer.redelivery.lists import (
    PAGE_LIMIT,
    DeadMessage,
    ParkedKey,
    ParkedMessage,
    dead_messages,
    parked_keys,
    parked_messages,
)
from mqlayer.redelivery.message_details import (
    Attempt,
    MessageDetails,
    find_dead,
    recorded_attempts,
    show_dead,
    show_parked,
)
from mqlayer.redelivery.operator_actions import discard_dead, discard_parked, release_all, release_parked
from mqlayer.redelivery.parked_scan import clean_attempts, retry_scan
from mqlayer.redelivery.redelivery_job import new_worker
from mqlayer.redelivery.redrive import (
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
from mqlayer.redelivery.replay import (
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
from mqlayer.redelivery.shared_reclaim import reclaim_shared

__all__ = [
    "PAGE_LIMIT",
    "Attempt",
    "DeadFilter",
    "DeadMessage",
    "FailureCounts",
    "MessageDetails",
    "ParkedFilter",
    "ParkedKey",
    "ParkedMessage",
    "Redrive",
    "RedriveResult",
    "Replay",
    "ReplayFilter",
    "ReplayResult",
    "SkippedHead",
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
    "parked_messages",
    "pause_key",
    "reclaim_shared",
    "recorded_attempts",
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
