"""Positions and stalls of groups, for people: servers are read one after another.

Ages run from the publisher's time to the node's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.routing import Lp
from mqlayer.domain.tags import TagFilter
from mqlayer.groups.breaker import BreakerFacts
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.inspect.group_facts import GroupFacts, PartitionFacts, group_facts, partition_facts
from mqlayer.inspect.parked_status import (
    ParkedCounts,
    ReplayStatus,
    describe_full,
    parked_counts,
    parked_heads,
    parked_totals,
    running_replays,
)
from mqlayer.redis.read_scripts import GroupPosition, UnsettledHead
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

StallReason = Literal[
    "node_away", "partition_missing", "hidden", "paused", "no_owner", "lease_over", "not_taken", "replayed",
    "parking_full", "failing", "breaker",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class UnsettledMessage:
    """The first unsettled message. `retry_at`: at the latest; `unmatched`: settled without handling."""

    offset: int
    key: str | None
    identity: str
    age_s: float
    attempts: int
    failing_since: datetime | None
    retry_at: datetime | None
    retry_in_s: float | None
    unmatched: bool = False


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a partition is stuck, since when."""

    reason: StallReason
    since: datetime | None
    detail: str


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A group in a partition. `position`: None if not reported."""

    facts: PartitionFacts
    node: str
    position: GroupPosition | None
    head: UnsettledMessage | None
    stall: Stall | None

    @property
    def lag(self) -> int | None:
        """Unsettled messages; None where unknown."""
        if self.facts.drained:
            return 0
        return None if self.position is None else self.position.unsettled

    @property
    def age_s(self) -> float | None:
        """Age of the oldest unsettled message."""
        return self.head.age_s if self.head is not None else None


@dataclass(frozen=True, slots=True)
class VersionLag:
    """Lag per route version; `unknown`: partitions without an answer."""

    version: int
    partitions: int
    lag: int
    age_s: float | None
    unknown: int


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group's position and lag, without parked and replayed messages.

    `partitions`: empty unless live; `unreachable`: reason per silent node.
    """

    facts: GroupFacts
    partitions: Sequence[PartitionStatus]
    unreachable: Mapping[str, str]
    parked: ParkedCounts = field(default_factory=ParkedCounts)
    replay: ReplayStatus | None = None

    @property
    def undrained(self) -> list[PartitionStatus]:
        """Partitions that the group has not drained."""
        return [one for one in self.partitions if not one.facts.drained]

    @property
    def lag(self) -> int:
        """Unsettled messages on the nodes that answer."""
        return sum(one.lag or 0 for one in self.partitions)

    @property
    def age_s(self) -> float | None:
        """Age of the oldest unsettled message."""
        return _oldest(self.partitions)

    def versions(self) -> list[VersionLag]:
        """Return the lag per route version."""
        of_version: dict[int, list[PartitionStatus]] = {}
        for one in self.undrained:
            of_version.setdefault(one.facts.made_in, []).append(one)
        return [
            VersionLag(
                version,
                len(ones),
                sum(one.lag or 0 for one in ones),
                _oldest(ones),
                sum(one.lag is None for one in ones),
            )
            for version, ones in sorted(of_version.items())
        ]


