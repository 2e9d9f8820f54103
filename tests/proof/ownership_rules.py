"""Rules about who may act: epochs, leases and the gates of successor partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from tests.proof.evidence import NEVER, Evidence, Flow, Identity, Step, identity
from tests.proof.history import Ack, Append, Deliver, Drain, Gate, OwnershipEvent, Quarantined
from tests.proof.order_rules import fenced_effects
from tests.proof.violations import Breach, Violation

Place: TypeAlias = tuple[str, str, int]
"""A topic, a group and a partition: what one member owns."""

Owned = TypeVar("Owned", Ack, OwnershipEvent, Deliver, Drain, Gate)
Epoched = TypeVar("Epoched", Ack, OwnershipEvent)


class Lease(NamedTuple):
    """A time in which a member may act, by what it knows."""

    from_ns: int
    to_ns: int
    member: str
    epoch: int


def stale_effects(evidence: Evidence) -> Iterator[Violation]:
    """Epochs of fenced effects never fall within a group and LP."""
    highest: defaultdict[tuple[str, str, int], int] = defaultdict(int)
    for step in fenced_effects(evidence):
        event = step.event
        where = (event.group, event.topic, event.lp)
        if event.epoch < highest[where]:
            yield Violation(
                Breach.STALE_EFFECT,
                f"{where}: effect of {identity(event)} under epoch {event.epoch} after one under {highest[where]}",
            )
        highest[where] = max(highest[where], event.epoch)


def stale_acks(evidence: Evidence) -> Iterator[Violation]:
    """No ack is accepted that began after a higher epoch had been taken."""
    taken = _taken(evidence)
    acks = (step for step in evidence.acks if step.outcome == "ok")
    for place, of_place in _by_place(acks).items():
        for step, higher in _outdated(of_place, taken.get(place, [])):
            yield Violation(
                Breach.STALE_ACK, f"{place}: ack of {identity(step.event)}, epoch {step.event.epoch} after {higher}"
            )


def owners(evidence: Evidence) -> Iterator[Violation]:
    """Each epoch has one owner, a lower one is not taken after a higher one, and leases do not overlap."""
    for place, taken in _taken(evidence).items():
        yield from _shared_epochs(place, taken)
        for step, higher in _outdated(taken, taken):
            yield Violation(
                Breach.TWO_OWNERS, f"{place}: {step.event.member} took epoch {step.event.epoch} after {higher}"
            )
    for place, steps in _by_place(evidence.assignments).items():
        yield from _overlapping_leases(place, steps)


def _taken(evidence: Evidence) -> Mapping[Place, list[Step[OwnershipEvent]]]:
    return _by_place(step for step in evidence.assignments if step.event.change == "taken" and step.outcome == "ok")


def _by_place(steps: Iterable[Step[Owned]]) -> Mapping[Place, list[Step[Owned]]]:
    places: defaultdict[Place, list[Step[Owned]]] = defaultdict(list)
    for step in sorted(steps, key=lambda step: step.began):
        places[step.event.topic, step.event.group, step.event.partition].append(step)
    return places


def _outdated(
    steps: Sequence[Step[Epoched]], taken: Sequence[Step[OwnershipEvent]]
) -> Iterator[tuple[Step[Epoched], int]]:
    """Return the steps that began when a higher epoch was taken already, with that epoch."""
    by_end = sorted(taken, key=lambda step: step.ended)
    highest, passed = 0, 0
    for step in steps:
        while passed < len(by_end) and by_end[passed].ended < step.began:
            highest = max(highest, by_end[passed].event.epoch)
            passed += 1
        if step.event.epoch < highest:
            yield step, highest


def _shared_epochs(place: Place, taken: Iterable[Step[OwnershipEvent]]) -> Iterator[Violation]:
    owner_of: dict[int, tuple[str, str]] = {}
    for step in taken:
        owner = (step.event.member, step.writer)
        first = owner_of.setdefault(step.event.epoch, owner)
        if first != owner:
            yield Violation(Breach.TWO_OWNERS, f"{place}: epoch {step.event.epoch} taken by {first} and {owner}")


def _overlapping_leases(place: Place, steps: Iterable[Step[OwnershipEvent]]) -> Iterator[Violation]:
    longest: Lease | None = None
    for lease in sorted(_leases(steps)):
        if longest and lease.from_ns < longest.to_ns and lease.member != longest.member:
            yield Violation(
                Breach.TWO_OWNERS,
                f"{place}: {lease.member} (epoch {lease.epoch}) owned it from {lease.from_ns} ns, "
                f"{longest.member} (epoch {longest.epoch}) up to {longest.to_ns} ns",
            )
        if longest is None or lease.to_ns > longest.to_ns:
            longest = lease


def _leases(steps: Iterable[Step[OwnershipEvent]]) -> Iterator[Lease]:
    """Return when members were sure to be owners: from each answer on, until the lease's end or their release.

    What a member gives back under a renewed epoch it does not hold under its earlier ones either. A release may be said
    again where its answer was lost: the first time may have been it. An answer that comes after its lease ran out, to a
    process that was stopped meanwhile, gives nothing.
    """
    steps = [step for step in steps if step.possible]
    released: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in steps:
        if step.event.change == "released":
            released[step.event.member].append((step.event.epoch, step.began_ns))
    for step in steps:
        event = step.event
        if step.outcome == "ok" and event.change != "released" and event.until_ns is not None:
            ends_ns = (at_ns for epoch, at_ns in released[event.member] if epoch >= event.epoch)
            lease = Lease(step.ended_ns, min([event.until_ns, *ends_ns]), event.member, event.epoch)
            if lease.from_ns < lease.to_ns:
                yield lease


def gates(evidence: Evidence) -> Iterator[Violation]:
    """Nothing of a successor is delivered before its gate opens, nor before all of its parents is settled."""
    of_place = _by_place(step for step in evidence.gates if step.possible)
    delivered = _by_place(evidence.delivers)
    drained_at = _drained_times(evidence)
    for place, opened in of_place.items():
        topic, group, _ = place
        opened_at = opened[0].began
        parents = {parent for step in opened for parent in step.event.parents}
        settled_at = max((drained_at.get((topic, group, parent), 0) for parent in parents), default=0)
        for step in delivered.get(place, []):
            if step.began < opened_at:
                yield Violation(Breach.BEFORE_GATE, f"{place}: {identity(step.event)} delivered before it was opened")
            elif step.began < settled_at:
                yield Violation(
                    Breach.BEFORE_GATE,
                    f"{place}: {identity(step.event)} delivered before {sorted(parents)} was settled",
                )


def lineage(evidence: Evidence) -> Iterator[Violation]:
    """Nothing of a successor is delivered before its group has handled, and called drained, all of its parents.

    That a handler returned comes before any ack, so this needs none. Groups of which no drain is recorded are judged by
    what they handled alone.
    """
    handled_at = _handled_times(evidence)
    said_at: dict[Place, int] = {}
    for place, drains in _by_place(step for step in evidence.drains if step.possible).items():
        said_at[place] = drains[0].began
    saying = {step.event.group for step in evidence.drains}
    for (topic, group, partition), delivers in _by_place(evidence.delivers).items():
        for parent in sorted(evidence.parents.get((topic, partition), ())):
            place = (topic, group, parent)
            drained = said_at.get(place, NEVER) if group in saying else 0
            handled = handled_at.get(place, NOTHING)
            for step in delivers:
                if step.began < max(drained, handled.at):
                    word = "drained" if step.began < drained else f"handled up to {handled.last}"
                    yield Violation(
                        Breach.BEFORE_GATE,
                        f"group {group}, partition {partition}: {identity(step.event)} delivered (epoch "
                        f"{step.event.epoch}) before partition {parent} was {word}",
                    )


class Handled(NamedTuple):
    """When a group had done with a partition, and with which message."""

    at: int
    last: Identity | None


NOTHING: Final = Handled(0, None)


def _handled_times(evidence: Evidence) -> Mapping[Place, Handled]:
    """Return when each group had handled, or left with a reason, the last message that a partition holds."""
    first: defaultdict[Flow, dict[Identity, int]] = defaultdict(dict)
    done: list[tuple[Step[Deliver] | Step[Quarantined], int]] = [
        *((step, step.ended) for step in evidence.delivers if step.outcome == "ok"),
        *((step, step.began) for step in evidence.set_asides if step.possible),
    ]
    for step, at in done:
        of_flow = first[step.event.group, step.event.topic]
        of_flow[identity(step.event)] = min(of_flow.get(identity(step.event), NEVER), at)
    held = _held(evidence)
    return {
        (topic, group, partition): max(
            (Handled(handled.get(m, NEVER), m) for m, sure in messages.items() if sure or m in handled), default=NOTHING
        )
        for (group, topic), handled in first.items()
        for partition, messages in held[topic].items()
    }


def _drained_times(evidence: Evidence) -> Mapping[Place, int]:
    """Return when the last message of each partition was first settled by each group whose acks are known."""
    held = _held(evidence)
    drained: dict[Place, int] = {}
    for flow in evidence.flows:
        group, topic = flow
        if group in evidence.acking_groups:
            settled = _first_settled(evidence, flow)
            for partition, messages in held[topic].items():
                times = (settled.get(m, NEVER) for m, sure in messages.items() if sure or m in settled)
                drained[topic, group, partition] = max(times, default=0)
    return drained


def _held(evidence: Evidence) -> Mapping[str, Mapping[int, Mapping[Identity, bool]]]:
    """Return which messages each partition of each topic holds, and whether that is sure.

    What a partition lost when it fell back is its own no more where a successor has it: it was sealed without it. Where
    none has it yet, nobody knows; a group that never gets it tells of a loss. Only its stream shows what a partition
    has: who read a message before may deliver it long after it was lost.
    """
    appended, seen = _last_appended(evidence), _first_seen(evidence)
    held: defaultdict[str, defaultdict[int, dict[Identity, bool]]] = defaultdict(lambda: defaultdict(dict))
    for place in seen:
        topic, partition, message = place
        there_at = appended.get(place, 0)
        sure = not evidence.fell_back(topic, partition, there_at)
        if sure or not evidence.fell_back(topic, partition, there_at, _seen_below(evidence, seen, place)):
            held[topic][partition][message] = sure
    return held


Placed: TypeAlias = tuple[str, int, Identity]
"""A topic, a partition, and a message there."""


def _seen_below(evidence: Evidence, seen: Mapping[Placed, int], place: Placed) -> int:
    """Return when a message was first seen in the last successor of a partition that had it; 0: in none."""
    topic, partition, message = place
    below = ((topic, successor, message) for successor in evidence.descendants(topic, partition))
    return max((seen[one] for one in below if one in seen), default=0)


def _last_appended(evidence: Evidence) -> Mapping[Placed, int]:
    last: dict[Placed, int] = {}
    for step in evidence.appends:
        if step.outcome == "ok":
            place = (step.event.topic, step.event.partition, identity(step.event))
            last[place] = max(last.get(place, 0), step.began)
    return last


def _first_seen(evidence: Evidence) -> Mapping[Placed, int]:
    first: dict[Placed, int] = {}
    steps: list[Step[Append] | Step[Deliver]] = [*evidence.delivers]
    steps += (step for step in evidence.appends if step.outcome == "ok")
    for step in steps:
        place = (step.event.topic, step.event.partition, identity(step.event))
        first[place] = min(first.get(place, NEVER), step.began)
    return first


def _first_settled(evidence: Evidence, flow: Flow) -> Mapping[Identity, int]:
    settled: dict[Identity, int] = {}
    steps: list[Step[Ack] | Step[Quarantined]] = [*evidence.acks, *evidence.set_asides]
    for step in steps:
        if step.possible and (step.event.group, step.event.topic) == flow:
            of = identity(step.event)
            settled[of] = min(settled.get(of, NEVER), step.began)
    return settled
