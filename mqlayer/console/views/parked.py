"""Parked keys and dead messages: lists by filter, top errors, one of each, and acts on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mqlayer.console.body_files import BINARY, body_file
from mqlayer.console.lookups import check_bodies, topic_names, why_hidden
from mqlayer.console.node_reads import impatient
from mqlayer.console.page import ROWS, Action, Outcome, Page, Plan, Visit, part
from mqlayer.console.render import ago, counted, link, segment
from mqlayer.domain.body_text import decoded
from mqlayer.domain.message import Identity
from mqlayer.domain.names import parse_identity
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.inspect import KeyStatus, explain_key
from mqlayer.redelivery import (
    BoundedCount,
    DeadFilter,
    ErrorCount,
    MessageDetails,
    ParkedFilter,
    ParkedKey,
    ParkedMessage,
    dead_messages,
    discard_dead,
    discard_parked,
    estimate_dead,
    estimate_parked,
    last_errors,
    new_worker,
    parked_keys,
    parked_messages,
    plan_bulk,
    release_parked,
    show_dead,
    show_parked,
    start_bulk,
    top_errors,
    work_on,
)
from mqlayer.redelivery.filters import DEAD_CAUSES, PARKED_CAUSES

FIELDS: Final = ("show", "topic", "group", "key", "error", "cause", "older", "younger", "waiting", "order", "after")
AGES: Final = (("", "any"), ("600", "10 min"), ("3600", "1 h"), ("86400", "1 d"), ("604800", "7 d"))
ERRORS: Final = 8
ORDERS: Final[Mapping[str, str]] = {
    "": "by group, then by LP and key",
    "oldest": "the longest parked first",
    "largest": "the most messages first",
    "due": "the next attempt first",
}
BODY: Final = 100_000
LONGEST_WAIT_S: Final = 1.0


# -- lists -------------------------------------------------------------------------------------------------------------


def asked_of(visit: Visit) -> dict[str, str]:
    """Return the fields of the lists' filter."""
    # Blanks are part of a key.
    asked = {name: visit.text(name) for name in FIELDS} | {"key": visit.query.get("key", "")}
    return asked | {"show": "dead" if asked["show"] == "dead" else "parked"}


def parked_filter(visit: Visit) -> ParkedFilter:
    """Return the filter of parked keys, without topic and group. Raises InvalidInput."""
    asked = asked_of(visit)
    return ParkedFilter(None, None, asked["key"] or None, asked["cause"] or None, asked["error"] or None,
                        _moment(visit, "younger"), _moment(visit, "older"), bool(asked["waiting"]))  # fmt: skip


def dead_filter(visit: Visit) -> DeadFilter:
    """Return the filter of dead messages, without topic and group. Raises InvalidInput."""
    asked = asked_of(visit)
    return DeadFilter(asked["key"] or None, asked["cause"] or None, asked["error"] or None,
                      _moment(visit, "younger"), _moment(visit, "older"))  # fmt: skip


def _moment(visit: Visit, name: str) -> datetime | None:
    seconds = visit.number(name, 0)
    return datetime.now(UTC) - timedelta(seconds=min(seconds, 3_650 * 86_400)) if seconds else None


def _load(visit: Visit) -> Mapping[str, Any]:
    asked = asked_of(visit)
    dead = asked["show"] == "dead"
    place = asked["topic"] or None, asked["group"] or None
    found = part(lambda: _dead(visit, *place) if dead else _parked(visit, *place))
    errors = part(lambda: _errors(visit, dead=dead))
    following = found.value["after"] if found.value is not None else ""
    return {
        "topics": part(lambda: topic_names(visit)),
        "asked": asked,
        "causes": DEAD_CAUSES if dead else PARKED_CAUSES,
        "ages": AGES,
        "orders": ORDERS,
        "found": found,
        "errors": errors,
        "over": set() if dead else part(lambda: _over(visit, errors.value or ())).value or set(),
        "other": link(
            "/parked", **{**asked, "show": "" if dead else "dead", "cause": "", "order": "", "after": "", "waiting": ""}
        ),
        "older": link("/parked", **{**asked, "after": following}) if following else "",
        "newer": link("/parked", **{**asked, "after": ""}) if asked["after"] else "",
        "bulk": {name: value for name, value in asked.items() if value and name not in {"after", "order", "show"}},
    }


