"""The judge of histories: what was promised, and whether it was kept.

    verdict = check(read_histories(directory))
    assert verdict.clean, verdict

Every rule is linear or n log n in the length of the histories: seqs give the order, so nothing has to be searched for.
What a rule needs and the histories lack makes it silent, never lenient by guess: no acks recorded, no judgement on
acks. An operation with an unknown outcome may have happened or not, whichever is right.

Values must be unique within a topic for `aborted` and `phantom` to be told.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.proof import completeness_rules, content_rules, order_rules, ownership_rules
from tests.proof.evidence import Evidence, Flow, identity
from tests.proof.history import Record
from tests.proof.violations import Breach, Violation

__all__ = ["Breach", "Verdict", "Violation", "check"]

EXAMPLES: Final = 20
"""How many violations of each kind a verdict shows; all are counted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the histories show: how often each promise was broken, examples, and what is allowed but worth knowing."""

    counts: Mapping[Breach, int]
    violations: tuple[Violation, ...]
    messages: int
    delivered: int
    redelivered: int
    stale_delivered: int
    repeated_effects: int

    @property
    def clean(self) -> bool:
        """Whether no promise was broken."""
        return not any(self.counts.values())

    @property
    def broken(self) -> frozenset[Breach]:
        """Which promises were broken."""
        return frozenset(breach for breach, count in self.counts.items() if count)

    def as_json(self) -> str:
        """Return the verdict as one line of JSON."""
        return json.dumps(
            {
                "clean": self.clean,
                "messages": self.messages,
                "delivered": self.delivered,
                "redelivered": self.redelivered,
                "stale_delivered": self.stale_delivered,
                "repeated_effects": self.repeated_effects,
                "counts": {str(breach): count for breach, count in self.counts.items()},
                "violations": [str(violation) for violation in self.violations],
            },
            ensure_ascii=False,
        )

    def __str__(self) -> str:
        found = {str(breach): count for breach, count in self.counts.items() if count}
        lines = [f"{self.messages} messages, {self.delivered} deliveries: {found or 'clean'}"]
        return "\n  ".join([*lines, *map(str, self.violations)])


def check(
    records: Sequence[Record],
    *,
    drained: bool = True,
    flows: Collection[Flow] | None = None,
    backlog_limit_s: float | None = None,
) -> Verdict:
    """Judge the histories of a run.

    `drained`: the run went on until nothing more came, so what was not handled is lost.
    `flows`: which groups had to handle which topics from their start; by default those that touched them at all.
    `backlog_limit_s`: how long an LP may get stuck with a message waiting; by default that is not judged.
    """
    evidence = Evidence.of(records)
    counts = order_rules.DeliveryCounts()
    tally = dict.fromkeys(Breach, 0)
    shown: list[Violation] = []
    for violation in _violations(evidence, counts, drained=drained, flows=flows, backlog_limit_s=backlog_limit_s):
        tally[violation.breach] += 1
        if tally[violation.breach] <= EXAMPLES:
            shown.append(violation)
    return Verdict(
        counts=tally,
        violations=tuple(shown),
        messages=len(evidence.messages),
        delivered=counts.delivered,
        redelivered=counts.redelivered,
        stale_delivered=counts.stale_delivered,
        repeated_effects=_repeated_effects(evidence),
    )


def _violations(
    evidence: Evidence,
    counts: order_rules.DeliveryCounts,
    *,
    drained: bool,
    flows: Collection[Flow] | None,
    backlog_limit_s: float | None,
) -> Iterator[Violation]:
    expected = evidence.flows if flows is None else flows
    yield from content_rules.contents(evidence)
    yield from content_rules.positions(evidence)
    yield from content_rules.chains(evidence)
    yield from content_rules.seals(evidence)
    yield from order_rules.deliveries(evidence, counts)
    yield from order_rules.effects(evidence)
    yield from order_rules.real_time(evidence)
    yield from ownership_rules.stale_effects(evidence)
    yield from ownership_rules.stale_acks(evidence)
    yield from ownership_rules.owners(evidence)
    yield from ownership_rules.gates(evidence)
    yield from ownership_rules.lineage(evidence)
    yield from completeness_rules.acks_without_effect(evidence)
    if drained:
        yield from completeness_rules.lost(evidence, expected)
    if backlog_limit_s is not None:
        yield from completeness_rules.unseen_backlog(evidence, expected, backlog_limit_s)


def _repeated_effects(evidence: Evidence) -> int:
    """Return how many unfenced effects came again: allowed, each message has at least one."""
    done = [
        (step.event.group, identity(step.event))
        for step in evidence.effects
        if not step.event.fenced and step.outcome == "ok"
    ]
    return len(done) - len(set(done))
