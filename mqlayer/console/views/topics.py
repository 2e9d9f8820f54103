"""Topics: rates, backlog, settings, partitions with heat, and the route over time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.autopilot import RouteReport, explain_routes
from mqlayer.console.charts import Heat, TimeChart, heats, line_chart, route_chart
from mqlayer.console.node_reads import impatient
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.recent import RECENT
from mqlayer.console.render import link, number, segment, size, when
from mqlayer.console.spans import page_of, span_of
from mqlayer.doctor.hot_partitions import hot_partitions
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.pauses import pause_topic, resume_topic, running_partitions
from mqlayer.inspect import (
    BusiestKeys,
    MeasuredTopic,
    RateMeter,
    TopicPartition,
    busiest_keys,
    group_overviews,
    topic_overviews,
    topic_settings,
)
from mqlayer.postgres.database import Database
from mqlayer.routes import route_timeline
from mqlayer.topics.topics import set_limits

PER_MINUTE: Final = 60.0
NO_RATE: Final = "a rate needs two samples, of nodes that answer; the outbox is sampled where the worker reaches it"
VERSIONS: Final = 30
"""Route versions of one picture."""

DECISIONS: Final = 5

_METER: Final = RateMeter()


def _load_list(visit: Visit) -> Mapping[str, Any]:
    after, contains = visit.text("after"), visit.text("contains")
    control = visit.runtime.control
    rows = part(lambda: topic_overviews(control, after=after, contains=contains, limit=ROWS + 1))
    found = rows.value or []
    more = link("/topics", contains=contains, after=found[ROWS - 1].name) if len(found) > ROWS else ""
    first = link("/topics", contains=contains) if after else ""
    return {
        "rows": rows,
        "topics": found[:ROWS],
        "hot": part(lambda: hot_partitions(control)),
        "contains": contains,
        "more": more,
        "first": first,
    }


def _load_topic(visit: Visit) -> Mapping[str, Any]:
    name, control = visit.text("topic"), visit.runtime.control
    settings = topic_settings(control, name)
    chosen, _ = span_of(visit)
    path = f"/topics/{segment(name)}"
    measured = part(lambda: _METER.measure(impatient(visit.runtime), settings.topic_id))
    ranked, heat = _ranked(measured.value)
    shown, later, former = page_of(ranked, visit, path, last=chosen)
    return {
        "topic": settings,
        "path": path,
        "chosen": chosen,
        "charts": part(lambda: _charts(control, name, visit)),
        "groups": part(lambda: group_overviews(control, topic=name, limit=ROWS)),
        "auto": part(lambda: _automatic(visit, name)),
        "measured": measured,
        "partitions": [(one, heat.get(one.partition, Heat(None, None))) for one in shown],
        "open": [one.partition for one in ranked if one.state == "open"][:ROWS],
        "count": len(ranked),
        "later": later,
        "former": former,
    }


def _automatic(visit: Visit, name: str) -> RouteReport | None:
    """Return the report of a topic with a policy."""
    try:
        return explain_routes(visit.runtime, name, last=DECISIONS)
    except NotFound:
        return None


def _ranked(measured: MeasuredTopic | None) -> tuple[list[TopicPartition], dict[int, Heat]]:
    if measured is None:
        return [], {}
    ranked = sorted(measured.partitions, key=lambda one: (one.state != "open", -(one.per_s or 0.0), one.lp_from))
    there = [one for one in ranked if one.state == "open"]
    return ranked, heats({one.partition: (one.per_s, one.lp_to - one.lp_from) for one in there})


def _load_keys(visit: Visit) -> Mapping[str, Any]:
    name, partition = visit.text("topic"), visit.text("partition")
    topic_settings(visit.runtime.control, name)

    def measured() -> BusiestKeys | None:
        return busiest_keys(impatient(visit.runtime), name, visit.number("partition")) if partition else None

    return {
        "name": name,
        "partition": partition,
        "path": f"/topics/{segment(name)}",
        "found": part(measured),
    }


def _charts(control: Database, name: str, visit: Visit) -> list[TimeChart]:
    _, last = span_of(visit)
    found = {one.name: one for one in RECENT.of(control, "topic", name, last=last)}
    labels = {
        "stored": found["stored_per_s"],
        "committed to the outbox": found["committed_per_s"],
        "relayed": found["relayed_per_s"],
    }
    return [
        line_chart(
            "Published messages per minute", labels, now=datetime.now(UTC), last=last, scale=PER_MINUTE, why=NO_RATE
        ),
    ]


def _load_route(visit: Visit) -> Mapping[str, Any]:
    name, control = visit.text("topic"), visit.runtime.control
    settings = topic_settings(control, name)
    upto = visit.number("upto", 0)
    timeline = route_timeline(control, name, upto=upto or None, versions=VERSIONS)
    measured = part(lambda: _METER.measure(impatient(visit.runtime), settings.topic_id))
    rates = {one.partition: one.per_s for one in measured.value.partitions} if measured.value is not None else {}
    path = f"/topics/{segment(name)}/route"
    in_force = sorted(
        (one for one in timeline.spans if one.ended is None),
        key=lambda one: (-(rates.get(one.partition) or 0), one.lp_from),
    )
    heat = heats({one.partition: (rates.get(one.partition), one.lp_to - one.lp_from) for one in in_force})
    shown, later, former = page_of(in_force, visit, path, upto=upto or "")
    return {
        "topic": settings,
        "timeline": timeline,
        "chart": route_chart(timeline, rates, heat),
        "measured": measured,
        "partitions": [(one, rates.get(one.partition), heat[one.partition].word) for one in shown],
        "count": len(in_force),
        "later": later,
        "former": former,
        "older": link(path, upto=timeline.since - 1) if timeline.since > 1 else "",
        "newer": link(path, upto=timeline.upto + VERSIONS) if timeline.upto < timeline.newest else "",
    }


def _path(visit: Visit) -> str:
    return f"/topics/{segment(visit.text('topic'))}"


def _plan_pause(visit: Visit) -> Plan:
    topic = topic_settings(visit.runtime.control, visit.text("topic"))
    groups = group_overviews(visit.runtime.control, topic=topic.name, limit=ROWS)
    running = running_partitions(visit.runtime.control, topic.name)
    if topic.paused_at is not None:
        return Plan([f"Topic {topic.name} is paused already, by {topic.paused_by}: nothing will change."])
    names = ", ".join(one.name for one in groups) or "none yet"
    return Plan(
        [
            f"All groups of topic {topic.name} begin no further message: {names}.",
            f"Running messages finish; partitions with an owner now: {running:,}.",
            "Publishing goes on, so the backlog grows until the topic is resumed.",
        ]
    )


def _pause(visit: Visit) -> Outcome:
    name = visit.text("topic")
    done = pause_topic(visit.runtime, name)
    return Outcome(f"Topic {name} is paused." if done else f"Topic {name} was paused already.", _path(visit))


def _plan_resume(visit: Visit) -> Plan:
    topic = topic_settings(visit.runtime.control, visit.text("topic"))
    if topic.paused_at is None:
        return Plan([f"Topic {topic.name} is not paused: nothing will change."])
    still = [one.name for one in group_overviews(visit.runtime.control, topic=topic.name, limit=ROWS) if one.paused_at]
    lines = [f"The groups of topic {topic.name} go on; {topic.paused_by} paused it at {when(topic.paused_at)}."]
    return Plan(lines + ([f"These stay paused, each by itself: {', '.join(still)}."] if still else []))


def _resume(visit: Visit) -> Outcome:
    name = visit.text("topic")
    done = resume_topic(visit.runtime, name)
    return Outcome(f"Topic {name} is resumed." if done else f"Topic {name} was not paused.", _path(visit))


def _plan_limits(visit: Visit) -> Plan:
    topic = topic_settings(visit.runtime.control, visit.text("topic"))
    body, backlog = visit.number("body_limit"), visit.number("backlog_limit")
    if (body, backlog) == (topic.body_limit, topic.backlog_limit):
        raise InvalidInput("these are the limits that the topic has: change one of them")
    lines = []
    if body != topic.body_limit:
        lines.append(f"Bodies of topic {topic.name} may have {size(body)}, now {size(topic.body_limit)}.")
    if backlog != topic.backlog_limit:
        lines.append(f"A partition may keep {_backlog(backlog)}, now {_backlog(topic.backlog_limit)}.")
    return Plan([*lines, "Stored messages stay. Relays follow at once, direct producers within 5 s."])


def _backlog(limit: int) -> str:
    return f"{number(limit)} records" if limit else "any number of records"


def _limit(visit: Visit) -> Outcome:
    name = visit.text("topic")
    done = set_limits(
        visit.runtime, name, body_limit=visit.number("body_limit"), backlog_limit=visit.number("backlog_limit")
    )
    return Outcome(f"The limits of topic {name} are changed." if done else "Nothing changed.", _path(visit))


PAGES: Final = (
    Page("/topics", "Topics", "topics.html", _load_list, menu="Topics"),
    Page("/topics/{topic}", "Topic {topic}", "topic.html", _load_topic),
    Page("/topics/{topic}/keys", "Busiest keys of topic {topic}", "busiest_keys.html", _load_keys, live=False),
    Page("/topics/{topic}/route", "Route of topic {topic}", "route.html", _load_route),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("topic-pause", "Pause a topic", _plan_pause, _pause, button="Pause the topic"),
    Action("topic-resume", "Resume a topic", _plan_resume, _resume, button="Resume the topic"),
    Action("topic-limits", "Change a topic's limits", _plan_limits, _limit, button="Change the limits"),
)
