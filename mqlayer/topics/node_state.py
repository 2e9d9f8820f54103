"""A node's partitions, desired and observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from mqlayer.errors import ConfigurationRefused, StoreUnavailable
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import LogEnds, ends_command, ends_reply

SCAN_ROUNDS: Final = 1_000


@dataclass(frozen=True, slots=True)
class DesiredPartition:
    """A partition's state according to Postgres; an open one has no `seal_id`."""

    partition: int
    topic_id: int
    topic: str
    lp_from: int
    lp_to: int
    created_by_change: int | None
    change_id: int | None
    seal_id: str
    marks: Mapping[str, int]

    @property
    def change(self) -> int | str:
        """Its route change, as stored on the node."""
        return "" if self.created_by_change is None else self.created_by_change


Flaw = Literal["", "meta", "marks", "tail", "command"]
"""Damage: meta or marks are lost, records lie above the counted end, or the command record is missing."""


class ObservedPartition(NamedTuple):
    """A partition's state on the node; None if it or its records are missing."""

    state: str | None
    seal_id: str
    next_offset: int
    flaw: Flaw = ""

    @classmethod
    def of(cls, ends: LogEnds) -> ObservedPartition:
        """Judge records, marks and meta."""
        if not ends.state:
            return cls(None, "", 1) if ends.records < 0 else cls("torn", "", max(1, ends.behind), "meta")
        if ends.state == "deleted":
            return cls(ends.state, "", 1)
        if ends.records < 0 and ends.next_offset > 1:
            return cls(None, "", 1)
        return cls(ends.state, ends.seal_id, max(ends.next_offset, ends.behind), _flaw(ends))


def _flaw(ends: LogEnds) -> Flaw:
    if ends.records > 0 and not ends.has_marks:
        return "marks"
    if ends.behind > ends.next_offset:
        return "tail"
    return "command" if ends.state == "sealed" and not ends.command else ""


class NodeState:
    """Desired and observed partitions of one node. `empty`: its data are lost; ignore other prefixes."""

    def __init__(self, connection: Connection, node_connection: NodeConnection, prefix: str, *, empty: bool) -> None:
        self._node_connection, self._prefix, self._empty = node_connection, prefix, empty
        self.desired = [
            DesiredPartition(*row)
            for row in connection.execute(
                query("node_partitions"), {"node_id": node_connection.node.node_id}
            ).fetchall()
        ]
        self._observed = self._observe()

    def __getitem__(self, desired: DesiredPartition) -> ObservedPartition:
        return self._observed[desired.partition]

    @property
    def is_empty(self) -> bool:
        """Whether all partitions are missing. Raises ConfigurationRefused for another prefix."""
        states = [self._observed[desired.partition].state for desired in self.desired]
        if not states or any(states):
            return False
        if not self._empty:
            self._refuse_other_prefix()
        return True

    def _refuse_other_prefix(self) -> None:
        """Refuse another prefix, unless topic or LP range differ: then it is another system's."""
        for other in _prefixes(self._node_connection, self.desired[0].partition) - {self._prefix}:
            keys = [partition_keys(other, desired.partition).meta for desired in self.desired]
            replies = self._node_connection.call([("HMGET", key, "topic", "lp_from", "lp_to") for key in keys])
            there = [tuple(raise_for_reply(reply, self._node_connection.node.address)) for reply in replies]
            ours = [(w.topic.encode(), b"%d" % w.lp_from, b"%d" % w.lp_to) for w in self.desired]
            # A missing partition or a tombstone proves nothing.
            if all(facts[0] is None or facts == own for facts, own in zip(there, ours, strict=True)):
                raise ConfigurationRefused(
                    self._node_connection.node.address,
                    "MQLAYER_KEY_PREFIX",
                    self._prefix,
                    f"{other!r}, as when it was filled; say --empty where that is another system's, and this one's "
                    "data are gone",
                )

    @property
    def needs_restore(self) -> bool:
        """Whether partitions need creating or refilling."""
        return any(
            self._observed[desired.partition].state is None or (desired.seal_id and not self.is_right(desired))
            for desired in self.desired
        )

    @property
    def is_emptied(self) -> bool:
        """Whether an open partition is missing."""
        return any(not desired.seal_id and self._observed[desired.partition].state is None for desired in self.desired)

    @property
    def offsets(self) -> dict[int, int]:
        """Each partition's next offset; 1 for a missing one."""
        return {partition: found.next_offset for partition, found in self._observed.items()}

    def is_right(self, desired: DesiredPartition) -> bool:
        """Whether a partition needs no repair."""
        state, seal, _, flaw = self._observed[desired.partition]
        if desired.seal_id:
            return state == "sealed" and seal == desired.seal_id and not flaw
        # A seal that Postgres has not recorded belongs to a route change in progress, which continues from there.
        return state in ("open", "sealed") and flaw in ("", "command")

    def recheck(self) -> None:
        """Raise StoreUnavailable if a partition disappeared again."""
        gone = [partition for partition, found in self._observe().items() if found.state is None]
        if gone:
            raise StoreUnavailable(
                self._node_connection.node.address, f"it lost partition {gone[0]} again while it was armed"
            )

    def observe_again(self, desired: DesiredPartition) -> None:
        """Read a partition's state anew."""
        (self._observed[desired.partition],) = self._observe_some([desired])

    def _observe(self) -> dict[int, ObservedPartition]:
        return dict(zip([desired.partition for desired in self.desired], self._observe_some(self.desired), strict=True))

    def _observe_some(self, some: Sequence[DesiredPartition]) -> list[ObservedPartition]:
        commands = [ends_command(self._node_connection, self._prefix, desired.partition) for desired in some]
        replies = self._node_connection.call(commands) if commands else []
        return [ObservedPartition.of(ends_reply(reply, self._node_connection.node.address)) for reply in replies]


def _prefixes(connection: NodeConnection, partition: int) -> set[str]:
    cursor, prefixes, end = b"0", set[str](), b":{%d}:meta" % partition
    for _ in range(SCAN_ROUNDS):
        (reply,) = connection.call([(b"SCAN", cursor, b"MATCH", b"*" + end, b"COUNT", 1000)])
        cursor, found = raise_for_reply(reply, connection.node.address)
        prefixes.update(key.removesuffix(end).decode() for key in found)
        if cursor == b"0":
            break
    return prefixes
