"""Nodes, the processes that use them, and the periodic jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mqlayer.console.audit_words import repaired_words
from mqlayer.console.charts import TimeChart, line_chart
from mqlayer.console.kept import KeptValues
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.render import link, segment, size
from mqlayer.console.spans import span_of
from mqlayer.errors import InvalidInput
from mqlayer.inspect.audit_trail import AuditedAct, AuditFilter, audited_acts
from mqlayer.inspect.curves import curves
from mqlayer.inspect.node_status import NodeStatus, node_partitions, node_status, node_statuses
from mqlayer.inspect.overviews import group_overviews
from mqlayer.inspect.processes import MemberProcess, OpenSource, member_processes, open_sources, relay_processes
from mqlayer.maintenance.job_status import job_statuses
from mqlayer.postgres.rights import Right, require_change
from mqlayer.redis.addresses import display_url
from mqlayer.routes import give_up_node, refuse_class_loss
from mqlayer.topics import rearm_node, set_node_address

STATES: Final = {
    "serving": "good",
    "unarmed": "bad",
    "restarted": "bad",
    "unreachable": "bad",
    "lost": "quiet",
}
OUTCOMES: Final = {"done": "good", "failed": "bad", "running": "quiet", "never ran": "warn"}
POINTS: Final = 120
RETURNED: Final = timedelta(days=1)
"""A node's page tells of its last arming for so long."""
NAMED: Final = 5
LOSSES: Final[Mapping[str, str]] = {
    "accept_loss": "Messages that no outbox holds any more are lost; this accepts the loss.",
    "former": "An old primary is taken back; this accepts the messages that it lacks.",
    "empty": "Its data are gone: the data there belong to another system.",
}
"""Options of arming."""
CASES: Final[Mapping[str, str]] = {
    "accept_loss": "it came back without its newest data: arming it was refused, and the reason names lost messages",
    "former": "a replica was promoted meanwhile and this is the old primary: arming it was refused as an old primary",
    "empty": "its disk is gone, and an empty Redis, or one with data of another system, has its address",
}
"""When an option of arming is right, and how one knows."""

statuses: Final = KeptValues(node_statuses)


def _load(visit: Visit) -> Mapping[str, Any]:
    control = visit.runtime.control
    group, member, source = visit.number("group", 0), visit.text("member"), visit.number("source", 0) or None
    members = part(lambda: member_processes(control, after_group=group, after_member=member, limit=ROWS + 1))
    sources = part(lambda: open_sources(control, before=source, limit=ROWS + 1))
    return {
        "nodes": part(lambda: statuses.get(visit.runtime)),
        "jobs": part(lambda: job_statuses(control)),
        "relays": part(lambda: relay_processes(visit.runtime.outbox, limit=ROWS)),
        "members": members,
        "more_members": _more_members(members.value or []),
        "sources": sources,
        "more_sources": _more_sources(sources.value or []),
        "paged": bool(visit.query),
        "rows": ROWS,
        "states": STATES,
        "outcomes": OUTCOMES,
    }


def _more_members(found: Sequence[MemberProcess]) -> str:
    if len(found) <= ROWS:
        return ""
    return link("/nodes", group=found[ROWS - 1].group_id, member=found[ROWS - 1].member_id) + "#members"


def _more_sources(found: Sequence[OpenSource]) -> str:
    return "" if len(found) <= ROWS else link("/nodes", source=found[ROWS - 1].source_id) + "#sources"


def _load_node(visit: Visit) -> Mapping[str, Any]:
    name, after, (span, last) = visit.text("node"), visit.number("after", 0), span_of(visit)
    one = _known(visit, name)
    found = part(lambda: node_partitions(visit.runtime, one.node.node_id, after=after, limit=ROWS + 1))
    partitions = found.value or []
    path = f"/nodes/{segment(name)}"
    more = link(path, after=partitions[ROWS - 1].partition, last=span) if len(partitions) > ROWS else ""
    return {
        "one": one,
        "partitions": found,
        "more": more,
        "after": after,
        "rows": ROWS,
        "charts": part(lambda: _charts(visit, name, last)),
        "span": span,
        "path": path,
        "states": STATES,
        "losses": LOSSES,
        "cases": CASES,
        "returned": part(lambda: _returned(visit, name)),
    }


def _returned(visit: Visit, name: str) -> tuple[AuditedAct, str] | None:
    """Return the last arming of the last day, and its words."""
    chosen = AuditFilter(act="node rearm", object=name, since=datetime.now(UTC) - RETURNED)
    found = audited_acts(visit.runtime.control, chosen, limit=1)
    return (found[0], repaired_words(found[0].facts)) if found else None


