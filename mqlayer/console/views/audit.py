"""The audit trail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from mqlayer.console.page import ROWS, Action, Page, Visit, part
from mqlayer.console.render import link, segment
from mqlayer.errors import InvalidInput
from mqlayer.inspect.audit_trail import AuditedAct, AuditFilter, audited_acts, audited_kinds

SHORT: Final = 120
"""Characters of facts that a row shows at once."""
NAMES: Final = ("actor", "act", "object", "since", "until")


class ShownAct(NamedTuple):
    """An act with its facts as text, and the page of its object, if it has one."""

    act: AuditedAct
    facts: str
    is_long: bool
    path: str


def _load(visit: Visit) -> Mapping[str, Any]:
    fields = {name: visit.text(name) for name in NAMES}
    chosen = AuditFilter(
        fields["actor"] or None, fields["act"] or None, fields["object"] or None, _time(visit, "since"),
        _time(visit, "until"),
    )  # fmt: skip
    before = _place(visit)
    found = part(lambda: audited_acts(visit.runtime.control, chosen, before=before, limit=ROWS + 1))
    rows = found.value or []
    last = rows[ROWS - 1] if len(rows) > ROWS else None
    return {
        "found": found,
        "acts": [_shown(one) for one in rows[:ROWS]],
        "kinds": part(lambda: audited_kinds(visit.runtime.control)),
        "fields": fields,
        "older": "" if last is None else link("/audit", **fields, before=f"{last.at.isoformat()}_{last.audit_id}"),
        "newer": link("/audit", **fields) if before else "",
        "filtered": any(fields.values()),
    }


def _shown(one: AuditedAct) -> ShownAct:
    facts = {name: value for name, value in one.facts.items() if name != "reason"}
    short = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in facts.items())
    is_long = len(short) > SHORT
    text = json.dumps(facts, ensure_ascii=False, indent=1) if is_long else short
    return ShownAct(one, text, is_long, _path(one))


def _path(one: AuditedAct) -> str:
    kind = one.act.partition(" ")[0]
    if kind == "route" and isinstance(one.facts.get("change"), int):
        return f"/changes/{one.facts['change']}"
    if kind == "node":
        return f"/nodes/{segment(one.object)}"
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
    if not number.isdigit() or len(number) > 18:
        raise InvalidInput("before is no place of the list: follow its links")
    # A plus sign in a query is a blank.
    return _parsed(at.replace(" ", "+"), "before"), int(number)


PAGES: Final = (Page("/audit", "Audit", "audit.html", _load, menu="Audit"),)
ACTIONS: Final[tuple[Action, ...]] = ()
