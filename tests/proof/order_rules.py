"""Rules about order: of deliveries and fenced effects per key, and of publishes in real time.

The rule for deliveries, for each group and key (and source, as seqs of different sources have no order):

1.  *First deliveries are in order.* A delivery may begin only when every message of the key with a lower seq has been
    handled (a handler returned for it) or left with a written reason (skip, dead). Otherwise it is an `inversion`;
    so one handler at a time per key. A predecessor that is never handled at all is a `skip_without_record` instead,
    told once.
2.  *Only what is not settled comes again.* The delivery of a message that was handled before is a replay. It is
    counted, and allowed as long as no ack of it had been accepted when the replay began; after that it is a
    `replay_of_settled`, unless the partition that it was settled in fell back in between.
3.  *A replay goes on in order.* An owner (one epoch) that delivers a message after another one of the key passes over
    nothing that is not settled: every message between the two, and at its first delivery every message before it, has
    an ack begun by then. So m1 m2 crash m1 m2 is right, and so is m1 m2 crash m1 m3 if m2 was acknowledged before the
    crash; m1 m2 m3 crash m1 m3 with nothing acknowledged is a `replay_out_of_order`. Going back is a replay too,
    judged by 2.

Rule 2 needs the acks of the group in the histories, or what members know to be settled; rule 3 needs the acks. They are
silent without them.
A delivery by a stale owner, with an epoch lower than one that the key has seen, is counted and judged by rule 1 alone:
no fence stops a stopped process from running its handler when it wakes up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.proof.evidence import NEVER, Evidence, Message, Step, identity
from tests.proof.history import Ack, Deliver, Effect, Quarantined, Settled
from tests.proof.violations import Breach, Violation

Line: TypeAlias = tuple[str, str, str, int]
"""What order is kept in: group, topic, key, source."""

Occasion: TypeAlias = Step[Deliver] | Step[Quarantined] | Step[Ack] | Step[Settled]

Turn: TypeAlias = tuple[int, int, int, Callable[[], Iterable[Violation]]]
"""When, which goes first at the same time, in which order read; and what to do then."""


@dataclass
class DeliveryCounts:
    """What is allowed, and worth knowing."""

    delivered: int = 0
    redelivered: int = 0
    stale_delivered: int = 0


def deliveries(evidence: Evidence, counts: DeliveryCounts) -> Iterator[Violation]:
    """The rule of this module's docstring; adds to the counts."""
    walks: dict[Line, _Walk] = {}
    handled = _handled_seqs(evidence)
    for step in _of_keys(evidence, [*evidence.delivers, *evidence.set_asides, *evidence.acks, *evidence.settled]):
        line = _line(step.event)
        walk = walks.get(line)
        if walk is None:
            _, topic, key, source = line
            seqs = evidence.seqs_by_key[topic, key, source]
            walk = walks[line] = _Walk(line, seqs, handled[line], evidence, counts)
        walk.add(step)
    for walk in walks.values():
        yield from walk.judge()


def _of_keys(evidence: Evidence, steps: Iterable[Occasion]) -> Iterator[Occasion]:
    return (step for step in steps if step.event.key is not None and identity(step.event) in evidence.messages)


def _line(event: Deliver | Quarantined | Ack | Settled | Effect) -> Line:
    assert event.key is not None
    return (event.group, event.topic, event.key, event.source)


def _handled_seqs(evidence: Evidence) -> Mapping[Line, set[int]]:
    """Return what was ever handled, or left with a reason, for each line."""
    handled: defaultdict[Line, set[int]] = defaultdict(set)
    for step in evidence.delivers:
        if step.outcome == "ok" and step.event.key is not None:
            handled[_line(step.event)].add(step.event.seq)
    for aside in evidence.set_asides:
        if aside.possible and aside.event.how != "park" and aside.event.key is not None:
            handled[_line(aside.event)].add(aside.event.seq)
    return handled


