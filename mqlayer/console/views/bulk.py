"""Bulk actions: a fixed set of parked keys or dead messages, planned, started, watched and cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.render import counted, duration, link
from mqlayer.console.views.parked import dead_filter, parked_filter, told_count
from mqlayer.errors import InvalidInput
from mqlayer.redelivery import (
    BULK_LIMIT,
    BulkAct,
    BulkAction,
    bulk_action,
    bulk_actions,
    bulk_items,
    cancel_bulk,
    estimate_dead,
    estimate_parked,
    new_worker,
    plan_bulk,
    start_bulk,
    work_on,
)
from mqlayer.redelivery.bulk import DEAD_ACTS, PLAN_EXPIRES_S
from mqlayer.redelivery.filters import DeadFilter, ParkedFilter

HERE: Final = 500
"""Items of a bulk action that the console does at once; larger and slower ones are the workers'."""
SOON_S: Final = 2.0
LONGEST_WAIT_S: Final = 1.0
WORDS: Final[Mapping[str, str]] = {
    "redrive": "give dead messages back to their group",
    "keep": "rule that dead messages stay dead",
    "release": "try parked keys at once",
    "discard": "let the messages of parked keys die",
}


def order_of(act: str) -> str:
    """Return the order in which an act takes its items."""
    if act in DEAD_ACTS:
        return "key by key, and of a key in the order in which its messages were published"
    return "parked keys by their LP (the number that places a key), then by name; messages of a key stay in order"


def filter_words(wanted: DeadFilter | ParkedFilter) -> str:
    """Return a filter in words, empty for one that takes all."""
    said = {name: value for name, value in wanted.as_json().items() if name != "waiting"}
    told = [f"{name.replace('_', ' ')} {value}" for name, value in said.items()]
    return ", ".join([*told, *(["those that wait for an operator"] if wanted.as_json().get("waiting") else [])])


def _list(visit: Visit) -> Mapping[str, Any]:
    after = visit.number("after") if visit.text("after") else None
    found = part(lambda: bulk_actions(visit.runtime.control, after=after, limit=ROWS))
    rows = found.value or []
    return {
        "found": found,
        "older": link("/bulk", after=rows[-1].bulk_id) if len(rows) == ROWS else "",
        "newer": "/bulk" if after is not None else "",
    }


def _show(visit: Visit) -> Mapping[str, Any]:
    database = visit.runtime.control
    action = bulk_action(database, visit.number("bulk_id"))
    after, failed = visit.number("after", 0), bool(visit.text("failed"))
    items = part(lambda: bulk_items(database, action.bulk_id, after=after, failed=failed, limit=ROWS))
    rows, path = items.value or [], f"/bulk/{action.bulk_id}"
    only = "1" if failed else ""
    return {
        "action": action,
        "words": WORDS[action.act],
        "order": order_of(action.act),
        "filtered": filter_words(action.filter),
        "left": action.size - action.done - action.skipped - action.failed,
        "items": items,
        "failed": failed,
        "reason": visit.text("reason"),
        "older": link(path, after=rows[-1].number, failed=only) if len(rows) == ROWS else "",
        "newer": link(path, failed=only) if after else "",
    }


# -- acts --------------------------------------------------------------------------------------------------------------


def _wanted(visit: Visit) -> tuple[BulkAct, str, str, DeadFilter | ParkedFilter]:
    act: Any = visit.text("act")
    topic, group = visit.text("topic"), visit.text("group")
    if act not in get_args(BulkAct):
        raise InvalidInput(f"{act!r} is no act: begin at the list of parked keys or dead messages")
    if not (topic and group):
        raise InvalidInput("a bulk action is on one group: name topic and group in the filter")
    return act, topic, group, dead_filter(visit) if act in DEAD_ACTS else parked_filter(visit)


