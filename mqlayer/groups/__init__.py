"""Groups, members and assignments: decided in Postgres, by its clock."""

from mqlayer.groups.group import Group, GroupSettings, ensure_group, find_group, raise_group_version
from mqlayer.groups.lineage import drained, drained_popped
from mqlayer.groups.members import (
    Assignment,
    HeartbeatReply,
    MemberSession,
    join,
    leave,
    release,
    send_heartbeat,
    start_leaving,
)
from mqlayer.groups.partition_rates import balance_by_rate
from mqlayer.groups.pop_partitions import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.groups.rebalance import rebalance, rebalance_groups
from mqlayer.groups.retirement import RetirementReport, forget_retired, retire_absent, retire_group
from mqlayer.groups.seek import SeekPlan, apply_seek, planned_seek
from mqlayer.groups.start_positions import Start

__all__ = [
    "Assignment",
    "Group",
    "GroupSettings",
    "HeartbeatReply",
    "MemberSession",
    "PopPartition",
    "RetirementReport",
    "SeekPlan",
    "Start",
    "apply_seek",
    "balance_by_rate",
    "drained",
    "drained_popped",
    "ensure_group",
    "find_group",
    "forget_retired",
    "join",
    "leave",
    "planned_seek",
    "pop_partitions",
    "raise_group_version",
    "rebalance",
    "rebalance_groups",
    "release",
    "renew_pop_epoch",
    "retire_absent",
    "retire_group",
    "send_heartbeat",
    "start_leaving",
]
