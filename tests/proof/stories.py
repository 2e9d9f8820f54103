"""Histories that nobody lived: told line by line, or drawn from a small model of a correct system.

They prove the checker: what the model does is clean, and each change that breaks one promise is found.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tests.proof.history import (
    Ack,
    Append,
    Deliver,
    Drain,
    Effect,
    Event,
    Gate,
    Lineage,
    OwnershipEvent,
    Phase,
    Publish,
    Quarantined,
    Record,
    Seal,
)

TOPIC: Final = "orders"
GROUP: Final = "billing"
TICK_NS: Final = 1_000_000


class Story:
    """Lines of histories with a clock that goes on by a millisecond each line."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.now_ns = 0
        self._operations: dict[int, Record] = {}

    def begin(self, event: Event, *, process: str = "p") -> int:
        """Tell of an operation that begins; return its number."""
        number = len(self.records) + 1
        record = self._line(number, "invoke", event, process)
        self._operations[number] = record
        return number

    def end(self, operation: int, phase: Phase = "ok", **facts: Any) -> None:
        """Tell how an operation ended, with what became known."""
        invoke = self._operations.pop(operation)
        self._line(operation, phase, msgspec.structs.replace(invoke.event, **facts), invoke.process)

    def tell(self, event: Event, phase: Phase = "ok", *, process: str = "p") -> None:
        """Tell of an operation that nothing came in between of."""
        self.end(self.begin(event, process=process), phase)

    def pause(self, pause_s: float) -> None:
        """Let time go by."""
        self.now_ns += int(pause_s * 1e9)

    def _line(self, operation: int, phase: Phase, event: Event, process: str) -> Record:
        self.now_ns += TICK_NS
        record = Record(process=process, pid=1, operation=operation, phase=phase, at_ns=self.now_ns, event=event)
        self.records.append(record)
        return record


@dataclass(frozen=True, slots=True)
class Fact:
    """A message of the model, published once and for all."""

    key: str
    lp: int
    seq: int
    value: str

    def fields(self) -> dict[str, Any]:
        """Return the part of an event that names the message."""
        return {"topic": TOPIC, "key": self.key, "source": 1, "lp": self.lp, "seq": self.seq, "value": self.value}


@dataclass
class _Partition:
    """A stream with one group's state, and what its present owner has in hand."""

    number: int
    readable: bool
    log: list[Fact] = field(default_factory=list)
    settled: set[Fact] = field(default_factory=set)
    epoch: int = 0
    started: set[Fact] = field(default_factory=set)
    running: dict[str, tuple[Fact, int]] = field(default_factory=dict)
    handled: list[Fact] = field(default_factory=list)

    @property
    def member(self) -> str:
        return f"member-{self.epoch}"

    @property
    def drained(self) -> bool:
        return self.settled.issuperset(self.log)

    def next_of_keys(self) -> list[Fact]:
        """Return the first message of each free key that the owner has not started."""
        first: dict[str, Fact] = {}
        for fact in self.log:
            if fact not in self.settled and fact not in self.started:
                first.setdefault(fact.key, fact)
        return [fact for key, fact in first.items() if key not in self.running]


