"""What people ask of groups and keys: where they stand, how far behind, and why something stands still. Reads only."""

from mqlayer.inspecting.facts import GroupFacts, MemberFacts, PartitionFacts, group_facts, group_members
from mqlayer.inspecting.keys import SCAN_LIMIT, Crossing, KeyStanding, Search, explain_key
from mqlayer.inspecting.parked import ParkedCounts, ParkedKeyStanding, ReplayStanding
from mqlayer.inspecting.standing import (
    GroupStanding,
    PartitionStanding,
    Stall,
    VersionLag,
    Waiting,
    group_standings,
)

__all__ = [
    "SCAN_LIMIT",
    "Crossing",
    "GroupFacts",
    "GroupStanding",
    "KeyStanding",
    "MemberFacts",
    "ParkedCounts",
    "ParkedKeyStanding",
    "PartitionFacts",
    "PartitionStanding",
    "ReplayStanding",
    "Search",
    "Stall",
    "VersionLag",
    "Waiting",
    "explain_key",
    "group_facts",
    "group_members",
    "group_standings",
]