def _plan_plan(visit: Visit) -> Plan:
    act, topic, group, wanted = _wanted(visit)
    database = visit.runtime.control
    if isinstance(wanted, DeadFilter):
        kind, count = "dead message", estimate_dead(database, wanted, topic=topic, group=group)
    else:
        kind, count = "parked key", estimate_parked(database, replace(wanted, topic=topic, group=group))
    narrowed = filter_words(wanted) or "all of the group"
    return Plan([
        f"List what the act is for: {WORDS[act]}, in group {group} of topic {topic}. Nothing is done to it yet.",
        f"Matching now: {told_count(count, kind)} ({narrowed}).",
        f"The first {BULK_LIMIT:,} are taken, {order_of(act)}. What matches later is not of the set.",
        (f"The next page shows the set: its size, its order and its first items. Start it there within "
        f"{duration(PLAN_EXPIRES_S)}, or leave it."),
    ])  # fmt: skip


def _plan(visit: Visit) -> Outcome:
    act, topic, group, wanted = _wanted(visit)
    found = plan_bulk(visit.runtime, act, topic, group, wanted, first=True)
    text = f"Bulk action {found.bulk_id} is planned: {counted(found.size, 'item')}. Nothing is done yet: start it."
    return Outcome(text, link(f"/bulk/{found.bulk_id}", reason=visit.text("reason")), goes_on=True)


def _plan_start(visit: Visit) -> Plan:
    found = bulk_action(visit.runtime.control, visit.number("bulk_id"))
    rate = _rate(visit)
    return Plan(
        [
            f"{counted(found.size, 'item')}, fixed: {WORDS[found.act]}, in group {found.group} of topic {found.topic}.",
            f"Order: {order_of(found.act)}.",
            f"At most {rate:g} a second." if rate else "As fast as the group has room for them.",
            "What changed since the list was made is left alone; new messages of a key are no change.",
            "It can be stopped on the way: finished items stay as they are.",
        ],
        danger=found.act == "discard",
    )


def _start(visit: Visit) -> Outcome:
    runtime, bulk_id = visit.runtime, visit.number("bulk_id")
    size, rate = bulk_action(runtime.control, bulk_id).size, _rate(visit)
    soon = size <= HERE and (rate == 0.0 or size <= rate * SOON_S)
    worker = new_worker() if soon else None
    started = start_bulk(runtime, bulk_id, reason=visit.text("reason"), per_s=rate, worker=worker)
    if worker is not None:
        started = work_on(runtime.control, bulk_id, worker=worker, longest_wait_s=LONGEST_WAIT_S)
    return Outcome(f"Bulk action {bulk_id} is {started.state}: {_progress(started)}.", f"/bulk/{bulk_id}")


def _progress(found: BulkAction) -> str:
    return f"{found.done:,} of {found.size:,} done, {found.skipped:,} left alone, {found.failed:,} failed"


def _rate(visit: Visit) -> float:
    return float(visit.number("per_s", 0))


def _plan_cancel(visit: Visit) -> Plan:
    found = bulk_action(visit.runtime.control, visit.number("bulk_id"))
    return Plan([
        f"Bulk action {found.bulk_id} ({WORDS[found.act]}) ends after the batch in hand.",
        f"{_progress(found)}: finished items stay as they are, and so does the rest.",
    ])  # fmt: skip


def _cancel(visit: Visit) -> Outcome:
    found = cancel_bulk(visit.runtime, visit.number("bulk_id"))
    return Outcome(f"Bulk action {found.bulk_id} is cancelled: {_progress(found)}.", f"/bulk/{found.bulk_id}")


PAGES: Final = (
    Page("/bulk", "Bulk actions", "bulk_list.html", _list, live=False),
    Page("/bulk/{bulk_id}", "Bulk action {bulk_id}", "bulk.html", _show),
)
ACTIONS: Final = (
    Action("bulk-plan", "Plan a bulk action", _plan_plan, _plan, "Make the list"),
    Action("bulk-start", "Start a bulk action", _plan_start, _start, "Start it"),
    Action("bulk-cancel", "Stop a bulk action", _plan_cancel, _cancel, "Stop it for good"),
)
