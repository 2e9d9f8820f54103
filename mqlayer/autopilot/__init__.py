"""Automatic routes: a job splits hot partitions and merges cold ones, within a topic's policy."""

from mqlayer.autopilot.auto_routes import AutoPass, auto_routes
from mqlayer.autopilot.auto_topics import AutoCluster, AutoNode, AutoPartition, AutoTopic, HotKey, LpLoads, PastChange
from mqlayer.autopilot.journal import RouteDecision, decisions_of
from mqlayer.autopilot.loads import LoadFigures, LoadSample, Times
from mqlayer.autopilot.policy import PolicyState, RoutePolicy
from mqlayer.autopilot.rules import RULES, decide
from mqlayer.autopilot.stored_policy import set_policy
from mqlayer.autopilot.verdicts import AutoDecision, AutoRule, Proposal, RefusedChange
from mqlayer.autopilot.why import PartitionReport, RouteReport, explain_routes

__all__ = [
    "RULES",
    "AutoCluster",
    "AutoDecision",
    "AutoNode",
    "AutoPartition",
    "AutoPass",
    "AutoRule",
    "AutoTopic",
    "HotKey",
    "LoadFigures",
    "LoadSample",
    "LpLoads",
    "PartitionReport",
    "PastChange",
    "PolicyState",
    "Proposal",
    "RefusedChange",
    "RouteDecision",
    "RoutePolicy",
    "RouteReport",
    "Times",
    "auto_routes",
    "decide",
    "decisions_of",
    "explain_routes",
    "set_policy",
]
