"""The scripts of shared consumption: one typed call for each, as in `partitions`; and the native group they guard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Record, records_of
from mqlayer.domain.offsets import Range
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys
from mqlayer.redis.nodes import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partitions import Failures, Fenced, Refused, failures_of

AT_ONCE: Final = 500
"""How many messages one call gives, gives back, keeps or reclaims, at most."""
SETTLE_LIMIT: Final = 1_000
"""How many messages one call settles, at most."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """A shared group at a partition, as Postgres says it: under which epoch, and where it starts."""

    prefix: str
    partition: int
    group_id: int
    epoch: int
    start: int = 1
    seek: int = 0

    @property
    def log(self) -> bytes:
        """The key of the partition's records."""
        return partition_keys(self.prefix, self.partition).log


class InForce(NamedTuple):
    """The epoch is in force. `fresh`: since this call; `left_ms`: until something is due again, -1 where nothing is."""

    committed: int
    left_ms: int
    fresh: bool


class Through(NamedTuple):
    """Everything before the command record of a sealed partition is settled."""

    seal_id: str


class Again(NamedTuple):
    """Messages that are given again, each with what is noted of its former attempts.

    `missing`: offsets of those that were due and are not there: they are to be settled.
    """

    records: Sequence[Record]
    failures: Sequence[Failures | None]
    missing: Sequence[int]


class SharedSettled(NamedTuple):
    """Done; so many messages, `fresh`, were not settled before."""

    committed: int
    fresh: int


def native_group(group_id: int) -> bytes:
    """Return the name of a shared group's native consumer group, the same in all partitions."""
    return b"g%d" % group_id


def shared_take_command(line: NodeConnection, place: SharedPlace, *, afresh: bool = False) -> Command:
    """Return the command that puts the place's epoch in force; `afresh` makes the native group where it is missing."""
    keys, group, due = _keys(place)
    args = (native_group(place.group_id), place.epoch, place.start, place.seek, int(afresh))
    return line.script("shared_take", (keys.meta, keys.log, group.lock, group.attempts, due), *args)


def shared_take_reply(reply: Any, address: str) -> InForce | Through | Fenced | Refused:
    """Return what shared_take says."""
    word, *facts = raise_for_reply(reply, address)
    if word == b"kept":
        return InForce(facts[0], facts[1], fresh=False)
    if word == b"taken":
        return InForce(facts[0], -1, fresh=True)
    if word == b"drained":
        return Through(facts[0].decode())
    return _fenced_or_refused(word, facts)


def shared_read_command(
    places: Sequence[SharedPlace], member: str, *, group_id: int, count: int, block_ms: int
) -> Command:
    """Return the native command that reads new messages of partitions on one node, up to `count` of each."""
    logs = [place.log for place in places]
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREADGROUP", "GROUP", native_group(group_id), member, "COUNT", count, *block,
            "STREAMS", *logs, *(b">" for _ in logs))  # fmt: skip


def is_missing_group(reply: Any) -> bool:
    """Say whether a reply is the server's "no such consumer group"."""
    return isinstance(reply, Exception) and str(reply).startswith("NOGROUP")


def shared_settle_command(
    line: NodeConnection, place: SharedPlace, member: str, ranges: Sequence[Range], *, told: bytes = b"",
    command: bytes = b"",
) -> Command:  # fmt: skip
    """Return the command that settles ranges of SETTLE_LIMIT messages at most; `told`: see `outcomes`.

    `command`: the entry id of a command record that was read.
    """
    keys, group, due = _keys(place)
    outcomes = outcomes_key(place.prefix, place.partition, place.group_id)
    flat = [offset for one in ranges for offset in one]
    return line.script(
        "shared_settle", (keys.meta, keys.log, group.lock, group.attempts, due, outcomes),
        native_group(place.group_id), place.epoch, member, command, told, len(ranges), *flat,
    )  # fmt: skip


