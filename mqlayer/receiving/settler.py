"""Settles, returns or extends messages of an ordered pop."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, NodeNotArmed, StaleToken, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group
from mqlayer.metrics import MemberMeters
from mqlayer.receiving.partition_cache import PartitionCache
from mqlayer.receiving.pop_message import Token
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.outcomes import MAX_OUTCOMES, encode_pop_outcome
from mqlayer.redis.partition_scripts import Refused
from mqlayer.redis.pop_scripts import (
    BATCH_LIMIT,
    PopGroupPartition,
    PopSettled,
    SettleAction,
    pop_settle_command,
    pop_settle_reply,
)
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import RouteCache

OUTCOMES: Final[Mapping[SettleAction, tuple[str, ...]]] = {
    "ack": ("handled", "settled"),
    "park": (),
    "return": (),
    "nack": ("failed",),
    "extend": (),
}
"""Counts by action."""


@dataclass(slots=True)
class _SettleCall:
    action: SettleAction
    ms: int
    outcomes: bytes
    handled: bool
    unhandled: str = "unmatched"
    stale: list[Token] = field(default_factory=list)
    unknown: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class SettlePlan:
    """Calls by node, until they are answered."""

    said: _SettleCall
    by_node: dict[NodeId, list[tuple[PopGroupPartition, Sequence[Token]]]]
    count: int

    def add_stale(self, tokens: Sequence[Token]) -> None:
        """Add void tokens of other kinds."""
        self.said.stale += tokens
        self.count += len(tokens)


class PopSettler:
    """Sends settlements. Thread-safe; one call at a time."""

    def __init__(
        self,
        group: Group,
        cache: PartitionCache,
        connections: NodePool,
        routes: RouteCache,
        *,
        prefix: str,
        name: str,
        meters: MemberMeters | None = None,
    ) -> None:
        self._group, self._cache, self._connections, self._routes, self._prefix = (
            group,
            cache,
            connections,
            routes,
            prefix,
        )
        self._name, self._lock, self._meters = name, threading.Lock(), meters
        self.counts: Counter[str] = Counter()

    def settle(self, action: SettleAction, tokens: Sequence[Token], *, ms: int = 0, handled: bool = True) -> None:
        """Send one write per node. `handled`: False records no outcome.

        Raises InvalidInput for unknown offsets, StaleToken for redelivered messages; the rest is done.
        """
        # `archived` may have changed; a receiver that only settles reads it nowhere else.
        self._cache.refresh()
        outcomes = encode_pop_outcome(self._name) if handled and action == "ack" and self._cache.archived else b""
        self.send(self._plan(_SettleCall(action, ms, outcomes, handled), tokens))

    def exclude(self, tokens: Sequence[Token]) -> None:
        """Settle messages that the group's filter leaves out. Raises as `settle`."""
        outcomes = encode_pop_outcome(self._name, "u") if self._cache.archived else b""
        self.send(self._plan(_SettleCall("ack", 0, outcomes, handled=False), tokens))

    def expire(self, tokens: Sequence[Token]) -> None:
        """Settle messages whose time to live ended. Raises as `settle`."""
        # The count of expired ones is kept for every topic.
        most = MAX_OUTCOMES if self._cache.archived else 0
        outcomes = encode_pop_outcome(self._name, "e", max_entries=most)
        self.send(self._plan(_SettleCall("ack", 0, outcomes, handled=False, unhandled="expired"), tokens))

    def plan_acks(self, tokens: Sequence[Token]) -> SettlePlan:
        """Return acknowledgements to send beside requests; `send` sends the others."""
        self._cache.refresh()
        outcomes = encode_pop_outcome(self._name) if self._cache.archived else b""
        return self._plan(_SettleCall("ack", 0, outcomes, handled=True), tokens)

    def commands(self, connection: NodeConnection, plan: SettlePlan) -> list[Command]:
        """Return a plan's commands for a node, in order; `answered` takes the replies."""
        said = plan.said
        return [
            pop_settle_command(
                connection,
                group_partition,
                said.action,
                [(token.batch, token.offset) for token in tokens],
                ms=said.ms,
                encoded_outcome=said.outcomes,
            )
            for group_partition, tokens in plan.by_node.get(connection.node.node_id, ())
        ]

    def answered(self, connection: NodeConnection, plan: SettlePlan, replies: Sequence[Any]) -> None:
        """Note a node's replies."""
        said = plan.said
        for (_, tokens), reply in zip(plan.by_node.pop(connection.node.node_id, ()), replies, strict=True):
            answer = pop_settle_reply(reply, connection.node.address)
            if isinstance(answer, PopSettled):
                said.stale += [tokens[group_partition - 1] for group_partition in answer.stale]
            elif isinstance(answer, Refused) and answer.status == "unknown":
                said.unknown += tokens
            else:
                said.stale += tokens

    def send(self, plan: SettlePlan) -> None:
        """Send what no node answered yet. Raises as `settle`."""
        said = plan.said
        with self._lock:
            for node_id in list(plan.by_node):
                self._settle_on(node_id, plan)
            done = plan.count - len(said.stale) - len(said.unknown)
            for outcome in OUTCOMES[said.action] if said.handled else (said.unhandled,):
                self.counts[outcome] += done
        if said.unknown:
            named = ", ".join(f"{token.partition}/{token.offset}" for token in said.unknown[:5])
            raise InvalidInput(f"no such message was given out: {named}")
        if said.stale:
            stale = [(token.partition, token.offset) for token in said.stale]
            raise StaleToken(self._group.name, self._group.topic, stale)

    def _plan(self, said: _SettleCall, tokens: Sequence[Token]) -> SettlePlan:
        by_place: dict[tuple[int, int], list[Token]] = {}
        for token in tokens:
            by_place.setdefault((token.partition, token.epoch), []).append(token)
        by_node: dict[NodeId, list[tuple[PopGroupPartition, Sequence[Token]]]] = {}
        for (partition, epoch), of_place in by_place.items():
            node_id = self._cache.node_of(partition)
            if node_id is None:
                said.stale += of_place
                continue
            group_partition = PopGroupPartition(
                self._prefix, partition, self._group.group_id, self._group.scope or "key", epoch
            )
            chunks = [of_place[at : at + BATCH_LIMIT] for at in range(0, len(of_place), BATCH_LIMIT)]
            by_node.setdefault(node_id, []).extend((group_partition, chunk) for chunk in chunks)
        return SettlePlan(said, by_node, len(tokens))

    def _settle_on(self, node_id: NodeId, plan: SettlePlan) -> None:
        connection = self._connections.to(node_id)
        failpoint("pop.before_settle")
        try:
            replies = self._ask(connection, plan)
        except NodeNotArmed:
            # Nothing was sent. Another process may have armed the node since.
            self._routes.refresh_nodes()
            connection = self._connections.to(node_id)
            replies = self._ask(connection, plan)
        except StoreUnavailable:
            if plan.said.action in ("nack", "return"):
                # A repeated nack is refused.
                raise
            replies = self._ask(connection, plan)
        failpoint("pop.after_settle")
        self.answered(connection, plan, replies)

    def _ask(self, connection: NodeConnection, plan: SettlePlan) -> list[Any]:
        commands = self.commands(connection, plan)
        return connection.call(commands) if self._meters is None else self._meters.settling(connection.call, commands)
