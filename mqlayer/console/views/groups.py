"""Groups: troubles first, lag as curves, members, owners, and the head of each partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.console.charts import TimeChart, line_chart
from mqlayer.console.node_reads import impatient
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.partition_words import Waiting, stall_words, waits_for
from mqlayer.console.recent import RECENT
from mqlayer.console.render import counted, duration, link, number, segment, when
from mqlayer.console.spans import page_of, span_of
from mqlayer.console.views.nodes import statuses
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups import Start, apply_seek, planned_seek
from mqlayer.groups.admin import evict_member, pause_group, resume_group
from mqlayer.groups.breaker_admin import reset_breaker, trip_breaker
from mqlayer.groups.pauses import pause_partitions, resume_partitions, running_partitions
from mqlayer.groups.retirement import retire_group
from mqlayer.inspect import (
    GroupFacts,
    GroupStatus,
    MemberFacts,
    PartitionStatus,
    describe_breaker,
    group_facts,
    group_members,
    group_overviews,
    group_statuses,
    groups_in_trouble,
    partition_head,
)
from mqlayer.postgres.database import Database
from mqlayer.runtime.route_cache import RouteCache

NO_LAG: Final = "a node of the group's partitions did not answer when samples were taken"
SHOWN: Final = 40
"""Lines of a plan that name partitions."""


def _load_list(visit: Visit) -> Mapping[str, Any]:
    control, topic, contains = visit.runtime.control, visit.text("topic"), visit.text("contains")
    after = visit.text("after_topic"), visit.text("after")
    nodes = part(lambda: statuses.get(visit.runtime))
    # A sample is up to a minute old, and knows no node that died since.
    silent = {one.node.node_id: one.node.name for one in nodes.value or () if one.state not in {"serving", "lost"}}
    rows = part(
        lambda: group_overviews(
            control, topic=topic or None, after=after, contains=contains, limit=ROWS + 1, silent=list(silent)
        )
    )
    found = rows.value or []
    last = found[ROWS - 1] if len(found) > ROWS else None
    kept = {"topic": topic, "contains": contains}
    return {
        "wrong": part(lambda: groups_in_trouble(control, limit=ROWS, silent=list(silent))),
        "nodes": nodes,
        "silent": list(silent.values()),
        "rows": rows,
        "groups": found[:ROWS],
        "topic": topic,
        "contains": contains,
        "more": "" if last is None else link("/groups", **kept, after_topic=last.topic, after=last.name),
        "first": link("/groups", **kept) if after[1] else "",
    }


def _load_group(visit: Visit) -> Mapping[str, Any]:
    topic, name, control = visit.text("topic"), visit.text("group"), visit.runtime.control
    (facts,) = group_facts(control, topic, name)
    chosen, _ = span_of(visit)
    path = _path(visit)
    status = part(lambda: group_statuses(impatient(visit.runtime), topic, name, count_keys=False)[0])
    ranked = _ranked(status.value)
    shown, later, former = page_of(ranked, visit, path, last=chosen)
    return {
        "facts": facts,
        "status": status,
        "path": path,
        "chosen": chosen,
        "stalls": _stalls(status.value),
        "away": _away(status.value),
        "charts": part(lambda: _charts(control, topic, name, visit)),
        "members": part(lambda: _members(control, facts)),
        "instances": part(lambda: _instances(control, facts)),
        "partitions": [(one, stall_words(one)) for one in shown],
        "count": len(ranked),
        "later": later,
        "former": former,
    }


def _ranked(status: GroupStatus | None) -> list[PartitionStatus]:
    undrained = [] if status is None else status.undrained
    return sorted(
        undrained,
        key=lambda one: (one.stall is None, -(one.age_s or 0.0), -(one.lag or 0), one.facts.partition),
    )


def _stalls(status: GroupStatus | None) -> list[tuple[tuple[str, str], int, PartitionStatus]]:
    # Those on a silent node are told with the node.
    stuck = [one for one in _ranked(status) if one.stall is not None and one.stall.reason != "node_away"]
    counts = Counter(stall_words(one) for one in stuck)
    firsts = {stall_words(one): one for one in reversed(stuck)}
    return [(words, count, firsts[words]) for words, count in counts.most_common()]


def _away(status: GroupStatus | None) -> list[tuple[str, str, list[PartitionStatus]]]:
    if status is None:
        return []
    return [
        (node, reason.rstrip(". "), [one for one in status.undrained if one.node == node])
        for node, reason in status.unreachable.items()
    ]


def _charts(control: Database, topic: str, name: str, visit: Visit) -> list[TimeChart]:
    _, last = span_of(visit)
    found = {one.name: one for one in RECENT.of(control, "group", name, topic=topic, last=last)}
    now = datetime.now(UTC)
    return [
        line_chart("Lag in messages", {"lag": found["lag"]}, now=now, last=last, peaks=True, why=NO_LAG),
        line_chart(
            "Age of the oldest unsettled message", {"age": found["oldest_s"]}, now=now, last=last, peaks=True,
            shown=duration, why=NO_LAG,
        ),
        line_chart("Parked and dead messages", {"parked": found["parked"], "dead": found["dead"]}, now=now, last=last),
    ]  # fmt: skip


def _members(control: Database, facts: GroupFacts) -> list[MemberFacts]:
    found = group_members(control, facts.topic, facts.name)
    return sorted(found, key=lambda one: (one.state == "gone", one.member_id))


def _instances(control: Database, facts: GroupFacts) -> Sequence[Any]:
    if facts.mode != "broadcast":
        return []
    return group_overviews(control, topic=facts.topic, contains=f"{facts.name}@", limit=ROWS)


def _load_partition(visit: Visit) -> Mapping[str, Any]:
    head = partition_head(
        impatient(visit.runtime),
        visit.text("topic"),
        visit.text("group"),
        visit.number("partition"),
        bodies=visit.user.bodies,
    )
    waits: list[Waiting] = waits_for(head)
    return {
        "head": head,
        "facts": head.status.facts,
        "group": head.group.facts,
        "waits": waits,
        "path": _path(visit),
        "body": head.message.body.decode(errors="backslashreplace")[:10_000] if head.message is not None else "",
    }


def _path(visit: Visit) -> str:
    return f"/groups/{segment(visit.text('topic'))}/{segment(visit.text('group'))}"


def _named(visit: Visit) -> str:
    return f"group {visit.text('group')} of topic {visit.text('topic')}"


def _facts(visit: Visit) -> GroupFacts:
    (facts,) = group_facts(visit.runtime.control, visit.text("topic"), visit.text("group"))
    return facts


def _plan_pause(visit: Visit) -> Plan:
    facts = _facts(visit)
    if facts.paused_at is not None:
        return Plan([f"The {_named(visit)} is paused already, by {facts.paused_by}: nothing will change."])
    running = running_partitions(visit.runtime.control, facts.topic, facts.name)
    return Plan(
        [
            f"Members of {_named(visit)} begin no further message; {facts.alive:,} alive now.",
            f"Running messages finish; partitions with an owner now: {running:,}.",
            "Its messages stay in the streams, so its lag grows, and they are not trimmed.",
        ]
    )


def _pause(visit: Visit) -> Outcome:
    done = pause_group(visit.runtime, visit.text("topic"), visit.text("group"))
    return Outcome(f"The {_named(visit)} {'is' if done else 'was already'} paused.", _path(visit))


def _plan_resume(visit: Visit) -> Plan:
    facts = _facts(visit)
    if facts.paused_at is None:
        return Plan([f"The {_named(visit)} is not paused: nothing will change."])
    lines = [f"The {_named(visit)} goes on; {facts.paused_by} paused it at {when(facts.paused_at)}."]
    if facts.topic_paused_at is not None:
        lines.append("It still waits: its topic is paused, too.")
    return Plan(lines)


def _resume(visit: Visit) -> Outcome:
    done = resume_group(visit.runtime, visit.text("topic"), visit.text("group"))
    return Outcome(f"The {_named(visit)} {'is resumed' if done else 'was not paused'}.", _path(visit))


def _plan_open(visit: Visit) -> Plan:
    facts = _facts(visit)
    if facts.breaker is not None and facts.breaker.state != "ramping":
        return Plan([f"The circuit breaker of {_named(visit)} is open already: nothing will change."])
    return Plan(
        [
            f"Members of {_named(visit)} begin no further message; {facts.alive:,} alive now. No failure counts.",
            "Probes of one message begin within a second; the first that succeeds closes the breaker again.",
        ]
    )


def _open(visit: Visit) -> Outcome:
    done = trip_breaker(visit.runtime, visit.text("topic"), visit.text("group"))
    return Outcome(f"The circuit breaker of {_named(visit)} is open{'' if done else ' already'}.", _path(visit))


def _plan_close(visit: Visit) -> Plan:
    facts = _facts(visit)
    if facts.breaker is None:
        return Plan([f"The circuit breaker of {_named(visit)} is closed: nothing will change."])
    return Plan(
        [
            f"Members of {_named(visit)} go on at full speed; {describe_breaker(facts.breaker)}.",
            "If most keys still fail, it opens again.",
        ]
    )


def _close(visit: Visit) -> Outcome:
    done = reset_breaker(visit.runtime, visit.text("topic"), visit.text("group"))
    return Outcome(f"The circuit breaker of {_named(visit)} is closed{'' if done else ' already'}.", _path(visit))


def _partition(visit: Visit) -> int:
    return visit.number("partition")


def _plan_pause_partition(visit: Visit) -> Plan:
    facts, partition = _facts(visit), _partition(visit)
    return Plan(
        [
            f"The group {facts.name} begins no further message of partition {partition} of topic {facts.topic}.",
            "Its other partitions go on; successors of this one wait behind it.",
        ]
    )


def _pause_partition(visit: Visit) -> Outcome:
    done = pause_partitions(visit.runtime, visit.text("topic"), visit.text("group"), [_partition(visit)])
    text = f"Partition {_partition(visit)} {'is' if done else 'was already'} paused for {_named(visit)}."
    return Outcome(text, f"{_path(visit)}/partitions/{_partition(visit)}")


def _plan_resume_partition(visit: Visit) -> Plan:
    return Plan([f"The {_named(visit)} goes on with partition {_partition(visit)}."])


def _resume_partition(visit: Visit) -> Outcome:
    done = resume_partitions(visit.runtime, visit.text("topic"), visit.text("group"), [_partition(visit)])
    text = f"Partition {_partition(visit)} {'is resumed' if done else 'was not paused'} for {_named(visit)}."
    return Outcome(text, f"{_path(visit)}/partitions/{_partition(visit)}")


def _plan_evict(visit: Visit) -> Plan:
    facts, wanted = _facts(visit), visit.text("member")
    found = [one for one in group_members(visit.runtime.control, facts.topic, facts.name) if one.member_id == wanted]
    if not found or found[0].state == "gone":
        raise Conflict(f"no member {wanted!r} lives in the {_named(visit)}", "look at its members again")
    (member,) = found
    return Plan(
        [
            f"Member {member.member_id}, process {member.pid} on {member.host}, ends and consumes no more.",
            _handed_over(member.partitions, facts.alive - 1),
            "Messages that it has in hand are handled again by their new owners.",
        ],
        danger=True,
    )


def _handed_over(partitions: int, others: int) -> str:
    if others <= 0:
        return f"No other member lives: {counted(partitions, 'partition')} without an owner until one joins."
    return f"Its {counted(partitions, 'partition')} will be of {counted(others, 'other member')} at once."


def _evict(visit: Visit) -> Outcome:
    evict_member(visit.runtime, visit.text("topic"), visit.text("group"), visit.text("member"))
    return Outcome(f"Member {visit.text('member')} of {_named(visit)} is evicted.", _path(visit))


def _start(visit: Visit) -> Start:
    to = visit.text("to")
    if to in {"earliest", "latest"}:
        return "earliest" if to == "earliest" else "latest"
    if to != "time":
        raise InvalidInput("say where to: earliest, latest or a time")
    text = visit.text("time")
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no time: write it as 2026-11-21T09:30") from error
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def _plan_seek(visit: Visit) -> Plan:
    topic, name, to = visit.text("topic"), visit.text("group"), _start(visit)
    with closing(RouteCache(visit.runtime.control)) as routes:
        plan = planned_seek(impatient(visit.runtime), routes, topic=topic, name=name, to=to)
    (status,) = group_statuses(impatient(visit.runtime), topic, name, count_keys=False)
    now = {one.facts.partition: one.position for one in status.partitions}
    moves: list[tuple[int, str]] = []
    for beginning in plan.beginnings:
        position = now.get(beginning.partition)
        known = None if position is None else position.position
        moves.append(
            (0 if known is None else abs(beginning.offset - known), _move(beginning.partition, known, beginning.offset))
        )
    moves.sort(key=lambda one: -one[0])
    back = sum(_again(now.get(one.partition), one.offset) for one in plan.beginnings)
    over = sum(_over(now.get(one.partition), one.offset) for one in plan.beginnings)
    lines = [
        f"The {_named(visit)} goes on from {_where(to)} in {counted(len(plan.beginnings), 'partition')}.",
        f"Settled messages that are delivered again: at most {number(back)}.",
        f"Unsettled messages that are passed over: at most {number(over)}.",
        "Effects with a fence are not applied twice, other effects are."
        if visit.text("replay") != "yes"
        else "Effects with a fence are applied again, as are all others.",
        "Parked messages stay parked. Owners lose their partitions and take them again.",
        *(text for _, text in moves[:SHOWN]),
    ]
    if len(moves) > SHOWN:
        lines.append(f"and {counted(len(moves) - SHOWN, 'partition')} with a smaller move")
    return Plan(lines, danger=True, fields={"seek": str(plan.group.seek)})


def _move(partition: int, known: int | None, offset: int) -> str:
    return f"partition {partition}: {'unknown' if known is None else f'{known:,}'} → {offset:,}"


def _again(position: Any, offset: int) -> int:
    return 0 if position is None else max(0, position.position - offset)


def _over(position: Any, offset: int) -> int:
    return 0 if position is None else max(0, offset - position.position)


def _where(to: Start) -> str:
    if isinstance(to, datetime):
        return f"the first message published at {when(to)} or later"
    return "the first message kept" if to == "earliest" else "behind the last message"


def _seek(visit: Visit) -> Outcome:
    topic, name = visit.text("topic"), visit.text("group")
    with closing(RouteCache(visit.runtime.control)) as routes:
        plan = planned_seek(visit.runtime, routes, topic=topic, name=name, to=_start(visit))
    if plan.group.seek != visit.number("seek"):
        raise Conflict(f"{_named(visit)} was sent elsewhere in the meantime", "look where it is now, and seek again")
    missed = apply_seek(visit.runtime, plan, replay=visit.text("replay") == "yes")
    told = f" Nodes that did not answer: {', '.join(missed)}; the next owners fence there." if missed else ""
    return Outcome(f"The {_named(visit)} goes on from {_where(plan.to)}.{told}", _path(visit))


def _plan_retire(visit: Visit) -> Plan:
    facts = _facts(visit)
    (status,) = group_statuses(impatient(visit.runtime), facts.topic, facts.name, count_keys=False)
    if facts.alive:
        raise Conflict(
            f"{_named(visit)} has {counted(facts.alive, 'living member')}", "stop them first; then retire it"
        )
    lines = [
        f"The {_named(visit)} ends for good: its position is forgotten.",
        f"Unsettled messages that it will never handle: {status.lag:,}.",
        "Its messages bound neither trimming nor the retirement of partitions any more.",
    ]
    if status.parked.messages:
        lines.append(f"Deleted: {counted(status.parked.messages, 'parked message')}.")
    return Plan(lines, danger=True, fields={"parked": str(status.parked.messages)})


def _retire(visit: Visit) -> Outcome:
    drop = visit.number("parked", 0) > 0
    done = retire_group(visit.runtime, visit.text("topic"), visit.text("group"), drop_parked=drop)
    return Outcome(f"The {_named(visit)} is retired, with {counted(done.parked, 'parked message')}.", "/groups")


PAGES: Final = (
    Page("/groups", "Groups", "groups.html", _load_list, menu="Groups"),
    Page("/groups/{topic}/{group}", "Group {group} of topic {topic}", "group.html", _load_group),
    Page(
        "/groups/{topic}/{group}/partitions/{partition}",
        "Partition {partition} of {topic} for group {group}",
        "partition.html",
        _load_partition,
    ),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("group-pause", "Pause a group", _plan_pause, _pause, button="Pause the group"),
    Action("group-resume", "Resume a group", _plan_resume, _resume, button="Resume the group"),
    Action("breaker-open", "Open a circuit breaker", _plan_open, _open, button="Open the breaker"),
    Action("breaker-close", "Close a circuit breaker", _plan_close, _close, button="Close the breaker"),
    Action("partition-pause", "Pause a partition for a group", _plan_pause_partition, _pause_partition, button="Pause"),
    Action(
        "partition-resume", "Resume a partition for a group", _plan_resume_partition, _resume_partition, button="Resume"
    ),
    Action("group-evict", "Evict a member", _plan_evict, _evict, button="Evict the member"),
    Action("group-seek", "Seek a group", _plan_seek, _seek, button="Seek"),
    Action("group-retire", "Retire a group", _plan_retire, _retire, button="Retire the group"),
)
