"""The scripts of ordered pop: one typed call for each, as in `partitions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.rates import RateShare
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys, rate_key
from mqlayer.redis.nodes import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partitions import Fenced, Refused

BATCH_LIMIT: Final = 500
"""How many messages one call gives out or settles, at most: the width of what a batch is tracked by."""

Scope = Literal["partition", "key"]
SettleWord = Literal["ack", "nack", "extend"]


@dataclass(frozen=True, slots=True)
class Place:
    """A group with ordered pop at a partition, as Postgres says it: under which epoch, and where it starts.

    `rate`: what this partition gives out of the group's rate.
    """

    prefix: str
    partition: int
    group_id: int
    scope: Scope
    epoch: int
    start: int = 1
    seek: int = 0
    rate: RateShare | None = None


class Wish(NamedTuple):
    """What a receiver asks for. `only_again`: nothing but a batch that the same attempt was given before."""

    attempt_id: str
    limit: int
    bytes: int
    invisible_ms: int
    only_again: bool = False


class Given(NamedTuple):
    """A batch, and how often each of its records was given out, this time included."""

    batch: int
    records: Sequence[Record]
    times: Sequence[int]


class Nothing(NamedTuple):
    """Nothing to give out. `more`: there is more to look at; `blocked`: appending makes no difference.

    `left_ms`: until a lane is free again, -1 for none; `wakes`: number of the last entry that told of one.
    """

    word: Literal["more", "empty", "blocked"]
    left_ms: int
    next_offset: int
    wakes: int


class Drained(NamedTuple):
    """Everything before the command record of a sealed partition is settled."""

    seal_id: str


class Settled(NamedTuple):
    """What was said was taken, but for the messages at these places of the call, from 1: another batch has them since,
    or none.
    """

    committed: int
    stale: Sequence[int]


def receive_command(line: NodeConnection, place: Place, wish: Wish) -> Command:
    """Return the command that asks for a batch."""
    keys, group = partition_keys(place.prefix, place.partition), _group(place)
    pops = pop_keys(place.prefix, place.partition, place.group_id)
    return line.script(
        "pop_receive",
        (
            keys.meta,
            keys.log,
            *group,
            pops.pops,
            pops.lines,
            pops.due,
            pops.batches,
            rate_key(place.prefix, place.partition, place.group_id),
        ),
        place.epoch,
        place.start,
        place.seek,
        place.scope,
        wish.limit,
        wish.bytes,
        wish.invisible_ms,
        wish.attempt_id,
        int(wish.only_again),
        *((0, 0) if place.rate is None else map(repr, map(float, place.rate[:2]))),
    )


def receive_reply(reply: Any, address: str) -> Given | Nothing | Drained | Fenced | Refused:
    """Return what pop_receive says."""
    word, *facts = raise_for_reply(reply, address)
    if word == b"given":
        batch, flat = facts
        fields = zip(flat[::5], flat[2::5], flat[3::5], flat[4::5], strict=True)
        return Given(batch, [Record(*record) for record in fields], flat[1::5])
    if word == b"drained":
        return Drained(facts[0].decode())
    if word == b"fenced":
        return Fenced(facts[0])
    if word == b"absent":
        return Refused("absent", "")
    return Nothing(word.decode(), *facts)


def pop_settle_command(
    line: NodeConnection,
    place: Place,
    word: SettleWord,
    tokens: Iterable[tuple[int, int]],
    *,
    ms: int = 0,
    told: bytes = b"",
) -> Command:
    """Return the command that says what became of messages; `tokens`: batch and offset of each, at most BATCH_LIMIT.

    `told`: see `outcomes`.
    """
    keys, group = partition_keys(place.prefix, place.partition), _group(place)
    pops = pop_keys(place.prefix, place.partition, place.group_id)
    flat = [number for token in tokens for number in token]
    return line.script(
        "pop_settle",
        (
            keys.meta,
            *group,
            pops.pops,
            pops.lines,
            pops.due,
            pops.wake,
            outcomes_key(place.prefix, place.partition, place.group_id),
            keys.log,
        ),
        place.epoch,
        word,
        ms,
        len(flat) // 2,
        told,
        *flat,
    )


def pop_settle_reply(reply: Any, address: str) -> Settled | Fenced | Refused:
    """Return what pop_settle says."""
    word, *facts = raise_for_reply(reply, address)
    if word == b"settled":
        return Settled(*facts)
    if word == b"fenced":
        return Fenced(facts[0])
    return Refused(word.decode(), str(facts[0]) if facts else "")


def _group(place: Place) -> Any:
    return group_keys(place.prefix, place.partition, place.group_id)
