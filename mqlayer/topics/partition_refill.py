"""Refill a node's partitions from the outbox, and seal them again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg.types.json import Jsonb

from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import (
    AS_BEFORE,
    MessageRun,
    Sealed,
    append_command,
    brief_seal_command,
    check_appended,
    reopen_command,
    seal_command,
    seal_reply,
)
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.lost_messages import LostMessages
from mqlayer.topics.node_state import DesiredPartition, ObservedPartition
from mqlayer.topics.outbox_access import borrow_outbox, may_lack_commits_of
from mqlayer.topics.outbox_resend import BorrowedOutbox, lost_runs
from mqlayer.topics.partition_creation import PartitionCreation, in_transaction

SEEN_EVERY_S: Final = 5.0


class PartitionRefill:
    """Resends from the runtime's outbox. A partition is sealed between any two writes."""

    def __init__(
        self,
        runtime: Runtime,
        connection: Connection,
        node_connection: NodeConnection,
        creation: PartitionCreation,
        lost: LostMessages,
    ) -> None:
        self._connection, self._node_connection, self._prefix = connection, node_connection, runtime.prefix
        self._application, self._creation, self._lost = runtime.application, creation, lost
        self._seen = time.monotonic()

    def reseal(self, desired: DesiredPartition, found: ObservedPartition) -> None:
        """Refill a sealed partition up to its recorded marks; seal it again."""
        state, seal_id = found.state, found.seal_id
        if state in (None, "importing"):
            # Other clients never see it open.
            opened, seal_id = self._at_once(desired, [self._creation.open_command(desired)])
            self._creation.check_opening(desired, opened)
        self._lost.note(desired, self._resend(desired, seal_id))
        failpoint("repair.after_resend")
        seal = seal_command(
            self._node_connection, self._prefix, desired.partition, desired.change_id or 0, str(uuid.uuid4())
        )
        answer = self._sealed(desired, self._node_connection.call([seal])[0])
        failpoint("repair.after_seal")
        facts = {
            "partition_id": desired.partition,
            "change_id": desired.change_id,
            "seal_id": answer.seal_id,
            "next_offset": answer.next_offset,
            "run_id": self._node_connection.connect().run_id,
            "marks": Jsonb(dict(desired.marks)),
            "unreachable": False,
            # Sealed while its node was unavailable, it may hold messages that its successors hold too.
            "cut": any(seq > desired.marks.get(name, seq) for name, seq in answer.marks.items()),
        }
        self._connection.execute(query("seal_put"), facts)

    def put_command(self, desired: DesiredPartition) -> None:
        """Append a sealed partition's missing command record."""
        change = desired.change_id or 0
        seal = seal_command(self._node_connection, self._prefix, desired.partition, change, str(uuid.uuid4()))
        self._node_connection.call([seal])

    def unblock(self, desired: DesiredPartition) -> None:
        """Skip rows that the outbox lost, and release quarantined rows."""
        outboxes = self._connection.execute(query("outbox_sources")).fetchall()
        if len(outboxes) != 1:
            return
        ((source, outbox_uuid),) = outboxes
        there = self._marks(desired)
        facts = {"topic_id": desired.topic_id, "lp_from": desired.lp_from, "lp_to": desired.lp_to}
        with borrow_outbox(self._application, outbox_uuid) as outbox:
            if outbox is None:
                return
            for lp, _, floor in outbox.execute(query("outbox_proof"), facts).fetchall():
                mark = there.get(f"{source}:{lp}", 0)
                if mark < floor:
                    self._lost.skip(desired, source, lp, mark, floor)
                    outbox.execute(query("quarantined_remove"), {"topic_id": desired.topic_id, "lp": lp})
        self._lost.note(desired)

    def _marks(self, desired: DesiredPartition) -> dict[str, int]:
        keys = partition_keys(self._prefix, desired.partition)
        flat = raise_for_reply(
            self._node_connection.call([("HGETALL", keys.marks)])[0], self._node_connection.node.address
        )
        return {name.decode(): int(seq) for name, seq in zip(flat[::2], flat[1::2], strict=True)}

    def _resend(self, desired: DesiredPartition, seal_id: str) -> int:
        there = self._marks(desired)
        short: dict[int, dict[int, tuple[int, int]]] = {}
        for name, seq in desired.marks.items():
            source, lp = map(int, name.split(":"))
            if there.get(name, 0) < seq:
                short.setdefault(source, {})[lp] = (there.get(name, 0), seq)
        lost = 0
        for source, lps in short.items():
            seal_id, of_source = self._resend_source(desired, seal_id, source, lps)
            lost += of_source
        return lost

    def _resend_source(
        self, desired: DesiredPartition, seal_id: str, source: int, lps: Mapping[int, tuple[int, int]]
    ) -> tuple[str, int]:
        row = self._connection.execute(query("source_outbox"), {"source_id": source}).fetchone()
        if row is None or row[0] is None:
            # No outbox to resend direct messages from.
            return seal_id, _count(lps)
        with borrow_outbox(self._application, row[0]) as outbox:
            if outbox is None:
                whose = f"partition {desired.partition} waits for the relay of outbox {row[0]}"
                raise StoreUnavailable(
                    self._node_connection.node.address, f"{whose}, which can send again what it lost"
                )
            seal_id = self._resend_lps(BorrowedOutbox(source, row[0], outbox), desired, seal_id, lps)
        return seal_id, 0

    def _resend_lps(
        self, borrowed: BorrowedOutbox, desired: DesiredPartition, seal_id: str, lps: Mapping[int, tuple[int, int]]
    ) -> str:
        def give_up(lp: int, after: int, to: int) -> bool:
            self._lost.skip(desired, borrowed.source, lp, after, to)
            return True

        sure = self._sure(borrowed.outbox, desired, lps)
        address = self._node_connection.node.address
        for runs in lost_runs(borrowed, desired.topic_id, sure, give_up, address=address):
            if runs:
                seal_id = self._append(desired, seal_id, borrowed.source, runs)
            self._keep_alive()
        for lp, (_, to) in lps.items():
            if (known := sure[lp][1]) < to:
                give_up(lp, known, to)
        return seal_id

    def _sure(
        self, outbox: Connection, desired: DesiredPartition, lps: Mapping[int, tuple[int, int]]
    ) -> Mapping[int, tuple[int, int]]:
        """Return, per LP, the missing range that the outbox provably has: rows relayed before its loss."""
        if not may_lack_commits_of(outbox, self._connection):
            return lps
        rows = outbox.execute(query("relayed_all"), {"topic_id": desired.topic_id}).fetchall()
        relayed: dict[int, int] = dict(rows)
        return {lp: (mark, max(mark, min(to, relayed.get(lp, 0)))) for lp, (mark, to) in lps.items()}

    def _keep_alive(self) -> None:
        """Keep Postgres's idle limit from ending this transaction."""
        if time.monotonic() - self._seen > SEEN_EVERY_S:
            self._connection.execute(query("clock"))
            self._seen = time.monotonic()

    def _append(self, desired: DesiredPartition, seal_id: str, source: int, runs: Sequence[MessageRun]) -> str:
        append = append_command(self._node_connection, self._prefix, desired.partition, source, runs, backlog=AS_BEFORE)
        commands = [append]
        if seal_id:
            short = (f"{source}:{runs[0].lp}", runs[0].first - 1)
            commands.insert(0, reopen_command(self._node_connection, self._prefix, desired.partition, seal_id, *short))
        reply, sealed = self._at_once(desired, commands)
        check_appended(reply, self._node_connection.node.address)
        return sealed

    def _at_once(self, desired: DesiredPartition, commands: list[Command]) -> tuple[Any, str]:
        # By its text: an emptied server may have reloaded the other scripts, but not this one.
        seal = brief_seal_command(
            self._node_connection, self._prefix, desired.partition, desired.change_id or 0, str(uuid.uuid4())
        )
        *_, last, sealed = in_transaction(self._node_connection, [*commands, seal])
        return last, self._sealed(desired, sealed).seal_id

    def _sealed(self, desired: DesiredPartition, reply: Any) -> Sealed:
        answer = seal_reply(reply, self._node_connection.node.address)
        if not isinstance(answer, Sealed):
            raise Conflict(
                f"partition {desired.partition} can't be sealed again: {answer.status} {answer.fact}".rstrip()
            )
        return answer


def _count(lps: Mapping[int, tuple[int, int]]) -> int:
    return sum(to - after for after, to in lps.values())
