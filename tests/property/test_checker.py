"""The checker is silent on every correct history, and finds every planted breach under its right name.

A checker that never failed would prove nothing: each plant changes one correct history in one way.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fixtures.variants import some_of
from tests.proof.checker import Breach, check
from tests.proof.evidence import identity
from tests.proof.history import (
    Ack,
    Append,
    Deliver,
    Drain,
    Effect,
    Event,
    Gate,
    Lineage,
    MessageEvent,
    OwnershipEvent,
    Phase,
    Publish,
    Quarantined,
    Record,
    Seal,
)
from tests.proof.stories import GROUP, TOPIC, Model

E = TypeVar("E", bound=Event)
Of = TypeVar("Of")
Plant = Callable[["Garden"], None]

PLANTS: dict[str, tuple[Plant, Collection[Breach]]] = {}


def plant(*breaches: Breach) -> Callable[[Plant], Plant]:
    """Register a change of correct histories, with the breaches of which it must show one at least."""

    def register(change: Plant) -> Plant:
        PLANTS[change.__name__] = (change, breaches)
        return change

    return register


@dataclass
class Garden:
    """A correct history to plant one breach in."""

    records: list[Record]
    rng: random.Random
    backlog_limit_s: float = 60

    def of(self, kind: type[E], phase: Phase = "ok") -> list[tuple[Record, E]]:
        """Return the lines of a kind, with their events."""
        return [(r, r.event) for r in self.records if isinstance(r.event, kind) and r.phase == phase]

    def some(self, choices: Sequence[Of]) -> Of:
        """Choose, or give this history up."""
        assume(choices)
        return self.rng.choice(choices)

    def change(self, record: Record, **facts: Any) -> None:
        """Change facts of one line."""
        changed = msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, **facts))
        self.records[self.records.index(record)] = changed

    def move(self, record: Record, at_ns: int) -> None:
        """Let a line have been written at another time."""
        self.records[self.records.index(record)] = msgspec.structs.replace(record, at_ns=at_ns)

    def add(self, event: Event, at_ns: int | None = None, *, process: str = "planted") -> None:
        """Let something have happened, by default at the end."""
        at_ns = self.records[-1].at_ns + 1 if at_ns is None else at_ns
        operation = len(self.records) + 1_000_000
        record = Record(process=process, pid=1, operation=operation, phase="ok", at_ns=at_ns, event=event)
        self.records = sorted([*self.records, record], key=lambda record: record.at_ns)

    def remove(self, unwanted: Callable[[Event], bool]) -> None:
        """Let something not have happened."""
        self.records = [record for record in self.records if not unwanted(record.event)]

    def remove_handling(self, event: MessageEvent) -> None:
        """Let a message never have been handled."""
        kinds = (Deliver, Effect, Ack, Quarantined)
        self.remove(lambda other: isinstance(other, kinds) and identity(other) == identity(event))

    def effects_by(self, *names: str) -> list[list[tuple[Record, Effect]]]:
        """Return the effects in the order of the sink, for each value of these facts, where there are two or more."""
        found: defaultdict[tuple[Any, ...], list[tuple[Record, Effect]]] = defaultdict(list)
        for record, effect in sorted(self.of(Effect), key=lambda pair: pair[1].place or 0):
            found[tuple(getattr(effect, name) for name in names)].append((record, effect))
        return [effects for effects in found.values() if len(effects) > 1]

    def first_deliveries(self) -> list[tuple[Record, Deliver]]:
        """Return the beginning of each message's first delivery."""
        first: dict[object, tuple[Record, Deliver]] = {}
        for record, deliver in self.of(Deliver, "invoke"):
            first.setdefault(identity(deliver), (record, deliver))
        return list(first.values())


def about(event: MessageEvent) -> dict[str, Any]:
    """Return the part of an event that names the message."""
    return {name: getattr(event, name) for name in MessageEvent.__struct_fields__}


@plant(Breach.LOST)
def the_last_message_of_a_key_is_dropped(garden: Garden) -> None:
    last = {deliver.key: deliver for _, deliver in sorted(garden.of(Deliver), key=lambda pair: pair[1].seq)}
    garden.remove_handling(garden.some(list(last.values())))


@plant(Breach.SKIP_WITHOUT_RECORD)
def a_message_in_the_middle_is_skipped(garden: Garden) -> None:
    highest = {d.key: d.seq for _, d in sorted(garden.of(Deliver), key=lambda pair: pair[1].seq)}
    garden.remove_handling(garden.some([d for _, d in garden.of(Deliver) if d.seq < highest[d.key]]))