class Model:
    """A correct system in small: writers, a relay, owners that crash, a split in the middle.

    Three LPs; LPs 0 and 1 move from partition 1 to partitions 3 and 4, LP 2 stays in partition 2.
    """

    def __init__(self, rng: random.Random, *, keys: int, messages: int) -> None:
        self._rng = rng
        self._keys = [f"k{number}" for number in range(keys)]
        self._unpublished = messages
        self.story = Story()
        self._committed: defaultdict[int, list[Fact]] = defaultdict(list)
        self._appended: defaultdict[int, int] = defaultdict(int)
        self._writing: dict[int, tuple[Fact, int]] = {}
        self._partitions = {number: _Partition(number, number < 3) for number in (1, 2, 3, 4)}
        self._home = {0: 1, 1: 1, 2: 2}
        self._epochs = 0
        self._applied: set[Fact] = set()
        self._gate_open = False

    def run(self) -> list[Record]:
        """Run until everything is handled; return the histories."""
        for partition in self._partitions.values():
            if partition.readable:
                self._take(partition)
        while actions := self._actions():
            self._rng.choice(actions)()
        return self.story.records

    def _actions(self) -> list[Callable[[], None]]:
        return [*self._writers(), *self._relays(), *self._route_changes(), *self._owners()]

    def _writers(self) -> Iterator[Callable[[], None]]:
        if self._unpublished:
            yield self._begin_publish
        for lp in self._writing:
            yield lambda lp=lp: self._end_publish(lp)  # type: ignore[misc]

    def _begin_publish(self) -> None:
        key = self._rng.choice(self._keys)
        lp = self._keys.index(key) % 3
        if lp in self._writing:
            return  # it waits for the counter's row lock
        self._unpublished -= 1
        fact = Fact(key, lp, len(self._committed[lp]) + 1, f"v{self._unpublished}")
        event = Publish(**{**fact.fields(), "seq": 0}, transaction=fact.value)
        self._writing[lp] = (fact, self.story.begin(event, process=f"writer-{lp}"))

    def _end_publish(self, lp: int) -> None:
        fact, operation = self._writing.pop(lp)
        fate = self._rng.random()
        if fate < 0.15:
            self.story.end(operation, "fail", seq=fact.seq)
            return
        self._committed[lp].append(fact)
        if fate < 0.9:
            self.story.end(operation, seq=fact.seq)
        # Else the writer was killed after its commit and before it could tell.

    def _relays(self) -> Iterator[Callable[[], None]]:
        for lp, facts in self._committed.items():
            if self._appended[lp] < len(facts):
                yield lambda lp=lp: self._append(lp)  # type: ignore[misc]

    def _append(self, lp: int) -> None:
        partition = self._partitions[self._home[lp]]
        fact = self._committed[lp][self._appended[lp]]
        self._appended[lp] += 1
        partition.log.append(fact)
        self.story.tell(Append(**fact.fields(), partition=partition.number, offset=len(partition.log)), process="relay")

    def _route_changes(self) -> Iterator[Callable[[], None]]:
        if self._home[0] == 1 and self._unpublished < 20:
            yield self._split
        elif self._home[0] == 3 and not self._gate_open and self._partitions[1].drained:
            yield self._open_gate

    def _split(self) -> None:
        self._home = {0: 3, 1: 4, 2: 2}
        self.story.tell(Seal(topic=TOPIC, partition=1, offset=len(self._partitions[1].log)), process="driver")
        for number in (3, 4):
            self.story.tell(Lineage(topic=TOPIC, partition=number, parents=(1,)), process="driver")

    def _open_gate(self) -> None:
        self._gate_open = True
        self.story.tell(Drain(topic=TOPIC, group=GROUP, partition=1), process="worker")
        for number in (3, 4):
            self.story.tell(Gate(topic=TOPIC, group=GROUP, partition=number, parents=(1,)), process="worker")
            self._partitions[number].readable = True
            self._take(self._partitions[number])

    def _take(self, partition: _Partition) -> None:
        """Give a partition to a new member; what the former owner had in hand is open again."""
        self._epochs += 1
        partition.epoch = self._epochs
        partition.started, partition.running, partition.handled = set(partition.settled), {}, []
        self._assign(partition, "taken")

    def _assign(self, partition: _Partition, change: Any) -> None:
        event = OwnershipEvent(
            topic=TOPIC,
            group=GROUP,
            partition=partition.number,
            member=partition.member,
            epoch=partition.epoch,
            change=change,
            until_ns=None if change == "released" else self.story.now_ns + 3 * TICK_NS,
        )
        self.story.tell(event, process=partition.member)

    def _owners(self) -> Iterator[Callable[[], None]]:
        for partition in self._partitions.values():
            if partition.readable:
                yield from self._owner(partition)

    def _owner(self, partition: _Partition) -> Iterator[Callable[[], None]]:
        for fact in partition.next_of_keys():
            yield lambda fact=fact: self._start(partition, fact)  # type: ignore[misc]
        for key in partition.running:
            yield lambda key=key: self._finish(partition, key)  # type: ignore[misc]
        if partition.handled:
            yield lambda: self._acknowledge(partition)
        if (partition.running or partition.handled) and self._rng.random() < 0.2:
            yield lambda: self._change_owner(partition)

    def _start(self, partition: _Partition, fact: Fact) -> None:
        event = Deliver(**fact.fields(), group=GROUP, partition=partition.number, epoch=partition.epoch)
        partition.started.add(fact)
        partition.running[fact.key] = (fact, self.story.begin(event, process=partition.member))

    def _finish(self, partition: _Partition, key: str) -> None:
        fact, operation = partition.running.pop(key)
        fate = self._rng.random()
        if fate < 0.15:
            self.story.end(operation, "fail")
            partition.started.discard(fact)
        elif fate < 0.2:
            self.story.end(operation, "fail")
            self._give_up(partition, fact)
        else:
            self._apply(partition, fact)
            self.story.end(operation)
            partition.handled.append(fact)

    def _give_up(self, partition: _Partition, fact: Fact) -> None:
        aside = Quarantined(**fact.fields(), group=GROUP, how="dead", reason="no attempts left")
        self.story.tell(aside, process=partition.member)
        partition.settled.add(fact)
        self._ack(partition, fact, partition.epoch, "ok")

    def _apply(self, partition: _Partition, fact: Fact) -> None:
        if fact not in self._applied:
            self._applied.add(fact)
            effect = Effect(
                **fact.fields(),
                group=GROUP,
                partition=partition.number,
                epoch=partition.epoch,
                place=len(self._applied),
            )
            self.story.tell(effect, process="sink")

    def _acknowledge(self, partition: _Partition) -> None:
        fact = partition.handled.pop(self._rng.randrange(len(partition.handled)))
        partition.settled.add(fact)
        self._ack(partition, fact, partition.epoch, "ok")

    def _ack(self, partition: _Partition, fact: Fact, epoch: int, phase: Phase) -> None:
        event = Ack(**fact.fields(), group=GROUP, partition=partition.number, epoch=epoch)
        self.story.tell(event, phase, process=f"member-{epoch}")

    def _change_owner(self, partition: _Partition) -> None:
        """Take a partition from a member that was killed or stopped at any line."""
        former, running, handled = partition.epoch, list(partition.running.values()), partition.handled
        for fact, _ in running:
            if self._rng.random() < 0.3:
                self._apply(partition, fact)  # it committed, and was killed before it could tell
        self._take(partition)
        if self._rng.random() < 0.5:
            for _, operation in running:
                self.story.end(operation, "fail")  # it woke up, and the fence refused it
            for fact in handled:
                self._ack(partition, fact, former, "fail")
