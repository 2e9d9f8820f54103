"""What becomes of one key for one group: where it was and is, what waits, and what to do about it.

The stream is searched from where the group is, over SCAN_LIMIT offsets at most; a key's messages behind that are not
seen, and it is said when the search ended there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mqlayer.domain.names import check_group, encode_key
from mqlayer.domain.routing import Lp, NodeId, Route, lp_of
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.inspecting.parked import ParkedKeyStanding, full_words, parked_key
from mqlayer.inspecting.standing import GroupStanding, PartitionStanding, Waiting, group_standings, waiting
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.looking import FIND_LIMIT, Found, find_command, find_reply
from mqlayer.redis.nodes import NodeConnection
from mqlayer.routes.cache import load_nodes, load_route

SCAN_LIMIT: Final = 10_000
"""How many offsets are searched for a key's messages, over all partitions."""
CALL_BYTES: Final = 16_000_000
"""How much of bodies one call may have its node look at, at most."""
NOTHING: Final = "nothing: "


@dataclass(frozen=True, slots=True)
class Crossing:
    """A partition that the key's LP was or is in, in route versions first to last (None: it is in force).

    `state`: of the partition (open, sealed, deleted); `sight`: how the group stands with it, None where it is deleted.
    """

    first_version: int
    last_version: int | None
    partition: int
    node: str
    lp_from: int
    lp_to: int
    state: str
    sight: str | None


@dataclass(frozen=True, slots=True)
class Search:
    """What the bounded search found: the key's first message that is not settled, where, and how many follow it.

    `cut`: it ended at the bound, with offsets left to look at; `blind`: partitions whose node does not answer.
    """

    looked_at: int
    cut: bool
    blind: tuple[int, ...]
    partition: int | None
    head: Waiting | None
    following: int


@dataclass(frozen=True, slots=True)
class KeyStanding:
    """Everything about a key for a group.

    `publishes_to`: the partition in force; `current`: the first one that the group has not drained; `holds_up`: what
    has to be drained before the group gets the partition that the key's messages wait in, empty where nothing has to;
    `parked`: what of it waits outside of the stream, before all that the search found.
    """

    key: str
    lp: Lp
    group: GroupStanding
    crossings: Sequence[Crossing]
    publishes_to: Crossing
    current: PartitionStanding | None
    search: Search
    holds_up: Sequence[PartitionStanding]
    run_next: str
    parked: ParkedKeyStanding | None = None


def explain_key(
    database: Database, topic: str, key: str, group: str, *, prefix: str, unsafe: bool = False
) -> KeyStanding:
    """Return where a key is for a group, what of it waits and why, and what to run next. Changes nothing.

    Raises NotFound for a topic or group that is not there, KeyTooLarge.
    """
    name = encode_key(key)
    lp = lp_of(name)
    check_group(group)
    route = load_route(database, topic)
    (standing,) = group_standings(database, topic, group, prefix=prefix, unsafe=unsafe)
    if standing.facts.mode == "broadcast":
        raise InvalidInput(f"group {group!r} is broadcast: name one of its instances, as {group}@INSTANCE")
    by_id = {one.facts.partition: one for one in standing.partitions}
    crossings = _crossings(database, topic, lp, by_id)
    ways = [by_id[one.partition] for one in crossings if one.partition in by_id]
    undrained = [one for one in ways if not one.facts.drained]
    search = _search(database, standing, undrained, name, route, prefix=prefix, unsafe=unsafe)
    # Where nothing waits, what is published next will.
    waits_in = by_id.get(search.partition or crossings[-1].partition)
    holds_up = [] if waits_in is None else _holding_up(waits_in, by_id)
    parked = parked_key(database, standing.facts.group_id, lp, name)
    next_step = _next_of_parked(standing, key, parked) or _next_step(standing, undrained, search, waits_in, holds_up)
    return KeyStanding(
        key,
        lp,
        standing,
        crossings,
        crossings[-1],
        undrained[0] if undrained else None,
        search,
        holds_up,
        next_step,
        parked,
    )