@plant(Breach.LOST, Breach.SKIP_WITHOUT_RECORD)
def the_record_of_a_skip_is_not_written(garden: Garden) -> None:
    applied = {identity(effect) for _, effect in garden.of(Effect)}
    _, aside = garden.some([pair for pair in garden.of(Quarantined) if identity(pair[1]) not in applied])
    garden.remove(lambda event: isinstance(event, Quarantined) and identity(event) == identity(aside))


@plant(Breach.DUPLICATE_EFFECT)
def an_effect_happens_twice(garden: Garden) -> None:
    _, effect = garden.some(garden.of(Effect))
    garden.add(msgspec.structs.replace(effect, place=1_000_000, epoch=1_000_000))


@plant(Breach.INVERSION)
def two_effects_of_a_key_are_swapped(garden: Garden) -> None:
    effects = garden.some(garden.effects_by("key"))
    (one, first), (other, second) = effects[0], effects[1]
    garden.change(one, place=second.place)
    garden.change(other, place=first.place)


@plant(Breach.INVERSION)
def two_messages_of_a_key_are_handled_in_wrong_order(garden: Garden) -> None:
    keys: defaultdict[str | None, list[Deliver]] = defaultdict(list)
    handled = {identity(d) for _, d in garden.of(Deliver)} - {identity(a) for _, a in garden.of(Quarantined)}
    for _, deliver in garden.first_deliveries():
        if identity(deliver) in handled:
            keys[deliver.key].append(deliver)
    first, second = garden.some([delivers[:2] for delivers in keys.values() if len(delivers) > 1])
    exchanged = {identity(first): second, identity(second): first}
    for record, deliver in [*garden.of(Deliver, "invoke"), *garden.of(Deliver), *garden.of(Deliver, "fail")]:
        if identity(deliver) in exchanged:
            other = exchanged[identity(deliver)]
            garden.change(record, seq=other.seq, value=other.value)


