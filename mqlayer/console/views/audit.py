"""The audit trail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from mqlayer.console.audit_words import act_words
from mqlayer.console.page import ROWS, Action, Page, Visit, part
from mqlayer.console.render import link, segment
from mqlayer.errors import InvalidInput
from mqlayer.inspect.audit_trail import AuditedAct, AuditedBy, AuditFilter, audited_acts, audited_kinds
from mqlayer.postgres.database import Database
from mqlayer.routes.status import change_states
from mqlayer.runtime.route_cache import node_names

NAMES: Final = ("actor", "act", "object", "since", "until")
WHO: Final[Mapping[str, AuditedBy | None]] = {"people": "people", "machines": "machines", "all": None}
HEADINGS: Final = {
    "people": "What people did",
    "machines": "What relays, workers, members and programs did",
    "all": "What people and machines did",
}


class ShownAct(NamedTuple):
    """An act in words, its facts as JSON, and the page of its object, if it has one."""

    act: AuditedAct
    words: str
    facts: str
    path: str


def _load(visit: Visit) -> Mapping[str, Any]:
    fields = {name: visit.text(name) for name in NAMES} | {"who": visit.text("who")}
    who = _who(visit)
    chosen = AuditFilter(
        fields["actor"] or None, fields["act"] or None, fields["object"] or None, _time(visit, "since"),
        _time(visit, "until"), WHO[who],
    )  # fmt: skip
    before = _place(visit)
    found = part(lambda: audited_acts(visit.runtime.control, chosen, before=before, limit=ROWS + 1))
    rows = found.value or []
    last = rows[ROWS - 1] if len(rows) > ROWS else None
    return {
        "found": found,
        "acts": _all_shown(visit.runtime.control, rows[:ROWS]),
        "kinds": part(lambda: audited_kinds(visit.runtime.control)),
        "fields": fields,
        "older": "" if last is None else link("/audit", **fields, before=f"{last.at.isoformat()}_{last.audit_id}"),
        "newer": link("/audit", **fields) if before else "",
        "filtered": any(fields[name] for name in NAMES),
        "who": who,
        "ways": [(one, link("/audit", **fields | {"who": one})) for one in WHO],
        "heading": HEADINGS[who],
    }


def _all_shown(control: Database, acts: Sequence[AuditedAct]) -> list[ShownAct]:
    changes = [one.facts["change"] for one in acts if "successors" in one.facts]
    found = part(lambda: _named(control, changes)).value or ({}, {})
    return [_shown(one, *found) for one in acts]


def _named(control: Database, changes: Sequence[int]) -> tuple[Mapping[int, str], Mapping[int, str]]:
    if not changes:
        return {}, {}
    return change_states(control, changes), {int(node): name for node, name in node_names(control).items()}


def _shown(one: AuditedAct, states: Mapping[int, str], nodes: Mapping[int, str]) -> ShownAct:
    facts, told = json.dumps(one.facts, ensure_ascii=False, indent=1) if one.facts else "", one
    if "successors" in one.facts:
        parts = [[first, end, nodes.get(node, node)] for first, end, node in one.facts["successors"]]
        told = replace(one, facts={**one.facts, "successors": parts, "state": states.get(one.facts["change"], "")})
    return ShownAct(one, act_words(told), facts, _path(one))


def _who(visit: Visit) -> str:
    # A named actor may be either.
    found = visit.text("who") or ("all" if visit.text("actor") else "people")
    if found not in WHO:
        raise InvalidInput(f"who is {found!r}: say people, machines or all")
    return found


def _path(one: AuditedAct) -> str:
    kind = one.act.partition(" ")[0]
    if kind == "route" and isinstance(one.facts.get("change"), int):
        return f"/changes/{one.facts['change']}"
    if kind == "node":
        return f"/nodes/{segment(one.object)}"
    if kind == "bulk" and isinstance(one.facts.get("bulk"), int):
        return f"/bulk/{one.facts['bulk']}"
    if one.act == "dead discard":
        return f"/dead/{segment(one.object)}"
    if kind in ("topic", "route"):
        return f"/topics/{segment(one.object)}"
    if kind == "group" and one.object.count("/") == 1:
        topic, group = one.object.split("/")
        return f"/groups/{segment(topic)}/{segment(group)}"
    return ""


def _time(visit: Visit, name: str) -> datetime | None:
    text = visit.text(name)
    return _parsed(text, name) if text else None


def _parsed(text: str, name: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{name} is no time: {text!r}; write it as 2026-01-31T23:59, in UTC") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _place(visit: Visit) -> tuple[datetime, int] | None:
    text = visit.text("before")
    if not text:
        return None
    at, _, number = text.rpartition("_")
    if not (number.isascii() and number.isdigit() and len(number) <= 18):
        raise InvalidInput("before is no place of the list: follow its links")
    # A plus sign in a query is a blank.
    return _parsed(at.replace(" ", "+"), "before"), int(number)


PAGES: Final = (Page("/audit", "Audit", "audit.html", _load, menu="Audit"),)
ACTIONS: Final[tuple[Action, ...]] = ()