def group_statuses(
    runtime: Runtime,
    topic: str | None = None,
    name: str | None = None,
    *,
    partitions: Collection[int] | None = None,
    lp: Lp | None = None,
    count_keys: bool = True,
) -> list[GroupStatus]:
    """Return all groups, a topic's, or one, in all or some partitions; one batch per node. Raises NotFound.

    `lp`: at its partitions, and those that hide them. `count_keys`: False leaves parked keys uncounted, for millions
    take long.
    """
    groups = group_facts(runtime.control, topic, name)
    # Only the instances of a broadcast group have positions.
    live = [group for group in groups if group.state == "live" and group.mode != "broadcast"]
    facts = [one for one in partition_facts(runtime.control, live) if partitions is None or one.partition in partitions]
    if lp is not None:
        facts = _of_lp(facts, lp)
    nodes = load_nodes(runtime.control)
    group_partitions = (
        GroupPartition(one.node, one.partition, one.group_id, start=one.start, seek=one.seek) for one in facts
    )
    positions = read_positions(runtime, nodes, group_partitions)
    names = {node.node_id: node.name for node in nodes}
    by_id = {group.group_id: group for group in groups}
    replays = running_replays(runtime.control, by_id)
    found: dict[int, list[PartitionStatus]] = {group.group_id: [] for group in groups}
    unreachable: dict[int, dict[str, str]] = {group.group_id: {} for group in groups}
    parked = parked_counts(runtime.control, by_id) if count_keys else parked_totals(runtime.control, by_id)
    looked = [
        (one, position)
        for one in facts
        if (position := positions.at(one.partition, one.group_id)) is not None and one.group_id in parked
    ]
    parked_sizes = parked_heads(
        runtime.control, [(one.group_id, *ref) for one, position in looked if (ref := _head_key(position)) is not None]
    )
    for one in facts:
        group, position, reason = (
            by_id[one.group_id],
            positions.at(one.partition, one.group_id),
            positions.unreachable.get(one.node),
        )
        head = None if position is None or one.drained else waiting(position.head, position.now_ms, group)
        ref = None if position is None else _head_key(position)
        of_key = None if ref is None else parked_sizes.get((one.group_id, *ref))
        counts = parked.get(one.group_id, ParkedCounts())
        full = None
        if head is not None and (of_key is not None or head.attempts):
            full = describe_full(group.rules, counts, of_key)
        replay = replays.get(one.group_id)
        stall = stall_of(one, position, head, group, unreachable=reason, full=full, replay=replay)
        found[one.group_id].append(PartitionStatus(one, names[one.node], position, head, stall))
        if reason is not None:
            unreachable[one.group_id][names[one.node]] = reason
    return [
        GroupStatus(
            group,
            found[group.group_id],
            unreachable[group.group_id],
            parked.get(group.group_id, ParkedCounts()),
            replays.get(group.group_id),
        )
        for group in groups
    ]


def _of_lp(facts: Sequence[PartitionFacts], lp: Lp) -> list[PartitionFacts]:
    by_id = {(one.group_id, one.partition): one for one in facts}
    wanted: set[tuple[int, int]] = set()
    following = [(one.group_id, one.partition) for one in facts if one.lp_from <= lp < one.lp_to]
    while following:
        place = following.pop()
        if place in by_id and place not in wanted:
            wanted.add(place)
            following += [(place[0], parent) for parent in by_id[place].behind]
    return [one for place, one in by_id.items() if place in wanted]


def waiting(head: UnsettledHead | None, now_ms: int, group: GroupFacts) -> UnsettledMessage | None:
    """Return an unsettled message for display."""
    if head is None:
        return None
    record = Record(head.offset, head.m, head.key, b"")
    failures = head.failures
    first_ms, last_ms = (failures.first_ms, failures.last_ms) if failures else (None, None)
    attempts = failures.attempts if failures else 0
    wanted = TagFilter.of(group.tag_filter)
    if group.mode == "pop":
        # Pop counts at delivery: the last attempt may be running, and its receiver decides when it returns.
        attempts, last_ms = max(0, attempts - 1), None
    retry_ms = None if last_ms is None else last_ms + round(1000 * group.rules.wait_s(attempts, 0.0))
    return UnsettledMessage(
        head.offset,
        None if head.key == NO_KEY else head.key.decode(errors="replace"),
        str(record.identity),
        max(0, now_ms - record.at_ms) / 1000,
        attempts,
        _time(first_ms) if attempts else None,
        _time(retry_ms),
        None if retry_ms is None else max(0, retry_ms - now_ms) / 1000,
        record.void or (wanted is not None and not wanted.takes(record.tags)),
    )


def stall_of(
    facts: PartitionFacts, position: GroupPosition | None, head: UnsettledMessage | None, group: GroupFacts, *,
    unreachable: str | None,
    full: str | None = None, replay: ReplayStatus | None = None,
) -> Stall | None:  # fmt: skip
    """Return why a partition is stuck, or None. `full`: why its head cannot be parked."""
    if facts.drained:
        return None
    if unreachable is not None:
        return Stall("node_away", None, f"its node does not answer: {unreachable}")
    if position is None:
        return Stall("partition_missing", None, "its node does not have it: it lost data")
    if not position.unsettled:
        return None
    if facts.behind and group.mode != "shared":
        parents = ", ".join(map(str, facts.behind))
        return Stall("hidden", facts.made_at, f"its parents are not drained: partition {parents}")
    paused = _paused(facts, group)
    if paused is not None:
        return paused
    if group.breaker is not None and group.breaker.state != "ramping":
        return Stall("breaker", group.breaker.opened_at, describe_breaker(group.breaker))
    if group.mode == "pop":
        return _failing(head)
    if group.mode == "shared":
        return _unheard(group, facts.lp_from) or _failing(head)
    return (
        _unowned(facts, group)
        or _untaken(facts, position)
        or _waits_for_replay(replay)
        or _unparkable(head, full)
        or _failing(head)
    )


