"""A group's member without threads: it takes, handles, settles and reports when a test says so."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field

from mqlayer.domain.message import CommandRecord, Record, pop_command, records_of
from mqlayer.groups import Assignment, GroupSettings, Start, drained, ensure_group, find_group, join, send_heartbeat
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import (
    LockHolder,
    LockKept,
    LockTaken,
    acquire_command,
    acquire_reply,
    settle_command,
    settle_reply,
)
from mqlayer.runtime.route_cache import RouteCache, load_nodes
from tests.proof.runtimes import runtime_of

LEASE_S = 600.0
ALL = 1_000_000
PER_READ = 500


@dataclass
class ManualMember:
    """One member of a group; joins at once, and again under its id where it is made again."""

    database: Database
    prefix: str
    topic: str
    group: str = "ledger"
    member: str = "hand"
    start: Start = "earliest"
    handled: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        routes = RouteCache(self.database)
        try:
            found = ensure_group(
                runtime_of(self.database, self.prefix),
                routes,
                topic=self.topic,
                name=self.group,
                settings=GroupSettings(start=self.start),
            )
        finally:
            routes.close()
        self.group_id = found.group_id
        self.session = join(self.database, group_id=self.group_id, member_id=self.member, lease_s=LEASE_S)

    @property
    def version(self) -> int:
        """The group's route version."""
        return find_group(self.database, self.topic, self.group).version

    def assigned(self) -> dict[int, Assignment]:
        """Return what a heartbeat gives it."""
        answer = send_heartbeat(self.database, self.session, lease_s=LEASE_S)
        assert answer.known
        return {one.partition: one for one in answer.assignments if not one.release}

    def position(self, partition: int) -> tuple[list[Record], CommandRecord | None]:
        """Return what it has not settled of a partition; the lock is taken for that."""
        one = self.assigned()[partition]
        with self._connection(one) as connection:
            taken = self._take(connection, one)
            return self._read(connection, partition, taken.committed)

    def consume(self, partition: int, count: int = ALL, *, report: bool = True, settle: bool = True) -> int:
        """Handle and settle so many messages of a partition; report it drained where that was all up to the command.

        Postgres refuses that of a command which it has not recorded yet. Settles nothing where it shall not.
        """
        one = self.assigned()[partition]
        with self._connection(one) as connection:
            return self._consume(connection, one, count, report=report, settle=settle)

    def consume_all(self) -> int:
        """Handle everything that it may see, until there is nothing more."""
        done = 0
        connections: dict[int, NodeConnection] = {}
        with ExitStack() as cleanup:
            while True:
                before, count = self.assigned(), 0
                for _, one in sorted(before.items()):
                    if one.node not in connections:
                        connections[one.node] = cleanup.enter_context(self._connection(one))
                    count += self._consume(connections[one.node], one, ALL)
                done += count
                if count == 0 and self.assigned().keys() == before.keys():
                    return done

    def bodies(self) -> dict[str, list[str]]:
        """Return what was handled, by key."""
        found: dict[str, list[str]] = defaultdict(list)
        for record in self.handled:
            found[record.key.decode()].append(record.body.decode())
        return dict(found)

    def _consume(
        self, connection: NodeConnection, one: Assignment, count: int, *, report: bool = True, settle: bool = True
    ) -> int:
        taken = self._take(connection, one)
        at, left = taken.committed, count
        while True:
            records, command = self._read(connection, one.partition, at)
            wanted = records[:left]
            self.handled += wanted
            if not settle:
                return len(wanted)
            self._settle(connection, one, wanted)
            left -= len(wanted)
            if wanted:
                at = wanted[-1].offset + 1
            if command is not None and len(wanted) == len(records):
                assert command.end == at
                if report:
                    drained(self.database, self.session, one, command.seal_id)
            if len(wanted) < PER_READ - 1:
                return count - left

    def _take(self, connection: NodeConnection, one: Assignment) -> LockTaken:
        command = acquire_command(connection, self._holder(one), start=one.start, seek=one.seek, afresh=True)
        taken = acquire_reply(connection.call([command])[0], "")
        assert isinstance(taken, LockTaken), taken
        return taken

    def _read(self, connection: NodeConnection, partition: int, at: int) -> tuple[list[Record], CommandRecord | None]:
        log = partition_keys(self.prefix, partition).log
        # From behind the record before: the command has that one's offset.
        (reply,) = connection.call([("XRANGE", log, b"(%d-0" % (at - 1), b"+", b"COUNT", PER_READ)])
        entries = raise_for_reply(reply, connection.node.address)
        command = pop_command(entries)
        return records_of(entries), command

    def _settle(self, connection: NodeConnection, one: Assignment, records: list[Record]) -> None:
        if not records:
            return
        ranges = [(records[0].offset, records[-1].offset)]
        answer = settle_reply(connection.call([settle_command(connection, self._holder(one), ranges)])[0], "")
        assert isinstance(answer, LockKept), answer

    def _connection(self, one: Assignment) -> NodeConnection:
        return NodeConnection(next(node for node in load_nodes(self.database) if node.node_id == one.node))

    def _holder(self, one: Assignment) -> LockHolder:
        return LockHolder(self.prefix, one.partition, self.group_id, self.member, one.epoch)
