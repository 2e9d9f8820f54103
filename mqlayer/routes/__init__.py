"""Route changes: split, merge and move partitions under load; retire the old ones."""

from mqlayer.domain.route_changes import ChangePlan, Successor, plan_merge, plan_move, plan_split
from mqlayer.routes.change_driver import finish_change, finish_changes
from mqlayer.routes.drain_plan import DrainMove, DrainPlan, GroupDrain, plan_drain
from mqlayer.routes.lost_changes import UndoReport, reopen_forgotten
from mqlayer.routes.lp_load import PartitionLoad, measured_load
from mqlayer.routes.node_drain import DrainReport, DrainStep, carry_out_moves, drain_node
from mqlayer.routes.node_loss import NodeLossReport, give_up_node, rearm_lost_nodes, refuse_class_loss
from mqlayer.routes.partition_retirement import retire_partitions
from mqlayer.routes.planner import (
    apply_change,
    apply_plan,
    drop_change,
    finish_earlier,
    planned_merge,
    planned_move,
    planned_split,
)
from mqlayer.routes.split_report import (
    PartitionSplit,
    SplitReport,
    planned_splits,
    read_split_report,
    write_split_report,
)
from mqlayer.routes.status import DrainProgress, RouteChange, RouteRange, drain_progress, route_history, route_ranges
from mqlayer.routes.timeline import PartitionSpan, PlannedChange, RouteTimeline, route_timeline

__all__ = [
    "ChangePlan",
    "DrainMove",
    "DrainPlan",
    "DrainProgress",
    "DrainReport",
    "DrainStep",
    "GroupDrain",
    "NodeLossReport",
    "PartitionLoad",
    "PartitionSpan",
    "PartitionSplit",
    "PlannedChange",
    "RouteChange",
    "RouteRange",
    "RouteTimeline",
    "SplitReport",
    "Successor",
    "UndoReport",
    "apply_change",
    "apply_plan",
    "carry_out_moves",
    "drain_node",
    "drain_progress",
    "drop_change",
    "finish_change",
    "finish_changes",
    "finish_earlier",
    "give_up_node",
    "measured_load",
    "plan_drain",
    "plan_merge",
    "plan_move",
    "plan_split",
    "planned_merge",
    "planned_move",
    "planned_split",
    "planned_splits",
    "read_split_report",
    "rearm_lost_nodes",
    "refuse_class_loss",
    "reopen_forgotten",
    "retire_partitions",
    "route_history",
    "route_ranges",
    "route_timeline",
    "write_split_report",
]
