"""A key: where it is, what waits for what in each group, its messages, and acts on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.console.lookups import topic_names
from mqlayer.console.node_reads import impatient
from mqlayer.console.page import Action, Outcome, Page, PagePart, Plan, Visit, part
from mqlayer.console.render import ago, counted, duration, lasting, link, when
from mqlayer.domain.names import parse_identity
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups.group import find_group
from mqlayer.inspect import KeyHistory, KeyStatus, explain_key, group_facts, history_of_key
from mqlayer.redelivery import DeadFilter, DeadMessage, dead_messages, pause_key, release_parked, resume_key, skip_head
from mqlayer.redelivery.key_pause import refuse_without_keys

GROUPS: Final = 6
"""Explained on one page; others by their name."""
MESSAGES: Final = 20
RECORDS: Final = 20_000
"""Of streams, that a page of the history looks at."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A key in a group: one sentence with its weight, further facts, and which acts fit."""

    name: str
    status: KeyStatus
    kind: str
    word: str
    sentence: str
    facts: Sequence[tuple[str, str]]
    head: str
    next_step: str


def _load(visit: Visit) -> Mapping[str, Any]:
    topic, key, group = visit.text("topic"), _key(visit), visit.text("group")
    shown = bool(topic and key)
    return {
        "topics": part(lambda: topic_names(visit)),
        "asked": {"topic": topic, "key": key, "group": group, "after": visit.text("after")},
        "shown": shown,
        "groups": part(lambda: _groups(visit, topic, key, group)) if shown else PagePart(),
        "history": part(lambda: _history(visit, topic, key)) if shown else PagePart(),
        "dead": part(lambda: _dead(visit, topic, key)) if shown else PagePart(),
    }


def _key(visit: Visit) -> str:
    # Blanks are part of a key.
    return visit.query.get("key", "")


# -- explain -----------------------------------------------------------------------------------------------------------


def _groups(visit: Visit, topic: str, key: str, group: str) -> Mapping[str, Any]:
    runtime = impatient(visit.runtime)
    live = [one.name for one in group_facts(runtime.control, topic) if one.state == "live" and one.mode != "broadcast"]
    wanted = [group] if group else live[:GROUPS]
    views = [(name, part(lambda name=name: _view(explain_key(runtime, topic, key, name)))) for name in wanted]  # type: ignore[misc]
    locations = next((one.value.status for _, one in views if one.value is not None), None)
    return {"views": views, "status": locations, "others": [name for name in live if name not in wanted]}


def _view(found: KeyStatus) -> GroupView:
    kind, word, sentence = _verdict(found)
    head = _head(found)
    return GroupView(
        found.group.facts.name, found, kind, word, sentence, list(_facts(found)), head, _next_step(found.run_next)
    )


def _head(found: KeyStatus) -> str:
    if found.parked is not None and found.parked.head is not None:
        return str(found.parked.head)
    return "" if found.search.head is None else found.search.head.identity


def _verdict(found: KeyStatus) -> tuple[str, str, str]:
    """Return weight, word and sentence."""
    parked, search, current = found.parked, found.search, found.current
    if parked is not None and parked.paused_at is not None:
        return "warn", "paused", f"Paused by {parked.paused_by} {ago(parked.paused_at)}; {_waiting(parked.messages)}"
    if parked is not None and parked.due_in_s is None:
        waits = f"Parked {ago(parked.since)} ({parked.cause}); {_waiting(parked.messages)} until an operator acts"
        return "bad", "waits for an operator", waits
    if parked is not None:
        again = "it is due now" if (parked.due_in_s or 0) <= 0 else f"tried again in {duration(parked.due_in_s)}"
        return "warn", "parked", f"Parked {ago(parked.since)} ({parked.cause}); {_waiting(parked.messages)}; {again}"
    if search.head is None:
        return _without_message(found)
    if found.holds_up:
        before = ", ".join(str(one.facts.partition) for one in found.holds_up)
        return "warn", "waits for another partition", f"Order over a change: partition {before} has to be drained first"
    if current is not None and current.stall is not None:
        return (
            "bad",
            current.stall.reason.replace("_", " "),
            f"Stuck{_since(current.stall.since)}: {current.stall.detail}",
        )
    if search.head.attempts:
        since = _since(search.head.failing_since)
        return "warn", "fails", f"Its first message failed {_times(search.head.attempts)}{since}, and is tried again"
    return "good", "in progress", f"Its first message is {duration(search.head.age_s)} old, and nothing holds it up"


