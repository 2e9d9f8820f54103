"""Histories put in order for judging: operations with their outcomes, and the messages that exist."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from tests.proof.history import (
    Ack,
    Append,
    Deliver,
    Drain,
    Effect,
    Event,
    FallBack,
    Gate,
    Health,
    Lineage,
    MessageEvent,
    OwnershipEvent,
    Publish,
    Quarantined,
    Record,
    Seal,
    Settled,
)

NEVER: Final = sys.maxsize
"""When an operation ended that may still happen."""

Identity: TypeAlias = tuple[str, int, int, int]
"""Topic, source, LP, seq."""

Flow: TypeAlias = tuple[str, str]
"""A group and a topic that it consumes."""

E_co = TypeVar("E_co", bound=Event, covariant=True)


@dataclass(frozen=True, slots=True)
class Step(Generic[E_co]):
    """An operation with what is known of it at the end.

    It took place, if it did, between `began` and `ended`: times or numbers of a shared sequence, comparable among
    all steps of one evidence. `writer` is the process that did it.
    """

    event: E_co
    outcome: Literal["ok", "fail", "info"]
    began: int
    ended: int
    began_ns: int
    ended_ns: int
    writer: str

    @property
    def possible(self) -> bool:
        """Whether it happened or may have happened."""
        return self.outcome != "fail"


@dataclass(frozen=True, slots=True)
class Message:
    """A message as its best witness tells it; `published` is its successful publish, if that was recorded."""

    identity: Identity
    key: str | None
    value: str
    published: Step[Publish] | None = None

    def __str__(self) -> str:
        topic, source, lp, seq = self.identity
        value = f" {self.value!r}" if self.value else ""
        return f"{topic} key {self.key!r} {source}:{lp}:{seq}{value}"


@dataclass
class Evidence:
    """Everything that a set of histories says."""

    publishes: list[Step[Publish]] = field(default_factory=list)
    appends: list[Step[Append]] = field(default_factory=list)
    delivers: list[Step[Deliver]] = field(default_factory=list)
    effects: list[Step[Effect]] = field(default_factory=list)
    acks: list[Step[Ack]] = field(default_factory=list)
    settled: list[Step[Settled]] = field(default_factory=list)
    set_asides: list[Step[Quarantined]] = field(default_factory=list)
    gates: list[Step[Gate]] = field(default_factory=list)
    drains: list[Step[Drain]] = field(default_factory=list)
    lineages: list[Step[Lineage]] = field(default_factory=list)
    seals: list[Step[Seal]] = field(default_factory=list)
    assignments: list[Step[OwnershipEvent]] = field(default_factory=list)
    fall_backs: list[Step[FallBack]] = field(default_factory=list)
    healths: list[Step[Health]] = field(default_factory=list)
    ended_ns: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> Evidence:
        """Put the lines of histories in order."""
        evidence = cls(ended_ns=max((record.at_ns for record in records), default=0))
        for step in _steps(records):
            evidence._lists[type(step.event)].append(step)
        return evidence

    @cached_property
    def _lists(self) -> Mapping[type[Event], list[Step[Event]]]:
        lists: dict[type[Event], object] = {
            Publish: self.publishes,
            Append: self.appends,
            Deliver: self.delivers,
            Effect: self.effects,
            Ack: self.acks,
            Settled: self.settled,
            Quarantined: self.set_asides,
            Gate: self.gates,
            Drain: self.drains,
            Lineage: self.lineages,
            Seal: self.seals,
            OwnershipEvent: self.assignments,
            FallBack: self.fall_backs,
            Health: self.healths,
        }
        return lists  # type: ignore[return-value]

    @cached_property
    def messages(self) -> Mapping[Identity, Message]:
        """Every message that exists: published for sure, or seen and neither aborted nor a phantom."""
        found: dict[Identity, Message] = {}
        for publish in self.publishes:
            if publish.outcome == "ok":
                message = Message(identity(publish.event), publish.event.key, publish.event.value, publish)
                found[message.identity] = message
        for seen in self.sightings:
            if identity(seen) not in found and not self.is_aborted(seen) and not self.is_phantom(seen):
                found[identity(seen)] = Message(identity(seen), seen.key, seen.value)
        return found

    @cached_property
    def sightings(self) -> Sequence[MessageEvent]:
        """Each time that a message was certainly seen outside its publisher; the surest first."""
        return [
            *(step.event for step in self.appends if step.outcome == "ok"),
            *(step.event for step in self.delivers),
            *(step.event for step in self.effects if step.outcome == "ok"),
        ]

    def is_aborted(self, event: MessageEvent) -> bool:
        """Whether what was seen is known only from publishes that failed."""
        content = (event.topic, event.value)
        return bool(event.value) and content in self._failed_contents and content not in self._possible_contents

    def is_phantom(self, event: MessageEvent) -> bool:
        """Whether nobody published what was seen, though publishing to its topic was recorded."""
        return (
            event.topic in self._recorded_topics
            and identity(event) not in self._published
            and bool(event.value)
            and (event.topic, event.value) not in self._possible_contents
            and not self.is_aborted(event)
        )

    @cached_property
    def _published(self) -> frozenset[Identity]:
        return frozenset(identity(step.event) for step in self.publishes if step.outcome == "ok")

    @cached_property
    def _recorded_topics(self) -> frozenset[str]:
        return frozenset(step.event.topic for step in self.publishes)

    @cached_property
    def _possible_contents(self) -> frozenset[tuple[str, str]]:
        return frozenset((step.event.topic, step.event.value) for step in self.publishes if step.possible)

    @cached_property
    def _failed_contents(self) -> frozenset[tuple[str, str]]:
        return frozenset((step.event.topic, step.event.value) for step in self.publishes if not step.possible)

    @cached_property
    def flows(self) -> frozenset[Flow]:
        """Which group consumed which topic."""
        steps: Iterable[Step[Deliver | Effect | Ack | Quarantined]] = (
            *self.delivers,
            *self.effects,
            *self.acks,
            *self.set_asides,
        )
        return frozenset((step.event.group, step.event.topic) for step in steps)

    @cached_property
    def fenced_groups(self) -> frozenset[str]:
        """Groups that are judged by what is in their sink."""
        return frozenset(step.event.group for step in self.effects if step.event.fenced)

    @cached_property
    def acking_groups(self) -> frozenset[str]:
        """Groups whose acks were recorded."""
        return frozenset(step.event.group for step in self.acks)

    @cached_property
    def parents(self) -> Mapping[tuple[str, int], frozenset[int]]:
        """For each topic and partition that a route change made, those whose place it took."""
        found: defaultdict[tuple[str, int], frozenset[int]] = defaultdict(frozenset)
        for step in self.lineages:
            found[step.event.topic, step.event.partition] |= frozenset(step.event.parents)
        return found

    @cached_property
    def fall_back_times(self) -> Mapping[tuple[str, int], list[int]]:
        """For each topic and partition when its node lost something, in order."""
        times: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for step in sorted(self.fall_backs, key=lambda step: step.began):
            times[step.event.topic, step.event.partition].append(step.began)
        return times

    def fell_back(self, topic: str, partition: int, after: int, before: int = NEVER) -> bool:
        """Return whether a partition fell back between two times."""
        times = self.fall_back_times.get((topic, partition), [])
        first = bisect_left(times, after)
        return first < len(times) and times[first] <= before

    def ancestors(self, topic: str, partition: int) -> frozenset[int]:
        """Return all partitions that came before one in its lineage."""
        if (topic, partition) not in self._ancestors:
            self._ancestors[topic, partition] = self._find_ancestors(topic, partition)
        return self._ancestors[topic, partition]

    @cached_property
    def _ancestors(self) -> dict[tuple[str, int], frozenset[int]]:
        return {}

    def descendants(self, topic: str, partition: int) -> frozenset[int]:
        """Return all partitions that came after one in its lineage."""
        if (topic, partition) not in self._descendants:
            later = (p for of, p in self.parents if of == topic and partition in self.ancestors(topic, p))
            self._descendants[topic, partition] = frozenset(later)
        return self._descendants[topic, partition]

    @cached_property
    def _descendants(self) -> dict[tuple[str, int], frozenset[int]]:
        return {}

    def _find_ancestors(self, topic: str, partition: int) -> frozenset[int]:
        found: set[int] = set()
        waiting = {partition}
        while waiting:
            parents = self.parents.get((topic, waiting.pop()), frozenset())
            waiting |= parents - found
            found |= parents
        return frozenset(found)

    @cached_property
    def seqs_by_key(self) -> Mapping[tuple[str, str, int], list[int]]:
        """For each topic, key and source the seqs of its messages, in order."""
        seqs: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
        for (topic, source, _, seq), message in self.messages.items():
            if message.key is not None:
                seqs[topic, message.key, source].append(seq)
        for of_key in seqs.values():
            of_key.sort()
        return seqs


def identity(event: MessageEvent) -> Identity:
    """Return the identity of the message that an event is about."""
    return (event.topic, event.source, event.lp, event.seq)


def _steps(records: Sequence[Record]) -> Iterator[Step[Event]]:
    numbered = all(record.sequence is not None for record in records)
    begun: dict[tuple[str, int, int], Record] = {}
    for record in sorted(records, key=_moment if numbered else _time):
        operation = (record.process, record.pid, record.operation)
        if record.phase == "invoke":
            begun[operation] = record
        else:
            yield _step(begun.pop(operation, record), record, numbered=numbered)
    for record in begun.values():
        yield _step(record, None, numbered=numbered)


def _step(invoke: Record, outcome: Record | None, *, numbered: bool) -> Step[Event]:
    moment = _moment if numbered else _time
    certain = outcome is not None and outcome.phase != "info"
    return Step(
        event=invoke.event if outcome is None else outcome.event,
        outcome="info" if outcome is None or outcome.phase == "invoke" else outcome.phase,
        began=moment(invoke),
        ended=moment(outcome) if outcome is not None and certain else NEVER,
        began_ns=invoke.at_ns,
        ended_ns=outcome.at_ns if outcome is not None and certain else NEVER,
        writer=f"{invoke.process}.{invoke.pid}",
    )


def _moment(record: Record) -> int:
    return record.sequence or 0


def _time(record: Record) -> int:
    return record.at_ns