def _affected(visit: Visit, one: NodeStatus) -> str:
    """Return the topics with partitions on a node, and their groups, as a sentence."""
    control = visit.runtime.control
    topics = sorted({part.topic for part in node_partitions(visit.runtime, one.node.node_id, after=0, limit=ROWS)})
    if not topics:
        return "No topic has a partition there."
    groups = [group.name for topic in topics[:NAMED] for group in group_overviews(control, topic=topic, limit=NAMED)]
    more = f" and {len(topics) - NAMED} more" if len(topics) > NAMED else ""
    names = ", ".join(topics[:NAMED]) + more
    return f"Topics with partitions there: {names}; their groups: {', '.join(dict.fromkeys(groups)) or 'none'}."


def _known(visit: Visit, name: str) -> NodeStatus:
    kept = next((one for one in statuses.get(visit.runtime) if one.node.name == name), None)
    # A node that was registered a moment ago.
    return kept or node_status(visit.runtime, name)


def _charts(visit: Visit, name: str, last: timedelta) -> list[TimeChart]:
    memory, commands = curves(visit.runtime.control, "node", name, last=last, points=POINTS)
    now = datetime.now(UTC)
    return [
        line_chart("Memory", {"memory": memory}, now=now, last=last, shown=size),
        line_chart("Commands per second", {"commands per second": commands}, now=now, last=last, peaks=True),
    ]


def _plan_rearm(visit: Visit) -> Plan:
    one = _changeable(visit, Right.RELAY, Right.WORK)
    lines = [
        _state_line(one),
        f"Its present run is armed: each owner of its {_held(one)} gets a new epoch.",
        _affected(visit, one),
    ]
    lines += [text for name, text in LOSSES.items() if visit.text(name)]
    return Plan(lines, danger=any(visit.text(name) for name in LOSSES))


def _rearm(visit: Visit) -> Outcome:
    one = _changeable(visit, Right.RELAY, Right.WORK)
    node, count = rearm_node(visit.runtime, one.node.name, **_options(visit))
    return Outcome(f"Node {node.name} is armed; {count} assignments got a new epoch.", f"/nodes/{segment(node.name)}")


def _plan_set(visit: Visit) -> Plan:
    one, url = _changeable(visit), _url(visit)
    lines = [
        _state_line(one),
        f"Its address changes from {one.node.address} to {display_url(url)}.",
        "The server there is armed; processes follow within seconds.",
        _affected(visit, one),
        *(text for name, text in LOSSES.items() if visit.text(name)),
    ]
    return Plan(lines, danger=any(visit.text(name) for name in LOSSES))


def _set(visit: Visit) -> Outcome:
    one = _changeable(visit)
    node, count = set_node_address(visit.runtime, one.node.name, _url(visit), **_options(visit))
    text = f"Node {node.name} is {node.address}; {count} assignments got a new epoch."
    return Outcome(text, f"/nodes/{segment(node.name)}")


def _plan_lost(visit: Visit) -> Plan:
    one = _changeable(visit)
    refuse_class_loss(visit.runtime, one.node)
    lines = [
        _state_line(one),
        f"{one.open} open partitions move to other nodes; {one.sealed} sealed ones are made anew there.",
        _affected(visit, one),
        "Messages that the outbox still has are sent again; messages that only this node holds are lost.",
        "It is refused while the node answers. Better wait for the node, if it may come back.",
    ]
    return Plan(lines, danger=True)


def _lost(visit: Visit) -> Outcome:
    one = _changeable(visit)
    loss = give_up_node(visit.runtime, one.node.name)
    direct = " Direct producers published there: unsettled messages of these are lost." if loss.direct else ""
    text = (
        f"Node {one.node.name} is given up: {len(loss.moved)} partitions moved, {len(loss.recreated)} sealed ones made "
        f"anew. {loss.resent} messages are sent again, {loss.only_on_node} are in no outbox any more.{direct}"
    )
    return Outcome(text, f"/nodes/{segment(one.node.name)}")


def _changeable(visit: Visit, *others: Right) -> NodeStatus:
    with visit.runtime.control.connection() as connection:
        require_change(connection, "control", *others)
    return node_status(visit.runtime, visit.text("node"))


def _state_line(one: NodeStatus) -> str:
    memory = one.number("used_memory")
    shown = "" if memory is None else f", {size(memory)} of memory"
    return f"Node {one.node.name} at {one.node.address} is {one.state}{shown}. {one.reason}".rstrip()


def _held(one: NodeStatus) -> str:
    return f"{one.open + one.sealed} partitions"


def _options(visit: Visit) -> dict[str, Any]:
    return {name: bool(visit.text(name)) for name in LOSSES}


def _url(visit: Visit) -> str:
    url = visit.text("url")
    if not url:
        raise InvalidInput(
            "name the address: redis://…, rediss://…, sentinel://… or cluster://…, without user and password"
        )
    return url


PAGES: Final = (
    Page("/nodes", "Nodes", "nodes.html", _load, menu="Nodes"),
    Page("/nodes/{node}", "Node {node}", "node.html", _load_node),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("node-rearm", "Arm a node again", _plan_rearm, _rearm, "Arm it"),
    Action("node-set", "Change a node's address", _plan_set, _set, "Change it"),
    Action("node-lost", "Give up a lost node", _plan_lost, _lost, "Give it up"),
)