def _without_message(found: KeyStatus) -> tuple[str, str, str]:
    search = found.search
    if search.blind:
        where = ", ".join(map(str, search.blind))
        return "bad", "not known", f"The node of partition {where} does not answer: its messages may wait there"
    if search.cut:
        return "warn", "not known", f"None of its messages is among the first {search.scanned:,} that wait"
    return "good", "nothing waits", "The group has settled all of its messages"


def _facts(found: KeyStatus) -> Iterator[tuple[str, str]]:
    group, current, search, parked = found.group.facts, found.current, found.search, found.parked
    if group.topic_paused_at is not None:
        yield "topic", f"{group.topic_paused_by} paused it {ago(group.topic_paused_at)}"
    if group.paused_at is not None:
        yield "group", f"{group.paused_by} paused it {ago(group.paused_at)}"
    if current is not None:
        yield "partition", f"{current.facts.partition} on {current.node}, {_owner(found)}"
    if parked is not None:
        yield "parked since", when(parked.since)
        yield "failed attempts", str(parked.attempts)
        if parked.due_at is not None:
            yield "next attempt", when(parked.due_at)
    if search.head is not None:
        place = f"message {search.head.identity}, partition {search.partition}, offset {search.head.offset}"
        yield ("then in the stream" if parked is not None else "first message"), place
        yield "more behind it", f"{search.following:,}"
        if search.head.unmatched:
            yield "filter", "the first message does not match the group's tag filter: it is passed over"
    for one in found.holds_up:
        left = "its node does not answer" if one.lag is None else f"{counted(one.lag, 'message')} left"
        yield f"before it: partition {one.facts.partition}", left
    if search.cut:
        yield "bound", f"looked at {search.scanned:,} unsettled offsets; more wait"


def _owner(found: KeyStatus) -> str:
    current = found.current
    if found.group.facts.mode in {"pop", "shared"}:
        return f"mode {found.group.facts.mode}: any consumer may have it"
    if current is None or current.facts.owner is None:
        return "without an owner"
    state = "" if current.facts.alive else ", whose lease is over"
    return f"owner {current.facts.owner}{state}, epoch {current.facts.epoch}"


def _next_step(run_next: str) -> str:
    return (
        run_next.removeprefix("nothing: ") if run_next.startswith("nothing: ") else f"on the command line: {run_next}"
    )


def _waiting(count: int) -> str:
    return f"{count:,} {'message waits' if count == 1 else 'messages wait'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _since(moment: datetime | None) -> str:
    return "" if moment is None else f" for {lasting(moment)}"


# -- history -----------------------------------------------------------------------------------------------------------


def _history(visit: Visit, topic: str, key: str) -> KeyHistory:
    after = visit.text("after") or None
    return history_of_key(impatient(visit.runtime), topic, key, limit=MESSAGES, after=after, records=RECORDS)


def _dead(visit: Visit, topic: str, key: str) -> Sequence[DeadMessage]:
    return dead_messages(visit.runtime.control, DeadFilter(key=key), topic=topic, redriven=True, limit=MESSAGES)


# -- acts --------------------------------------------------------------------------------------------------------------


def _named(visit: Visit) -> tuple[str, str, str]:
    named = visit.text("topic"), visit.text("group"), _key(visit)
    if not all(named):
        raise InvalidInput("name topic, group and key: begin at the page of the key")
    return named


def _page_of(topic: str, group: str, key: str) -> str:
    return link("/keys", topic=topic, key=key, group=group)


def _plan_pause(visit: Visit) -> Plan:
    topic, group, key = _named(visit)
    refuse_without_keys(find_group(visit.runtime.control, topic, group))
    return Plan([
        f"Group {group} of topic {topic} stops with key {key}; its other keys go on.",
        "Messages that a member has in hand end first.",
        "New messages of the key are parked behind it, in order and within the group's limits.",
        "It stays so until someone resumes it.",
    ])  # fmt: skip


