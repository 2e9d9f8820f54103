"""Create and open a node's partitions, and count what their metas lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.domain.route_changes import marks_within
from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import (
    MARKS_PER_CALL,
    Refused,
    clear_commands,
    create_command,
    end_sources,
    fence_command,
    load_commands,
    open_command,
    recount_command,
    recount_reply,
    status_of,
)
from mqlayer.topics.node_state import DesiredPartition, Flaw

EMPTY: Final = 1 << 52


def put_ended_sources(
    connection: Connection, node_connection: NodeConnection, prefix: str, partitions: Sequence[int]
) -> None:
    """Make a node refuse ended sources: on a cluster each of these partitions does. Raises StoreUnavailable."""
    sources = [row[0] for row in connection.execute(query("sources_ended"))]
    end_sources(node_connection, prefix, sources, closed=True, partitions=partitions)


class PartitionCreation:
    """Makes partitions as Postgres has them, on one node."""

    def __init__(self, connection: Connection, node_connection: NodeConnection, prefix: str) -> None:
        self._connection, self._node_connection, self._prefix = connection, node_connection, prefix

    def make(self, desired: DesiredPartition, raised: Sequence[tuple[int, int, int]]) -> None:
        """Create a lost partition under raised epochs (group, partition, epoch)."""
        # In the same transaction: an emptied server has forgotten the epochs and would accept stale ones.
        epochs = [
            fence_command(self._node_connection, self._prefix, partition, group, epoch, whole=True)
            for group, partition, epoch in raised
            if partition == desired.partition
        ]
        # Groups' positions refer to lost records, and their offsets are assigned again.
        groups = [row[0] for row in self._connection.execute(query("forgotten_groups"), {"topic_id": desired.topic_id})]
        clear = clear_commands(self._node_connection, self._prefix, desired.partition, groups, whole=True)
        self._create(desired, *clear, *epochs)

    def load(self, desired: DesiredPartition) -> bool:
        """Load a successor's marks and open it; False for none."""
        if desired.created_by_change is None:
            return False
        marks = self._came_with(desired)
        self._open_by(
            desired, load_commands(self._node_connection, self._prefix, desired.partition, desired.change, marks)
        )
        return True

    def open(self, desired: DesiredPartition) -> None:
        """Open an importing partition."""
        self._open_by(desired, [self.open_command(desired)])

    def count(self, desired: DesiredPartition, flaw: Flaw) -> None:
        """Count records that meta or marks lack."""
        connection, address, partition = self._node_connection, self._node_connection.node.address, desired.partition
        marks: list[tuple[str, int]] = []
        start = 0
        if flaw != "tail":
            marks, start = list(self._came_with(desired).items()), 1
        if flaw == "meta":
            # Not open before all is counted: appends rely on the count.
            self._create(desired)
        for at in range(0, len(marks), MARKS_PER_CALL):
            some = dict(marks[at : at + MARKS_PER_CALL])
            raise_for_reply(
                connection.call([recount_command(connection, self._prefix, partition, start=EMPTY, marks=some)])[0],
                address,
            )
        while True:
            answer = recount_reply(
                connection.call([recount_command(connection, self._prefix, partition, start=start)])[0], address
            )
            if isinstance(answer, Refused):
                raise StoreUnavailable(address, f"partition {partition} can't be counted: {answer.status}")
            if answer[1] == start or start == 0:
                break
            start = answer[1]
        if flaw == "meta" and not desired.seal_id:
            self.open(desired)

    def open_command(self, desired: DesiredPartition) -> Command:
        """Return the command that opens it."""
        return open_command(self._node_connection, self._prefix, desired.partition, desired.change)

    def check_opening(self, desired: DesiredPartition, reply: Any) -> None:
        """Raise Conflict or StoreUnavailable unless it opened."""
        word, *state = raise_for_reply(reply, self._node_connection.node.address)
        if state == [b"importing"]:
            raise Conflict(
                f"partition {desired.partition} on {self._node_connection.node.address} waits for the marks of "
                f"another route change"
            )
        # Any other conflict: another process opened and sealed it first.
        if word not in (b"loaded", b"open", b"conflict"):
            raise StoreUnavailable(
                self._node_connection.node.address, f"partition {desired.partition} can't be opened: {word.decode()}"
            )

    def _create(self, desired: DesiredPartition, *before: Command) -> None:
        made = create_command(
            self._node_connection, self._prefix, desired.partition, desired.topic, desired.lp_from, desired.lp_to,
            "importing",
            desired.change,
        )  # fmt: skip
        word = status_of(in_transaction(self._node_connection, [*before, made])[-1], self._node_connection.node.address)
        if word == "conflict":
            raise Conflict(
                f"partition {desired.partition} is on {self._node_connection.node.address} otherwise than it has to be"
            )

    def _came_with(self, desired: DesiredPartition) -> dict[str, int]:
        if desired.created_by_change is None:
            return {}
        rows = self._connection.execute(query("seal_marks_of"), {"change_id": desired.created_by_change}).fetchall()
        return dict(marks_within((row[0] for row in rows), desired.lp_from, desired.lp_to))

    def _open_by(self, desired: DesiredPartition, commands: list[Command]) -> None:
        for reply in self._node_connection.call(commands) if commands else ():
            self.check_opening(desired, reply)


def in_transaction(connection: NodeConnection, commands: Sequence[Command]) -> list[Any]:
    """Run commands in one transaction; return replies. Raises as `raise_for_reply`."""
    address = connection.node.address
    # No part of it may run by itself.
    _, *queued, done = connection.call_once([("MULTI",), *commands, ("EXEC",)])
    for reply in queued:
        raise_for_reply(reply, address)
    return [raise_for_reply(reply, address) for reply in raise_for_reply(done, address)]
