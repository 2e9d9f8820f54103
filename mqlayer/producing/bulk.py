"""Publishing many messages in one call: batches of one partition each, several under way per connection."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT
from mqlayer.domain.routing import Lp, random_lp
from mqlayer.errors import InvalidInput, MqlayerError, PartlyPublished, PublishError
from mqlayer.producing.lanes import Slot, TopicLanes
from mqlayer.producing.ledger import Ledger, tell_all
from mqlayer.producing.links import Link
from mqlayer.producing.messages import (
    NO_KEY_BULK,
    Message,
    Receipts,
    facts_bulk,
    indices_within,
    pieces_of,
    place_id,
    place_key,
    whole_body,
)
from mqlayer.producing.parcels import Gathering, Listener, Parcel, Receipt
from mqlayer.producing.waiting import await_all, unknown_outcome
from mqlayer.redis.packets import LINE_END, bulk_head

OVERHEAD_BYTES: Final = 64
"""Counted per message for what is neither facts, key nor body."""

Positions = Sequence[int]


class Bulk:
    """The messages of one call, checked: columns of LPs and encoded keys, bodies, and facts where they differ.

    Raises what the edge checks raise; nothing was sent then.
    """

    def __init__(
        self, topic: TopicLanes, messages: Sequence[Message], chance: random.Random, *, eager: bool = False
    ) -> None:
        try:
            keys = [message.key for message in messages]
            bodies = [message.body for message in messages]
            extras = [message.headers or message.tags or message.dedup_id is not None for message in messages]
        except AttributeError:
            raise InvalidInput("a batch is a sequence of Message(key, body, headers, tags, dedup_id)") from None
        limit = topic.route.body_limit
        if set(map(type, bodies)) != {bytes} or max(map(len, bodies)) > limit:
            bodies = [whole_body(topic.name, body, limit) for body in bodies]
        self.topic, self.eager = topic, eager
        self.bodies = cast("list[bytes]", bodies)
        self.placed: list[tuple[Lp, bytes]] = (
            [(random_lp(chance), NO_KEY_BULK) if key is None else place_key(key) for key in keys]
            if None in keys
            else list(map(place_key, cast("list[str]", keys)))
        )
        at_ms = time.time_ns() // 1_000_000
        self.facts: list[bytes] | None = None
        self.tokens: list[bytes] = []
        if any(extras):
            self._note_ids(messages)
            self.facts = [facts_bulk(at_ms, message.headers, message.tags) for message in messages]
        self.common_facts = facts_bulk(at_ms, None)
        longest = max(map(len, self.facts)) if self.facts else len(self.common_facts)
        self._largest = OVERHEAD_BYTES + longest + KEY_LIMIT + max(map(len, self.bodies))

    def __len__(self) -> int:
        return len(self.placed)

    def singly(self, listener: Gathering, deadline: float) -> Iterator[tuple[Lp, Parcel]]:
        """Yield each message as a parcel of its own, with its LP and its token."""
        for position, (lp, key) in enumerate(self.placed):
            facts = self.common_facts if self.facts is None else self.facts[position]
            body = self.bodies[position]
            size = len(facts) + len(key) + len(body)
            yield (
                lp,
                Parcel(
                    pieces_of(facts, key, body),
                    1,
                    size,
                    deadline,
                    listener,
                    token=self.tokens[position],
                    eager=self.eager,
                ),
            )

    def _note_ids(self, messages: Sequence[Message]) -> None:
        """Keep the tokens of messages with dedup ids, if there are any; without a key the LP follows from the id."""
        if all(message.dedup_id is None for message in messages):
            return
        for position, message in enumerate(messages):
            lp, key = self.placed[position]
            lp, token = place_id(message.key, message.dedup_id, lp)
            self.placed[position] = (lp, key)
            self.tokens.append(token)

    def chunks(self) -> Iterator[tuple[Slot, Positions]]:
        """Yield positions in chunks of one partition each, of 500 messages and 1 MB at the most, partitions in turn."""
        cut = [self._cut(slot, positions) for slot, positions in self._by_slot().items()]
        for round_ in zip_longest(*cut):
            yield from (chunk for chunk in round_ if chunk is not None)

    def parcels(
        self, positions: Positions, gathering: Gathering, deadline: float, owners: list[Parcel | None]
    ) -> dict[Lp, Parcel]:
        """Return the messages at these positions as one parcel per LP, and note for each position whose it is."""
        placed, bodies, facts, common = self.placed, self.bodies, self.facts, self.common_facts
        by_lp: dict[Lp, Parcel] = {}
        for position in positions:
            lp, key = placed[position]
            body = bodies[position]
            if facts is not None:
                common = facts[position]
            size = len(body)
            parcel = by_lp.get(lp)
            if parcel is None:
                pieces = (common, key, bulk_head(size), body, LINE_END)
                by_lp[lp] = parcel = Parcel(pieces, 1, len(common) + len(key) + size, deadline, gathering)
                parcel.eager = self.eager
            else:
                parcel.pieces += (common, key, bulk_head(size), body, LINE_END)
                parcel.count += 1
                parcel.size += len(common) + len(key) + size
            owners[position] = parcel
        return by_lp

    def _by_slot(self) -> dict[Slot, Positions]:
        table = self.topic.table
        if table[0] is table[-1]:
            # Ranges are contiguous: one partition serves all.
            return {table[0]: range(len(self.placed))}
        by_slot: dict[Slot, list[int]] = {}
        for position, (lp, _) in enumerate(self.placed):
            by_slot.setdefault(table[lp], []).append(position)
        return dict(by_slot)

    def _cut(self, slot: Slot, positions: Positions) -> Iterator[tuple[Slot, Positions]]:
        start = 0
        while start < len(positions):
            chunk = positions[start : start + BATCH_COUNT_LIMIT]
            if len(chunk) * self._largest > BATCH_BYTES_LIMIT:
                chunk = chunk[: self._fitting(chunk)]
            yield slot, chunk
            start += len(chunk)

    def _fitting(self, chunk: Positions) -> int:
        """Return how many of a chunk's messages fit into one call; at least one."""
        size = 0
        for count, position in enumerate(chunk):
            facts = self.common_facts if self.facts is None else self.facts[position]
            size += OVERHEAD_BYTES + len(facts) + len(self.placed[position][1]) + len(self.bodies[position])
            if size > BATCH_BYTES_LIMIT:
                return max(1, count)
        return len(chunk)