def _pause(visit: Visit) -> Outcome:
    topic, group, key = _named(visit)
    done = pause_key(visit.runtime, topic, group, key)
    return Outcome(f"Key {key} {'is paused' if done else 'was paused already'}.", _page_of(topic, group, key))


def _plan_resume(visit: Visit) -> Plan:
    topic, group, key = _named(visit)
    parked = explain_key(impatient(visit.runtime), topic, key, group).parked
    if parked is None or parked.paused_at is None:
        raise Conflict(f"key {key!r} is not paused for group {group}", "look at the key again")
    lines = [f"Group {group} of topic {topic} goes on with key {key}: {_waiting(parked.messages)}, in order."]
    if parked.cause != "paused":
        lines.append(f"It was parked before the pause ({parked.cause}): it waits on for its time, or for a release.")
    return Plan(lines)


def _resume(visit: Visit) -> Outcome:
    topic, group, key = _named(visit)
    done = resume_key(visit.runtime, topic, group, key)
    return Outcome(f"Key {key} {'goes on' if done else 'was not paused'}.", _page_of(topic, group, key))


def _plan_skip(visit: Visit) -> Plan:
    topic, group, key = _named(visit)
    found = explain_key(impatient(visit.runtime), topic, key, group)
    head = _head(found)
    if not head:
        raise Conflict(f"no message of key {key!r} waits in group {group}", "look at the key again")
    behind = found.search.following
    if found.parked is not None:
        behind = found.parked.messages - 1 + (found.search.head is not None) + found.search.following
    lines = [
        f"Message {head} of key {key} becomes a dead message of group {group}, its body kept.",
        f"The key goes on with the next one: {_waiting(behind)} behind it." if behind else "No other message waits.",
        "A redrive can send it again later, after messages handled meanwhile: it loses its place in the order.",
        "If another message is first by then, nothing happens.",
    ]
    if found.parked is None:
        lines.append("If a handler is running it: its effect is fenced off where it can be, its ack is refused.")
    return Plan(lines, danger=True, fields={"message": head})


def _skip(visit: Visit) -> Outcome:
    topic, group, key = _named(visit)
    only = parse_identity(visit.text("message"))
    skipped = skip_head(visit.runtime, topic, group, key, reason=visit.text("reason"), only=only)
    text = f"Message {skipped.identity} is passed over: dead message {skipped.dead_id}."
    if not skipped.parked and not skipped.fenced:
        text += " If a handler is running it, its effect may still commit; its ack is refused."
    return Outcome(text, _page_of(topic, group, key))


def _plan_release(visit: Visit) -> Plan:
    topic, group, key = _named(visit)
    parked = explain_key(impatient(visit.runtime), topic, key, group).parked
    if parked is None:
        raise Conflict(f"key {key!r} is not parked for group {group}", "look at the key again")
    if parked.paused_at is not None:
        raise Conflict(f"key {key!r} is paused for group {group}", "resume it instead")
    return Plan([
        f"Group {group} of topic {topic} tries key {key} at once: {_waiting(parked.messages)}, in order.",
        f"First message {parked.head}, parked {ago(parked.since)} ({parked.cause}), with all its attempts again.",
        "If it fails for the same cause, it is parked again: repair the handler first.",
    ])  # fmt: skip


def _release(visit: Visit) -> Outcome:
    topic, group, key = _named(visit)
    release_parked(visit.runtime, topic, group, key=key)
    return Outcome(f"Key {key} is released: its owner tries it at once.", _page_of(topic, group, key))


PAGES: Final = (Page("/keys", "Keys", "keys.html", _load, menu="Keys", live=False),)
ACTIONS: Final = (
    Action("key-pause", "Pause a key", _plan_pause, _pause, "Pause it"),
    Action("key-resume", "Resume a key", _plan_resume, _resume, "Resume it"),
    Action("key-skip-head", "Skip a key's first message", _plan_skip, _skip, "Skip it"),
    Action("key-release", "Release a parked key", _plan_release, _release, "Release it"),
)
