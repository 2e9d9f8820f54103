"""Route changes: open and ended ones, plans with their effect on load, and acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import permutations
from typing import Any, Final

from mqlayer.console.node_reads import impatient
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.render import counted, duration, link, number
from mqlayer.console.views.nodes import statuses
from mqlayer.domain.route_changes import ChangePlan, halving_point
from mqlayer.domain.routing import LpRange, Route
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.inspect import BusiestKeys, busiest_keys
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import require_change
from mqlayer.routes import (
    DrainProgress,
    PartitionLoad,
    apply_plan,
    drain_progress,
    drop_change,
    finish_changes,
    measured_load,
    planned_merge,
    planned_move,
    planned_split,
)
from mqlayer.routes.status import ListedChange, changed_partitions, find_change, list_changes
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime

OPEN_SHOWN: Final = 100
LONGEST_MEASURE_S: Final = 10
KINDS: Final = {"planned": "warn", "sealing": "warn", "sealed": "bad", "done": "good", "dropped": "quiet"}
MEANINGS: Final = {
    "planned": "recorded; nothing is sealed yet, so it can be dropped",
    "sealing": "its parents are being sealed: publishers of their LPs may wait",
    "sealed": "its parents are sealed and its successors not open yet: publishers of their LPs wait",
    "done": "its successors are in force",
    "dropped": "it was given up before anything was sealed",
}

MEASURES: Final = (
    (LONGEST_MEASURE_S, f"the last {LONGEST_MEASURE_S} s: for a flood now; the plan takes as long to come"),
    (0, "all messages ever published to it: for a load that lasts"),
)
NODES_PAIRED: Final = 5
"""Of more nodes, no pairs are offered."""
ONE_KEY: Final = 0.5
"""A key with a larger share makes the load."""

Loads = Mapping[int, int] | None
"""Messages per LP; None: not known."""


def _load(visit: Visit) -> Mapping[str, Any]:
    control, topic, before = visit.runtime.control, visit.text("topic") or None, visit.number("before", 0) or None
    ended = part(lambda: list_changes(control, topic=topic, before=before, limit=ROWS + 1))
    rows = ended.value or []
    older = link("/changes", topic=topic, before=rows[ROWS - 1].change_id) if len(rows) > ROWS else ""
    return {
        "open": part(lambda: _open(visit.runtime)),
        "draining": part(lambda: list_changes(control, which="draining", limit=OPEN_SHOWN)),
        "history": ended,
        "older": older,
        "newer": link("/changes", topic=topic) if before else "",
        "rows": ROWS,
        "topic": topic or "",
        "partition": visit.text("partition"),
        "kinds": KINDS,
        "nodes": part(lambda: _targets(control)),
        "measures": MEASURES,
        "pairs": part(lambda: _pairs(_targets(control))),
    }


def _targets(control: Database) -> list[str]:
    return [one.name for one in load_nodes(control) if one.draining_at is None]


def _pairs(names: Sequence[str]) -> list[str]:
    return [", ".join(pair) for pair in permutations(names, 2)] if len(names) <= NODES_PAIRED else []


def _open(runtime: Runtime) -> list[tuple[ListedChange, str]]:
    changes = list_changes(runtime.control, which="open", limit=OPEN_SHOWN)
    return [(one, _waits_for(runtime, one)) for one in changes]


def _waits_for(runtime: Runtime, change: ListedChange) -> str:
    """Say in words which node or step an open change waits for."""
    states = {one.node.name: one.state for one in statuses.get(runtime)}
    names = {one.node for one in changed_partitions(runtime.control, change.change_id)}
    away = sorted(f"{name} is {states[name]}" for name in names if states.get(name, "serving") != "serving")
    if away:
        return f"node {', node '.join(away)}: bring it back, and the worker goes on"
    return {
        "planned": "its driver: the worker's job repair_routes goes on with it every 2 seconds",
        "sealing": "its driver, which seals the parents",
        "sealed": "its driver, which opens the successors",
    }[change.state]


def _load_change(visit: Visit) -> Mapping[str, Any]:
    change = find_change(visit.runtime.control, visit.number("change"))
    return {
        "change": change,
        "meaning": MEANINGS[change.state],
        "steps": _steps(change),
        "waits": part(lambda: _waits_for(visit.runtime, change) if change.is_open else ""),
        "partitions": part(lambda: changed_partitions(visit.runtime.control, change.change_id)),
        "drain": part(lambda: _drain(visit.runtime, change)),
        "kinds": KINDS,
    }


def _steps(change: ListedChange) -> list[tuple[str, Any, float | None]]:
    moments = [
        ("planned", change.planned_at), ("parents sealed", change.sealed_at), ("successors open", change.opened_at),
        ("dropped" if change.state == "dropped" else "done", change.ended_at),
    ]  # fmt: skip
    found: list[tuple[str, Any, float | None]] = []
    before: datetime | None = None
    for name, at in moments:
        found.append((name, at, None if at is None or before is None else (at - before).total_seconds()))
        before = at or before
    return found


def _drain(runtime: Runtime, change: ListedChange) -> list[DrainProgress]:
    if not change.kept:
        return []
    return drain_progress(impatient(runtime), change.topic, change.parents)


def _plan_split(visit: Visit) -> Plan:
    runtime, partition, over_s = _changeable(visit), visit.number("partition"), visit.number("measure", 0)
    if over_s > LONGEST_MEASURE_S:
        raise InvalidInput(f"the console measures for at most {LONGEST_MEASURE_S} s; mqlayer route split for longer")
    route, at = load_route(runtime.control, visit.text("topic")), _numbers(visit, "at")
    found, r = _measured(runtime, route, partition, over_s), _in_force(route, partition)
    loads = None if found is None else found.per_lp
    if r is not None and not at:
        at = [halving_point(loads or {}, r.lp_from, r.lp_to)]
    plan = _planned_split(visit, at)
    chosen = ", ".join(str(made.lp_from) for made in plan.successors[1:])
    counted_s = 0.0 if found is None else found.over_s
    shown = _shown(visit, plan, {partition: loads}, {"at": chosen}, counted_s)
    keys = part(lambda: busiest_keys(impatient(runtime), plan.topic, partition))
    told = [_of_keys(keys.value)] if keys.value is not None and keys.value.read else []
    return replace(shown, lines=[*shown.lines, *told])


def _of_keys(found: BusiestKeys) -> str:
    first = found.busiest[0]
    span = f"of the newest {counted(found.read, 'message')}, published within {duration(found.over_s)}"
    if first.key is None or first.share <= ONE_KEY:
        named = "messages without key have" if first.key is None else f"the busiest, {first.key}, has"
        return f"Many keys make the load: {named} {first.share:.0%} {span}."
    return (
        f"A split does not help: one key, {first.key}, has {first.share:.0%} {span}, and a key stays in one partition."
    )


def _planned_split(visit: Visit, at: Sequence[int]) -> ChangePlan:
    runtime, partition, to = _changeable(visit), visit.number("partition"), _words(visit, "to")
    return planned_split(runtime, visit.text("topic"), partition, at=at, to=to, if_version=_version(visit))


def _plan_merge(visit: Visit) -> Plan:
    plan = _planned_merge(visit)
    return _shown(visit, plan, _measured_parents(visit.runtime, plan), {})


def _planned_merge(visit: Visit) -> ChangePlan:
    runtime, to = _changeable(visit), visit.text("to") or None
    partitions = _numbers(visit, "partitions")
    return planned_merge(runtime.control, visit.text("topic"), partitions, to=to, if_version=_version(visit))


def _plan_move(visit: Visit) -> Plan:
    plan = _planned_move(visit)
    names = {node.node_id: node.name for node in load_nodes(visit.runtime.control)}
    shown = _shown(visit, plan, _measured_parents(visit.runtime, plan), {"to": names[plan.successors[0].node]})
    if plan.mode == "live":
        return shown
    text = "It goes on without the old node: messages that only that node holds come late, or never."
    return replace(shown, lines=[*shown.lines, text], danger=True)


def _planned_move(visit: Visit) -> ChangePlan:
    runtime = _changeable(visit)
    return planned_move(
        runtime.control,
        visit.text("topic"),
        visit.number("partition"),
        to=visit.text("to") or None,
        unreachable=bool(visit.text("unreachable")),
        if_version=_version(visit),
    )


def _split(visit: Visit) -> Outcome:
    return _applied(visit, _planned_split(visit, _numbers(visit, "at")))


def _merge(visit: Visit) -> Outcome:
    return _applied(visit, _planned_merge(visit))


def _move(visit: Visit) -> Outcome:
    return _applied(visit, _planned_move(visit))


def _applied(visit: Visit, plan: ChangePlan) -> Outcome:
    route = apply_plan(visit.runtime, plan)
    (change,) = list_changes(visit.runtime.control, topic=plan.topic, limit=1)
    text = f"Route version {route.version} of topic {plan.topic} is in force."
    after = "Groups get the new partitions when they have drained the old ones."
    return Outcome(f"{text} {after}", f"/changes/{change.change_id}")


def _plan_drop(visit: Visit) -> Plan:
    change = _open_of(_changeable(visit), visit.text("topic"))
    return Plan(
        [_told(change), "It is given up, and the route stays as it is. Once it is sealing it only goes forward."]
    )


def _drop(visit: Visit) -> Outcome:
    change = drop_change(_changeable(visit), visit.text("topic"))
    return Outcome(f"Change {change} is dropped; the route is as before.", f"/changes/{change}")


def _plan_repair(visit: Visit) -> Plan:
    runtime = _changeable(visit)
    change = _open_of(runtime, visit.text("topic"))
    waits = f"It waits for {_waits_for(runtime, change)}."
    return Plan([_told(change), waits, "This goes on with it now, as the worker does."])


def _told(change: ListedChange) -> str:
    kind, meaning = change.kind.capitalize(), MEANINGS[change.state]
    return f"{kind} {change.change_id} of topic {change.topic} is {change.state}: {meaning}."


def _repair(visit: Visit) -> Outcome:
    topic = visit.text("topic")
    change = _open_of(_changeable(visit), topic)
    came_to = finish_changes(visit.runtime, topic=topic)
    text = "; ".join(f"change {number}: {word}" for number, word in came_to.items()) or "nothing was open any more"
    return Outcome(f"Of topic {topic}, {text}.", f"/changes/{change.change_id}")


def _open_of(runtime: Runtime, topic: str) -> ListedChange:
    load_route(runtime.control, topic)
    for one in list_changes(runtime.control, topic=topic, which="open", limit=1):
        return one
    raise InvalidInput(f"no route change of topic {topic!r} is open")


def _changeable(visit: Visit) -> Runtime:
    with visit.runtime.control.connection() as connection:
        require_change(connection, "control")
    return visit.runtime


def _shown(
    visit: Visit, plan: ChangePlan, loads: Mapping[int, Loads], fields: Mapping[str, str], counted_s: float = 0.0
) -> Plan:
    names = {node.node_id: node.name for node in load_nodes(visit.runtime.control)}
    span = f"the last {counted_s:g} s" if counted_s else "all messages ever published to it"
    if visit.number("measure", 0) and not counted_s:
        span += ", since none came while it was measured"
    return Plan([*_lines(plan, loads, names, span)], fields={**fields, "version": str(plan.base)})


def _lines(plan: ChangePlan, loads: Mapping[int, Loads], names: Mapping[Any, str], span: str) -> Iterator[str]:
    known = [one for one in loads.values() if one is not None]
    per_lp = {lp: count for one in known for lp, count in one.items()}
    total = sum(per_lp.values())
    unknown = len(known) < len(loads)

    def share(lp_from: int, lp_to: int) -> str:
        if unknown:
            return "its load is not known: its node does not answer"
        count = sum(per_lp.get(lp, 0) for lp in range(lp_from, lp_to))
        return f"{number(count)} messages ({count / total:.0%})" if total else "no messages"

    yield f"The {plan.kind} takes topic {plan.topic} from route version {plan.base} to {plan.version}."
    yield (
        f"Loads are of {span}. The topic's page measures the last seconds, the overview the last minutes: they differ."
    )
    for parent in plan.parents:
        place = f"LPs {parent.lp_from} to {parent.lp_to - 1} on {names[parent.node]}"
        yield f"Before: partition {parent.partition}, {place}: {share(parent.lp_from, parent.lp_to)}. It ends."
    for made in plan.successors:
        place = f"LPs {made.lp_from} to {made.lp_to - 1} on {names[made.node]}"
        yield f"After: a new partition, {place}: {share(made.lp_from, made.lp_to)}."
    stay = {made.node for made in plan.successors}
    if plan.kind == "split" and stay == {one.node for one in plan.parents}:
        (node,) = stay
        yield (
            f"All parts stay on {names[node]}: more members can share the work, but {names[node]} stores as much as "
            "before. Name a node for each part to divide that too."
        )
    heaviest = max(per_lp, key=lambda lp: per_lp[lp], default=None)
    if plan.kind == "split" and heaviest is not None and per_lp[heaviest] > total / 2:
        yield f"LP {heaviest} alone has {per_lp[heaviest] / total:.0%} of the load: no split divides an LP."
    yield "Publishers of these LPs wait while the old partitions are sealed: milliseconds, as a rule."
    yield "Each group goes on in the new partitions when it has drained the old ones, so order holds."


def _measured_parents(runtime: Runtime, plan: ChangePlan) -> dict[int, Loads]:
    route = load_route(runtime.control, plan.topic)
    found = {int(parent.partition): _measured(runtime, route, parent.partition, 0) for parent in plan.parents}
    return {partition: None if one is None else one.per_lp for partition, one in found.items()}


def _measured(runtime: Runtime, route: Route, partition: int, over_s: int) -> PartitionLoad | None:
    if _in_force(route, partition) is None:
        return None
    try:
        return measured_load(runtime, route, partition, over_s=over_s)
    except MqlayerError:
        return None


def _in_force(route: Route, partition: int) -> LpRange | None:
    return next((one for one in route.ranges if one.partition == partition), None)


def _numbers(visit: Visit, name: str) -> list[int]:
    words = _words(visit, name)
    bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) <= 9)]
    if bad:
        raise InvalidInput(f"{name} is a list of numbers: {bad[0]!r} is none")
    return [int(word) for word in words]


def _words(visit: Visit, name: str) -> Sequence[str]:
    return visit.text(name).replace(",", " ").split()


def _version(visit: Visit) -> int | None:
    return visit.number("version", 0) or None


PAGES: Final = (
    Page("/changes", "Route changes", "changes.html", _load, menu="Route changes"),
    Page("/changes/{change}", "Route change {change}", "change.html", _load_change),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("route-split", "Split a partition", _plan_split, _split, "Split it"),
    Action("route-merge", "Merge partitions", _plan_merge, _merge, "Merge them"),
    Action("route-move", "Move a partition", _plan_move, _move, "Move it"),
    Action("route-drop", "Drop a route change", _plan_drop, _drop, "Drop it"),
    Action("route-repair", "Go on with a route change", _plan_repair, _repair, "Go on"),
)