class BulkSend:
    """One call's way: batches go out while earlier ones are under way, in the caller's thread where it can.

    Links that somebody else works with take our batches along; we only wait then.
    """

    def __init__(self, bulk: Bulk, ledger: Ledger, deadline: float, in_flight: int) -> None:
        self._bulk, self._ledger, self._deadline, self._in_flight = bulk, ledger, deadline, in_flight
        self._gathering = Gathering(len(bulk))
        self._owners: list[Parcel | None] = [None] * len(bulk)
        self._led: dict[Link, None] = {}

    def run(self) -> Receipts:
        """Publish all; return when all are settled. Raises PartlyPublished."""
        try:
            self._send_all()
            for link in self._led:
                self._finish(link)
        finally:
            for link in self._led:
                link.resign()
        return self._receipts()

    def _send_all(self) -> None:
        for slot, positions in self._bulk.chunks():
            parcels = self._bulk.parcels(positions, self._gathering, self._deadline, self._owners)
            try:
                self._send(slot, parcels)
            except PublishError as error:
                self._drop(positions, error)

    def _send(self, slot: Slot, parcels: dict[Lp, Parcel]) -> None:
        """Send parcels over a link that we can have, else leave them to whoever has it."""
        ledger, topic, link = self._ledger, self._bulk.topic, slot.link
        count = sum(parcel.count for parcel in parcels.values())
        size = sum(parcel.size for parcel in parcels.values())
        if self._has(link) and ledger.has_room(count, size) and not ledger.closed_because:
            link.launch(topic, parcels, slot)
            return
        if not ledger.has_room(count, size):
            self._hand_over()
        with ledger.lock:
            ledger.wait_for_room(count, size, self._deadline)
            for lp, parcel in parcels.items():
                ledger.add(topic, lp, parcel)
            now = time.monotonic()
            told = [listener for parcel in parcels.values() for listener in ledger.refuse_eager(parcel, now)]
            link.wake_locked()
        tell_all(told)

    def _has(self, link: Link) -> bool:
        """Return whether we hold a link that takes one more append now."""
        if link not in self._led:
            if not link.try_lead():
                return False
            self._led[link] = None
        link.push()
        while link.under_way >= self._in_flight and link.pull(link.patience(self._deadline)):
            link.push()
        if link.good and link.under_way < self._in_flight:
            return True
        del self._led[link]
        link.resign()
        return False

    def _finish(self, link: Link) -> None:
        """Take the answers of a link that we lead."""
        while self._gathering.left and link.under_way and link.pull(link.patience(self._deadline)):
            link.push()

    def _hand_over(self) -> None:
        """Let the links' threads make room while we wait."""
        led, self._led = self._led, {}
        for link in led:
            link.resign()

    def _drop(self, positions: Positions, error: PublishError) -> None:
        """Note that these messages were never queued."""
        with self._ledger.lock:
            self._gathering.any_failed = True
            self._gathering.left -= len(positions)
            for position in positions:
                parcel = self._owners[position]
                if parcel is not None:
                    parcel.outcome = error

    def _receipts(self) -> Receipts:
        owners = cast("list[Parcel]", self._owners)
        if self._gathering.left:
            await_all(self._ledger, self._gathering, owners, self._deadline)
        if self._gathering.left or self._gathering.any_failed:
            raise _partly(self._bulk.topic.name, owners)
        return Receipts(owners)


