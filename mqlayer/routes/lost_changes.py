"""Undo route changes that the control database lost (docs/design/lost-commits.md).

All unknown successors become tombstones before a parent opens (invariant 4).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.partition_scripts import fence_command, reopen_command, retire_command
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import load_route, nodes_by
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

TIMEOUTS: Final = {"lock_wait": "10s", "idle": "30s"}
KEYS_PER_SCAN: Final = 1_000


@dataclass(slots=True)
class UndoReport:
    """Reopened partitions; deleted successors, with the number of messages each had."""

    opened: list[int] = field(default_factory=list)
    deleted: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PartitionMeta:
    partition: int
    node: NodeId
    state: str
    sealed_for: int
    seal: str
    next: int


def reopen_forgotten(runtime: Runtime, topic: str) -> UndoReport:
    """Delete a topic's unknown successors, reopen their parents. After a crash, repeat it.

    Outboxes resend messages that only successors had, while the rows exist; direct producers get an error; groups may
    handle some again, except fenced effects. Scans all keys of every node. Raises NotFound, StoreUnavailable,
    NodeNotArmed, Conflict for a seal or partition with a number that this database never gave out.
    """
    topic_id = load_route(runtime.control, topic).topic_id

    def work(connection: Connection) -> UndoReport:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        nodes = {node.node_id: node for node in nodes_by(connection)}
        with NodePool(runtime, nodes.__getitem__) as connections:
            undo = _LostChangeUndo(connection, connections, nodes.values(), topic, topic_id, runtime.prefix)
            done = undo.run()
        if done.opened or done.deleted:
            facts: dict[str, Any] = {
                "opened": done.opened,
                "deleted": {str(number): count for number, count in done.deleted.items()},
            }
            write_audit(connection, runtime.actor, "route reopen", topic, facts)
            log.warning("lost_change_undone", extra={"topic": topic, **facts})
        return done

    reopened: UndoReport = runtime.control.transaction(work)
    return reopened


class _LostChangeUndo:
    def __init__(
        self,
        connection: Connection,
        connections: NodePool,
        nodes: Collection[Node],
        topic: str,
        topic_id: int,
        prefix: str,
    ) -> None:
        self._connection, self._topic, self._topic_id, self._prefix = connection, topic, topic_id, prefix
        self._connections = connections
        # These rows stay locked, so arming waits.
        rows = connection.execute(query("node_armed_runs"), {"node_ids": [node.node_id for node in nodes]}).fetchall()
        armed: dict[int, str | None] = {node_id: run for node_id, run, _ in rows}
        given_up = {node_id for node_id, _, lost in rows if lost}
        self._node_ids = [node.node_id for node in nodes if node.node_id not in given_up]
        for node_id in self._node_ids:
            node_connection = connections.to(node_id)
            if node_connection.connect().run_id != armed[node_id]:
                raise NodeNotArmed(node_connection.node.address, "it was armed anew meanwhile: say the command again")
        ((self._last_change, self._last_partition),) = connection.execute(query("forgotten_limits")).fetchall()

    def run(self) -> UndoReport:
        metas = [meta for node_id in self._node_ids for meta in self._metas(node_id)]
        facts = {"changes": [meta.sealed_for for meta in metas], "partitions": [meta.partition for meta in metas]}
        ((known_changes, known_partitions),) = self._connection.execute(query("forgotten_known"), facts).fetchall()
        rows = self._connection.execute(query("forgotten_homes"), {"topic_id": self._topic_id}).fetchall()
        homes: dict[int, int] = dict(rows)
        sealed = [
            meta
            for meta in metas
            if meta.state == "sealed" and homes.get(meta.partition) == meta.node
            and meta.sealed_for not in known_changes
        ]  # fmt: skip
        done = UndoReport()
        if not sealed:
            return done
        unknown = [meta for meta in metas if meta.partition not in known_partitions and meta.state != "deleted"]
        self._refuse_others(sealed, unknown)
        for meta in unknown:
            self._delete(meta)
            done.deleted[meta.partition] = meta.next - 1
            failpoint("lost_change.after_retire")
        self._raise_epochs(sealed)
        for meta in sealed:
            self._open(meta)
            done.opened.append(meta.partition)
            failpoint("lost_change.after_open")
        return done

    def _metas(self, node_id: NodeId) -> list[_PartitionMeta]:
        connection, cursor, found = self._connections.to(node_id), b"0", set()
        while True:
            command = (b"SCAN", cursor, b"MATCH", f"{self._prefix}:{{*}}:meta", b"COUNT", KEYS_PER_SCAN)
            cursor, keys = raise_for_reply(connection.call([command])[0], connection.node.address)
            found |= {int(key.split(b"{", 1)[1].split(b"}", 1)[0]) for key in keys}
            if cursor == b"0":
                break
        return [meta for partition in sorted(found) if (meta := self._meta(node_id, partition)) is not None]

    def _meta(self, node_id: NodeId, partition: int) -> _PartitionMeta | None:
        connection = self._connections.to(node_id)
        meta_key = partition_keys(self._prefix, partition).meta
        (reply,) = connection.call([("HMGET", meta_key, "topic", "state", "sealed_for", "seal", "next")])
        topic, state, change, seal, following = raise_for_reply(reply, connection.node.address)
        if topic is None or topic.decode() != self._topic:
            return None
        return _PartitionMeta(
            partition, node_id, state.decode(), int(change or 0), (seal or b"").decode(), int(following or 1)
        )

    def _refuse_others(self, sealed: list[_PartitionMeta], unknown: list[_PartitionMeta]) -> None:
        late = [f"partition {meta.partition} is sealed for change {meta.sealed_for}"
                for meta in sealed if meta.sealed_for > self._last_change]  # fmt: skip
        late += [f"partition {meta.partition} exists" for meta in unknown if meta.partition > self._last_partition]
        if late:
            raise Conflict(
                f"{late[0]}, a number that this database never gave out: it is another one than the control database",
                "look whether MQLAYER_DSN leads to an old primary of it, or another system uses the key prefix",
            )

    def _delete(self, meta: _PartitionMeta) -> None:
        groups = [row[0] for row in self._connection.execute(query("forgotten_groups"), {"topic_id": self._topic_id})]
        connection = self._connections.to(meta.node)
        raise_for_reply(
            connection.call([retire_command(connection, self._prefix, meta.partition, groups)])[0],
            connection.node.address,
        )

    def _raise_epochs(self, sealed: list[_PartitionMeta]) -> None:
        """Make owners that read the command record begin again."""
        homes = {meta.partition: meta.node for meta in sealed}
        for group, partition, epoch in self._connection.execute(
            query("forgotten_epochs"), {"partitions": list(homes)}
        ).fetchall():
            connection = self._connections.to(homes[partition])
            (reply,) = connection.call([fence_command(connection, self._prefix, partition, group, epoch)])
            raise_for_reply(reply, connection.node.address)

    def _open(self, meta: _PartitionMeta) -> None:
        """Remove the command record; free its entry id: it breaks dense offsets."""
        connection, keys = self._connections.to(meta.node), partition_keys(self._prefix, meta.partition)
        # Empty: no LP is short.
        reopen = reopen_command(connection, self._prefix, meta.partition, meta.seal, "", 0)
        last = ("XSETID", keys.log, f"{meta.next - 1}-0")
        replies = raise_for_reply(
            connection.call_once([("MULTI",), reopen, last, ("EXEC",)])[-1], connection.node.address
        )
        word, *fact = raise_for_reply(replies[0], connection.node.address)
        if word != b"open" or isinstance(replies[1], Exception):
            shown = fact[0].decode() if fact else word.decode()
            raise StoreUnavailable(connection.node.address, f"partition {meta.partition} is {shown} by now: look again")
