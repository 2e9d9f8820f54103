"""The steps of a route change, each repeated by whoever finds the change unfinished.

States, and who repairs a crash behind them:

1. *planned* (rows in Postgres; successors may exist in Redis, importing). Anybody goes on, or drops it.
2. *sealing* (parents may be sealed). Only forward from here: a driver that is stopped and wakes up later seals for a
   change that goes on anyway. Anybody goes on.
3. *sealed* (every parent's command record is in its stream, and Postgres has recorded these very ones with their
   marks). Anybody goes on.
4. *done* (successors open with their marks, route version in force). Nothing is left to do.

A step runs in one transaction that holds the change's row, so that two drivers work one after the other. One that was
stopped for so long that Postgres ended its transaction does no harm when it wakes up: making, sealing and opening are
idempotent by the change's id.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from psycopg.types.json import Jsonb
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from mqlayer.changes.ids import hand_over_ids
from mqlayer.changes.proving import hold_back, prove, refuse_unproven
from mqlayer.domain.changes import Mode, marks_within
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import Conflict, MqlayerError, NodeNotArmed, NotFound, StoreUnavailable, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.membership.gates import raise_group_versions
from mqlayer.postgres.audit import note
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import Node, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.partitions import (
    Refused,
    Sealed,
    create,
    open_partition,
    seal_command,
    seal_reply,
)
from mqlayer.routes.cache import nodes_by
from mqlayer.topics.nodes import rearm_node

log = logging.getLogger(__name__)

PATIENCE: Final = {"lock_wait": "10s", "idle": "30s"}
"""A driver that is stopped in a step must not keep all others from finishing the change."""
AGAIN_FOR_S: Final = 5.0
"""How long a step is repeated that a node's restart came between."""


@dataclass(frozen=True, slots=True)
class Place:
    """A partition of a change, and where it is."""

    partition: PartitionId
    node: NodeId
    lp_from: int
    lp_to: int


@dataclass(frozen=True, slots=True)
class Work:
    """A change under its lock."""

    change_id: int
    topic_id: int
    topic: str
    version: int
    kind: str
    state: str
    mode: Mode
    parents: tuple[Place, ...]
    successors: tuple[Place, ...]


