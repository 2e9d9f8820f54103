"""A partition's head in words: what waits for what, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.console.render import counted, duration, link, segment, when
from mqlayer.inspect import PartitionHead, PartitionStatus

STALLS: Final = {
    "node_away": "node not reachable",
    "partition_missing": "partition missing on its node",
    "hidden": "waits for parents",
    "paused": "paused",
    "no_owner": "no owner",
    "lease_over": "lease over",
    "not_taken": "not taken yet",
    "replayed": "waits for a replay",
    "parking_full": "no room to park",
    "failing": "failing",
    "breaker": "circuit breaker open",
}
"""The reasons of stalls, for a table."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence of why a head waits. `path`, `label`: where to go on; `kind`: good, warn or bad."""

    text: str
    kind: str = "warn"
    since: datetime | None = None
    path: str = ""
    label: str = ""


def stall_words(one: PartitionStatus) -> tuple[str, str]:
    """Return a partition's state in a few words, and its kind."""
    if one.stall is not None:
        return STALLS[one.stall.reason], "bad" if one.stall.reason in _BAD else "warn"
    if one.lag is None:
        return "unknown", "warn"
    return ("in progress", "good") if one.lag else ("nothing waits", "quiet")


_BAD: Final = frozenset(
    {"node_away", "partition_missing", "no_owner", "lease_over", "parking_full", "failing", "breaker"}
)


def waits_for(head: PartitionHead) -> list[Waiting]:
    """Return why the head is not settled, the deepest cause first."""
    status, stall = head.status, head.status.stall
    if status.facts.drained:
        return [Waiting("The group drained this partition: every message of it is settled.", "good")]
    if stall is None and not status.lag:
        return [Waiting("Nothing waits: every message of this partition is settled.", "good")]
    return [*_stalled(head), *_of_message(head)]


def _stalled(head: PartitionHead) -> Iterator[Waiting]:
    status, stall, group = head.status, head.status.stall, head.group.facts
    if stall is None:
        yield _in_hand(head)
        return
    here = _group_path(head)
    match stall.reason:
        case "node_away" | "partition_missing":
            text = f"Node {status.node}: {stall.detail}. Nothing of this partition can be read or settled."
            yield Waiting(text, "bad", stall.since, "/nodes", "Nodes")
        case "hidden":
            yield from _parents(head, here)
        case "paused":
            yield Waiting(f"Stopped: {stall.detail}.", "warn", stall.since)
        case "no_owner" | "lease_over":
            hint = "" if group.alive else " Start a consumer of this group."
            yield Waiting(f"No member handles it: {stall.detail}.{hint}", "bad", stall.since, here, "Members")
        case "not_taken":
            yield Waiting(f"Its next owner is about to take it: {stall.detail}.", "warn", stall.since)
        case "replayed" | "breaker":
            what = "It waits for a replay" if stall.reason == "replayed" else "Nothing begins"
            yield Waiting(f"{what}: {stall.detail}.", "warn", stall.since)
        case "parking_full":
            path = link("/parked", topic=group.topic, group=group.name)
            yield Waiting(f"Its key can't be parked: {stall.detail}.", "bad", stall.since, path, "Parked keys")
        case "failing":
            yield _failing(head)


def _parents(head: PartitionHead, here: str) -> Iterator[Waiting]:
    for parent in head.parents:
        lag = "an unknown number" if parent.lag is None else counted(parent.lag, "message")
        yield Waiting(
            f"It waits until parent {parent.facts.partition} is drained, or a key's order would break: "
            f"{lag} unsettled there ({stall_words(parent)[0]}).",
            "warn",
            head.status.facts.made_at,
            f"{here}/partitions/{parent.facts.partition}",
            f"Head of partition {parent.facts.partition}",
        )


def _failing(head: PartitionHead) -> Waiting:
    one, owner = head.status.head, head.status.facts.owner
    if one is None:
        return Waiting("Its first message fails.", "bad")
    times = "once" if one.attempts == 1 else f"{one.attempts:,} times"
    limit = f" of {head.group.facts.rules.attempt_limit:,} attempts" if head.group.facts.mode == "exclusive" else ""
    text = f"Its handler failed {times}{limit}"
    if one.retry_at is not None and one.retry_in_s:
        text += f"; the next attempt is at {when(one.retry_at)}, in {duration(one.retry_in_s)}"
    elif one.retry_at is not None:
        text += "; the next attempt is due"
    log = f" The log of member {owner} says why." if owner and not head.attempts else ""
    return Waiting(f"{text}.{log}", "bad", one.failing_since, _key_path(head), "Explain the key")


def _in_hand(head: PartitionHead) -> Waiting:
    mode, facts = head.group.facts.mode, head.status.facts
    age = f" It was published {duration(head.status.age_s)} ago." if head.status.age_s is not None else ""
    if mode == "pop":
        return Waiting(f"A receiver has it, or the next one gets it.{age}", "good")
    if mode == "shared":
        return Waiting(f"A member has it, or the next one with room gets it.{age}", "good")
    owner = facts.owner or "its owner"
    return Waiting(
        f"It is running at member {owner}, or waits there for a free worker; nodes don't record since when.{age}",
        "good",
        None,
        _group_path(head),
        "Members",
    )


def _of_message(head: PartitionHead) -> Iterator[Waiting]:
    parked, one = head.parked, head.status.head
    if one is not None and one.unmatched:
        yield Waiting("The group's filter leaves it out, or it is void: it is settled without a handler.", "good")
    if parked is not None:
        due = "an operator must release it" if parked.due_at is None else f"it is tried again at {when(parked.due_at)}"
        if parked.paused_at is not None:
            due = f"{parked.paused_by} paused it"
        yield Waiting(
            f"Its key is parked ({parked.cause}) with {counted(parked.messages, 'message')} before this one: {due}. "
            "This message joins them as soon as the owner gets to it.",
            "warn",
            parked.since,
            _key_path(head),
            "Explain the key",
        )


def _group_path(head: PartitionHead) -> str:
    return f"/groups/{segment(head.group.facts.topic)}/{segment(head.group.facts.name)}"


def _key_path(head: PartitionHead) -> str:
    key = None if head.status.head is None else head.status.head.key
    if key is None:
        return ""
    return link("/keys", topic=head.group.facts.topic, group=head.group.facts.name, key=key)
