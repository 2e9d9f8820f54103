"""The outbox: what waits, for which node, and what holds it; relays; rows that can't be sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.console.kept import KeptValues
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.problem_help import KINDS
from mqlayer.console.render import counted, duration, minute, when
from mqlayer.console.views.overview import health, look_age
from mqlayer.doctor.health import SystemHealth, SystemTotals
from mqlayer.doctor.postgres import OpenTransaction
from mqlayer.doctor.problem_history import Problem
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.idempotency import version_gaps
from mqlayer.inspect.outbox_status import WaitingPart, outbox_waiting, sums_by_node, sums_by_topic
from mqlayer.inspect.processes import relay_processes
from mqlayer.outbox import (
    QuarantinedRow,
    audit_quarantine,
    discard_quarantined,
    list_quarantined,
    retry_quarantined,
)
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import require_change

OPEN_S: Final = 5.0
"""Younger transactions are not shown."""
LONG_S: Final = 30.0
BLOCKING: Final = ("MqlayerOutboxSuspect", "MqlayerNoRelay")
HOLDING: Final = (
    "MqlayerNodeAway", "MqlayerTransactionOpen", "MqlayerOutboxQuarantined", "MqlayerRouteChangeStuck",
    "MqlayerVersionsOverdue",
)  # fmt: skip

waiting: Final = KeptValues(outbox_waiting)


def _load(visit: Visit) -> Mapping[str, Any]:
    outbox, looked = visit.runtime.outbox, part(lambda: health.get(visit.runtime))
    found, transactions = part(lambda: waiting.get(visit.runtime)), part(lambda: _transactions(outbox))
    rows = found.value or []
    age = look_age(looked.value)
    totals = None if looked.value is None else _totals(looked.value.totals, found.value)
    holders = [] if transactions.value is None else [one for one in transactions.value["open"] if one.holds]
    lines = [] if looked.value is None or totals is None else list(_lines(looked.value, totals, holders))
    return age | {
        "health": looked,
        # What was good may be over.
        "lines": [(kind, line) for kind, line in lines if kind != "good" or age["old_s"] is None],
        "totals": totals,
        "waiting": found,
        "nodes": sums_by_node(rows),
        "topics": sums_by_topic(rows)[:ROWS],
        "topic_count": len(sums_by_topic(rows)),
        "transactions": transactions,
        "relays": part(lambda: relay_processes(outbox, limit=ROWS)),
        "lease_s": visit.runtime.settings.lease_s,
        "quarantined": part(lambda: list_quarantined(outbox, limit=ROWS)),
        "versions": part(lambda: version_gaps(outbox, limit=ROWS)),
        "rows": ROWS,
        "long_s": LONG_S,
    }


def _totals(totals: SystemTotals, parts: Sequence[WaitingPart] | None) -> SystemTotals:
    """Have the counts of one page be of one time."""
    if parts is None or totals.outbox is None:
        return totals
    sent = [one for one in parts if one.waiting > one.held]
    oldest = min((one.oldest_at for one in sent), default=None)
    oldest_s = 0.0 if oldest is None else (datetime.now(UTC) - oldest).total_seconds()
    return replace(totals, outbox=sum(one.waiting - one.held for one in sent), outbox_s=oldest_s)


def _lines(found: SystemHealth, totals: SystemTotals, holders: Sequence[OpenTransaction]) -> Iterator[tuple[str, str]]:
    """Yield what a person has to know first, each with its colour."""
    problems = {name: [one for one in found.problems if one.alert.name == name] for name in (*BLOCKING, *HOLDING)}
    stands = [one for name in BLOCKING for one in problems[name]]
    for one in stands:
        yield "bad", _stands(one)
    for name in HOLDING:
        # A node's effect counts what waits, at the time of the look.
        yield from (
            (KINDS[one.alert.severity], f"{one.text}. {one.effect.partition(';')[0] + '.' if one.node else one.effect}")
            for one in problems[name]
        )
    young = [] if problems["MqlayerTransactionOpen"] else [one for one in holders if one.waiting]
    yield from (("warn", f"{one.text()}.") for one in young)
    yield from _waits(totals, stands=bool(stands), holds=bool(young or problems["MqlayerTransactionOpen"]))


def _waits(totals: SystemTotals, *, stands: bool, holds: bool) -> Iterator[tuple[str, str]]:
    if totals.outbox is None:
        yield "warn", "How much waits is unknown: see what could not be looked at on the overview."
    elif totals.outbox:
        line = f"{counted(totals.outbox, 'message')} wait, the oldest for {duration(totals.outbox_s)}."
        yield ("warn" if totals.outbox_s > LONG_S else "good"), line if stands else f"Relays work: {line}"
    elif holds:
        yield "note", "All that was committed is relayed; messages of an open transaction are not committed."
    elif not stands:
        yield "good", "Nothing waits: all that was committed is relayed."
    if holds and totals.committed_per_s == 0 and totals.committed_at is not None:
        yield "warn", f"Nothing was committed since {minute(totals.committed_at)}, by the samples."


def _stands(one: Problem) -> str:
    if one.alert.name == "MqlayerNoRelay":
        return f"No relay lives{_since(one)}{one.text.removeprefix('No relay lives')}."
    return f"Relaying stands{_since(one)}: {one.text[0].lower()}{one.text[1:]}."


def _since(one: Problem) -> str:
    return "" if one.since is None else f" since {when(one.since)}"


def _transactions(outbox: Database) -> Mapping[str, Any]:
    with outbox.connection() as connection:
        ((sees_all, role),) = connection.execute(query("check_statistics_allowed")).fetchall()
        found = connection.execute(query("check_open_transactions"), {"age_s": OPEN_S}).fetchall()
        prepared = connection.execute(query("check_prepared_transactions"), {"age_s": OPEN_S}).fetchmany(ROWS)
    ours = sorted((OpenTransaction(*row) for row in found), key=lambda one: (not one.holds, not one.ours, -one.age_s))
    return {"sees_all": sees_all, "role": role, "open": ours[:ROWS], "prepared": prepared}


# -- acts --------------------------------------------------------------------------------------------------------------


def _chosen(visit: Visit) -> tuple[str | None, int | None, Sequence[QuarantinedRow]]:
    topic, lp = visit.text("topic") or None, visit.number("lp") if visit.text("lp") else None
    if lp is not None and topic is None:
        raise InvalidInput("an LP needs its topic: go back to the list")
    rows = list_quarantined(visit.runtime.outbox)
    return topic, lp, [one for one in rows if topic in (None, one.topic) and lp in (None, one.lp)]


def _plan_retry(visit: Visit) -> Plan:
    _changeable(visit)
    topic, lp, rows = _chosen(visit)
    blocking = [one for one in rows if one.number is None]
    place = "of all topics" if topic is None else f"of topic {topic}" + ("" if lp is None else f", LP {lp}")
    lines = [
        f"Relays try {counted(len(blocking), 'row')} {place} again, and then the messages behind them, in order.",
        "A row that still can't be sent is quarantined again.",
    ]
    anew = len(rows) - len(blocking)
    if anew:
        lines.append(
            f"{counted(anew, 'row')} that were passed over are published anew, behind later ones of their keys."
        )
    return Plan(lines if rows else ["Nothing is quarantined there: nothing will change."])


def _retry(visit: Visit) -> Outcome:
    _changeable(visit)
    topic, lp, _ = _chosen(visit)
    audit_quarantine(visit.runtime.control, visit.runtime.actor, "retry", topic=topic, lp=lp)
    rows = retry_quarantined(visit.runtime.outbox, topic=topic, lp=lp)
    return Outcome(f"{counted(len(rows), 'row')} tried again.", "/outbox#quarantined")


def _plan_discard(visit: Visit) -> Plan:
    _changeable(visit)
    one = _passed_over(visit)
    lines = [
        f"The message of row {one.number}, of topic {one.topic or one.topic_id}, LP {one.lp}, is lost: {one.reason}",
        "Later messages of its key went on already.",
    ]
    return Plan(lines, danger=True)


def _discard(visit: Visit) -> Outcome:
    _changeable(visit)
    one = _passed_over(visit)
    number = visit.number("row")
    audit_quarantine(visit.runtime.control, visit.runtime.actor, "discard", topic=one.topic, lp=one.lp, row=number)
    discard_quarantined(visit.runtime.outbox, number)
    return Outcome(f"Row {number} is discarded.", "/outbox#quarantined")


def _passed_over(visit: Visit) -> QuarantinedRow:
    number = visit.number("row")
    for one in list_quarantined(visit.runtime.outbox):
        if one.number == number:
            return one
    raise NotFound("row that was passed over", number, "go back to the list: it was decided")


def _changeable(visit: Visit) -> None:
    with visit.runtime.outbox.connection() as connection:
        require_change(connection, "application")


PAGES: Final = (Page("/outbox", "Outbox", "outbox.html", _load),)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("outbox-retry", "Retry quarantined rows", _plan_retry, _retry, "Retry them"),
    Action("outbox-discard", "Discard a row", _plan_discard, _discard, "Discard it"),
)
