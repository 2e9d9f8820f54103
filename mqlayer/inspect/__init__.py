"""Read-only views of groups and keys."""

from mqlayer.inspect.curves import Curve, CurvePoint, curves
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
from mqlayer.inspect.key_life import KeyHistory, KeyMessage, history_of_key
from mqlayer.inspect.key_status import SCAN_LIMIT, KeySearch, KeyStatus, LpLocation, explain_key
from mqlayer.inspect.message_life import LifeStep, MessageLife, MissingStep, message_life
from mqlayer.inspect.message_search import (
    FoundMessage,
    MessageFilter,
    MessagePage,
    find_by_dedup_id,
    search_messages,
)
from mqlayer.inspect.message_status import (
    GroupAttempt,
    MessageContent,
    MessageInGroup,
    MessageStatus,
    find_message,
    hidden_from,
)
from mqlayer.inspect.parked_status import ParkedCounts, ParkedKeyStatus, ReplayStatus
from mqlayer.inspect.partition_pages import (
    NewestMessages,
    PartitionPage,
    newest_messages,
    partition_page,
    stored_messages,
)
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader
from mqlayer.inspect.topic_status import TopicPartition, TopicStatus, topic_status

__all__ = [
    "SCAN_LIMIT",
    "Curve",
    "CurvePoint",
    "FoundMessage",
    "GroupAttempt",
    "GroupFacts",
    "GroupStatus",
    "KeyHistory",
    "KeyMessage",
    "KeySearch",
    "KeyStatus",
    "LifeStep",
    "LpLocation",
    "MemberFacts",
    "MessageContent",
    "MessageFilter",
    "MessageInGroup",
    "MessageLife",
    "MessagePage",
    "MessageStatus",
    "MissingStep",
    "NewestMessages",
    "ParkedCounts",
    "ParkedKeyStatus",
    "PartitionFacts",
    "PartitionPage",
    "PartitionStatus",
    "ReplayStatus",
    "Stall",
    "StoredMessage",
    "TopicPartition",
    "TopicReader",
    "TopicStatus",
    "UnsettledMessage",
    "VersionLag",
    "curves",
    "explain_key",
    "find_by_dedup_id",
    "find_message",
    "group_facts",
    "group_members",
    "group_statuses",
    "hidden_from",
    "history_of_key",
    "key_history",
    "message_life",
    "newest_messages",
    "partition_page",
    "record_of",
    "search_messages",
    "stored_messages",
    "topic_status",
]
