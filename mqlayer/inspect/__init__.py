"""Read-only views of groups and keys."""

from mqlayer.inspect.group_facts import GroupFacts, MemberFacts, PartitionFacts, group_facts, group_members
from mqlayer.inspect.group_status import (
    GroupStatus,
    PartitionStatus,
    Stall,
    UnsettledMessage,
    VersionLag,
    group_statuses,
)
from mqlayer.inspect.key_status import SCAN_LIMIT, KeySearch, KeyStatus, LpLocation, explain_key
from mqlayer.inspect.message_status import (
    FailedAttempt,
    MessageContent,
    MessageInGroup,
    MessageStatus,
    find_message,
    hidden_from,
)
from mqlayer.inspect.parked_status import ParkedCounts, ParkedKeyStatus, ReplayStatus
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader

__all__ = [
    "SCAN_LIMIT",
    "FailedAttempt",
    "GroupFacts",
    "GroupStatus",
    "KeySearch",
    "KeyStatus",
    "LpLocation",
    "MemberFacts",
    "MessageContent",
    "MessageInGroup",
    "MessageStatus",
    "ParkedCounts",
    "ParkedKeyStatus",
    "PartitionFacts",
    "PartitionStatus",
    "ReplayStatus",
    "Stall",
    "StoredMessage",
    "TopicReader",
    "UnsettledMessage",
    "VersionLag",
    "explain_key",
    "find_message",
    "group_facts",
    "group_members",
    "group_statuses",
    "hidden_from",
]