@dataclass
class _Walk:
    """The history of one line, walked through in order of time."""

    line: Line
    seqs: list[int]
    ever_handled: Collection[int]
    evidence: Evidence
    counts: DeliveryCounts
    turns: list[Turn] = field(default_factory=list)
    handled: set[int] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    ack_begun: set[int] = field(default_factory=set)
    ack_accepted: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Index of the first message that is not yet handled or excused; of the first that may not be passed over.
    handled_to: int = 0
    settled_to: int = 0
    highest_epoch: int = 0
    furthest: int = -1
    last_of_owner: dict[int, int] = field(default_factory=dict)

    def add(self, step: Occasion) -> None:
        """Note what a step changes, and when. At the same time, what settles comes first."""
        event = step.event
        if isinstance(event, Deliver):
            self._at(step.began, 1, lambda: self._begin(step.began, event))
            if step.outcome == "ok":
                self._at(step.ended, 0, lambda: self._note(self.handled, event.seq))
        elif not step.possible:
            return
        elif isinstance(event, Settled):
            if step.outcome == "ok":
                # The node took it at some time from its beginning on, and may have lost it since.
                self._at(step.ended, 0, lambda: self._accept(event, step.began))
        elif isinstance(event, Quarantined):
            if event.how != "park":
                self._at(step.began, 0, lambda: self._note(self.excused, event.seq))
        else:
            self._at(step.began, 0, lambda: self._note(self.ack_begun, event.seq))
            if step.outcome == "ok":
                self._at(step.ended, 0, lambda: self._accept(event, step.ended))

    def judge(self) -> Iterator[Violation]:
        """Walk through; then tell what was passed over for good."""
        for _, _, _, act in sorted(self.turns, key=lambda turn: turn[:3]):
            yield from act()
        for seq in self.seqs[: max(self.furthest, 0)]:
            if seq not in self.ever_handled:
                yield Violation(Breach.SKIP_WITHOUT_RECORD, f"{self.line}: {seq} was passed over by later ones")

    def _at(self, time: int, rank: int, act: Callable[[], Iterable[Violation]]) -> None:
        if time != NEVER:
            self.turns.append((time, rank, len(self.turns), act))

    def _note(self, seqs: set[int], seq: int) -> Iterable[Violation]:
        seqs.add(seq)
        return ()

    def _accept(self, ack: Ack | Settled, time: int) -> Iterable[Violation]:
        if ack.seq not in self.ack_accepted or self.ack_accepted[ack.seq][1] < time:
            self.ack_accepted[ack.seq] = (ack.partition, time)
        return ()

    def _begin(self, time: int, event: Deliver) -> Iterator[Violation]:
        index = bisect_left(self.seqs, event.seq)
        stale = event.epoch < self.highest_epoch
        replay = event.seq in self.handled
        self.counts.delivered += 1
        self.counts.redelivered += replay
        self.counts.stale_delivered += stale
        yield from self._inversions(index, event)
        if replay and not stale:
            yield from self._settled_before(time, event)
        if self.line[0] in self.evidence.acking_groups and not stale:
            yield from self._passed_over(index, event)
        if not stale:
            self.highest_epoch = event.epoch
            self.last_of_owner[event.epoch] = index
        self.furthest = max(self.furthest, index)

    def _inversions(self, index: int, event: Deliver) -> Iterator[Violation]:
        while self.handled_to < len(self.seqs) and self._passable(self.seqs[self.handled_to]):
            self.handled_to += 1
        if index > self.handled_to:
            waiting = self.seqs[self.handled_to]
            yield Violation(
                Breach.INVERSION,
                f"{self.line}: {event.seq} delivered (epoch {event.epoch}) before {waiting} was handled",
            )

    def _passable(self, seq: int) -> bool:
        return seq in self.handled or seq in self.excused or seq not in self.ever_handled

    def _settled_before(self, time: int, event: Deliver) -> Iterator[Violation]:
        if event.seq not in self.ack_accepted:
            return
        # What a partition lost may come again in a successor.
        partition, accepted = self.ack_accepted[event.seq]
        if not self.evidence.fell_back(event.topic, partition, accepted, time):
            yield Violation(Breach.REPLAY_OF_SETTLED, f"{self.line}: {event.seq} delivered again after its ack")

    def _passed_over(self, index: int, event: Deliver) -> Iterator[Violation]:
        while self.settled_to < len(self.seqs) and self._settled(self.seqs[self.settled_to]):
            self.settled_to += 1
        before = self.last_of_owner.get(event.epoch, -1)
        for seq in self.seqs[max(before + 1, self.settled_to) : index]:
            if not self._settled(seq) and seq in self.handled:
                yield Violation(
                    Breach.REPLAY_OUT_OF_ORDER,
                    f"{self.line}: {event.seq} delivered (epoch {event.epoch}), passing over {seq}, not settled",
                )
                return

    def _settled(self, seq: int) -> bool:
        return seq in self.ack_begun or seq in self.excused


def effects(evidence: Evidence) -> Iterator[Violation]:
    """Fenced effects of a key are in the order of their seqs, and each message has one."""
    highest: dict[Line, int] = {}
    seen: set[tuple[str, object]] = set()
    for step in fenced_effects(evidence):
        event = step.event
        if (event.group, identity(event)) in seen:
            yield Violation(Breach.DUPLICATE_EFFECT, f"group {event.group}: {identity(event)} of key {event.key!r}")
            continue
        seen.add((event.group, identity(event)))
        if event.key is None:
            continue
        line = _line(event)
        if event.seq < highest.get(line, 0):
            yield Violation(Breach.INVERSION, f"{line}: effect of {event.seq} after that of {highest[line]}")
        highest[line] = max(highest.get(line, 0), event.seq)


def fenced_effects(evidence: Evidence) -> list[Step[Effect]]:
    """Return the fenced effects that are in sinks for sure, in the order of the sinks where that is known."""
    done = [step for step in evidence.effects if step.event.fenced and step.outcome == "ok"]
    placed = all(step.event.place is not None for step in done)
    return sorted(done, key=lambda step: (step.event.place or 0) if placed else step.began)


def real_time(evidence: Evidence) -> Iterator[Violation]:
    """Nothing comes before a message of its key that was published completely before it began to be."""
    for name, messages in _orders(evidence).items():
        yield from _real_time_inversions(name, messages)


def _orders(evidence: Evidence) -> Mapping[object, list[Message]]:
    """Return each order in which messages of a key came: by seq, by first delivery, by fenced effect."""
    orders: defaultdict[object, list[Message]] = defaultdict(list)
    for of, message in sorted(evidence.messages.items()):
        orders["seq", of[0], message.key, of[1]].append(message)
    came: list[Step[Deliver] | Step[Effect]] = sorted(evidence.delivers, key=lambda step: step.began)
    came += fenced_effects(evidence)
    seen: set[object] = set()
    for step in came:
        event = step.event
        first = (type(event), step.event.group, identity(event))
        if identity(event) in evidence.messages and first not in seen:
            seen.add(first)
            orders[type(event).__name__, step.event.group, event.topic, event.key].append(
                evidence.messages[identity(event)]
            )
    return {name: messages for name, messages in orders.items() if messages[0].key is not None}


def _real_time_inversions(name: object, messages: Iterable[Message]) -> Iterator[Violation]:
    latest: Message | None = None
    latest_began = -1
    for message in messages:
        if message.published is None:
            continue
        if message.published.ended < latest_began:
            yield Violation(Breach.REAL_TIME_INVERSION, f"{name}: {latest} before {message}, published before it began")
        if message.published.began > latest_began:
            latest, latest_began = message, message.published.began
