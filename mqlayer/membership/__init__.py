"""Groups, their members, and who may consume what: decided in Postgres, by its clock only."""

from mqlayer.membership.groups import Group, GroupSettings, Start, ensure_group, find_group
from mqlayer.membership.members import Assigned, Beat, Session, beat, join, leave, release, start_leaving
from mqlayer.membership.rebalance import rebalance

__all__ = [
    "Assigned",
    "Beat",
    "Group",
    "GroupSettings",
    "Session",
    "Start",
    "beat",
    "ensure_group",
    "find_group",
    "join",
    "leave",
    "rebalance",
    "release",
    "start_leaving",
]
