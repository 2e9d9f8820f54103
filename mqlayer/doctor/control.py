"""Checks on the control schema."""

from __future__ import annotations

from typing import Final

from mqlayer.doctor.findings import Check, CheckLimits, CheckStatus, Finding, format_seconds
from mqlayer.doctor.nodes import RegisteredNode
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.domain.routing import NodeId
from mqlayer.maintenance.late_jobs import LATE_FACTS
from mqlayer.redis.node_connection import Node

OLD_SHOWN: Final = 20
"""Most old processes that are named."""
START_BEAT: Final = "run one: celery -A mqlayer.workers.app worker --beat (a second one does no harm)"


def registered_nodes(checked: CheckedDatabase) -> list[RegisteredNode]:
    """Return all nodes."""
    return [
        RegisteredNode(Node(NodeId(node_id), name, url, run_id, replicas=replicas), lost_at, classes)
        for node_id, name, url, run_id, lost_at, replicas, classes in checked.rows("check_nodes")
    ]


def check_replaced(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report a replaced database: it may lack commits."""
    rows = checked.rows("check_replaced")
    known, now, another, noted_s = rows[0] if rows else (0, 0, False, None)
    if another or (known and now not in (0, known)):
        seen = f"it is on timeline {now}{' of another system' if another else ''}, the schema knows {known}"
        fix = "nothing, while a worker, relay or member runs: the next connection repairs it"
        fix += "; see the page 'Handle a Postgres fail-over'"
        seen += ": it was replaced, and no process has connected since"
        return [Finding("replaced", checked.subject, CheckStatus.BROKEN, seen, fix)]
    if noted_s is not None and noted_s < limits.replaced_s:
        seen = f"it was replaced {format_seconds(noted_s)} ago, and may lack the last commits of before"
        fix = "mqlayer verify names what differs; where effects must not be missing: mqlayer group seek"
        return [Finding("replaced", checked.subject, CheckStatus.WARNING, seen, fix)]
    return [
        Finding("replaced", checked.subject, CheckStatus.OK, f"timeline {now or 'not told'}, as the schema knows it")
    ]


def check_numbers(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report sequences near their end: nothing that they number can be made behind it."""
    found = []
    for name, used in checked.rows("check_numbers", part=limits.part / 2):
        verdict = CheckStatus.BROKEN if used > limits.part else CheckStatus.WARNING
        seen = f"sequence {name} gave out {used:.0%} of its numbers: no role needs that many"
        found.append(
            Finding("numbers", checked.subject, verdict, seen, "end the role that uses them up: mqlayer grants")
        )
    return found or [Finding("numbers", checked.subject, CheckStatus.OK, "each sequence has numbers left")]


def check_unarmed(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report nodes without an armed run: they serve nothing."""
    found = []
    for name, age_s in checked.rows("check_unarmed"):
        verdict = CheckStatus.BROKEN if age_s is None or age_s > limits.unarmed_s else CheckStatus.WARNING
        seen = (
            f"no run of node {name} is armed{'' if age_s is None else f', for {format_seconds(age_s)}'}: it "
            f"serves nothing"
        )
        fix = f"mqlayer node rearm {name}: it says what it waits for; a running worker tries it every 5 s"
        found.append(Finding("unarmed", checked.subject, verdict, seen, fix))
    return found or [Finding("unarmed", checked.subject, CheckStatus.OK, "a run of each node is armed")]


def check_draining(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report draining nodes, also those without progress."""
    found = []
    for name, age_s, in_force, sealed, quiet_s in checked.rows("check_draining"):
        seen = f"node {name} drains since {format_seconds(age_s)}: {in_force} partitions to move, {sealed} to retire"
        stopped = in_force and quiet_s > limits.change_s
        fix = f"mqlayer node drain {name} --yes goes on; --stop ends it" if in_force or sealed else (
            f"mqlayer node remove {name}, or let it have partitions again: mqlayer node drain {name} --stop"
        )  # fmt: skip
        verdict = CheckStatus.WARNING if stopped else CheckStatus.OK
        found.append(Finding("draining", checked.subject, verdict, seen, fix))
    return found or [Finding("draining", checked.subject, CheckStatus.OK, "no node is being drained")]


def check_beat(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report late periodic jobs."""
    ((last_s,),) = checked.rows("check_last_job")
    if last_s is None:
        return [Finding("beat", checked.subject, CheckStatus.WARNING, "no periodic job ever ran", START_BEAT)]
    found = []
    for name, every_s, last_at, late_s in checked.rows("jobs_late", **LATE_FACTS):
        seen = f"{name} never ran" if last_at is None else f"{name} is late by {format_seconds(late_s)}"
        fix = f"see worker and beat, or {START_BEAT}"
        found.append(
            Finding("beat", checked.subject, CheckStatus.BROKEN, f"{seen}; it is due every {every_s:g} s", fix)
        )
    seen = f"no periodic job is late, the last ran {format_seconds(last_s)} ago"
    return found or [Finding("beat", checked.subject, CheckStatus.OK, seen)]


def check_changes(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report open route changes: sealed ones block publishers."""
    found = []
    for topic, change_id, kind, state, age_s in checked.rows("check_changes", age_s=limits.change_s):
        waits = state != "planned"
        seen = f"{kind} {change_id} of topic {topic} is {state} for {format_seconds(age_s)}"
        seen += ": publishers of its LPs may wait" if waits else ""
        fix = f"mqlayer route repair {topic}; it names what it waits for, as a rule a node that is away"
        found.append(
            Finding("routes", checked.subject, CheckStatus.BROKEN if waits else CheckStatus.WARNING, seen, fix)
        )
    return found or [Finding("routes", checked.subject, CheckStatus.OK, "no route change waits")]


def check_autopilot(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report topics whose automatic routes stopped themselves, and hot LPs that no split helps."""
    found = []
    for topic, reason, age_s in checked.rows("check_autopilot"):
        seen = f"automatic routes of topic {topic} stopped {format_seconds(age_s)} ago: {reason}"
        fix = f"repair the cause, then: mqlayer route auto {topic} --on"
        found.append(Finding("autopilot", checked.subject, CheckStatus.WARNING, seen, fix))
    for topic, partition, _lp, reason, _age_s in checked.rows("check_hot_keys"):
        seen = f"partition {partition} of topic {topic}: {reason}"
        found.append(
            Finding("autopilot", checked.subject, CheckStatus.WARNING, seen, f"see: mqlayer route why {topic}")
        )
    return found or [Finding("autopilot", checked.subject, CheckStatus.OK, "no automatic route stopped")]


def check_deletions(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report unfinished deletions of topics."""
    found = []
    for topic, age_s in checked.rows("check_deletions", age_s=limits.deletion_s):
        seen = f"the deletion of topic {topic} began {format_seconds(age_s)} ago and is unfinished"
        fix = f"mqlayer topic delete {topic} names the obstacles; with --yes it goes on"
        found.append(Finding("deletions", checked.subject, CheckStatus.WARNING, seen, fix))
    return found or [Finding("deletions", checked.subject, CheckStatus.OK, "no deletion of a topic is unfinished")]


def check_groups(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report groups without living members: they hold up trimming."""
    rows = checked.rows("check_groups")
    found = []
    for topic, group, living, absent_s, keep_s in rows:
        if living:
            continue
        seen = f"group {group} of topic {topic} has no living member, and holds trimming up"
        fix = f"start its consumers: mqlayer consume MODULE:APP, or: mqlayer group retire {topic} {group} --yes"
        if keep_s is not None:
            since = "" if absent_s is None else f" for {format_seconds(absent_s)}"
            seen = f"instance {group} of topic {topic} has been away{since}, and holds trimming up"
            fix = (
                f"start it, or let the worker drop its position after {format_seconds(keep_s)}, or retire it as "
                f"any group"
            )
        found.append(Finding("groups", checked.subject, CheckStatus.WARNING, seen, fix))
    seen = f"each of {len(rows)} groups has living members" if rows else "no group with members as yet"
    return found or [Finding("groups", checked.subject, CheckStatus.OK, seen)]


def check_parked(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report parked keys that are waiting, overdue, or at a limit."""
    found, keys = [], 0
    for topic, group, parked, messages, waiting, full, waits_s, due_s in checked.rows("check_parked"):
        keys += parked
        of = f"group {group} of topic {topic}"
        if due_s is not None and due_s > limits.parked_s:
            seen = f"a parked key of {of} has been due for {format_seconds(due_s)}, and nobody tries it"
            fix = f"see whether its consumers are well: mqlayer group lag {topic} {group}"
            found.append(Finding("parked", checked.subject, CheckStatus.BROKEN, seen, fix))
        if full:
            seen = f"{of} or one of its keys is at its limit of parked messages: further failures wait in the stream"
            fix = (
                f"mqlayer parked stats {topic} {group}, then release, discard, or raise a limit with mqlayer group set"
            )
            found.append(Finding("parked", checked.subject, CheckStatus.WARNING, seen, fix))
        if waiting:
            seen = (
                f"{waiting} of {parked} parked keys of {of} wait for an operator, the oldest for "
                f"{format_seconds(waits_s)}"
            )
            fix = f"mqlayer parked list {topic} {group} --waiting, then release or discard; waiting: {messages}"
            found.append(Finding("parked", checked.subject, CheckStatus.WARNING, seen, fix))
    seen = f"none of {keys} parked keys waits for an operator" if keys else "no key is parked"
    return found or [Finding("parked", checked.subject, CheckStatus.OK, seen)]


def check_pauses(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report pauses: paused messages are not trimmed."""
    found = [
        Finding(
            "pauses",
            checked.subject,
            CheckStatus.WARNING,
            f"{by or 'somebody'} paused {what} {format_seconds(age_s)} ago",
            fix,
        )
        for what, fix, by, age_s in checked.rows("check_pauses")
    ]
    return found or [Finding("pauses", checked.subject, CheckStatus.OK, "nothing is paused")]


def check_archive(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report gaps and lagging archives: they hold up trimming."""
    rows, found = checked.rows("check_archive"), []
    for topic, gaps, passed_s, dropped in rows:
        if dropped:
            seen = f"nodes dropped outcomes of {dropped} messages of topic {topic}, for lack of an archiver"
            fix = "run archivers without a pause: mqlayer archive status counts it, the doctor forgets it after a day"
            found.append(Finding("archive", checked.subject, CheckStatus.WARNING, seen, fix))
        if gaps:
            seen = f"the archive of topic {topic} waits at {gaps} gaps, and holds trimming up"
            fix = f"mqlayer archive gaps {topic}, then mqlayer archive accept-gap {topic} --reason TEXT"
            found.append(Finding("archive", checked.subject, CheckStatus.BROKEN, seen, fix))
        elif passed_s is None or passed_s > limits.archive_s:
            since = "never" if passed_s is None else f"for the last time {format_seconds(passed_s)} ago"
            seen = f"an archiver came to the end of topic {topic} {since}, and that holds trimming up"
            fix = "see worker and beat, or mqlayer archive run; mqlayer archive status says how far it is behind"
            found.append(Finding("archive", checked.subject, CheckStatus.WARNING, seen, fix))
    seen = f"archived topics: {len(rows)}; none is behind" if rows else "no topic is archived"
    return found or [Finding("archive", checked.subject, CheckStatus.OK, seen)]


def check_exports(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report exports that are behind the archive: retention may wait for them."""
    rows, found = checked.rows("lake_statuses"), []
    for location, topic, _, _, _, _, batches, behind_s in rows:
        if behind_s > limits.export_s:
            seen = (
                f"the export of topic {topic} at {location} lacks {batches} batches, since {format_seconds(behind_s)}"
            )
            fix = f"mqlayer archive export --to {location}; or, if it ended, mqlayer archive forget-export {location}"
            found.append(Finding("exports", checked.subject, CheckStatus.WARNING, seen, fix))
    places = len({row[0] for row in rows})
    seen = f"exports of the archive: {places}; none is late" if rows else "the archive is not exported"
    return found or [Finding("exports", checked.subject, CheckStatus.OK, seen)]


def check_protocol(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report an upgrade that waits to be finalized, and processes that are too old."""
    ((serves_from, in_force, serves_to, _, _, age_s),) = checked.rows("protocol_control")
    old = [row for row in checked.rows("living_processes", limit=OLD_SHOWN) if row[7] < serves_from]
    found = []
    for kind, name, host, pid, _, version, _, most, *_ in old:
        seen = f"{kind} {name} on {host} (pid {pid}) runs mqlayer {version} with protocol {most}"
        seen += f", {serves_from} is the lowest served: it drains and ends"
        found.append(Finding("protocol", checked.subject, CheckStatus.WARNING, seen, "start it with the new release"))
    if in_force < serves_to:
        seen = f"protocol {in_force} is in force, {serves_to} was prepared {format_seconds(age_s)} ago"
        fix = "once no process of the old release is needed: mqlayer upgrade finalize"
        verdict = CheckStatus.WARNING if age_s > limits.finalize_s else CheckStatus.OK
        found.append(Finding("protocol", checked.subject, verdict, seen, fix if verdict is not CheckStatus.OK else ""))
    seen = f"protocol {in_force} is in force, and all processes know it"
    return found or [Finding("protocol", checked.subject, CheckStatus.OK, seen)]


def check_schedules(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report schedules of analytics whose last run found faults or failed, and late ones."""
    found, count = [], 0
    for name, state, error, age_s, jobs, overdue_s in checked.rows("check_schedules"):
        count += 1
        if state in {"faults", "failed"}:
            told = "found faults" if state == "faults" else "failed"
            seen = f"schedule {name}: {', '.join(jobs) or 'its run'} {told} {format_seconds(age_s)} ago"
            seen += f": {error}" if error else ""
            verdict = CheckStatus.BROKEN if state == "faults" else CheckStatus.WARNING
            found.append(
                Finding("schedules", checked.subject, verdict, seen, f"mqlayer analytics schedule runs {name}")
            )
        if overdue_s > limits.schedule_s:
            seen = f"schedule {name} is due for {format_seconds(overdue_s)} without a run"
            fix = "does Celery's worker run, and does another run go on? mqlayer analytics schedule list"
            found.append(Finding("schedules", checked.subject, CheckStatus.WARNING, seen, fix))
    seen = f"the last run of each of {count} schedules was good" if count else "there is no schedule of analytics"
    return found or [Finding("schedules", checked.subject, CheckStatus.OK, seen)]


CHECKS: Final[dict[str, Check[CheckedDatabase]]] = {
    "replaced": check_replaced,
    "numbers": check_numbers,
    "unarmed": check_unarmed,
    "draining": check_draining,
    "beat": check_beat,
    "protocol": check_protocol,
    "routes": check_changes,
    "autopilot": check_autopilot,
    "deletions": check_deletions,
    "groups": check_groups,
    "parked": check_parked,
    "pauses": check_pauses,
    "archive": check_archive,
    "exports": check_exports,
    "schedules": check_schedules,
}