@plant(Breach.INVERSION)
def a_message_begins_while_the_one_before_is_running(garden: Garden) -> None:
    ends = {(r.process, r.operation): r for r, _ in garden.of(Deliver)}
    running = [
        (record, ends[record.process, record.operation])
        for record, _ in garden.first_deliveries()
        if (record.process, record.operation) in ends
    ]
    begin, end = garden.some(running)
    event = begin.event
    assert isinstance(event, Deliver)
    later = [d for _, d in garden.first_deliveries() if d.key == event.key and d.seq == event.seq + 1]
    garden.add(garden.some(later), (begin.at_ns + end.at_ns) // 2)
    assume(end.at_ns - begin.at_ns > 1)


@plant(Breach.STALE_EFFECT)
def a_stale_owner_has_an_effect(garden: Garden) -> None:
    effects = garden.some(garden.effects_by("lp"))
    record, _ = garden.some(effects[1:])
    garden.change(record, epoch=0)


@plant(Breach.INCONSISTENT)
def an_effect_has_another_value(garden: Garden) -> None:
    record, effect = garden.some(garden.of(Effect))
    garden.change(record, value=garden.some([p.value for _, p in garden.of(Publish) if p.value != effect.value]))


@plant(Breach.INCONSISTENT)
def a_message_has_another_key_in_the_stream(garden: Garden) -> None:
    record, _ = garden.some(garden.of(Append))
    garden.change(record, key="nobody")


@plant(Breach.ABORTED)
def a_rolled_back_message_is_handled(garden: Garden) -> None:
    _, failed = garden.some(garden.of(Publish, "fail"))
    garden.add(Deliver(**about(failed), group=GROUP, partition=1, epoch=1_000_000))


@plant(Breach.PHANTOM)
def a_message_appears_from_nowhere(garden: Garden) -> None:
    _, effect = garden.some(garden.of(Effect))
    garden.add(msgspec.structs.replace(effect, seq=1_000_000, value="from nowhere", place=1_000_000, epoch=1_000_000))


@plant(Breach.DUPLICATE_IN_STREAM)
def a_message_is_appended_twice(garden: Garden) -> None:
    _, append = garden.some(garden.of(Append))
    garden.add(msgspec.structs.replace(append, offset=1_000_000))


@plant(Breach.CHAIN_BREAK)
def a_message_is_missing_in_the_stream(garden: Garden) -> None:
    last = {append.lp: append.seq for _, append in garden.of(Append)}
    _, append = garden.some([(r, a) for r, a in garden.of(Append) if a.seq < last[a.lp]])
    garden.remove(lambda event: isinstance(event, Append) and identity(event) == identity(append))


@plant(Breach.CHAIN_BREAK)
def two_messages_of_an_lp_are_appended_in_wrong_order(garden: Garden) -> None:
    chains: defaultdict[tuple[int, int], list[tuple[Record, Append]]] = defaultdict(list)
    for record, append in garden.of(Append):
        chains[append.partition, append.lp].append((record, append))
    chain = garden.some([chain for chain in chains.values() if len(chain) > 1])
    (one, first), (other, second) = chain[0], chain[1]
    garden.change(one, offset=second.offset)
    garden.change(other, offset=first.offset)


@plant(Breach.REAL_TIME_INVERSION)
def a_message_overtakes_one_that_was_committed_before_it_began(garden: Garden) -> None:
    keys: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record, publish in garden.of(Publish):
        keys[publish.key].append(record)
    first, second = garden.some([records[:2] for records in keys.values() if len(records) > 1])
    ends_ns = garden.records[-1].at_ns
    for record in [r for r in garden.records if (r.process, r.operation) == (first.process, first.operation)]:
        garden.move(record, record.at_ns + ends_ns)
    assert second.at_ns < first.at_ns + ends_ns


@plant(Breach.BEFORE_GATE)
def a_gate_opens_late(garden: Garden) -> None:
    successors = {deliver.partition for _, deliver in garden.of(Deliver, "invoke")}
    gates = [record for record, gate in garden.of(Gate, "invoke") if gate.partition in successors]
    gate = garden.some(gates)
    ends_ns = garden.records[-1].at_ns
    for record in [r for r in garden.records if r.operation == gate.operation and r.process == gate.process]:
        garden.move(record, ends_ns + 1)


@plant(Breach.BEFORE_GATE)
def a_gate_opens_with_a_message_of_the_parent_not_settled(garden: Garden) -> None:
    successors = {d.partition for _, d in garden.of(Deliver, "invoke")} - {1, 2}
    assume(successors)
    settled = [(record, ack) for record, ack in garden.of(Ack, "invoke") if ack.partition == 1]
    _, ack = garden.some(settled)
    garden.remove(lambda event: isinstance(event, Ack | Quarantined) and identity(event) == identity(ack))


@plant(Breach.BEFORE_GATE)
def a_group_reads_a_successor_before_it_has_drained_the_parent(garden: Garden) -> None:
    """The gates themselves say nothing wrong: the lineage and the word of the group do."""
    garden.some([d for _, d in garden.of(Deliver, "invoke") if d.partition in {3, 4}])
    garden.remove(lambda event: isinstance(event, Gate))
    drain, _ = garden.some(garden.of(Drain, "invoke"))
    ends_ns = garden.records[-1].at_ns
    for record in [r for r in garden.records if isinstance(r.event, Drain)]:
        garden.move(record, ends_ns + 1 + (record.at_ns - drain.at_ns))


@plant(Breach.BEFORE_GATE)
def a_group_reads_a_successor_while_a_message_of_the_parent_is_not_handled(garden: Garden) -> None:
    garden.some([d for _, d in garden.of(Deliver, "invoke") if d.partition in {3, 4}])
    garden.remove(lambda event: isinstance(event, Gate | Drain))
    garden.remove_handling(garden.some([d for _, d in garden.of(Deliver) if d.partition == 1]))


@plant(Breach.BEHIND_SEAL)
def a_message_is_appended_to_a_closed_partition(garden: Garden) -> None:
    record, seal = garden.some([(r, s) for r, s in garden.of(Seal) if s.offset > 0])
    garden.change(record, offset=seal.offset - 1)


@plant(Breach.CHAIN_BREAK)
def the_rest_of_a_chain_goes_to_the_parent_and_its_beginning_to_the_successor(garden: Garden) -> None:
    chains: defaultdict[int, list[tuple[Record, Append]]] = defaultdict(list)
    for record, append in garden.of(Append):
        chains[append.lp].append((record, append))
    garden.some([record for record, _ in garden.of(Lineage)])
    whole = [chain for chain in chains.values() if {a.partition for _, a in chain} in ({1, 3}, {1, 4})]
    chain = garden.some([chain for chain in whole if len(chain) > 1])
    successor = next(a.partition for _, a in chain if a.partition != 1)
    for record, append in chain:
        garden.change(record, partition=successor if append is chain[0][1] else 1, offset=append.seq + 1_000)


@plant(Breach.ACK_WITHOUT_EFFECT)
def a_message_is_acknowledged_before_it_is_handled(garden: Garden) -> None:
    applied_before = {identity(effect) for _, effect in garden.of(Effect)}
    begin, deliver = garden.some([p for p in garden.first_deliveries() if identity(p[1]) not in applied_before])
    garden.add(Ack(**about(deliver), group=GROUP, partition=deliver.partition, epoch=deliver.epoch), begin.at_ns + 1)


@plant(Breach.STALE_ACK)
def a_stale_owner_settles(garden: Garden) -> None:
    highest: dict[int, int] = {}
    for _, taken in garden.of(OwnershipEvent):
        highest[taken.partition] = max(highest.get(taken.partition, 0), taken.epoch)
    stale = [ack for _, ack in garden.of(Ack) if ack.epoch < highest[ack.partition]]
    garden.add(garden.some(stale))


@plant(Breach.TWO_OWNERS)
def two_members_take_one_epoch(garden: Garden) -> None:
    _, taken = garden.some(garden.of(OwnershipEvent))
    garden.add(msgspec.structs.replace(taken, member="another"))


@plant(Breach.TWO_OWNERS)
def an_old_epoch_is_taken_again(garden: Garden) -> None:
    _, taken = garden.some(garden.of(OwnershipEvent))
    garden.add(msgspec.structs.replace(taken, epoch=0))


@plant(Breach.TWO_OWNERS)
def a_lease_is_longer_than_the_database_thinks(garden: Garden) -> None:
    owners: defaultdict[int, list[Record]] = defaultdict(list)
    for record, taken in garden.of(OwnershipEvent):
        owners[taken.partition].append(record)
    first = garden.some([records[0] for records in owners.values() if len(records) > 1])
    garden.change(first, until_ns=garden.records[-1].at_ns)


@plant(Breach.REPLAY_OF_SETTLED)
def a_settled_message_comes_again(garden: Garden) -> None:
    handled = {identity(deliver) for _, deliver in garden.of(Deliver)}
    ack = garden.some([a for _, a in garden.of(Ack) if identity(a) in handled])
    garden.add(Deliver(**about(ack), group=GROUP, partition=ack.partition, epoch=1_000_000))


@plant(Breach.REPLAY_OUT_OF_ORDER)
def an_owner_passes_over_what_nobody_settled(garden: Garden) -> None:
    keys: defaultdict[str | None, list[Deliver]] = defaultdict(list)
    aside = {identity(event) for _, event in garden.of(Quarantined)}
    for _, deliver in garden.first_deliveries():
        keys[deliver.key].append(deliver)
    pairs = [delivers[-2:] for delivers in keys.values() if len(delivers) > 1 and identity(delivers[-2]) not in aside]
    passed, following = garden.some(pairs)
    garden.remove(lambda event: isinstance(event, Ack) and identity(event) == identity(passed))
    garden.add(msgspec.structs.replace(following, epoch=1_000_000))


@plant(Breach.UNSEEN_BACKLOG)
def a_message_waits_while_nothing_happens(garden: Garden) -> None:
    record, _ = garden.some([p for p in garden.first_deliveries() if p[1].value in published_values(garden, p[0])])
    shift_ns = 10 * 10**9
    garden.records = [
        msgspec.structs.replace(r, at_ns=r.at_ns + (shift_ns if r.at_ns >= record.at_ns else 0)) for r in garden.records
    ]
    garden.backlog_limit_s = 9


def published_values(garden: Garden, before: Record) -> set[str]:
    return {publish.value for record, publish in garden.of(Publish) if record.at_ns < before.at_ns}


def models(*, least_messages: int) -> st.SearchStrategy[Model]:
    return st.builds(
        lambda seed, keys, messages: Model(random.Random(seed), keys=keys, messages=messages),
        seed=st.integers(0, 2**32 - 1),
        keys=st.integers(1, 6),
        messages=st.integers(least_messages, 60),
    )


@settings(deadline=None)
@given(models(least_messages=0))
def test_a_correct_history_is_clean(model: Model) -> None:
    """Crashes, replays, dead letters, rollbacks and a split included."""
    verdict = check(model.run(), flows=[(GROUP, TOPIC)], backlog_limit_s=60)
    assert verdict.clean, verdict


@settings(deadline=None, max_examples=20)
@given(models(least_messages=0), st.randoms(use_true_random=False))
def test_the_order_of_the_lines_in_the_files_does_not_matter(model: Model, rng: random.Random) -> None:
    """Time decides."""
    records = model.run()
    assert check(sorted(records, key=lambda _: rng.random())) == check(records)


@pytest.mark.parametrize("name", some_of(PLANTS, 3))
@settings(deadline=None, max_examples=30)
@given(model=models(least_messages=20), seed=st.integers(0, 2**32 - 1))
def test_every_planted_breach_is_found(name: str, model: Model, seed: int) -> None:
    """Under the name it deserves."""
    change, breaches = PLANTS[name]
    garden = Garden(model.run(), random.Random(seed))
    change(garden)
    verdict = check(garden.records, flows=[(GROUP, TOPIC)], backlog_limit_s=garden.backlog_limit_s)
    assert verdict.broken.intersection(breaches), verdict


def test_every_breach_is_planted() -> None:
    """A rule that no plant breaks proves nothing."""
    assert {breach for _, breaches in PLANTS.values() for breach in breaches} == set(Breach)
