"""A producer's unsettled messages: state and rules. No I/O, no lock, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from mqlayer.domain.routing import Lp
from mqlayer.producing.append_answers import AppendAnswers
from mqlayer.producing.follow_ups import FollowUps
from mqlayer.producing.losses import Losses
from mqlayer.producing.producer_queues import Capacity, ProducerQueues
from mqlayer.producing.send_counts import SendCounts
from mqlayer.producing.send_queues import PendingSend, TopicQueues
from mqlayer.producing.settlement import SendSettlement


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts of messages since the producer started."""

    stored: int
    repeated: int
    """Part of `stored`: an unanswered try stored them."""
    failed: int
    """Certainly not stored: refused until their deadline, or for good."""
    aborted: int
    """An earlier message of their LP failed."""
    withdrawn: int
    """Their futures were cancelled."""
    lost: int
    duplicates: int
    """Not stored: an earlier message has their dedup id."""
    diverted: int
    """Sent to another partition than their key's; counted again if that one refuses."""
    unreplicated: int
    """Stored, but on too few replicas in time."""
    connections_lost: int
    """How often a connection broke, was refused or got an error."""
    pending: int
    pending_bytes: int


COUNTED: Final = (
    "stored",
    "repeated",
    "failed",
    "aborted",
    "withdrawn",
    "lost",
    "duplicates",
    "diverted",
    "unreplicated",
)


class InFlight:
    """The in-flight store: its parts share one state, and note outside work in `follow_ups`."""

    def __init__(
        self,
        *,
        source: int,
        max_count: int,
        max_bytes: int,
        require_replicas: int = 0,
        rng: random.Random | None = None,
    ) -> None:
        self.counts = SendCounts()
        self.follow_ups = FollowUps()
        self.capacity = Capacity(max_count, max_bytes)
        self.queues = ProducerQueues(source, self.capacity, self.counts, self.follow_ups, rng or random.Random())
        self.settlement = SendSettlement(self.queues, self.capacity, self.counts, self.follow_ups)
        self.losses = Losses(self.queues, self.settlement, self.counts, self.follow_ups)
        self.answers = AppendAnswers(
            self.queues,
            self.settlement,
            self.losses,
            capacity=self.capacity,
            counts=self.counts,
            follow_ups=self.follow_ups,
            require_replicas=require_replicas,
        )

    def accept(self, topic: TopicQueues, lp: Lp, pending: PendingSend, now: float) -> None:
        """Queue a pending send; an eager one fails at once if its partition is full."""
        self.queues.add(topic, lp, pending, now)
        if pending.eager:
            self.settlement.refuse_eager(pending, now)

    def wake_for(self, pending: PendingSend) -> None:
        """Have the sender of a pending send look for work."""
        # Accepting may have diverted it to another queue.
        self.follow_ups.wake(pending.queue.partition_queue.node)

    def stats(self) -> ProducerStats:
        """The counts so far."""
        return ProducerStats(
            **{name: self.counts[name] for name in COUNTED},
            connections_lost=self.counts.connections_lost,
            pending=self.capacity.count,
            pending_bytes=self.capacity.size,
        )
