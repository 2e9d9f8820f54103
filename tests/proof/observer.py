"""Writes down, in the histories, what members and drivers are told and do: the facts that no store keeps.

It stands between the library and Postgres: nothing is changed, each call goes on as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import redis

from mqlayer.consuming.engine import heartbeat
from mqlayer.consuming.ordered import partition_reports
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.settler import Settler
from mqlayer.domain.message import Record
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import StoreUnavailable
from mqlayer.groups.lineage import drained
from mqlayer.groups.members import Assignment, HeartbeatReply, MemberSession, leave, release, send_heartbeat
from mqlayer.parking import ParkingBatch, ParkingResult, ParkingStore
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import retire_command
from mqlayer.routes import partition_retirement
from mqlayer.topics import node_repair
from tests.proof.history import Drain, History, OwnershipEvent, Quarantined, Settled
from tests.proof.node_client import client_at
from tests.proof.streams import read_records


class MemberWitness:
    """Notes who owns what, by the answers of Postgres to the members of this process, and what they call drained."""

    def __init__(self, history: History, topic: str) -> None:
        self._history, self._topic = history, topic
        self._names: dict[int, str] = {}
        self._owned: dict[MemberSession, dict[int, int]] = {}

    def observe(self) -> None:
        """From now on, for all members of this process."""
        _replace(heartbeat, send_heartbeat=self.send_heartbeat, leave=self.leave)
        _replace(partition_reports, release=self.release, drained=self.drained)
        self._observe_settling()

    def _observe_settling(self) -> None:
        """Note what was handled and settled, once the node took it; what is parked is settled too, and not noted."""
        send, acknowledged = Settler._send, Dispatcher.settled
        sending: dict[OwnedPartition, tuple[int, set[int]]] = {}

        def send_noted(settler: Settler, partitions: Sequence[OwnedPartition]) -> None:
            for owned in partitions:
                sending[owned] = time.monotonic_ns(), {record.offset for record in owned.results.handled.copy()}
            send(settler, partitions)

        def settled_noted(
            dispatcher: Dispatcher, owned: OwnedPartition, records: list[Record], committed: int, *unmatched: Any
        ) -> None:
            acknowledged(dispatcher, owned, records, committed, *unmatched)
            began_ns, handled = sending.pop(owned)
            for record in records:
                if record.offset in handled:
                    self._history.note(self._settled(owned, record), since_ns=began_ns)

        _replace(Settler, _send=send_noted)
        _replace(Dispatcher, settled=settled_noted)

    def _settled(self, owned: OwnedPartition, record: Record) -> Settled:
        source, lp, seq = record.identity
        return Settled(
            topic=self._topic, group=self._names[owned.lock_holder.group_id], key=record.key.decode(), source=source,
            lp=lp,
            seq=seq, partition=owned.partition, epoch=owned.lock_holder.epoch,
        )  # fmt: skip

    def send_heartbeat(
        self, database: Database, session: MemberSession, *, lease_s: float, **own: Any
    ) -> HeartbeatReply:
        """Note what the answer gives: each epoch is taken once, and kept from then on."""
        # The lease that the answer is about began after this.
        began_ns = time.monotonic_ns()
        until_ns = began_ns + int(lease_s * 1e9)
        owned = self._owned.setdefault(session, {})
        answer = send_heartbeat(database, session, lease_s=lease_s, **own)
        for assigned in answer.assignments:
            change = "kept" if owned.get(assigned.partition) == assigned.epoch else "taken"
            owned[assigned.partition] = assigned.epoch
            event = self._assignment(database, session, assigned.partition, assigned.epoch, change, until_ns)
            self._history.note(event, since_ns=began_ns)
        return answer

    def release(self, database: Database, session: MemberSession, *assigned: Assignment) -> None:
        """Note what is given back, before it is."""
        events = [self._assignment(database, session, one.partition, one.epoch, "released") for one in assigned]
        operations = [self._history.begin(event) for event in events]
        release(database, session, *assigned)
        for operation in operations:
            operation.ok()

    def leave(self, database: Database, session: MemberSession) -> None:
        """Note that all is given back, before it is."""
        for partition, epoch in self._owned.get(session, {}).items():
            self._history.begin(self._assignment(database, session, partition, epoch, "released"))
        leave(database, session)

    def drained(
        self, database: Database, session: MemberSession, assigned: Assignment, seal_id: str, **patience: float
    ) -> bool:
        """Note that a partition is called drained, before it is, and whether that was taken."""
        group = self._name(database, session.group_id)
        event = Drain(topic=self._topic, group=group, partition=assigned.partition, epoch=assigned.epoch)
        operation = self._history.begin(event)
        taken = drained(database, session, assigned, seal_id, **patience)
        (operation.ok if taken else operation.fail)()
        return taken

    def _assignment(
        self,
        database: Database,
        session: MemberSession,
        partition: int,
        epoch: int,
        change: Any,
        until_ns: int | None = None,
    ) -> OwnershipEvent:
        return OwnershipEvent(
            topic=self._topic, group=self._name(database, session.group_id), partition=partition,
            member=f"{session.member_id}/{session.session}", epoch=epoch, change=change, until_ns=until_ns,
        )  # fmt: skip

    def _name(self, database: Database, group_id: int) -> str:
        if group_id not in self._names:
            with database.connection() as connection:
                statement = "SELECT name FROM mqlayer.consumer_group WHERE group_id = %s"
                row = connection.execute(statement, (group_id,)).fetchone()
            assert row is not None
            self._names[group_id] = row[0]
        return self._names[group_id]


def observe_retiring(history: History, topic: str) -> Callable[[], None]:
    """From now on, note what a partition holds before this process leaves nothing of it but a tombstone.

    Whoever retires it does so, and whoever arms its node again. Return what ends that.
    """

    def bury(
        connection: NodeConnection, prefix: str, partition: int, groups: Iterable[int], *, archived: bool = False
    ) -> Command:
        # Nearly all of what an arming buries is buried already: it is not to wait for a connection to each of them.
        (there,) = connection.call([("EXISTS", partition_keys(prefix, partition).log)])
        if raise_for_reply(there, connection.node.address):
            note(connection, prefix, partition)
        return retire_command(connection, prefix, partition, groups, archived=archived)

    def note(connection: NodeConnection, prefix: str, partition: int) -> None:
        try:
            with client_at(connection.node.url) as client:
                for event in read_records(client, prefix, partition, topic):
                    history.note(event)
        except redis.RedisError as error:
            raise StoreUnavailable(connection.node.address, str(error)) from error

    def observe(command: Callable[..., Command]) -> None:
        for module in (partition_retirement, node_repair):
            _replace(module, retire_command=command)

    observe(bury)
    return lambda: observe(retire_command)


def observe_parking(history: History, topic: str, group: str) -> None:
    """From now on, note which messages the members of this process park or bury, before they do."""

    def write(ledger: ParkingStore, partition: PartitionId, epoch: int, page: ParkingBatch) -> ParkingResult:
        burials = [*page.dead_letters, *(turn.dead_letter for turn in page.updates if turn.dead_letter is not None)]
        events = [_quarantined(b.record, topic, group, "dead" if b.keep_body else "skip", b.reason) for b in burials]
        events += [_quarantined(record, topic, group, "park") for _, record in page.messages]
        operations = [history.begin(event) for event in events]
        written = write_page(ledger, partition, epoch, page)
        for operation in operations:
            operation.ok()
        return written

    write_page = ParkingStore.write
    _replace(ParkingStore, write=write)


def _quarantined(
    record: Record, topic: str, group: str, how: Literal["skip", "park", "dead"], reason: str = ""
) -> Quarantined:
    source, lp, seq = record.identity
    key = record.key.decode()
    return Quarantined(topic=topic, group=group, key=key, source=source, lp=lp, seq=seq, how=how, reason=reason)


def _replace(module: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        assert hasattr(module, name)
        setattr(module, name, function)
