"""Explain a key for a group; the search is bounded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mqlayer.domain.names import check_group, encode_key
from mqlayer.domain.routing import Lp, NodeId, Route, lp_of
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.inspect.group_status import GroupStatus, PartitionStatus, UnsettledMessage, group_statuses, waiting
from mqlayer.inspect.parked_status import ParkedKeyStatus, describe_full, parked_key
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.read_scripts import FIND_LIMIT, KeySearchResult, find_command, find_reply
from mqlayer.runtime.route_cache import load_nodes, load_route, node_names
from mqlayer.runtime.runtime import Runtime

SCAN_LIMIT: Final = 10_000
"""Offsets searched for a key's messages, over all partitions."""
CALL_BYTES: Final = 16_000_000
"""Body bytes that a node reads per call."""
NOTHING: Final = "nothing: "
NO_MEMBER: Final = "mqlayer consume MODULE:APP  # no member of the group lives"


@dataclass(frozen=True, slots=True)
class LpLocation:
    """A partition of the key's LP, in these route versions (None: in force)."""

    first_version: int
    last_version: int | None
    partition: int
    node: str
    lp_from: int
    lp_to: int
    state: str
    visibility: str | None


@dataclass(frozen=True, slots=True)
class KeySearch:
    """The key's first unsettled message, and the count behind it.

    `cut`: ended at the bound; `blind`: partitions on silent nodes.
    """

    scanned: int
    cut: bool
    blind: tuple[int, ...]
    partition: int | None
    head: UnsettledMessage | None
    following: int


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """A key for a group. `group`: at the partitions of the key and those that hide them.

    `publishes_to`: partition in force; `current`: first undrained one; `holds_up`: partitions to drain first; `parked`:
    messages before those of `search`.
    """

    key: str
    lp: Lp
    group: GroupStatus
    locations: Sequence[LpLocation]
    publishes_to: LpLocation
    current: PartitionStatus | None
    search: KeySearch
    holds_up: Sequence[PartitionStatus]
    run_next: str
    parked: ParkedKeyStatus | None = None


def explain_key(runtime: Runtime, topic: str, key: str, group: str) -> KeyStatus:
    """Return a key's place, waiting messages and the next command.

    Raises NotFound, KeyTooLarge, InvalidInput for a broadcast group.
    """
    name = encode_key(key)
    lp = lp_of(name)
    check_group(group)
    route = load_route(runtime.control, topic)
    (status,) = group_statuses(runtime, topic, group, lp=lp, count_keys=False)
    if status.facts.mode == "broadcast":
        raise InvalidInput(f"group {group!r} is broadcast: name one of its instances, as {group}@INSTANCE")
    by_id = {one.facts.partition: one for one in status.partitions}
    locations = _locations(runtime.control, topic, lp, by_id)
    ways = [by_id[one.partition] for one in locations if one.partition in by_id]
    undrained = [one for one in ways if not one.facts.drained]
    search = _search(runtime, status, undrained, name, route)
    # Without a waiting message: the partition of the next one.
    waits_in = by_id.get(search.partition or locations[-1].partition)
    holds_up = [] if waits_in is None else _holding_up(waits_in, by_id)
    parked = parked_key(runtime.control, status.facts.group_id, lp, name)
    next_step = _next_of_parked(status, key, parked) or _next_step(status, undrained, search, waits_in, holds_up)
    return KeyStatus(
        key,
        lp,
        status,
        locations,
        locations[-1],
        undrained[0] if undrained else None,
        search,
        holds_up,
        next_step,
        parked,
    )


def _locations(database: Database, topic: str, lp: Lp, by_id: Mapping[int, PartitionStatus]) -> list[LpLocation]:
    names = node_names(database)
    with database.connection() as connection:
        rows = connection.execute(query("inspected_lineage"), {"topic": topic, "lp": lp}).fetchall()
    return [
        LpLocation(
            first,
            last,
            partition,
            names[node_id],
            lp_from,
            lp_to,
            state,
            by_id[partition].facts.visibility if partition in by_id else None,
        )
        for partition, node_id, lp_from, lp_to, state, first, last in rows
    ]


@dataclass(frozen=True, slots=True)
class _SearchSlice:
    status: PartitionStatus
    first: int
    count: int


