"""The autopilot's own rules, bounds and judgements on a simulated topic with one node: pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mqlayer.autopilot.auto_topics import AutoCluster, AutoNode, AutoPartition, AutoTopic, HotKey, LpLoads, PastChange
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.judging import ChangeToJudge, facts_before, judge, stop_reason
from mqlayer.autopilot.loads import TIMES, LoadSample, Times, load_figures
from mqlayer.autopilot.policy import PolicyState, RoutePolicy, check_policy
from mqlayer.autopilot.rules import MOST_OF_ONE, RULES, decide_by_samples
from mqlayer.autopilot.simulated_queues import OTHER_KEYS, SimulatedPartition
from mqlayer.autopilot.simulated_topic import SimulatedTopic
from mqlayer.autopilot.verdicts import AutoRule, Proposal
from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput

PASS_S: Final = 5.0
"""As the job auto_routes."""
LONGEST_SLOT_S: Final = 20.0
"""Longer slots are no samples."""
KEPT_SAMPLES: Final = 64
KEPT_CHANGES: Final = 1_000
NODE: Final = NodeId(1)


@dataclass(slots=True)
class SimulatedChange:
    """`helped`: None: unknown."""

    change_id: int
    at_s: float
    kind: str
    partitions: tuple[int, ...]
    successors: tuple[int, ...]
    reason: str
    facts: dict[str, float]
    helped: bool | None = None
    is_judged: bool = False


class SimulatedPilot:
    """To call after each slot. Raises InvalidInput for long slots, or a policy out of bounds."""

    def __init__(
        self, policy: RoutePolicy, times: Times = TIMES, *, pass_s: float = PASS_S, rules: Sequence[AutoRule] = RULES
    ) -> None:
        self._policy = check_policy(replace(policy, mode="on"))
        self._times, self._pass_s, self._rules = times, pass_s, rules
        self.changes: list[SimulatedChange] = []
        self.state = PolicyState()
        self._samples: dict[int, deque[LoadSample]] = {}
        self._sampled_at: dict[int, float] = {}
        self._next_s = 0.0

    def __call__(self, topic: SimulatedTopic) -> None:
        """Make a pass, if one is due."""
        if topic.arrivals.slot_s > LONGEST_SLOT_S:
            raise InvalidInput(f"automatic routes are simulated with slots of {LONGEST_SLOT_S:g} s at most: --slot")
        if topic.now_s < self._next_s:
            return
        self._next_s = topic.now_s + self._pass_s
        self._sample(topic)
        seen = self._seen(topic)
        if seen.limit_per_s is not None:
            self.state = replace(self.state, measured_per_s=seen.limit_per_s)
            seen = replace(seen, state=self.state)
        if self._judge_all(topic, seen):
            return
        seen, decision = decide_by_samples(
            seen, CLUSTER, self._rules, self._times.again_s, lambda whole, parts: self._with_loads(topic, whole, parts)
        )
        if decision.chosen is not None:
            self._change(topic, seen, decision.chosen)

    def _sample(self, topic: SimulatedTopic) -> None:
        for one in topic.open:
            samples = self._samples.setdefault(one.number, deque(maxlen=KEPT_SAMPLES))
            # No group consumes a partition whose parents are not drained: it is measured without a lag.
            settled = one.arrived if one.parents else one.served
            samples.appendleft(LoadSample(topic.now_s, one.arrived, settled))

    def _seen(self, topic: SimulatedTopic) -> AutoTopic:
        now = topic.arrivals.time_of(topic.slot)
        past = tuple(
            PastChange(one.change_id, one.kind, "done", ACTOR, topic.now_s - one.at_s, one.successors)
            for one in self.changes[-KEPT_CHANGES:]
        )
        parts = tuple(self._partition(topic, one) for one in topic.open)
        version = 1 + len(self.changes)
        minute = now.hour * 60 + now.minute
        return AutoTopic(1, "", version, self._policy, self.state, parts, past, now, minute)

    def _partition(self, topic: SimulatedTopic, one: SimulatedPartition) -> AutoPartition:
        sampled = self._sampled_at.get(one.number)
        return AutoPartition(
            one.number,
            NODE,
            one.lp_from,
            one.lp_to,
            (topic.slot - one.born) * topic.arrivals.slot_s,
            bool(one.parents),
            None if sampled is None else topic.now_s - sampled,
            load_figures(self._samples[one.number], self._times),
        )

    def _with_loads(self, topic: SimulatedTopic, whole: AutoTopic, candidates: Sequence[AutoPartition]) -> AutoTopic:
        """Count the last arrivals per LP, as many as a sample has."""
        slots = max(1, round(self._times.sample_s / topic.arrivals.slot_s))
        part = min(1.0, self._times.sample_s / (slots * topic.arrivals.slot_s))
        per_lp: Counter[int] = Counter()
        per_key: Counter[tuple[int, int]] = Counter()
        for slot in range(max(0, topic.slot - slots), topic.slot):
            for lp, key, messages in topic.arrivals.at(slot):
                per_lp[lp] += messages
                if key != OTHER_KEYS:
                    per_key[lp, key] += messages
        self._sampled_at |= dict.fromkeys((one.partition for one in candidates), topic.now_s)
        loads = {}
        for one in candidates:
            own = {lp: round(n * part) for lp, n in per_lp.items() if one.lp_from <= lp < one.lp_to and round(n * part)}
            loads[one.partition] = LpLoads(own, _hot_key(topic, one, per_lp, per_key))
        partitions = tuple(replace(one, loads=loads.get(one.partition)) for one in whole.partitions)
        return replace(whole, partitions=partitions)

    def _judge_all(self, topic: SimulatedTopic, seen: AutoTopic) -> bool:
        """Return whether the autopilot stopped."""
        stops = False
        for one in [one for one in self.changes if not one.is_judged]:
            drained = not any(topic.partitions[n].parents for n in one.successors if n in topic.partitions)
            made = ChangeToJudge(
                one.change_id, one.change_id, one.kind, one.facts, "done", topic.now_s - one.at_s, drained,
                one.successors,
            )  # fmt: skip
            judgement = judge(seen, made, self._times)
            if judgement is None:
                continue
            one.is_judged, one.helped = True, judgement.helped
            unhelpful = self.state.unhelpful
            unhelpful = {None: unhelpful, True: 0, False: unhelpful + 1}[judgement.helped]
            self.state = replace(self.state, unhelpful=unhelpful)
            if reason := stop_reason(judgement, unhelpful):
                self.state = replace(self.state, stopped_at=seen.at, stopped_because=reason)
                stops = True
        return stops

    def _change(self, topic: SimulatedTopic, seen: AutoTopic, chosen: Proposal) -> None:
        parents = [one for one in seen.partitions if one.partition in chosen.partitions]
        facts = facts_before(seen, parents, chosen.share)
        if chosen.kind == "split":
            made = topic.split(chosen.partitions[0], chosen.points)
        else:
            made = topic.merge(chosen.partitions)
        for number in chosen.partitions:
            self._samples.pop(number, None)
        number = len(self.changes) + 1
        self.changes.append(
            SimulatedChange(number, topic.now_s, chosen.kind, chosen.partitions, tuple(made), chosen.reason, facts)
        )


CLUSTER: Final = AutoCluster([AutoNode(NODE, "")])


def _hot_key(
    topic: SimulatedTopic, one: AutoPartition, per_lp: Counter[int], per_key: Counter[tuple[int, int]]
) -> HotKey | None:
    total = sum(messages for lp, messages in per_lp.items() if one.lp_from <= lp < one.lp_to)
    own = {at: messages for at, messages in per_key.items() if one.lp_from <= at[0] < one.lp_to}
    if not own or max(own.values()) <= MOST_OF_ONE * total:
        return None
    (lp, key), messages = max(own.items(), key=lambda item: item[1])
    return HotKey(topic.arrivals.keys[key], lp, messages / total)
