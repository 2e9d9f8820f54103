"""Elastic routes: split, merge and move partitions while messages flow; what becomes of the old ones."""

from mqlayer.changes.changing import (
    apply_change,
    drop_change,
    finish_earlier,
    merge,
    move,
    planned_merge,
    planned_move,
    planned_split,
    split,
)
from mqlayer.changes.forgotten import Reopened, reopen_forgotten
from mqlayer.changes.load import measured_load
from mqlayer.changes.losing import Loss, bring_back_nodes, give_up_node
from mqlayer.changes.reports import (
    PartitionSplit,
    SplitReport,
    planned_splits,
    read_split_report,
    write_split_report,
)
from mqlayer.changes.retiring import retire_partitions
from mqlayer.changes.showing import Change, DrainProgress, RouteLine, drain_progress, route_history, route_lines
from mqlayer.changes.steps import finish_change, finish_changes
from mqlayer.domain.changes import Plan, Successor, plan_merge, plan_move, plan_split

__all__ = [
    "Change",
    "DrainProgress",
    "Loss",
    "PartitionSplit",
    "Plan",
    "Reopened",
    "RouteLine",
    "SplitReport",
    "Successor",
    "apply_change",
    "bring_back_nodes",
    "drain_progress",
    "drop_change",
    "finish_change",
    "finish_changes",
    "finish_earlier",
    "give_up_node",
    "measured_load",
    "merge",
    "move",
    "plan_merge",
    "plan_move",
    "plan_split",
    "planned_merge",
    "planned_move",
    "planned_split",
    "planned_splits",
    "read_split_report",
    "reopen_forgotten",
    "retire_partitions",
    "route_history",
    "route_lines",
    "split",
    "write_split_report",
]
