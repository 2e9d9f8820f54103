"""Skip a key's head: the message dies by an operator's decision, and the key continues.

Parked: one transaction. In the stream: see docs/design/parked-keys.md, "Passing over the head of a key". A crash
before the commit leaves only raised epochs; the owner then asks Postgres for a higher one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mqlayer.domain.message import Identity, Record, records_of
from mqlayer.domain.names import encode_key
from mqlayer.domain.routing import Lp, NodeId, lp_of
from mqlayer.errors import Conflict, MqlayerError, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.groups.rebalance import change_group
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import count_action, emit_action
from mqlayer.redelivery.operator_actions import audit_target, check_reason, discard_first
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import fence_command
from mqlayer.redis.read_scripts import FIND_LIMIT, KeySearchResult, find_command, find_reply
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

SCAN_LIMIT: Final = 10_000
"""Offsets searched, over all partitions."""
CALL_BYTES: Final = 16_000_000
"""Body bytes that a node reads per call."""
CALLS_AT_ONCE: Final = 32
NODE_LIMIT_S: Final = 15.0
"""Idle limit of the transaction that waits for the node."""
FENCE_TIMEOUTS: Final = {"lock_wait": "500ms", "idle": "5s"}
RETRY_HINT: Final = "look at the key, and say it again if it is still right: mqlayer key explain"


@dataclass(frozen=True, slots=True)
class SkippedHead:
    """A skipped message. `parked`: it waited in Postgres, otherwise in the stream.

    `fenced`: its effect can't commit any more. False if parked or the fence could not be raised; a running effect may
    commit, but its ack is refused.
    """

    identity: Identity
    dead_id: int
    parked: bool
    fenced: bool


@dataclass(frozen=True, slots=True)
class _SearchPartition:
    partition: int
    node: NodeId
    start: int
    seek: int
    replay: int


@dataclass(frozen=True, slots=True)
class _StreamHead:
    part: _SearchPartition
    node: Node
    offset: int
    identity: Identity
    attempts: int


def skip_head(
    runtime: Runtime, topic: str, group: str, key: str, *, reason: str, only: Identity | None = None
) -> SkippedHead:
    """Make a key's head dead, with its body kept; the key continues.

    `only`: refuse any other message. Raises InvalidInput for an empty
    reason, NotFound if nothing waits, Conflict if that changed or the effect is committed, StoreUnavailable; then
    nothing changes.
    """
    check_reason(reason)
    found, name = find_group(runtime.control, topic, group), encode_key(key)
    lp = lp_of(name)
    act = _HeadSkip(runtime, found, name, lp, reason=reason, only=only)
    skipped = act.skip_parked()
    if skipped is None:
        skipped = act.skip_in_stream()
        failpoint("skip.after_commit")
    emit_action("head_skipped", found, lp=int(lp), seq=skipped.identity.seq, actor=runtime.actor)
    log.info("head_skipped", extra={"topic": topic, "group": group, "identity": str(skipped.identity)})
    return skipped


class _HeadSkip:
    def __init__(
        self, runtime: Runtime, group: Group, key: bytes, lp: Lp, *, reason: str, only: Identity | None
    ) -> None:
        self._runtime, self._group, self._key, self._lp = runtime, group, key, lp
        self._reason, self._only = reason, only
        self._place: dict[str, Any] = {"group_id": group.group_id, "lp": int(lp), "name": key}

    # -- parked ------------------------------------------------------------------------------------------------------

    def skip_parked(self) -> SkippedHead | None:
        return change_group(self._runtime.control, self._group.group_id, self._skip_parked)

    def _skip_parked(self, connection: Connection) -> SkippedHead | None:
        if connection.execute(query("parked_hold"), self._place).fetchone() is None:
            return None
        first = {"after_place": 0, "after_seq": 0, "limit": 1}
        row = connection.execute(query("parked_messages_list"), self._place | first).fetchone()
        if row is None:
            raise Conflict("the key is parked and nothing waits in it", "its owner takes it up by itself")
        head = Identity(row[1], int(self._lp), row[2])
        self._check_only(head)
        facts = {"reason": self._reason, "actor": self._runtime.actor, "limit": 1, "upto": row[0]}
        discard_first(connection, self._group, self._place | facts, act="key skip-head")
        count_action(connection, self._group.group_id, "head_skipped")
        named = connection.execute(query("dead_find"), head._asdict() | self._names()).fetchone()
        failpoint("skip.parked_before_commit")
        return SkippedHead(head, int(named[0]) if named is not None else 0, parked=True, fenced=False)

    # -- in the stream -----------------------------------------------------------------------------------------------

    def skip_in_stream(self) -> SkippedHead:
        head = next(self._heads(), None)
        if head is None:
            key = self._key.decode(errors="replace")
            explain = f"mqlayer key explain {self._group.topic} {shlex.quote(key)} --group {self._group.name}"
            raise NotFound(
                "waiting message of the key", f"{audit_target(self._group)}/{key}", f"see where it is: {explain}"
            )
        self._check_only(head.identity)
        return change_group(
            self._runtime.control, self._group.group_id, lambda connection: self._rule(connection, head),
            idle_s=NODE_LIMIT_S,
        )  # fmt: skip

    def _rule(self, connection: Connection, head: _StreamHead) -> SkippedHead:
        """New epoch, node, fence, recheck, dead row: the order matters."""
        epoch = self._new_epoch(connection, head)
        with self._runtime.connection(head.node) as node_connection:
            self._raise(node_connection, head, epoch)
            failpoint("skip.after_fence")
            fenced = self._fence(head, epoch)
            record = self._recheck(connection, node_connection, head)
        facts = {
            "group_id": self._group.group_id,
            "partition_id": head.part.partition,
            "log_offset": head.offset,
            "key": record.key,
            "m": record.m,
            "body": record.body,
            "reason": self._reason,
            "attempts": head.attempts,
            "actor": self._runtime.actor,
        }
        ((dead_id,),) = connection.execute(query("dead_kept_put"), facts | head.identity._asdict()).fetchall()
        said = {"key": self._key.decode(errors="replace"), "message": str(head.identity), "dead_id": dead_id,
                "reason": self._reason}  # fmt: skip
        write_audit(connection, self._runtime.actor, "key skip-head", audit_target(self._group), said)
        count_action(connection, self._group.group_id, "head_skipped")
        connection.execute(query("allocation_raise"), {"group_id": self._group.group_id})
        failpoint("skip.before_commit")
        return SkippedHead(head.identity, int(dead_id), parked=False, fenced=fenced)

    def _new_epoch(self, connection: Connection, head: _StreamHead) -> int:
        facts = {"group_id": self._group.group_id, "partition_id": head.part.partition}
        row = connection.execute(query("skip_epoch"), facts).fetchone()
        if row is None:
            (row,) = connection.execute(query("epoch_next")).fetchall()
        return int(row[0])

    def _raise(self, connection: NodeConnection, head: _StreamHead, epoch: int) -> None:
        command = fence_command(connection, self._runtime.prefix, head.part.partition, self._group.group_id, epoch)
        word = raise_for_reply(connection.call([command])[0], connection.node.address)[0]
        if word != b"fenced_off":
            raise Conflict(f"partition {head.part.partition} changed hands in the meantime", RETRY_HINT)

    def _fence(self, head: _StreamHead, epoch: int) -> bool:
        application = self._runtime.application
        if application is None:
            return False
        alone = not self._group.ordered or self._group.strategy != "strict"
        facts = {
            "group_id": self._group.group_id,
            "lp": head.identity.lp,
            "lp_from": head.identity.lp,
            "lp_to": head.identity.lp + 1,
            "epoch": epoch,
            "source": -head.identity.source if alone else head.identity.source,
            "key": str(head.identity.seq) if alone else self._key.decode(),
            "seq": head.identity.seq,
            "replay": head.part.replay,
        }
        try:
            with application.connection() as connection, connection.transaction():
                # A running first effect of the LP holds its row.
                connection.execute(query("transaction_patience"), FENCE_TIMEOUTS)
                connection.execute(query("fence_raise"), facts)
                ((at, applied),) = connection.execute(query("fence_state"), facts).fetchall()
        except MqlayerError as error:
            log.warning("fence_not_raised", extra={"lp": head.identity.lp, "reason": str(error)})
            return False
        if applied:
            raise Conflict(f"the effect of message {head.identity} is there: it only has to be settled", RETRY_HINT)
        return at is not None and int(at) >= epoch

    def _recheck(self, connection: Connection, node_connection: NodeConnection, head: _StreamHead) -> Record:
        (seek,) = connection.execute(query("group_seeks"), self._place).fetchone() or (None,)
        parked = connection.execute(query("parked_hold"), self._place).fetchone()
        found = self._heads_found(node_connection, head.part, [(head.offset, 1)])[0].head
        log_key = partition_keys(self._runtime.prefix, head.part.partition).log
        (reply,) = node_connection.call([("XRANGE", log_key, b"%d-0" % head.offset, b"%d-0" % head.offset)])
        records = records_of(raise_for_reply(reply, node_connection.node.address))
        same = [record for record in records if record.identity == head.identity and record.key == self._key]
        if seek != head.part.seek or parked is not None or found is None or not same:
            raise Conflict(f"message {head.identity} is not what the key waits for any more", RETRY_HINT)
        if self._is_dead(connection, head.identity, head.part):
            raise Conflict(f"message {head.identity} is dead already", RETRY_HINT)
        return same[0]

    # -- finding it --------------------------------------------------------------------------------------------------

    def _heads(self) -> Iterator[_StreamHead]:
        parts, nodes = self._parts(), {node.node_id: node for node in load_nodes(self._runtime.control)}
        group_partitions = [
            GroupPartition(w.node, w.partition, self._group.group_id, start=w.start, seek=w.seek) for w in parts
        ]
        positions = read_positions(self._runtime, nodes.values(), group_partitions)
        left = SCAN_LIMIT
        for part in parts:
            node, position = nodes[part.node], positions.at(part.partition, self._group.group_id)
            if position is None:
                reason = positions.unreachable.get(part.node, f"it does not have partition {part.partition}")
                raise StoreUnavailable(f"node {node.name}", reason)
            end = min(position.next_offset, position.position + left)
            left -= max(0, end - position.position)
            with self._runtime.connection(node) as connection:
                yield from self._heads_in(connection, part, node, position.position, end)

    def _heads_in(
        self, node_connection: NodeConnection, part: _SearchPartition, node: Node, first: int, end: int
    ) -> Iterator[_StreamHead]:
        per_call = min(
            FIND_LIMIT, max(1, CALL_BYTES // load_route(self._runtime.control, self._group.topic).body_limit)
        )
        while first < end:
            upto = min(end, first + per_call * CALLS_AT_ONCE)
            pages = [(at, min(per_call, upto - at)) for at in range(first, upto, per_call)]
            head = next(
                (one.head for one in self._heads_found(node_connection, part, pages) if one.head is not None), None
            )
            if head is None:
                first = upto
                continue
            first = head.offset + 1
            identity = Record(head.offset, head.m, head.key, b"").identity
            with self._runtime.control.connection() as connection:
                dead = self._is_dead(connection, identity, part)
            if not dead:
                attempts = head.failures.attempts if head.failures else 0
                yield _StreamHead(part, node, head.offset, identity, attempts)

    def _heads_found(
        self, connection: NodeConnection, part: _SearchPartition, pages: list[tuple[int, int]]
    ) -> list[KeySearchResult]:
        commands = [
            find_command(
                connection,
                self._runtime.prefix,
                part.partition,
                self._group.group_id,
                key=self._key,
                first=first,
                count=count,
                seek=part.seek,
            )
            for first, count in pages
        ]
        return [find_reply(reply, self._key, connection.node.address) for reply in connection.call(commands)]

    def _parts(self) -> list[_SearchPartition]:
        with self._runtime.control.connection() as connection:
            rows = connection.execute(query("head_skip_partitions"), self._place).fetchall()
        return [
            _SearchPartition(partition, NodeId(node), start, seek, replay)
            for partition, node, start, seek, replay in rows
        ]

    def _is_dead(self, connection: Connection, identity: Identity, part: _SearchPartition) -> bool:
        facts = {"group_id": self._group.group_id, "seek": part.seek} | identity._asdict()
        row = connection.execute(query("dead_in_stream"), facts).fetchone()
        return bool(row and row[0])

    def _check_only(self, head: Identity) -> None:
        if self._only not in (None, head):
            raise Conflict(f"the key waits for message {head}, not for {self._only}", RETRY_HINT)

    def _names(self) -> dict[str, Any]:
        return {"topic": self._group.topic, "group": self._group.name}
