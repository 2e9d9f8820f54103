"""Rules about what messages there are: their contents, their places in partitions, their chains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias

from tests.proof.evidence import Evidence, Identity, identity
from tests.proof.history import Append
from tests.proof.violations import Breach, Violation

Chain: TypeAlias = tuple[str, int, int]
"""A topic, a source and an LP."""

Segment: TypeAlias = tuple[int, str]
"""A partition and a run of its node: where offsets are given out once."""


def contents(evidence: Evidence) -> Iterator[Violation]:
    """What is seen was published, by a publish that may have succeeded, with this very content."""
    told: set[tuple[Breach, Identity, str]] = set()
    for event in evidence.sightings:
        message = evidence.messages.get(identity(event))
        if evidence.is_aborted(event):
            breach = Breach.ABORTED
        elif evidence.is_phantom(event):
            breach = Breach.PHANTOM
        elif message is not None and (message.key != event.key or _differ(message.value, event.value)):
            breach = Breach.INCONSISTENT
        else:
            continue
        mention = (breach, identity(event), event.value)
        if mention not in told:
            told.add(mention)
            yield Violation(breach, f"{message or identity(event)} seen as key {event.key!r} {event.value!r}")


def _differ(known: str, seen: str) -> bool:
    return bool(known) and bool(seen) and known != seen


def positions(evidence: Evidence) -> Iterator[Violation]:
    """A message has one position, and a position one message, save for what a node lost and got again."""
    messages: dict[tuple[str, Segment, int], Identity] = {}
    places: defaultdict[Identity, set[tuple[int, str, int]]] = defaultdict(set)
    for append in _appended(evidence):
        at = (append.partition, append.run, append.offset)
        holder = messages.setdefault((append.topic, (append.partition, append.run), append.offset), identity(append))
        if holder != identity(append):
            yield Violation(Breach.INCONSISTENT, f"position {at} holds both {holder} and {identity(append)}")
        places[identity(append)].add(at)
    for of, found in places.items():
        if _is_duplicate(found):
            yield Violation(Breach.DUPLICATE_IN_STREAM, f"{of} is at {sorted(found)}")


def _is_duplicate(found: set[tuple[int, str, int]]) -> bool:
    partitions = {partition for partition, _, _ in found}
    runs = {(partition, run) for partition, run, _ in found}
    return len(partitions) > 1 or len(runs) < len(found)


def chains(evidence: Evidence) -> Iterator[Violation]:
    """For each source and LP the seqs in each partition, by offset, are consecutive, and together leave no hole.

    Where the lineage of partitions is known, what a partition holds of an LP comes after all that its ancestors hold.
    What every group handled in a partition that lost it afterwards is no hole: such a one need not be filled up again.
    """
    gone = _gone(evidence)
    of_chain: defaultdict[Chain, defaultdict[Segment, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for append in _appended(evidence):
        chain = of_chain[append.topic, append.source, append.lp]
        chain[append.partition, append.run][append.offset] = append.seq
    for name, segments in of_chain.items():
        ordered = {at: [by_offset[offset] for offset in sorted(by_offset)] for at, by_offset in segments.items()}
        for at, seqs in ordered.items():
            yield from _breaks_within(name, at, seqs)
        yield from _holes_between(name, ordered, gone[name])
        yield from _against_lineage(name, ordered, evidence)


def _breaks_within(chain: Chain, at: Segment, seqs: list[int]) -> Iterator[Violation]:
    seen = set(seqs[:1])
    for previous, seq in pairwise(seqs):
        # A repeated one is a duplicate in the stream, not a break of the chain.
        if seq != previous + 1 and seq not in seen:
            yield Violation(Breach.CHAIN_BREAK, f"{chain} in partition {at[0]}: {seq} follows {previous}")
        seen.add(seq)


def _gone(evidence: Evidence) -> Mapping[Chain, set[int]]:
    """Return what every group of a topic handled in a partition that fell back afterwards."""
    handled: defaultdict[Identity, set[str]] = defaultdict(set)
    for step in evidence.delivers:
        if step.outcome == "ok" and evidence.fell_back(step.event.topic, step.event.partition, step.began):
            handled[identity(step.event)].add(step.event.group)
    gone: defaultdict[Chain, set[int]] = defaultdict(set)
    for message, groups in handled.items():
        topic, source, lp, seq = message
        if all(group in groups for group, of in evidence.flows if of == topic):
            gone[topic, source, lp].add(seq)
    return gone


def _holes_between(chain: Chain, segments: dict[Segment, list[int]], gone: set[int]) -> Iterator[Violation]:
    covered = 0
    for at, seqs in sorted(segments.items(), key=lambda item: min(item[1])):
        while covered + 1 in gone:
            covered += 1
        if min(seqs) > covered + 1:
            yield Violation(
                Breach.CHAIN_BREAK, f"{chain}: {covered + 1} to {min(seqs) - 1} missing before partition {at[0]}"
            )
        covered = max(covered, *seqs)


def _against_lineage(chain: Chain, segments: dict[Segment, list[int]], evidence: Evidence) -> Iterator[Violation]:
    last: dict[int, int] = {}
    for (partition, _), seqs in segments.items():
        last[partition] = max(last.get(partition, 0), *seqs)
    for (partition, _), seqs in segments.items():
        for ancestor in sorted(evidence.ancestors(chain[0], partition) & last.keys()):
            if last[ancestor] > min(seqs):
                yield Violation(
                    Breach.CHAIN_BREAK,
                    f"{chain}: partition {partition} holds {min(seqs)}, its ancestor {ancestor} {last[ancestor]}",
                )


def seals(evidence: Evidence) -> Iterator[Violation]:
    """No message stands behind the command record of a partition, within one run of its node."""
    closed = {(s.event.topic, s.event.partition, s.event.run): s.event.offset for s in evidence.seals}
    for append in _appended(evidence):
        end = closed.get((append.topic, append.partition, append.run))
        if end is not None and append.offset > end:
            yield Violation(
                Breach.BEHIND_SEAL,
                f"{identity(append)} is at {append.offset} of partition {append.partition}, closed behind {end}",
            )


def _appended(evidence: Evidence) -> Iterator[Append]:
    return (step.event for step in evidence.appends if step.outcome == "ok")