def _errors(visit: Visit, *, dead: bool) -> Any:
    topic, group = visit.text("topic") or None, visit.text("group") or None
    return top_errors(visit.runtime.control, topic, group, of="dead" if dead else "attempts", limit=ERRORS)


def _over(visit: Visit, errors: Sequence[ErrorCount]) -> set[tuple[str, str, str]]:
    """Return errors of which no key is parked; of groups with more than ROWS keys, none is looked for."""
    database, few = visit.runtime.control, dict[tuple[str, str], int]()
    found = set()
    for one in errors:
        place = one.topic, one.group
        if place not in few:
            few[place] = len(parked_keys(database, ParkedFilter(*place), limit=ROWS + 1))
        wanted = ParkedFilter(*place, error=one.error or None)
        if few[place] <= ROWS and not (few[place] and parked_keys(database, wanted, limit=1)):
            found.add((*place, one.error))
    return found


def _parked(visit: Visit, topic: str | None, group: str | None) -> Mapping[str, Any]:
    database, wanted = visit.runtime.control, replace(parked_filter(visit), topic=topic, group=group)
    order: Any = visit.text("order") or "key"
    page = parked_keys(database, wanted, after=visit.text("after") or None, limit=ROWS, order=order)
    count = estimate_parked(database, wanted)
    heads = [(one.group_id, one.head) for one in page if one.head is not None]
    return {
        "rows": page,
        "paths": [_path_of(one) for one in page],
        "errors": last_errors(database, heads),
        "count": told_count(count, "parked key"),
        "cut": order != "key" and not count.exact,
        "after": page.next or "",
    }


def _dead(visit: Visit, topic: str | None, group: str | None) -> Mapping[str, Any]:
    database, wanted = visit.runtime.control, dead_filter(visit)
    after = visit.number("after") if visit.text("after") else None
    page = dead_messages(database, wanted, topic=topic, group=group, after=after, limit=ROWS)
    count = estimate_dead(database, wanted, topic=topic, group=group)
    return {"rows": page, "count": told_count(count, "dead message"), "cut": False, "after": str(page.next or "")}


def told_count(count: BoundedCount, what: str) -> str:
    """Return a count with its noun, and whether there may be more."""
    return f"{'' if count.exact else 'at least '}{counted(count.count, what)}"


def _path_of(one: ParkedKey) -> str:
    # A message without key is parked by itself: its identity is the name.
    named = {"message": str(one.head or "")} if one.key is None else {"key": one.key}
    return link(f"/parked/{segment(one.topic)}/{segment(one.group)}", **named)


# -- one parked key ----------------------------------------------------------------------------------------------------


def _show_key(visit: Visit) -> Mapping[str, Any]:
    topic, group, key = visit.text("topic"), visit.text("group"), visit.query.get("key", "")
    row = _key_row(visit, topic, group, key) if key else None
    head = parse_identity(visit.text("message")) if row is None else row.head
    messages = [] if row is None else parked_messages(visit.runtime.control, row, after=_after(visit), limit=ROWS)
    detail = None if head is None else show_parked(visit.runtime.control, topic, group, head)
    full = len(messages) == ROWS
    path = f"/parked/{segment(topic)}/{segment(group)}"
    behind = f"{messages[-1].position}:{messages[-1].identity.seq}" if full else ""
    return {
        "topic": topic,
        "group": group,
        "key": key,
        "row": row,
        "head": head,
        "messages": messages,
        "detail": detail,
        "status": part(lambda: _status(visit, topic, group, key)),
        "older": link(path, key=key, after=behind) if full else "",
        "newer": link(path, key=key) if visit.text("after") else "",
        "download": link(f"{path}/body", message=str(head or "")),
        **_content(visit, detail),
    }