def _search(
    runtime: Runtime, group: GroupStatus, partitions: Sequence[PartitionStatus], key: bytes, route: Route
) -> KeySearch:
    slices, cut = _slices(partitions, min(FIND_LIMIT, max(1, CALL_BYTES // route.body_limit)))
    found = _ask(runtime, slices, key)
    hits = [
        (search_slice, answer)
        for search_slice, answer in zip(slices, found, strict=True)
        if answer and answer.head is not None
    ]
    blind = {one.facts.partition for one in partitions if one.position is None}
    blind |= {
        search_slice.status.facts.partition
        for search_slice, answer in zip(slices, found, strict=True)
        if answer is None
    }
    scanned = sum(search_slice.count for search_slice, answer in zip(slices, found, strict=True) if answer is not None)
    if not hits:
        return KeySearch(scanned, cut, tuple(sorted(blind)), None, None, 0)
    (search_slice, first), total = hits[0], sum(answer.messages for _, answer in hits)
    now_ms = search_slice.status.position.now_ms if search_slice.status.position else 0
    head = waiting(first.head, now_ms, group.facts)
    return KeySearch(scanned, cut, tuple(sorted(blind)), search_slice.status.facts.partition, head, total - 1)


def _slices(partitions: Sequence[PartitionStatus], per_call: int) -> tuple[list[_SearchSlice], bool]:
    slices: list[_SearchSlice] = []
    left, cut = SCAN_LIMIT, False
    for one in partitions:
        if one.position is None:
            continue
        first, there = one.position.position, one.position.next_offset - one.position.position
        count = min(there, left)
        slices += [_SearchSlice(one, first + at, min(per_call, count - at)) for at in range(0, count, per_call)]
        left, cut = left - count, cut or count < there
    return slices, cut


def _ask(runtime: Runtime, slices: Sequence[_SearchSlice], key: bytes) -> list[KeySearchResult | None]:
    nodes = {node.node_id: node for node in load_nodes(runtime.control)} if slices else {}
    by_node: dict[NodeId, list[int]] = {}
    for number, search_slice in enumerate(slices):
        by_node.setdefault(search_slice.status.facts.node, []).append(number)
    found: list[KeySearchResult | None] = [None] * len(slices)
    for node_id, numbers in by_node.items():
        try:
            with runtime.connection(nodes[node_id]) as connection:
                replies = connection.call(
                    [
                        find_command(
                            connection,
                            runtime.prefix,
                            search_slice.status.facts.partition,
                            search_slice.status.facts.group_id,
                            key=key,
                            first=search_slice.first,
                            count=search_slice.count,
                            seek=search_slice.status.facts.seek,
                        )
                        for search_slice in (slices[number] for number in numbers)
                    ]
                )
                answers = [find_reply(reply, key, connection.node.address) for reply in replies]
        except MqlayerError:
            continue
        for number, answer in zip(numbers, answers, strict=True):
            found[number] = answer
    return found


def _holding_up(one: PartitionStatus, by_id: Mapping[int, PartitionStatus]) -> list[PartitionStatus]:
    found: dict[int, PartitionStatus] = {}
    parents = list(one.facts.behind)
    while parents:
        parent = by_id.get(parents.pop())
        if parent is None or parent.facts.partition in found:
            continue
        if parent.facts.behind:
            parents += parent.facts.behind
        else:
            found[parent.facts.partition] = parent
    return [found[partition] for partition in sorted(found)]


def _next_of_parked(group: GroupStatus, key: str, parked: ParkedKeyStatus | None) -> str | None:
    if parked is not None and parked.paused_at is not None:
        named = shlex.quote(key)
        return f"mqlayer key resume {group.facts.topic} {named} --group {group.facts.name}  # it is paused"
    if parked is None or group.facts.state != "live":
        return None
    # A parked message is tried by an owner: a group that is paused, or has none, tries nothing.
    if (resume := _resume_of_group(group)) is not None:
        return resume
    if group.facts.mode != "pop" and not group.facts.alive:
        return NO_MEMBER
    # An unprintable key is named by its first message.
    named = shlex.quote(key) if key.isprintable() else f"--message {parked.head}"
    release = f"mqlayer parked release {group.facts.topic} {group.facts.name} {named}"
    full = describe_full(group.facts.rules, group.parked, (parked.messages, parked.bytes))
    more = f"; what follows it stays in the stream: {full}" if full else ""
    if parked.due_in_s is None and parked.cause == "rejected" and key.isprintable():
        skip = f"mqlayer key skip-head {group.facts.topic} {named} --group {group.facts.name}"
        return f"{skip}  # the handler rejected it; once a changed handler takes it: {release}{more}"
    if parked.due_in_s is None:
        return f"{release}  # or discard it, or key skip-head; it waits for an operator ({parked.cause}){more}"
    if parked.due_in_s > 0:
        return f"{NOTHING}it is tried again at {parked.due_at:%H:%M:%S} UTC; at once: {release}{more}"
    return f"{NOTHING}it is due, its owner tries it{more}"


def _next_step(
    group: GroupStatus,
    undrained: Sequence[PartitionStatus],
    search: KeySearch,
    waits_in: PartitionStatus | None,
    holds_up: Sequence[PartitionStatus],
) -> str:
    topic, name = group.facts.topic, group.facts.name
    if group.facts.state != "live":
        return f"{NOTHING}the group is {group.facts.state}"
    if search.head is None:
        blind = [one for one in undrained if one.facts.partition in search.blind]
        if blind:
            return _of_node(blind[0])
        if search.cut:
            return f"mqlayer group lag {topic} {name}  # none of its messages is among the first {search.scanned:,}"
        return f"{NOTHING}no message of it waits"
    for one in [*holds_up] or ([waits_in] if waits_in is not None else []):
        step = _of_servers(one, group)
        if step is not None:
            return step
    if holds_up:
        return _of_parents(holds_up, topic, name)
    return f"{NOTHING}{_in_progress(group, search.head, waits_in)}"


def _in_progress(group: GroupStatus, head: UnsettledMessage, waits_in: PartitionStatus | None) -> str:
    pop = group.facts.mode == "pop"
    if not head.attempts:
        return "a receiver has it, or the next one gets it" if pop else "it is being handled"
    if pop:
        return "it is given out again; the receivers say why it was not settled"
    if group.facts.mode == "shared":
        return "it is tried again; the logs of the group's members say why it fails"
    at = f" at {head.retry_at:%H:%M:%S} UTC" if head.retry_at else ""
    owner = waits_in.facts.owner if waits_in is not None else None
    return f"it is tried again{at}; the log of member {owner} says why it fails"


def _of_servers(one: PartitionStatus, group: GroupStatus) -> str | None:
    reason = one.stall.reason if one.stall is not None else None
    if reason in ("node_away", "partition_missing"):
        return _of_node(one)
    if (resume := _resume(group, one)) is not None:
        return resume
    if reason == "breaker" and one.stall is not None:
        return f"{NOTHING}{one.stall.detail}"
    if group.facts.mode == "pop":
        return None
    if group.facts.mode == "shared":
        return None if group.facts.alive else NO_MEMBER
    if reason in ("no_owner", "lease_over") or not one.facts.alive:
        if not group.facts.alive:
            return NO_MEMBER
        return f"{NOTHING}the next heartbeat of a member gives partition {one.facts.partition} an owner"
    if reason == "replayed" and one.stall is not None:
        return f"{NOTHING}{one.stall.detail}"
    if reason == "not_taken":
        return f"{NOTHING}{one.facts.owner} is about to take partition {one.facts.partition}"
    return None


def _resume_of_group(group: GroupStatus) -> str | None:
    topic, name = group.facts.topic, group.facts.name
    if group.facts.topic_paused_at is not None:
        return f"mqlayer topic resume {topic}  # it is paused"
    if group.facts.paused_at is not None:
        return f"mqlayer group resume {topic} {name}  # it is paused"
    return None


def _resume(group: GroupStatus, one: PartitionStatus) -> str | None:
    topic, name = group.facts.topic, group.facts.name
    if (resume := _resume_of_group(group)) is not None:
        return resume
    if one.facts.paused_at is not None:
        return f"mqlayer group resume {topic} {name} --partition {one.facts.partition}  # it is paused"
    return None


def _of_node(one: PartitionStatus) -> str:
    return f"mqlayer node rearm {one.node}  # once it is back; it does not serve partition {one.facts.partition}"


def _of_parents(parents: Iterable[PartitionStatus], topic: str, name: str) -> str:
    for one in sorted(parents, key=lambda parent: -(parent.head.attempts if parent.head else 0)):
        # An unprintable key cannot be given as an argument.
        if one.head is not None and one.head.key is not None and one.head.key.isprintable():
            key = shlex.quote(one.head.key)
            return f"mqlayer key explain {topic} {key} --group {name}  # partition {one.facts.partition} waits for it"
        if one.head is not None:
            return f"mqlayer group lag {topic} {name}  # partition {one.facts.partition} has to be drained first"
    return f"{NOTHING}what it waits for is settled, its owner says so next"