def send_singly(bulk: Bulk, ledger: Ledger, deadline: float) -> Receipts:
    """Publish a call's messages one by one, as those with dedup ids need it. Raises PartlyPublished."""
    gathering = Gathering(len(bulk))
    owners: list[Parcel] = []
    error: PublishError | None = None
    for lp, parcel in bulk.singly(gathering, deadline):
        owners.append(parcel)
        told: list[Listener] = []
        with ledger.lock:
            if error is None:
                try:
                    ledger.wait_for_room(1, parcel.size, deadline)
                except PublishError as refusal:
                    error = refusal
            if error is None:
                ledger.add(bulk.topic, lp, parcel)
                told = ledger.refuse_eager(parcel, time.monotonic())
                parcel.lane.slot.link.wake_locked()
            else:
                # It was never queued, and what follows it must not overtake it.
                parcel.outcome = error
                gathering.left -= 1
                gathering.any_failed = True
        tell_all(told)
    if gathering.left:
        await_all(ledger, gathering, owners, deadline)
    if gathering.left or gathering.any_failed:
        raise _partly(bulk.topic.name, owners)
    return Receipts(owners)


def _partly(topic: str, owners: Sequence[Parcel]) -> PartlyPublished:
    """Return the error that says what became of each message."""
    outcomes: list[Receipt | MqlayerError] = []
    for parcel, index in zip(owners, indices_within(owners), strict=True):
        if parcel.outcome is None:
            outcomes.append(unknown_outcome(parcel, index))
        elif isinstance(parcel.outcome, MqlayerError):
            outcomes.append(parcel.outcome)
        else:
            outcomes.append(parcel.receipt(index))
    errors = [outcome for outcome in outcomes if isinstance(outcome, MqlayerError)]
    partly = PartlyPublished(topic, len(outcomes) - len(errors), len(errors), str(errors[0]) if errors else "")
    partly.outcomes = outcomes
    partly.__cause__ = errors[0] if errors else None
    return partly