def _key_row(visit: Visit, topic: str, group: str, key: str) -> ParkedKey:
    found = parked_keys(visit.runtime.control, ParkedFilter(topic, group, key=key), limit=1)
    if not found:
        raise NotFound("parked key", key, f"group {group} of {topic} has none of this name any more: look at its page")
    return found[0]


def _status(visit: Visit, topic: str, group: str, key: str) -> KeyStatus | None:
    return explain_key(impatient(visit.runtime), topic, key, group) if key else None


def _after(visit: Visit) -> ParkedMessage | None:
    if not (text := visit.text("after")):
        return None
    try:
        position, seq = map(int, text.split(":"))
    except ValueError:
        raise InvalidInput(f"{text!r} is no place in the list: begin at its first page") from None
    return ParkedMessage(Identity(0, 0, seq), position, 0, 0, None, 0, 0, redriven=False, attempts=0)


def _content(visit: Visit, detail: MessageDetails | None) -> Mapping[str, Any]:
    hidden = why_hidden(visit)
    if hidden or detail is None:
        return {"hidden": hidden, "headers": (), "body": None}
    return {"hidden": "", "headers": detail.headers.items(), "body": _shown(detail)}


def _shown(detail: MessageDetails) -> Mapping[str, Any] | None:
    if detail.large_body is not None:
        return {"large": True, "bytes": detail.large_body.size}
    kind, text = decoded(detail.body)
    if text is None:
        return None
    cut = max(0, len(text) - BODY)
    return {"large": False, "text": text[:BODY], "cut": cut, "kind": kind, "bytes": len(detail.body or b"")}


# -- one dead message --------------------------------------------------------------------------------------------------


def _show_dead(visit: Visit) -> Mapping[str, Any]:
    detail = show_dead(visit.runtime.control, visit.number("dead_id"))
    return {"detail": detail, "download": f"/dead/{detail.dead_id}/body", **_content(visit, detail)}


def _download_dead(visit: Visit) -> Mapping[str, Any]:
    check_bodies(visit)
    return _file_of(visit, show_dead(visit.runtime.control, visit.number("dead_id")))


def _download_parked(visit: Visit) -> Mapping[str, Any]:
    check_bodies(visit)
    topic, group, message = visit.text("topic"), visit.text("group"), parse_identity(visit.text("message"))
    return _file_of(visit, show_parked(visit.runtime.control, topic, group, message))


def _file_of(visit: Visit, detail: MessageDetails) -> Mapping[str, Any]:
    if detail.body is None:
        raise NotFound("body of message", detail.identity, "it was passed over on purpose, and none was kept")
    return body_file(visit, str(detail.identity), detail.body, detail.large_body)


# -- acts on one -------------------------------------------------------------------------------------------------------


def _parked_one(visit: Visit) -> tuple[str, str, str | None, Identity | None]:
    topic, group, key = visit.text("topic"), visit.text("group"), visit.query.get("key", "")
    if not (topic and group):
        raise InvalidInput("name topic and group: begin at the page of the parked key")
    return topic, group, key or None, None if key else parse_identity(visit.text("message"))


def _name_of(key: str | None, message: Identity | None) -> str:
    return f"key {key}" if key is not None else f"message {message}"


def _plan_release(visit: Visit) -> Plan:
    topic, group, key, message = _parked_one(visit)
    waits = 1 if key is None else _key_row(visit, topic, group, key).messages
    return Plan([
        f"Group {group} of topic {topic} tries {_name_of(key, message)} at once, with all attempts again.",
        f"Waiting in it, in order: {counted(waits, 'message')}.",
        "If it fails for the same cause, it is parked again: repair the handler first.",
    ])  # fmt: skip


def _release(visit: Visit) -> Outcome:
    topic, group, key, message = _parked_one(visit)
    release_parked(visit.runtime, topic, group, key=key, message=message)
    return Outcome(f"{_name_of(key, message)} is released: its owner tries it at once.", _list_of(topic, group))


