"""Groups, their members, and who may consume what: decided in Postgres, by its clock only."""

from mqlayer.membership.gates import drained, drained_popped
from mqlayer.membership.groups import Group, GroupSettings, ensure_group, find_group, raise_group_version
from mqlayer.membership.jobs import LateJob, late_jobs
from mqlayer.membership.members import Assigned, Beat, Session, beat, join, leave, release, start_leaving
from mqlayer.membership.popping import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.membership.rates import balance_by_rate
from mqlayer.membership.rebalance import rebalance, rebalance_groups
from mqlayer.membership.retiring import Retired, forget_retired, retire_away, retire_group
from mqlayer.membership.seeking import SeekPlan, apply_seek, planned_seek
from mqlayer.membership.starts import Start

__all__ = [
    "Assigned",
    "Beat",
    "Group",
    "GroupSettings",
    "LateJob",
    "PopPartition",
    "Retired",
    "SeekPlan",
    "Session",
    "Start",
    "apply_seek",
    "balance_by_rate",
    "beat",
    "drained",
    "drained_popped",
    "ensure_group",
    "find_group",
    "forget_retired",
    "join",
    "late_jobs",
    "leave",
    "planned_seek",
    "pop_partitions",
    "raise_group_version",
    "rebalance",
    "rebalance_groups",
    "release",
    "renew_pop_epoch",
    "retire_away",
    "retire_group",
    "start_leaving",
]
