"""Audited acts in words: what, on what, from → to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from mqlayer.console.render import counted, size, when
from mqlayer.inspect.audit_trail import AuditedAct

Facts = Mapping[str, Any]

UNITS: Final = {"_s": " s", "_days": " days"}
BULK: Final = {
    "redrive": "give dead messages back",
    "keep": "rule that dead messages stay dead",
    "release": "release parked keys",
    "discard": "discard parked keys",
}
STATES: Final = {
    "planned": "; not begun yet",
    "sealing": "; begun, not done yet",
    "sealed": "; begun, not done yet",
    "dropped": "; it was dropped, the route stayed",
}
"""Of a route change, behind its plan."""
NEWER: Final = {"wait": "newer messages wait", "between": "newer messages go on meanwhile"}


def act_words(one: AuditedAct) -> str:
    """Return an act as a sentence. Facts may lack, as in rows of other versions.

    `state` of a route change says whether it was done; without it, it was planned.
    """
    words = WORDS.get(one.act)
    if words is None:
        return f"{one.act}: {one.object}"
    try:
        return words(one.object, one.facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{one.act}: {one.object}"


# -- groups and topics -------------------------------------------------------------------------------------------------


def _group(name: str) -> str:
    topic, _, group = name.partition("/")
    return f"group {group} of topic {topic}" if group else f"group {name}"


def _changed(facts: Facts, *skipped: str) -> str:
    before: Facts = facts.get("before") or {}
    told = []
    for name, value in facts.items():
        if name in {"before", "reason", "if_version", *skipped} or before.get(name, ...) == value:
            continue
        was = f"{_value(name, before[name])} → " if name in before else "→ "
        told.append(f"{_label(name)} {was}{_value(name, value)}")
    return ", ".join(told) or "nothing changed"


def _label(name: str) -> str:
    for unit in UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _value(name: str, value: Any) -> str:
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    if value is None or value == "none":
        return "for ever" if name == "retention_days" else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        told = ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
        return f"{told}{unit}" if value else "none"
    if isinstance(value, int | float):
        if name == "body_limit" or "bytes" in name:
            return size(value)
        return (
            "none"
            if name == "backlog_limit" and not value
            else f"{value:,.10g}{unit}"
            if isinstance(value, float)
            else f"{value:,}{unit}"
        )
    return f"{value}{unit}"


def _topic_create(name: str, facts: Facts) -> str:
    return f"created topic {name} with {counted(facts['partitions'], 'partition')}: {_limits(facts)}"


def _limits(facts: Facts) -> str:
    shown = {name: value for name, value in facts.items() if value not in (None, False, 0, "none")}
    return ", ".join(f"{_label(name)} {_value(name, value)}" for name, value in shown.items() if name != "partitions")


def _topic_deleted(name: str, facts: Facts) -> str:
    groups = ", ".join(facts["groups"]) or "no group"
    return f"deleted topic {name} for good: {counted(facts['partitions'], 'partition')}, {groups}"


def _retire(name: str, facts: Facts) -> str:
    if "absent_s" in facts:
        return f"retired the instance {name} after {facts['absent_s']:,} s without a member"
    more = [counted(facts["instances"], "instance")] if facts.get("instances") else []
    more += [counted(facts["parked"], "parked message") + " deleted"] if facts.get("parked") else []
    return f"retired {_group(name)}" + (f" with {' and '.join(more)}" if more else "")


def _seek(name: str, facts: Facts) -> str:
    to = facts["to"]
    where = {"earliest": "the first message kept", "latest": "behind the last message"}.get(to) or _moment(to)
    again = "; fenced effects are applied again" if facts.get("replay") else ""
    return f"sent {_group(name)} to {where}{again}"


def _deploy(name: str, facts: Facts) -> str:
    part = f" below LP {facts['lps']}" if facts.get("lps") else ""
    return f"deployed {_group(name)}{part}: {facts['from']} → {facts['to']}"


def _moment(text: str) -> str:
    return when(datetime.fromisoformat(text))


def _partitions(facts: Facts) -> str:
    numbers = facts["partitions"]
    return f"partition{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _backfill(name: str, facts: Facts) -> str:
    since = (facts.get("filter") or {}).get("since")
    return f"began to fill {_group(name)} from the archive" + (f", from {_moment(since)} on" if since else "")


# -- keys, parked and dead messages ------------------------------------------------------------------------------------


def _skip(name: str, facts: Facts) -> str:
    message = f"message {facts['message']}" if "message" in facts else "the first message"
    return f"passed over {message} of key {facts['key']} in {_group(name)}: {_dead(facts)}"


def _discard(name: str, facts: Facts) -> str:
    return f"let {counted(facts['messages'], 'message')} of key {facts['key']} in {_group(name)} die: {_dead(facts)}"


def _dead(facts: Facts) -> str:
    ids = facts.get("dead_ids") or [facts["dead_id"]]
    return f"dead {'message' if len(ids) == 1 else 'messages'} {' to '.join(map(str, ids))}"


def _keep(number: str, facts: Facts) -> str:
    before = facts["before"]
    was = ": ".join(str(one) for one in (before["cause"], (before["reason"] or "").partition("\n")[0]) if one)
    return f"ruled that dead message {number} stays dead; it said {was}"


def _bulk(facts: Facts) -> str:
    return f"bulk action {facts['bulk']} ({BULK.get(facts['act'], facts['act'])})"


def _bulk_plan(name: str, facts: Facts) -> str:
    matched, taken = facts["matched"], facts["size"]
    found = counted(taken, "item") + (f", the first of {matched:,}" if matched > taken else "")
    narrowed = ", ".join(f"{_label(key)} {value}" for key, value in facts["filter"].items()) or "all"
    return f"listed {found}, for {_bulk(facts)} in {_group(name)}: {narrowed}"


def _bulk_start(name: str, facts: Facts) -> str:
    rate = f", at most {facts['per_s']:g} a second" if facts.get("per_s") else ""
    return f"started {_bulk(facts)} in {_group(name)}: {counted(facts['size'], 'item')}{rate}"


def _bulk_over(verb: str) -> Callable[[str, Facts], str]:
    def told(name: str, facts: Facts) -> str:
        counts = f"{facts['done']:,} done, {facts['skipped']:,} left alone, {facts['failed']:,} failed"
        return f"{verb} {_bulk(facts)} in {_group(name)}: {counts}"

    return told


def _replay_start(name: str, facts: Facts) -> str:
    narrowed = ", ".join(f"{_label(key)} {value}" for key, value in facts["filter"].items()) or "all that is archived"
    newer = NEWER.get(facts.get("newer", ""), "")
    return f"started replay {facts['replay']} for {_group(name)}: {narrowed}" + (f"; {newer}" if newer else "")


def _replay_cancel(number: str, facts: Facts) -> str:
    why = f" ({facts['why']})" if facts.get("why") else ""
    return f"cancelled replay {number}{why}: {facts['sent']:,} sent, {facts['not_sent']:,} not sent"


# -- nodes and routes --------------------------------------------------------------------------------------------------


def _arm(name: str, facts: Facts) -> str:
    return f"armed node {name} again{repaired_words(facts)}"


def _address(name: str, facts: Facts) -> str:
    return f"changed the address of node {name}: {facts['from']} → {facts['to']}{repaired_words(facts)}"


def repaired_words(facts: Facts) -> str:
    """Return the repairs of an arming."""
    steps = (("partitions_remade", "remade"), ("opened", "opened"), ("sealed", "sealed"))
    told = [f"{word} {counted(len(facts[name]), 'partition')}" for name, word in steps if facts.get(name)]
    if lost := sum((facts.get("lost") or {}).values()):
        told.append(f"{counted(lost, 'message')} lost")
    return f": {', '.join(told)}" if told else ": nothing was missing there"


def _node_lost(name: str, facts: Facts) -> str:
    told = [f"{counted(len(facts['moved']), 'partition')} moved", f"{counted(facts['resent'], 'message')} sent again"]
    told += [f"{counted(facts['only_on_node'], 'message')} only there"] if facts["only_on_node"] else []
    return f"gave node {name} up as lost: {', '.join(told)}"


def _route(verb: str, past: str) -> Callable[[str, Facts], str]:
    def told(topic: str, facts: Facts) -> str:
        parents = ", ".join(map(str, facts["parents"]))
        ranges = ", ".join(f"LPs {first} to {end - 1} on {node}" for first, end, node in facts["successors"])
        version = facts["version"]
        state = facts.get("state", "")
        begun = past if state == "done" else f"planned to {verb}"
        now = STATES.get(state, "")
        return (
            f"{begun} partition{'s' if len(facts['parents']) > 1 else ''} {parents} of topic {topic} → "
            f"{ranges}: route {version - 1} → {version}{now}"
        )

    return told


def _reopen(topic: str, facts: Facts) -> str:
    opened = ", ".join(map(str, facts["opened"])) or "none"
    return f"took back a lost route change of topic {topic}: opened {opened}, deleted {', '.join(facts['deleted'])}"


def _given_up(topic: str, facts: Facts) -> str:
    told = f"gave partition {facts['partition']} of topic {topic} up with its node"
    return f"{told}: {facts['resent']:,} messages are sent again, {facts['only_on_node']:,} were only there"


# -- outbox, versions, archive -----------------------------------------------------------------------------------------


def _recover(outbox: str, facts: Facts) -> str:
    told = [f"{facts['waiting']:,} rows renumbered", f"{counted(facts['unproven'], 'message')} without a commit"]
    return f"recovered outbox {outbox} after lost commits: {', '.join(told)}"


def _version(target: str, facts: Facts) -> str:
    name, _, entity = target.partition("/")
    to = "forgotten" if facts["version"] is None else f"→ version {facts['version']}"
    return f"{name}: entity {entity} {to}" + ("; held events dropped" if facts.get("drop_held") else "")


def _gaps(topic: str, facts: Facts) -> str:
    part = "" if facts.get("partition") is None else f", partition {facts['partition']}"
    return f"accepted {counted(facts['gaps'], 'gap')} in the archive of topic {topic}{part}: {_missing(facts)}"


def _missing(facts: Facts) -> str:
    return f"{counted(facts['missing'], 'message')} missing"


def _snapshot(name: str, facts: Facts) -> str:
    at = f" as of {_moment(facts['at'])}" if "at" in facts else ""
    return f"made snapshot {name}{at}: {counted(facts['records'], 'record')} of {', '.join(facts['topics'])}"


def _export(name: str, facts: Facts) -> str:
    return f"exported snapshot {name} to {facts['directory']}: {counted(facts['records'], 'record')}"


def _of_nodes() -> Iterator[tuple[str, Callable[[str, Facts], str]]]:
    yield "node register", lambda name, facts: f"registered node {name} at {facts['url']}"
    yield "node rearm", _arm
    yield "node set", _address
    yield "node lost", _node_lost
    yield "node drain", lambda name, _: f"began to drain node {name}: it gets no new partitions"
    yield "node drain stop", lambda name, _: f"ended the draining of node {name}: it gets partitions again"
    yield "node remove", lambda name, _: f"removed node {name}, which was empty"
    yield "node zone", lambda name, facts: f"said that node {name} is in zone {facts['zone'] or '(none)'}"
    yield "node replicas", lambda name, facts: f"said that node {name} has {facts['replicas']} replicas"
    yield "node out of service", lambda name, _: f"took node {name} out of service: no process uses it any more"


def _of_the_archive() -> Iterator[tuple[str, Callable[[str, Facts], str]]]:
    yield "archive retain", lambda day, facts: f"dropped {day} of the archive: {counted(facts['records'], 'record')}"
    yield "archive accept-gap", _gaps
    yield "archive export", lambda place, _: f"began to export the archive to {place}"
    yield "archive forget-export", lambda place, _: f"forgot the export at {place}"
    yield "snapshot create", _snapshot
    yield "snapshot drop", lambda name, _: f"dropped snapshot {name}"
    yield "snapshot export", _export
    yield "schedule create", lambda name, facts: f"made schedule {name}: every {facts['every_s']} s"
    yield "schedule drop", lambda name, _: f"dropped schedule {name}; its snapshots stay"
    yield "schedule pause", lambda name, _: f"paused schedule {name}"
    yield "schedule resume", lambda name, _: f"resumed schedule {name}"


def _each() -> Iterator[tuple[str, Callable[[str, Facts], str]]]:
    yield from _of_nodes()
    yield "topic create", _topic_create
    yield "topic set", lambda name, facts: f"changed topic {name}: {_changed(facts)}"
    yield "topic pause", lambda name, _: f"paused topic {name}: running → paused"
    yield "topic resume", lambda name, _: f"resumed topic {name}: paused → running"
    yield "topic delete", lambda name, _: f"began to delete topic {name}"
    yield "topic deleted", _topic_deleted
    yield "group set", lambda name, facts: f"changed {_group(name)}: {_changed(facts)}"
    yield "group pause", lambda name, _: f"paused {_group(name)}: running → paused"
    yield "group resume", lambda name, _: f"resumed {_group(name)}: paused → running"
    yield "group evict", lambda name, facts: f"evicted member {facts['member']} of {_group(name)}"
    yield "group seek", _seek
    yield "group deploy", _deploy
    yield "group copy", lambda name, facts: f"made {_group(name)} a copy of group {facts['from']}"
    yield "group retire", _retire
    yield "group backfill", _backfill
    yield "partition pause", lambda name, facts: f"paused {_partitions(facts)} for {_group(name)}: running → paused"
    yield "partition resume", lambda name, facts: f"resumed {_partitions(facts)} for {_group(name)}: paused → running"
    yield "partition given up", _given_up
    yield "key pause", lambda name, facts: f"paused key {facts['key']} for {_group(name)}: running → paused"
    yield "key resume", lambda name, facts: f"resumed key {facts['key']} for {_group(name)}: paused → running"
    yield "key skip-head", _skip
    yield "parked release", lambda name, facts: f"released {facts['key']} in {_group(name)}: parked → tried at once"
    yield "parked discard", _discard
    yield "dead discard", _keep
    yield "bulk plan", _bulk_plan
    yield "bulk start", _bulk_start
    yield "bulk resume", lambda number, _: f"resumed bulk action {number}, which no worker was at"
    yield "bulk cancel", _bulk_over("cancelled")
    yield "bulk end", _bulk_over("ended")
    yield "replay start", _replay_start
    yield "replay resume", lambda number, _: f"resumed replay {number}, which no worker was at"
    yield "replay cancel", _replay_cancel
    yield "route split", _route("split", "split")
    yield "route merge", _route("merge", "merged")
    yield "route move", _route("move", "moved")
    yield "route drop", lambda topic, facts: f"dropped the planned {facts['kind']} {facts['change']} of topic {topic}"
    yield "route reopen", _reopen
    yield "route auto", lambda topic, facts: f"set the automatic routes of topic {topic} to {facts['mode']}"
    yield "route auto stop", lambda topic, facts: f"stopped the automatic routes of topic {topic}: {facts['reason']}"
    yield "outbox recover", _recover
    yield "postgres replaced", lambda _, __: "noticed another Postgres server: numbers leapt, nodes must be armed again"
    yield "versions set", _version
    yield from _of_the_archive()


WORDS: Final[Mapping[str, Callable[[str, Facts], str]]] = dict(_each())
