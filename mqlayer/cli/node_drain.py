"""Shows how nodes drain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from mqlayer.autopilot.node_balance import BalancePlan
from mqlayer.cli.output import echo, show_rows
from mqlayer.routes import DrainMove, DrainPlan, DrainReport, DrainStep, GroupDrain


def show_plan(plan: DrainPlan) -> None:
    """Print the moves, their pauses and the groups' drain times."""
    echo(f"node {plan.node.name} ({plan.node.address}): {len(plan.moves)} partitions to move, "
         f"{len(plan.sealed)} that moved before and are not retired")  # fmt: skip
    if plan.moves:
        show_rows(map(_move, plan.moves), as_json=False, nothing="")
        echo(_pauses(plan))
    if plan.groups:
        show_rows(map(_group, plan.groups), as_json=False, nothing="")
    for partition, reason in plan.held.items():
        echo(f"partition {partition} can't leave by itself: {reason}")


def show_step(step: DrainStep) -> None:
    """Print progress with a partition."""
    place = f"topic {step.topic}, partition {step.partition} {step.state}: " if step.partition else ""
    echo(f"{place}{step.detail}")


def show_report(name: str, report: DrainReport) -> None:
    """Print the end; exit code 1 if something is left."""
    if report.is_empty:
        echo(f"node {name} is empty: mqlayer node remove {name}, or let it have partitions again: "
             f"mqlayer node drain {name} --stop")  # fmt: skip
        return
    echo(
        f"mqlayer: node {name} is not empty: {_counted(report.failed, 'could not move')}"
        f"{_counted(report.waiting, 'wait')}go on with mqlayer node drain {name} --yes",
        err=True,
    )
    raise typer.Exit(1)


def _counted(partitions: Iterable[int], words: str) -> str:
    numbers = ", ".join(str(one) for one in sorted(partitions) if one)
    return f"partitions {numbers} {words}; " if numbers else ""


def show_balance(plan: BalancePlan) -> None:
    """Print the moves, why each is made, and their pauses."""
    rows = ({"from": one.source, **_move(one.move), "why": one.reason} for one in plan.moves)
    show_rows(rows, as_json=False, nothing="no node is loaded: no partition has to move")
    if plan.moves:
        echo(_pauses(plan))


def _pauses(plan: DrainPlan | BalancePlan) -> str:
    if plan.pause_s is None or plan.longest_pause_s is None:
        return "publishers of a partition wait while it moves; no change was measured yet"
    return (
        f"publishers of a partition wait while it moves: {1000 * plan.pause_s:.0f} ms, "
        f"{1000 * plan.longest_pause_s:.0f} ms at most, by the last changes"
    )


def _move(move: DrainMove) -> dict[str, Any]:
    notes = [] if move.fits else ["no node has memory for it"]
    return {
        "topic": move.topic,
        "partition": move.partition,
        "to": move.target_name,
        "messages/s": round(move.per_s, 1),
        "MiB": round(move.memory / 2**20, 1),
        "note": ", ".join(notes + ([] if move.at_home else ["away from its home zone"])),
    }


def _group(group: GroupDrain) -> dict[str, Any]:
    known = group.drain_s
    unknown = "paused" if group.paused else "not known"
    return {
        "topic": group.topic,
        "group": group.group,
        "left there": group.left,
        "settles/s": None if group.per_s is None else round(group.per_s, 1),
        "drained in": unknown if known is None else f"{known:.0f} s",
    }