class Driver:
    """Brings changes to their end. Holds connections to the nodes that it needed; close it."""

    def __init__(
        self, database: Database, *, prefix: str, application: Database | None = None, unsafe: bool = False
    ) -> None:
        self._database, self._application = database, application
        self._prefix, self._unsafe = prefix, unsafe
        self._nodes: dict[NodeId, Node] = {}
        self._lines: dict[NodeId, NodeConnection] = {}
        self._emptied = ""

    def finish(self, change_id: int) -> str:
        """Take every step that is left; return the state it ended in: done or dropped.

        Raises StoreUnavailable where a node is away: the change stays as far as it is. Raises Conflict where Redis
        holds something else than Postgres says.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(NodeNotArmed),
            wait=wait_random_exponential(multiplier=0.05, max=0.5),
            stop=stop_after_delay(AGAIN_FOR_S),
            reraise=True,
        )
        retrying(self._run, self._begin, change_id)
        retrying(self._run, self._seal, change_id)
        state: str = retrying(self._run, self._open, change_id)
        return state

    def close(self) -> None:
        """Close the connections."""
        for line in self._lines.values():
            line.close()

    def _run(self, step: Callable[[Connection, Work], str], change_id: int) -> str:
        def work(connection: Connection) -> str:
            locked_now = locked(connection, change_id)
            self._nodes = {node.node_id: node for node in nodes_by(connection)}
            return step(connection, locked_now)

        try:
            return self._database.transaction(work)
        except NodeNotArmed:
            self.close()
            self._lines.clear()
            self._arm_emptied()
            raise
        except TransactionConflict as error:
            raise Conflict(
                f"change {change_id} is held by another process", "it finishes it, or dies: mqlayer route repair"
            ) from error

    def _arm_emptied(self) -> None:
        """Arm the node that lacks a partition: its run is the armed one, so nobody else may notice."""
        name, self._emptied = self._emptied, ""
        if name:
            rearm_node(
                self._database, name, prefix=self._prefix, application=self._application, actor="driver",
                unsafe=self._unsafe,
            )  # fmt: skip

    def _begin(self, connection: Connection, work: Work) -> str:
        """Make the successors, and say that the change goes forward from here on."""
        if work.state != "planned":
            return work.state
        for place in work.successors:
            self._make(work, place)
            failpoint("change.after_make")
        if work.mode == "live":
            # One whose node is away must not leave the others sealed until it is back.
            for place in work.parents:
                self.line(place.node).call([("PING",)])
        connection.execute(query("change_sealing"), {"change_id": work.change_id})
        failpoint("change.before_sealing_commit")
        return "sealing"

    def _seal(self, connection: Connection, work: Work) -> str:
        """Seal the parents, and record what is durable."""
        if work.state != "sealing":
            return work.state
        seals: dict[Place, Sealed] = {}
        for place in work.parents:
            if not self._is_away(work, place):
                seals[place] = self._seal_one(work, place)
                failpoint("change.after_seal")
        # In this order: whoever arms a node waits from here on, so what is read back stays there, or its run changes.
        self._still_armed(connection, list(seals))
        for place, sealed in seals.items():
            self._read_back(place, sealed)
        for place, sealed in seals.items():
            self._record(connection, work, place, sealed)
        for place in work.parents:
            if place not in seals:
                self._record_proof(connection, work, place)
        connection.execute(query("change_sealed"), {"change_id": work.change_id})
        failpoint("change.before_sealed_commit")
        return "sealed"

    def _open(self, connection: Connection, work: Work) -> str:
        """Load the marks into the successors, open them, put the next route version in force."""
        if work.state != "sealed":
            return work.state
        change = {"change_id": work.change_id}
        marks = [row[0] for row in connection.execute(query("seal_marks_of"), change)]
        for place in work.successors:
            self._hand_over_ids(work, place)
        # What is opened on a run that is not armed any more is not on the one that is. Arming waits from here on.
        self._still_armed(connection, work.successors)
        for place in work.successors:
            self._open_one(work, place, marks_within(marks, place.lp_from, place.lp_to))
            failpoint("change.after_open")
        opened_at = connection.execute(query("clock")).fetchone()
        version = {"topic_id": work.topic_id, "version": work.version}
        connection.execute(query("topic_lock"), {"name": work.topic})
        connection.execute(query("route_insert_next"), version | change)
        connection.execute(query("change_partitions_settle"), change | {"mode": work.mode})
        raised = connection.execute(query("topic_version_raise"), version | {"version": work.version - 1})
        if raised.rowcount != 1:
            raise Conflict(f"topic {work.topic!r} is not at version {work.version - 1} any more")
        connection.execute(query("change_done"), change | {"opened_at": opened_at and opened_at[0]})
        connection.execute(query("change_notify"), {"topic_id": work.topic_id})
        failpoint("change.before_done_commit")
        facts = {"topic": work.topic, "kind": work.kind, "version": work.version, "change": work.change_id}
        log.info("route_changed", extra=facts)
        return "done"

    def _make(self, work: Work, place: Place) -> None:
        line = self.line(place.node)
        word = create(
            line, self._prefix, place.partition, work.topic, place.lp_from, place.lp_to, "importing", work.change_id
        )
        if word == "conflict":
            raise Conflict(
                f"partition {place.partition} exists on {line.node.address} otherwise than planned",
                "this Redis holds data of another control database: use another MQLAYER_KEY_PREFIX",
            )

    def _seal_one(self, work: Work, place: Place) -> Sealed:
        line = self.line(place.node)
        command = seal_command(line, self._prefix, place.partition, work.change_id, str(uuid.uuid4()))
        answer = seal_reply(_once_more(line, command), line.node.address)
        if isinstance(answer, Sealed):
            return answer
        if answer.word == "absent":
            self._emptied = line.node.name
        raise _not_sealed(work, place, answer, line.node.address)

    def _is_away(self, work: Work, place: Place) -> bool:
        """Say whether a parent's node can't be reached, where the change is meant for that."""
        if work.mode == "live":
            return False
        try:
            self.line(place.node).connect()
        except NodeNotArmed:
            # It answers: whoever arms it brings it back.
            raise
        except StoreUnavailable:
            return True
        return False

    def _record_proof(self, connection: Connection, work: Work, place: Place) -> None:
        """Record a parent as sealed by what its outbox proves. Its node is not served before it has sealed it too."""
        proof = prove(connection, self._application, work.topic_id, place.lp_from, place.lp_to, work.mode)
        if work.mode == "lost" and self._application is not None:
            # What is to be sent again must not be rotated away before.
            hold_back(self._application, work.topic_id, proof)
            given_up = {"partition": place.partition, "node": place.node} | proof.counts()
            note(connection, "driver", "partition given up", work.topic, given_up)
        connection.execute(query("node_disarm"), {"node_id": place.node})
        facts = {
            "partition_id": place.partition,
            "change_id": work.change_id,
            "seal_id": uuid.uuid4(),
            "next_offset": 0,
            "run_id": "",
            "marks": Jsonb(proof.marks),
            "away": True,
            "cut": False,
        }
        connection.execute(query("seal_put"), facts)
        # What its outbox sends to the successors again may be dead.
        connection.execute(query("dead_adrift"), {"partitions": [place.partition], "offsets": [1]})

    def _read_back(self, place: Place, sealed: Sealed) -> None:
        """See the very command in the stream, on the run it was written to: a fact to record (invariant 6)."""
        line, keys = self.line(place.node), partition_keys(self._prefix, place.partition)
        replies = line.call([("HGET", keys.meta, "seal"), ("XREVRANGE", keys.log, "+", "-", "COUNT", 1)])
        seal, last = (raise_for_reply(reply, line.node.address) for reply in replies)
        if seal != sealed.seal_id.encode() or not last or last[0][1][5] != seal:
            raise StoreUnavailable(line.node.address, f"the seal of partition {place.partition} is not there any more")

    def _still_armed(self, connection: Connection, places: Sequence[Place]) -> None:
        """Refuse to record what a run said that may not be the armed one any more: re-arming waits for us now."""
        wanted = {place.node: self.line(place.node) for place in places}
        rows = connection.execute(query("node_armed_runs"), {"node_ids": list(wanted)}).fetchall()
        for node_id, armed, given_up in rows:
            line = wanted[NodeId(node_id)]
            if armed is None and not given_up:
                # Emptied, and whoever found that died before it was armed.
                self._emptied = line.node.name
            if line.connect().run_id != armed:
                raise NodeNotArmed(
                    line.node.address, "it was not armed all the time while a partition on it was changed"
                )

    def _record(self, connection: Connection, work: Work, place: Place, sealed: Sealed) -> None:
        facts = {
            "partition_id": place.partition,
            "change_id": work.change_id,
            "seal_id": sealed.seal_id,
            "next_offset": sealed.next_offset,
            "run_id": self.line(place.node).connect().run_id,
            "marks": Jsonb(sealed.marks),
            "away": False,
            "cut": False,
        }
        connection.execute(query("seal_put"), facts)

    def _hand_over_ids(self, work: Work, place: Place) -> None:
        """Let a successor know the dedup ids of its LPs; what parents know on nodes that are away is forgotten."""
        if work.mode != "live":
            return
        successor = (self.line(place.node), place.partition)
        for parent in work.parents:
            if parent.lp_from < place.lp_to and place.lp_from < parent.lp_to:
                hand_over_ids(
                    (self.line(parent.node), parent.partition),
                    successor,
                    prefix=self._prefix,
                    change=work.change_id,
                    lp_from=place.lp_from,
                    lp_to=place.lp_to,
                )
        failpoint("change.after_ids")

    def _open_one(self, work: Work, place: Place, marks: Mapping[str, int]) -> None:
        line = self.line(place.node)
        word = open_partition(line, self._prefix, place.partition, work.change_id, marks)
        if word == "absent":
            # Made again by arming its node, under epochs that nobody has: it may have been open, and consumed.
            self._emptied = line.node.name
            raise NodeNotArmed(line.node.address, f"partition {place.partition} is gone from it: it lost data")
        if word != "open":
            raise Conflict(f"partition {place.partition} on {line.node.address} can't be opened: {word}")

    def line(self, node_id: NodeId) -> NodeConnection:
        """Return the connection to a node, in a step. Raises NotFound."""
        if node_id not in self._lines:
            if node_id not in self._nodes:
                raise NotFound("node", node_id, "its row is gone from the control database")
            self._lines[node_id] = NodeConnection(self._nodes[node_id], unsafe=self._unsafe)
        return self._lines[node_id]


def locked(connection: Connection, change_id: int) -> Work:
    """Lock a change for a step and return it with its partitions. Raises NotFound."""
    connection.execute(query("transaction_patience"), PATIENCE)
    row = connection.execute(query("change_lock"), {"change_id": change_id}).fetchone()
    if row is None:
        raise NotFound("route change", change_id)
    parents: list[Place] = []
    successors: list[Place] = []
    for partition, node, lp_from, lp_to, is_parent in connection.execute(
        query("change_partitions"), {"change_id": change_id}
    ):
        (parents if is_parent else successors).append(Place(PartitionId(partition), NodeId(node), lp_from, lp_to))
    number, topic_id, topic, version, kind, state, mode = row
    return Work(number, topic_id, topic, version, kind, state, mode, tuple(parents), tuple(successors))


@contextmanager
def driver(
    database: Database, *, prefix: str, application: Database | None = None, unsafe: bool = False
) -> Iterator[Driver]:
    """Lend a driver."""
    with ExitStack() as cleanup:
        lent = Driver(database, prefix=prefix, application=application, unsafe=unsafe)
        cleanup.callback(lent.close)
        yield lent


def finish_change(
    database: Database, change_id: int, *, prefix: str, application: Database | None = None, unsafe: bool = False
) -> str:
    """Bring one change to its end; return its state then: done or dropped. Safe to run twice at once.

    `application` is the database of the outbox, which proves the marks of a partition whose node is away.
    """
    with driver(database, prefix=prefix, application=application, unsafe=unsafe) as lent:
        state = lent.finish(change_id)
    # Behind the commit: a member that was stopped with its group's lock must not keep publishers waiting.
    raise_group_versions(database)
    return state


def finish_changes(
    database: Database,
    *,
    prefix: str,
    topic: str | None = None,
    application: Database | None = None,
    away: bool = False,
    accept_loss: bool = False,
    unsafe: bool = False,
) -> dict[int, str]:
    """Bring all unfinished changes, or those of a topic, as far as that goes; return what became of each.

    What a node that is away holds up is left for the next call, with the reason; with `away` it goes on without that
    node, as `planned_move` does: its parents count as sealed with the marks that the outbox proves, and it seals them
    when it is back.
    """
    if away and not accept_loss:
        refuse_unproven(database)
    with database.connection() as connection:
        open_ones = connection.execute(query("change_unfinished"), {"topic": topic}).fetchall()
        if away:
            connection.execute(query("changes_without_nodes"), {"change_ids": [row[0] for row in open_ones]})
    came_to: dict[int, str] = {}
    for change_id, name in open_ones:
        try:
            came_to[change_id] = finish_change(
                database, change_id, prefix=prefix, application=application, unsafe=unsafe
            )
        except MqlayerError as error:
            came_to[change_id] = str(error)
            log.warning("route_change_waits", extra={"topic": name, "change": change_id, "reason": str(error)})
    raise_group_versions(database)
    return came_to


def _once_more(line: NodeConnection, command: Any) -> Any:
    """Call a script; once more after loading the scripts, where the server forgot them."""
    (reply,) = line.call([command])
    if is_missing_script(reply):
        line.reload_scripts()
        (reply,) = line.call([command])
    return reply


def _not_sealed(work: Work, place: Place, refused: Refused, address: str) -> MqlayerError:
    if refused.word == "absent":
        return NodeNotArmed(address, f"partition {place.partition} is gone from it: the node lost data")
    return Conflict(
        f"partition {place.partition} on {address} can't be sealed for change {work.change_id}: "
        f"{refused.word} {refused.fact}".rstrip()
    )