def _unheard(group: GroupFacts, lp_from: int) -> Stall | None:
    if group.deployments.of(lp_from) in group.living:
        return None
    return Stall("no_owner", None, _why_unowned(group, group.deployments.of(lp_from)))


def _paused(facts: PartitionFacts, group: GroupFacts) -> Stall | None:
    scopes = (
        (f"topic {group.topic}", group.topic_paused_at, group.topic_paused_by),
        ("the group", group.paused_at, group.paused_by),
        (f"partition {facts.partition} for the group", facts.paused_at, facts.paused_by),
    )
    for scope, since, by in scopes:
        if since is not None:
            rest = f"; {facts.owner} finishes what it has in hand" if facts.owner is not None and facts.alive else ""
            return Stall("paused", since, f"{by or 'an operator'} paused {scope}{rest}")
    return None


def describe_breaker(breaker: BreakerFacts) -> str:
    """Return a breaker's state, cause and next step in a line."""
    why = f"{breaker.actor} tripped it" if breaker.cause == "operator" else f"{breaker.cause} of most keys"
    match breaker.state:
        case "open":
            following = f"the next probe is at {breaker.probe_at:%H:%M:%S} UTC, if a message waits then"
        case "probing":
            following = "a probe runs"
        case _:
            following = "messages go on, with more and more handlers"
    failed = f", {breaker.probes} failed before" if breaker.probes else ""
    return f"the circuit breaker is {breaker.state} ({why}): {following}{failed}"


def _waits_for_replay(replay: ReplayStatus | None) -> Stall | None:
    if replay is None or not replay.newer_wait:
        return None
    detail = f"the group is given what the archive holds first: mqlayer replay show {replay.replay_id}"
    return Stall("replayed", replay.since, detail)


def _unowned(facts: PartitionFacts, group: GroupFacts) -> Stall | None:
    others = _why_unowned(group, group.deployments.of(facts.lp_from))
    if facts.owner is None:
        return Stall("no_owner", facts.changed_at, f"nobody owns it: {others}")
    if not facts.alive:
        return Stall("lease_over", facts.lease_over_at, f"the lease of {facts.owner} is over: {others}")
    return None


def _why_unowned(group: GroupFacts, deployment: str) -> str:
    if not group.alive:
        return "no member lives"
    if group.instance is None and deployment not in group.living:
        named = f"mqlayer group deploy {group.topic} {group.name}"
        others = ", ".join(sorted(group.living))
        return f"no member of deployment {deployment} lives, of {others} some do: start one, or {named}"
    return "a member's next heartbeat gives it an owner"


def _untaken(facts: PartitionFacts, position: GroupPosition) -> Stall | None:
    if (position.owner, position.epoch) == (facts.owner, facts.epoch):
        return None
    return Stall("not_taken", facts.changed_at, f"{facts.owner} has not taken it yet under epoch {facts.epoch}")


def _unparkable(head: UnsettledMessage | None, full: str | None) -> Stall | None:
    if head is None or full is None:
        return None
    detail = f"offset {head.offset} finds no room in Postgres: {full}; release or discard, or raise it with group set"
    return Stall("parking_full", head.failing_since, detail)


def _head_key(position: GroupPosition) -> tuple[int, bytes] | None:
    if position.head is None or position.head.key == NO_KEY:
        return None
    return Record(position.head.offset, position.head.m, position.head.key, b"").identity.lp, position.head.key


def _failing(head: UnsettledMessage | None) -> Stall | None:
    if head is None or not head.attempts:
        return None
    times = "once" if head.attempts == 1 else f"{head.attempts} times"
    return Stall("failing", head.failing_since, f"offset {head.offset} failed {times}")


def _oldest(partitions: Iterable[PartitionStatus]) -> float | None:
    return max((one.age_s for one in partitions if one.age_s is not None), default=None)


def _time(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