def shared_settle_reply(reply: Any, address: str) -> SharedSettled | Fenced | Refused:
    """Return what shared_settle says."""
    word, *facts = raise_for_reply(reply, address)
    return SharedSettled(*facts) if word == b"settled" else _fenced_or_refused(word, facts)


def shared_again_command(line: NodeConnection, place: SharedPlace, member: str, limit: int) -> Command:
    """Return the command that gives a member what is due again."""
    return _script(line, "shared_again", place, member, limit)


def shared_again_reply(reply: Any, address: str) -> Again | Fenced:
    """Return what shared_again says."""
    word, *facts = raise_for_reply(reply, address)
    if word == b"fenced":
        return Fenced(facts[0])
    entries, notes, missing = facts
    return Again(records_of(entries), [failures_of(noted) if noted else None for noted in notes], missing)


def shared_back_command(
    line: NodeConnection, place: SharedPlace, member: str, messages: Iterable[tuple[int, int, int | None]]
) -> Command:
    """Return the command that gives messages back: offset, ms to wait, failed attempts by now (None: as noted)."""
    flat = [fact for offset, ms, failed in messages for fact in (offset, ms, "" if failed is None else failed)]
    return _script(line, "shared_back", place, member, len(flat) // 3, *flat)


def shared_begin_command(line: NodeConnection, place: SharedPlace, member: str, offset: int) -> Command:
    """Return the command that counts an attempt before its message is started."""
    keys, group, _ = _keys(place)
    args = (native_group(place.group_id), place.epoch, member, offset)
    return line.script("shared_begin", (keys.log, group.lock, group.attempts), *args)


def shared_begin_reply(reply: Any, address: str) -> int | None:
    """Return the attempts by now, this one included; None where the message is not this member's any more."""
    word, *facts = raise_for_reply(reply, address)
    return facts[0] if word == b"begun" else None


def shared_keep_command(line: NodeConnection, place: SharedPlace, member: str, offsets: Sequence[int]) -> Command:
    """Return the command that says which messages a member still has, AT_ONCE at most."""
    keys, group, _ = _keys(place)
    args = (native_group(place.group_id), place.epoch, member, *offsets)
    return line.script("shared_keep", (keys.log, group.lock), *args)


def shared_keep_reply(reply: Any, address: str) -> Sequence[int] | Fenced:
    """Return which of the messages are this member's no more."""
    word, fact = raise_for_reply(reply, address)
    return Fenced(fact) if word == b"fenced" else fact


def shared_reclaim_command(line: NodeConnection, place: SharedPlace, invisible_ms: int) -> Command:
    """Return the command that takes messages from members that were not heard of for so long."""
    keys, group, due = _keys(place)
    args = (native_group(place.group_id), place.epoch, invisible_ms, AT_ONCE)
    return line.script("shared_reclaim", (keys.log, group.lock, group.attempts, due), *args)


def shared_count_reply(reply: Any, address: str) -> int | Fenced | Refused:
    """Return how many messages shared_back or shared_reclaim made due."""
    word, *facts = raise_for_reply(reply, address)
    return facts[0] if word in (b"back", b"reclaimed") else _fenced_or_refused(word, facts)


def _script(line: NodeConnection, name: str, place: SharedPlace, *args: Any) -> Command:
    keys, group, due = _keys(place)
    return line.script(
        name, (keys.log, group.lock, group.attempts, due), native_group(place.group_id), place.epoch, *args
    )


def _keys(place: SharedPlace) -> tuple[Any, Any, bytes]:
    prefix, partition, group_id = place.prefix, place.partition, place.group_id
    group = group_keys(prefix, partition, group_id)
    return partition_keys(prefix, partition), group, pop_keys(prefix, partition, group_id).due


def _fenced_or_refused(word: bytes, facts: Sequence[Any]) -> Fenced | Refused:
    return Fenced(facts[0]) if word == b"fenced" else Refused(word.decode(), str(facts[0]) if facts else "")