def _plan_discard(visit: Visit) -> Plan:
    topic, group, key, message = _parked_one(visit)
    waits = 1 if key is None else _key_row(visit, topic, group, key).messages
    return Plan([
        (f"Group {group} of topic {topic} lets {counted(waits, 'message')} of {_name_of(key, message)} die without an "
        "effect; bodies are kept."),
        "Messages that come after that are handled as any other.",
        "A redrive can send them again later, after messages handled meanwhile: they lose their place in the order.",
    ], danger=True)  # fmt: skip


def _discard(visit: Visit) -> Outcome:
    topic, group, key, message = _parked_one(visit)
    count = discard_parked(visit.runtime, topic, group, key=key, message=message, reason=visit.text("reason"))
    return Outcome(
        f"Dead now: {counted(count, 'message')} of {_name_of(key, message)}.", _list_of(topic, group, show="dead")
    )


def _list_of(topic: str, group: str, **more: str) -> str:
    return link("/parked", topic=topic, group=group, **more)


def _plan_redrive(visit: Visit) -> Plan:
    one = show_dead(visit.runtime.control, visit.number("dead_id"))
    if one.body is None:
        raise InvalidInput(f"dead message {one.dead_id} has no body any more: publish it again instead")
    lines = [
        (
            f"Group {one.group} of topic {one.topic} gets message {one.identity} of key {one.key} again, "
            f"which died {ago(one.since)} ({one.cause})."
        ),
        "It comes in front of the later waiting ones of its source, else at the end of its key's messages.",
        "Messages of the key that were handled meanwhile are not handled again: the handler sees it late.",
    ]
    if one.redriven:
        lines.append("It was given back before: if it lives in its group, nothing happens.")
    return Plan(lines)


def _redrive(visit: Visit) -> Outcome:
    runtime, dead_id = visit.runtime, visit.number("dead_id")
    one = show_dead(runtime.control, dead_id)
    planned = plan_bulk(runtime, "redrive", one.topic, one.group, DeadFilter(dead_ids=(dead_id,)))
    worker = new_worker()
    start_bulk(runtime, planned.bulk_id, reason=visit.text("reason"), worker=worker)
    done = work_on(runtime.control, planned.bulk_id, worker=worker, longest_wait_s=LONGEST_WAIT_S)
    told = "is given back" if done.done else "was not given back: see the bulk action"
    return Outcome(f"Dead message {dead_id} {told}.", f"/bulk/{planned.bulk_id}")


def _plan_keep(visit: Visit) -> Plan:
    one = show_dead(visit.runtime.control, visit.number("dead_id"))
    return Plan([
        f"Dead message {one.dead_id} of group {one.group} of topic {one.topic} stays dead, with your reason.",
        f"Now it says: {one.cause}: {(one.reason or '').splitlines()[0] if one.reason else 'nothing'}",
        "A redrive can still give it back.",
    ])  # fmt: skip


def _keep(visit: Visit) -> Outcome:
    dead_id = visit.number("dead_id")
    discard_dead(visit.runtime, dead_id, reason=visit.text("reason"))
    return Outcome(f"Dead message {dead_id} stays dead.", f"/dead/{dead_id}")


PAGES: Final = (
    Page("/parked", "Parked and dead", "parked.html", _load, menu="Parked and dead", live=False),
    Page("/parked/{topic}/{group}", "Parked in group {group} of {topic}", "parked_key.html", _show_key, live=False),
    Page("/dead/{dead_id}", "Dead message {dead_id}", "dead.html", _show_dead, live=False),
    Page("/dead/{dead_id}/body", "Body of dead message {dead_id}", "", _download_dead, live=False, media_type=BINARY),
    Page(
        "/parked/{topic}/{group}/body", "Body of a parked message", "", _download_parked, live=False, media_type=BINARY
    ),
)
ACTIONS: Final = (
    Action("parked-release", "Release what is parked", _plan_release, _release, "Release it"),
    Action("parked-discard", "Discard what is parked", _plan_discard, _discard, "Let them die"),
    Action("dead-redrive", "Redrive a dead message", _plan_redrive, _redrive, "Give it back"),
    Action("dead-keep", "Rule that a dead message stays dead", _plan_keep, _keep, "It stays dead"),
)
