"""Nodes as Postgres knows them and as they answer, for people."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from mqlayer.domain.node_runs import is_same_run
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.redis.server_info import ServerInfo, read_server_info
from mqlayer.runtime.runtime import Runtime

ANSWER_WITHIN_S: Final = 0.5
AGAIN_WITHIN_S: Final = 2.0
"""A busy machine may miss the first time."""

ServingState = Literal["serving", "unarmed", "restarted", "unreachable", "lost"]
"""*restarted*: another run than the armed one answers."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node. `sampled_at`: of its last sample; `server`: its own facts, None with a `reason`."""

    node: Node
    armed_at: datetime | None
    lost_at: datetime | None
    created_at: datetime
    sampled_at: datetime | None
    open: int
    sealed: int
    server: ServerInfo | None
    reason: str = ""

    @property
    def state(self) -> ServingState:
        """Whether it serves, or why not."""
        if self.lost_at is not None:
            return "lost"
        if self.server is None:
            return "unreachable"
        if self.node.armed_run_id is None:
            return "unarmed"
        return "serving" if is_same_run(self.server.run_id, self.node.armed_run_id) else "restarted"

    @property
    def since(self) -> datetime | None:
        """Since when it is in this state; None if not known: for an unreachable one, after `sampled_at`."""
        if self.state == "restarted":
            up_for = self.up_for()
            return None if up_for is None else datetime.now(UTC) - up_for
        return {"lost": self.lost_at, "unreachable": None}.get(self.state, self.armed_at)

    def number(self, name: str) -> int | None:
        """Return a number of the server's own facts; None without an answer."""
        return None if self.server is None else self.server.number(name)

    def up_for(self) -> timedelta | None:
        """Return the age of its process."""
        seconds = self.number("uptime_in_seconds")
        return None if seconds is None else timedelta(seconds=seconds)


def node_statuses(runtime: Runtime, *, within_s: float = ANSWER_WITHIN_S) -> list[NodeStatus]:
    """Return all nodes, oldest first; each has `within_s` seconds to answer, and then more once again."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("health_nodes")).fetchall()
    nodes = [Node(NodeId(row[0]), *row[1:6]) for row in rows]
    answers = _ask(nodes, within_s)
    lost = {node.node_id for node, row in zip(nodes, rows, strict=True) if row[7] is not None}
    silent = [one for one in nodes if answers[one.node_id][0] is None and one.node_id not in lost]
    answers |= _ask(silent, AGAIN_WITHIN_S)
    return [
        NodeStatus(node, armed, lost, made, sampled, opened or 0, sealed or 0, *answers[node.node_id])
        for node, (*_, armed, lost, made, sampled, opened, sealed) in zip(nodes, rows, strict=True)
    ]


def node_status(runtime: Runtime, name: str, *, within_s: float = ANSWER_WITHIN_S) -> NodeStatus:
    """Return one node. Raises NotFound."""
    for one in node_statuses(runtime, within_s=within_s):
        if one.node.name == name:
            return one
    raise NotFound("node", name, "see those that there are: mqlayer node list")


@dataclass(frozen=True, slots=True)
class PartitionOnNode:
    """A partition on a node. `change`: the route change that ends it."""

    partition: int
    topic: str
    lp_from: int
    lp_to: int
    state: str
    created_at: datetime
    change: int | None


def node_partitions(runtime: Runtime, node_id: int, *, after: int = 0, limit: int = 50) -> list[PartitionOnNode]:
    """Return partitions on a node, from behind one on."""
    facts = {"node_id": node_id, "after": after, "limit": limit}
    with runtime.control.connection() as connection:
        return [PartitionOnNode(*row) for row in connection.execute(query("health_node_partitions"), facts).fetchall()]


def _ask(nodes: Sequence[Node], within_s: float) -> dict[NodeId, tuple[ServerInfo | None, str]]:
    late = f"no answer within {within_s:g} s"
    found: dict[NodeId, tuple[ServerInfo | None, str]] = {}

    def one(node: Node) -> None:
        try:
            server = read_server_info(node.url, timeout_s=within_s, node=node.name, armed=node.armed_run_id)
            found[node.node_id] = server, ""
        except MqlayerError as error:
            found[node.node_id] = None, str(error)

    # Daemon threads: a silent server must not keep the process alive.
    threads = [threading.Thread(target=one, args=(node,), name="node-status", daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return {node.node_id: found.get(node.node_id, (None, late)) for node in nodes}
