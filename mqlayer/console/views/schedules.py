"""Schedules of analytics, with what their runs found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.archive.schedules import find_schedule, pause_schedule, resume_schedule, schedule_runs, schedules
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.render import duration, link, when

KINDS: Final = {"good": "good", "faults": "bad", "failed": "bad", "running": "note"}
PATH: Final = "/schedules"


def _load(visit: Visit) -> Mapping[str, Any]:
    control, chosen, before = visit.runtime.control, visit.text("schedule"), visit.number("before", 0) or None
    found = part(lambda: schedules(control))
    name = chosen or next((one.name for one in found.value or ()), "")
    runs = part(lambda: schedule_runs(control, name, limit=ROWS + 1, after=before) if name else [])
    rows = runs.value or []
    return {
        "schedules": found,
        "chosen": name,
        "about": next((one for one in found.value or () if one.name == name), None),
        "runs": runs,
        "older": link(PATH, schedule=name, before=rows[ROWS - 1].run_id) if len(rows) > ROWS else "",
        "shown": rows[:ROWS],
        "kinds": KINDS,
    }


def _plan_pause(visit: Visit) -> Plan:
    one = find_schedule(visit.runtime.control, visit.text("schedule"))
    lines = [f"Schedule {one.name} begins no more runs; one that goes on ends."]
    return Plan(lines if one.paused_at is None else ["It is paused: nothing will change."])


def _pause(visit: Visit) -> Outcome:
    name = visit.text("schedule")
    pause_schedule(visit.runtime, name)
    return Outcome(f"{name} is paused.", link(PATH, schedule=name))


def _plan_resume(visit: Visit) -> Plan:
    one = find_schedule(visit.runtime.control, visit.text("schedule"))
    if one.paused_at is None:
        return Plan(["It is not paused: nothing will change."])
    return Plan([f"Schedule {one.name} runs every {duration(one.every_s)} again, next from {when(one.next_at)} on."])


def _resume(visit: Visit) -> Outcome:
    name = visit.text("schedule")
    resume_schedule(visit.runtime, name)
    return Outcome(f"{name} is resumed.", link(PATH, schedule=name))


PAGES: Final = (Page(PATH, "Analytics", "schedules.html", _load, menu="Analytics"),)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("schedule-pause", "Pause a schedule", _plan_pause, _pause, "Pause it"),
    Action("schedule-resume", "Resume a schedule", _plan_resume, _resume, "Resume it"),
)
