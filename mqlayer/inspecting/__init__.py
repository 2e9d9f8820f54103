"""What people ask of groups and keys: where they stand, how far behind, and why something stands still. Reads only."""

from mqlayer.inspecting.facts import GroupFacts, MemberFacts, PartitionFacts, group_facts, group_members
from mqlayer.inspecting.standing import (
    GroupStanding,
    PartitionStanding,
    Stall,
    VersionLag,
    Waiting,
    group_standings,
)

__all__ = [
    "GroupFacts",
    "GroupStanding",
    "MemberFacts",
    "PartitionFacts",
    "PartitionStanding",
    "Stall",
    "VersionLag",
    "Waiting",
    "group_facts",
    "group_members",
    "group_standings",
]
