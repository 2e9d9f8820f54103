"""Read-only views of groups and keys."""

from mqlayer.inspect.busiest_keys import BusiestKeys, BusyKey, busiest_keys
from mqlayer.inspect.curves import Curve, CurvePoint, curves
from mqlayer.inspect.group_facts import (
    GroupFacts,
    MemberFacts,
    PartitionFacts,
    group_facts,
    group_members,
    members_wanted,
)
from mqlayer.inspect.group_status import (
    GroupStatus,
    PartitionStatus,
    Stall,
    UnsettledMessage,
    VersionLag,
    describe_breaker,
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
from mqlayer.inspect.overviews import (
    GroupOverview,
    TopicOverview,
    TopicSettings,
    group_overviews,
    groups_in_trouble,
    topic_overviews,
    topic_settings,
)
from mqlayer.inspect.parked_status import ParkedCounts, ParkedKeyStatus, ReplayStatus
from mqlayer.inspect.partition_head import PartitionEnd, PartitionHead, partition_head
from mqlayer.inspect.partition_pages import (
    NewestMessages,
    PartitionPage,
    newest_messages,
    partition_page,
    stored_messages,
)
from mqlayer.inspect.rate_meter import MeasuredTopic, RateMeter
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader
from mqlayer.inspect.topic_status import TopicPartition, TopicStatus, topic_status

__all__ = [
    "SCAN_LIMIT",
    "BusiestKeys",
    "BusyKey",
    "Curve",
    "CurvePoint",
    "FoundMessage",
    "GroupAttempt",
    "GroupFacts",
    "GroupOverview",
    "GroupStatus",
    "KeyHistory",
    "KeyMessage",
    "KeySearch",
    "KeyStatus",
    "LifeStep",
    "LpLocation",
    "MeasuredTopic",
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
    "PartitionEnd",
    "PartitionFacts",
    "PartitionHead",
    "PartitionPage",
    "PartitionStatus",
    "RateMeter",
    "ReplayStatus",
    "Stall",
    "StoredMessage",
    "TopicOverview",
    "TopicPartition",
    "TopicReader",
    "TopicSettings",
    "TopicStatus",
    "UnsettledMessage",
    "VersionLag",
    "busiest_keys",
    "curves",
    "describe_breaker",
    "explain_key",
    "find_by_dedup_id",
    "find_message",
    "group_facts",
    "group_members",
    "group_overviews",
    "group_statuses",
    "groups_in_trouble",
    "hidden_from",
    "history_of_key",
    "key_history",
    "members_wanted",
    "message_life",
    "newest_messages",
    "partition_head",
    "partition_page",
    "record_of",
    "search_messages",
    "stored_messages",
    "topic_overviews",
    "topic_settings",
    "topic_status",
]
