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
from mqlayer.inspect.key_history import key_history, record_of
from mqlayer.inspect.key_status import SCAN_LIMIT, KeySearch, KeyStatus, LpLocation, explain_key
from mqlayer.inspect.message_status import (
    GroupAttempt,
    MessageContent,
    MessageInGroup,
    MessageStatus,
    find_message,
    hidden_from,
)
from mqlayer.inspect.parked_status import ParkedCounts, ParkedKeyStatus, ReplayStatus
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader
from mqlayer.inspect.topic_status import TopicPartition, TopicStatus, topic_status

__all__ = [
    "SCAN_LIMIT",
    "GroupAttempt",
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
    "TopicPartition",
    "TopicReader",
    "TopicStatus",
    "UnsettledMessage",
    "VersionLag",
    "explain_key",
    "find_message",
    "group_facts",
    "group_members",
    "group_statuses",
    "hidden_from",
    "key_history",
    "record_of",
    "topic_status",
]
