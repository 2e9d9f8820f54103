"""Parking capacity of a group for redriven messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mqlayer.domain.message import NO_KEY
from mqlayer.groups.group import Group
from mqlayer.parking import ParkingCapacity, ParkingLimit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

FULL_WAIT_S: Final = 2.0
"""Wait before the next check for room."""
REASONS: Final[dict[ParkingLimit, str]] = {
    "keys": "a partition has as many parked keys as parked_keys_limit allows",
    "key_messages": "a key has as many parked messages as key_messages_limit allows",
    "key_bytes": "a key has as many parked bytes as key_bytes_limit allows",
    "group_messages": "the group has as many parked messages as parked_messages_limit allows",
    "group_bytes": "the group has as many parked bytes as parked_bytes_limit allows",
}


def find_capacity(
    connection: Connection, group: Group, dead_ids: Sequence[int], *, alone: bool
) -> tuple[int, ParkingLimit | None]:
    """Return how many of the messages, in order, have room, and the limit that stops the next one."""
    facts = {"group_id": group.group_id, "dead_ids": list(dead_ids), "alone": alone}
    rows = connection.execute(query("redrive_room"), facts, prepare=False).fetchall()
    parked = connection.execute(query("parked_room"), facts).fetchone()
    if parked is None:
        return len(dead_ids), None
    wanted = [_Candidate(*row) for row in rows]
    check = _CapacityCheck(ParkingCapacity(*parked), _keys_parked(connection, group, wanted))
    for number, one in enumerate(wanted):
        limit = check.admit(one)
        if limit is not None:
            return number, limit
    return len(dead_ids), None


class _Candidate(NamedTuple):
    """`sent`: it needs room; `parked`: its key is parked."""

    sent: bool
    size: int
    lp: int
    name: bytes
    parked: bool
    key_messages: int
    key_bytes: int
    partition: int


def _keys_parked(connection: Connection, group: Group, wanted: Sequence[_Candidate]) -> dict[int, int]:
    facts = {"group_id": group.group_id, "partitions": list({one.partition for one in wanted})}
    return dict(connection.execute(query("redrive_keys_parked"), facts).fetchall())


class _CapacityCheck:
    """Counts messages as if they were parked one by one."""

    def __init__(self, capacity: ParkingCapacity, keys: dict[int, int]) -> None:
        self._room, self._keys = capacity, keys
        self._added: dict[tuple[int, bytes], tuple[int, int]] = {}

    def admit(self, one: _Candidate) -> ParkingLimit | None:
        """Add a message; return the limit that keeps it out."""
        if not one.sent:
            return None
        ref = one.lp, bytes(one.name)
        more, more_bytes = self._added.get(ref, (0, 0))
        new = not one.parked and ref not in self._added
        limit = self._room.limit_of(one.key_messages + more, one.key_bytes + more_bytes, alone=one.name[:1] == NO_KEY)
        if limit is None and new and self._keys[one.partition] >= self._room.keys_limit:
            limit = "keys"
        if limit is None:
            self._keys[one.partition] += new
            self._room = self._room.with_more(one.size)
            self._added[ref] = more + 1, more_bytes + one.size
        return limit