def _crossings(database: Database, topic: str, lp: Lp, by_id: Mapping[int, PartitionStanding]) -> list[Crossing]:
    names = {node.node_id: node.name for node in load_nodes(database)}
    with database.connection() as connection:
        rows = connection.execute(query("inspected_lineage"), {"topic": topic, "lp": lp}).fetchall()
    return [
        Crossing(
            first,
            last,
            partition,
            names[node_id],
            lp_from,
            lp_to,
            state,
            by_id[partition].facts.sight if partition in by_id else None,
        )
        for partition, node_id, lp_from, lp_to, state, first, last in rows
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A few offsets of a partition, for one call."""

    standing: PartitionStanding
    first: int
    count: int


def _search(
    database: Database,
    group: GroupStanding,
    partitions: Sequence[PartitionStanding],
    key: bytes,
    route: Route,
    *,
    prefix: str,
    unsafe: bool,
) -> Search:
    pieces, cut = _pieces(partitions, min(FIND_LIMIT, max(1, CALL_BYTES // route.body_limit)))
    found = _ask(database, pieces, key, prefix=prefix, unsafe=unsafe)
    hits = [(piece, answer) for piece, answer in zip(pieces, found, strict=True) if answer and answer.head is not None]
    blind = {one.facts.partition for one in partitions if one.look is None}
    blind |= {piece.standing.facts.partition for piece, answer in zip(pieces, found, strict=True) if answer is None}
    looked_at = sum(piece.count for piece, answer in zip(pieces, found, strict=True) if answer is not None)
    if not hits:
        return Search(looked_at, cut, tuple(sorted(blind)), None, None, 0)
    (piece, first), total = hits[0], sum(answer.messages for _, answer in hits)
    now_ms = piece.standing.look.now_ms if piece.standing.look else 0
    head = waiting(first.head, now_ms, group.facts)
    return Search(looked_at, cut, tuple(sorted(blind)), piece.standing.facts.partition, head, total - 1)


def _pieces(partitions: Sequence[PartitionStanding], per_call: int) -> tuple[list[_Piece], bool]:
    """Return what to search, in the order of the lineage, and whether the bound leaves something out."""
    pieces: list[_Piece] = []
    left, cut = SCAN_LIMIT, False
    for one in partitions:
        if one.look is None:
            continue
        first, there = one.look.position, one.look.next_offset - one.look.position
        count = min(there, left)
        pieces += [_Piece(one, first + at, min(per_call, count - at)) for at in range(0, count, per_call)]
        left, cut = left - count, cut or count < there
    return pieces, cut


def _ask(database: Database, pieces: Sequence[_Piece], key: bytes, *, prefix: str, unsafe: bool) -> list[Found | None]:
    """Return what each piece holds of the key, None where its node does not answer; one write for each node."""
    nodes = {node.node_id: node for node in load_nodes(database)} if pieces else {}
    by_node: dict[NodeId, list[int]] = {}
    for number, piece in enumerate(pieces):
        by_node.setdefault(piece.standing.facts.node, []).append(number)
    found: list[Found | None] = [None] * len(pieces)
    for node_id, numbers in by_node.items():
        try:
            with NodeConnection(nodes[node_id], unsafe=unsafe) as line:
                replies = line.call(
                    [
                        find_command(
                            line,
                            prefix,
                            piece.standing.facts.partition,
                            piece.standing.facts.group_id,
                            key=key,
                            first=piece.first,
                            count=piece.count,
                            seek=piece.standing.facts.seek,
                        )
                        for piece in (pieces[number] for number in numbers)
                    ]
                )
                answers = [find_reply(reply, key, line.node.address) for reply in replies]
        except MqlayerError:
            continue
        for number, answer in zip(numbers, answers, strict=True):
            found[number] = answer
    return found


def _holding_up(one: PartitionStanding, by_id: Mapping[int, PartitionStanding]) -> list[PartitionStanding]:
    """Return the partitions that the group can and has to drain before it gets this one, oldest first."""
    found: dict[int, PartitionStanding] = {}
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


def _next_of_parked(group: GroupStanding, key: str, parked: ParkedKeyStanding | None) -> str | None:
    """Return what brings a parked key on; None where that is no other thing than for any key."""
    if parked is not None and parked.paused_at is not None:
        named = shlex.quote(key)
        return f"mqlayer key resume {group.facts.topic} {named} --group {group.facts.name}  # it is paused"
    if parked is None or group.facts.state != "live" or group.facts.paused_at is not None or not group.facts.alive:
        return None
    # A key that can't be typed is named by the message that it waits for.
    named = shlex.quote(key) if key.isprintable() else f"--message {parked.head}"
    release = f"mqlayer parked release {group.facts.topic} {group.facts.name} {named}"
    full = full_words(group.facts.rules, group.parked, (parked.messages, parked.bytes))
    more = f"; what follows it stays in the stream: {full}" if full else ""
    if parked.due_in_s is None:
        return f"{release}  # or discard it, or key skip-head; it waits for an operator ({parked.cause}){more}"
    if parked.due_in_s > 0:
        return f"{NOTHING}it is tried again at {parked.due_at:%H:%M:%S} UTC; at once: {release}{more}"
    return f"{NOTHING}it is due, its owner tries it{more}"


def _next_step(
    group: GroupStanding,
    undrained: Sequence[PartitionStanding],
    search: Search,
    waits_in: PartitionStanding | None,
    holds_up: Sequence[PartitionStanding],
) -> str:
    """Return the one command that brings the key on, or why nothing has to be done."""
    topic, name = group.facts.topic, group.facts.name
    if group.facts.state != "live":
        return f"{NOTHING}the group is {group.facts.state}"
    if search.head is None:
        blind = [one for one in undrained if one.facts.partition in search.blind]
        if blind:
            return _of_node(blind[0])
        if search.cut:
            return f"mqlayer group lag {topic} {name}  # none of its messages is among the first {search.looked_at:,}"
        return f"{NOTHING}no message of it waits"
    for one in [*holds_up] or ([waits_in] if waits_in is not None else []):
        step = _of_servers(one, group)
        if step is not None:
            return step
    if holds_up:
        return _of_parents(holds_up, topic, name)
    return f"{NOTHING}{_under_way(group, search.head, waits_in)}"


def _under_way(group: GroupStanding, head: Waiting, waits_in: PartitionStanding | None) -> str:
    """Return what becomes of a message that nothing but its handling holds up."""
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


def _of_servers(one: PartitionStanding, group: GroupStanding) -> str | None:
    """Return what to do about a partition whose owner or node is not at work; None where both are."""
    reason = one.stall.reason if one.stall is not None else None
    if reason in ("node_away", "partition_missing"):
        return _of_node(one)
    if (resume := _resume(group, one)) is not None:
        return resume
    if group.facts.mode == "pop":
        return None
    if group.facts.mode == "shared":
        return None if group.facts.alive else "mqlayer consume MODULE:APP  # no member of the group lives"
    if reason in ("no_owner", "lease_over") or not one.facts.alive:
        if not group.facts.alive:
            return "mqlayer consume MODULE:APP  # no member of the group lives"
        return f"{NOTHING}the next heartbeat of a member gives partition {one.facts.partition} an owner"
    if reason == "replayed" and one.stall is not None:
        return f"{NOTHING}{one.stall.says}"
    if reason == "not_taken":
        return f"{NOTHING}{one.facts.owner} is about to take partition {one.facts.partition}"
    return None


def _resume(group: GroupStanding, one: PartitionStanding) -> str | None:
    """Return what ends the widest pause that a partition is under; None for none."""
    topic, name = group.facts.topic, group.facts.name
    if group.facts.topic_paused_at is not None:
        return f"mqlayer topic resume {topic}  # it is paused"
    if group.facts.paused_at is not None:
        return f"mqlayer group resume {topic} {name}  # it is paused"
    if one.facts.paused_at is not None:
        return f"mqlayer group resume {topic} {name} --partition {one.facts.partition}  # it is paused"
    return None


def _of_node(one: PartitionStanding) -> str:
    return f"mqlayer node rearm {one.node}  # once it is back; it does not serve partition {one.facts.partition}"


def _of_parents(parents: Iterable[PartitionStanding], topic: str, name: str) -> str:
    """Return how to see what keeps parents, whose owners are at work, from being drained."""
    for one in sorted(parents, key=lambda parent: -(parent.head.attempts if parent.head else 0)):
        # A key that can't be typed is left to be looked up.
        if one.head is not None and one.head.key is not None and one.head.key.isprintable():
            key = shlex.quote(one.head.key)
            return f"mqlayer key explain {topic} {key} --group {name}  # partition {one.facts.partition} waits for it"
        if one.head is not None:
            return f"mqlayer group lag {topic} {name}  # partition {one.facts.partition} has to be drained first"
    return f"{NOTHING}what it waits for is settled, its owner says so next"
