"""What a node holds of a partition; with `deep`, also the chain of every record, without keys and bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.checking.verifying.wanted import WantedGroup
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.looking import Look, look_command, look_reply
from mqlayer.redis.nodes import NodeConnection, raise_for_reply

RECORDS_PER_CALL: Final = 500
BREAKS_KEPT: Final = 20
TRIES: Final = 3


class Break(NamedTuple):
    """A record that does not follow the one before it in its chain."""

    offset: int
    name: str
    before: int
    seq: int


@dataclass(slots=True)
class Chains:
    """The chains of a stream: `<source>:<lp>` -> first and last seq; and the first breaks, of so many."""

    stretches: dict[str, tuple[int, int]] = field(default_factory=dict)
    breaks: list[Break] = field(default_factory=list)
    broken: int = 0

    def add(self, name: str, first: int, last: int, *, offset: int) -> None:
        """Take what one call found of a chain."""
        known = self.stretches.get(name)
        if known is not None and first != known[1] + 1:
            self.note(Break(offset, name, known[1], first))
        self.stretches[name] = (known[0] if known else first, last)

    def note(self, found: Break) -> None:
        """Take a break."""
        self.broken += 1
        if len(self.breaks) < BREAKS_KEPT:
            self.breaks.append(found)


@dataclass(slots=True)
class Held:
    """A partition on its node. `kept`: the offset of its oldest record, the next one where there is none; `first`: what
    trimming says of that; `records`: how many there are, the command not counted; `behind`: the offset behind the last
    of them; `has_command`: whether a command record is at the end."""

    state: str
    topic: str
    lp_from: int
    lp_to: int
    next: int
    first: int
    seal: str
    lost: int
    marks: dict[str, int]
    records: int
    kept: int
    looks: dict[int, Look]
    sealed_for: int = 0
    behind: int = 0
    has_command: bool = False
    chains: Chains | None = None


def ask_partition(
    line: NodeConnection, prefix: str, partition: int, groups: Sequence[WantedGroup], *, deep: bool
) -> Held | None:
    """Return what a node holds of a partition; None where it has nothing of it, or a tombstone.

    Records that are trimmed while chains are read would look like a break: it is read anew then, a few times; `chains`
    stays None where trimming was always faster.
    """
    held = _look(line, prefix, partition, groups)
    for _ in range(TRIES if deep else 0):
        if held is None:
            break
        chains, kept = _chains(line, partition_keys(prefix, partition).log, held), held.kept
        held = _look(line, prefix, partition, groups)
        if held is not None and held.kept == kept:
            held.chains = chains
            break
    return held


def _look(line: NodeConnection, prefix: str, partition: int, groups: Sequence[WantedGroup]) -> Held | None:
    keys = partition_keys(prefix, partition)
    looks = [look_command(line, prefix, partition, one.group_id, start=one.start, seek=one.seek) for one in groups]
    seen, *replies = line.call([line.script("partition_look", (keys.log, keys.meta, keys.marks)), *looks])
    found = [look_reply(reply, line.node.address) for reply in replies]
    known = {group.group_id: look for group, look in zip(groups, found, strict=True) if look is not None}
    return _held(raise_for_reply(seen, line.node.address), known)


def _held(seen: list[Any], looks: dict[int, Look]) -> Held | None:
    if seen[0] == b"absent":
        return None
    _, flat, marks, length, first_id, last_id = seen
    meta = {name.decode(): text.decode() for name, text in zip(flat[::2], flat[1::2], strict=True)}
    if meta.get("state") == "deleted":
        return None
    command = last_id[-2:] not in (b"", b"-0")
    following, records = int(meta["next"]), length - command
    return Held(
        state=meta["state"],
        topic=meta.get("topic", ""),
        lp_from=int(meta.get("lp_from", -1)),
        lp_to=int(meta.get("lp_to", -1)),
        next=following,
        first=int(meta.get("first", 1)),
        seal=meta.get("seal", ""),
        lost=int(meta.get("lost", 0)),
        marks={name.decode(): int(seq) for name, seq in zip(marks[::2], marks[1::2], strict=True)},
        records=records,
        kept=int(first_id.split(b"-")[0]) if records else following,
        looks=looks,
        sealed_for=int(meta.get("sealed_for", 0)),
        behind=int(last_id.split(b"-")[0]) + 1 if last_id else 0,
        has_command=command,
    )


def _chains(line: NodeConnection, log: bytes, held: Held) -> Chains:
    """Read the chains of all records below the offset that was next; memory goes by chains, not by records."""
    chains, offset = Chains(), held.kept
    while offset < held.next:
        (reply,) = line.call([line.script("log_chain", (log,), offset, held.next, RECORDS_PER_CALL)])
        last, stretches, breaks = raise_for_reply(reply, line.node.address)
        for at in range(0, len(breaks), 4):
            chains.note(Break(breaks[at], breaks[at + 1].decode(), breaks[at + 2], breaks[at + 3]))
        for at in range(0, len(stretches), 3):
            chains.add(stretches[at].decode(), stretches[at + 1], stretches[at + 2], offset=offset)
        if not last:
            break
        offset = last + 1
    return chains
