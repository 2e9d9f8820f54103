"""Recovery of an outbox whose Postgres lost commits: steps and crashes are in `docs/design/lost-commits.md`.

Records that Redis trimmed before they were recorded as relayed can't be proven, so they are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from mqlayer.domain.routing import NodeId
from mqlayer.errors import ConfigurationRefused, Conflict, NodeOutOfMemory, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, connect, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.postgres.server_identity import SUSPECT
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import end_sources
from mqlayer.redis.roles import RedisRole
from mqlayer.relay.outbox_source import end_former_sources, refuse_copy, refuse_former
from mqlayer.relay.restore import Fallen, Serving, restore
from mqlayer.relay.stored_records import Content, content_of_row, is_of_row, marks_of, newest_records
from mqlayer.runtime.route_cache import cluster_partitions, load_nodes
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.nodes import rearm_node
from mqlayer.topics.outbox_access import is_replaced
from mqlayer.topics.outbox_resend import BorrowedOutbox

log = event_logger(__name__)

MAX_RECORDS: Final = 200_000
"""Newest records compared per partition; older ones count as not proven."""
MAX_SHOWN: Final = 100

Connections = Callable[[NodeId], NodeConnection]


class SourceEnded(StoreUnavailable):
    """Nodes refuse the outbox's source: its recovery was begun, completed or given up elsewhere."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address,
            "nodes take nothing more under its outbox's numbers: it is recovered on another server, or goes on there; "
            "if this one stays after all, run `mqlayer outbox recover --anew`",
        )


@dataclass(slots=True)
class TopicProof:
    """A topic's proof. `proven`: per LP the last seq whose row is in Redis. Other fields as in `RecoveryReport`."""

    proven: dict[int, int] = field(default_factory=dict)
    beyond: dict[int, tuple[int, int]] = field(default_factory=dict)
    missing: Fallen = field(default_factory=dict)
    unasked: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """A recovery's result. `waiting`: messages to relay. `beyond`: per topic and LP, first and last unproven seq in
    Redis: phantoms, or messages sent again.

    `missing`: LPs that wait for an operator, because messages are in neither node nor outbox: last seq present, last
    known. `unasked`: LPs taken as recorded, because their node was unavailable.
    """

    waiting: int
    beyond: dict[str, dict[int, tuple[int, int]]]
    missing: dict[str, Fallen] = field(default_factory=dict)
    unasked: int = 0

    @property
    def count(self) -> int:
        """The unproven messages in Redis."""
        return sum(last - first + 1 for lps in self.beyond.values() for first, last in lps.values())

    @property
    def missing_count(self) -> int:
        """Messages not in Redis, of LPs that wait for an operator."""
        return sum(last - mark for lps in self.missing.values() for mark, last in lps.values())

    def facts(self) -> dict[str, Any]:
        """Facts for an audit row."""
        named = [f"{topic}/{lp}:{a}-{b}" for topic, lps in self.beyond.items() for lp, (a, b) in sorted(lps.items())]
        facts = {"waiting": self.waiting, "unproven": self.count, "ranges": named[:MAX_SHOWN]}
        more = {"gone": self.missing_count, "unasked": self.unasked}
        return facts | {name: count for name, count in more.items() if count}


def recover_outbox(
    application: Connection, runtime: Runtime, connections: Connections, *, address: str, unproven: bool = False
) -> RecoveryReport | None:
    """Recover an outbox that lost commits. None if there is nothing to do, or another process did it.

    `connections` must arm nodes if needed. Raises StoreUnavailable if a node needed for proof is unavailable, unless
    `unproven`: its messages are sent again, and no fence recognises them. Raises ConfigurationRefused for a copy, a
    former primary, or a backup older than the recovery.
    """
    if not is_replaced(application):
        return None
    identity = application.execute(query("outbox_identity")).fetchone()
    server = application.execute(query("outbox_server")).fetchone()
    if identity is None or server is None:
        return None
    (outbox_uuid, _, cluster), suspect = identity, server[1] == SUSPECT
    failpoint("recover.before_source")
    # First, because proof may need a node armed, and arming waits for messages of these sources that it lost.
    end_former_sources(application, runtime.control)
    with runtime.control.connection() as connection:
        known = connection.execute(query("source_of_outbox"), {"outbox_uuid": outbox_uuid}).fetchone()
    found: dict[str, tuple[int, TopicProof]] = {}
    if known is None:
        if application.execute(query("outbox_identity")).fetchone() != identity:
            # Another process recovered it and ended its source.
            return None
        refuse_former(runtime.control, outbox_uuid, address)
    else:
        refuse_copy(address, known[1], cluster, known[0])
        _end_source(runtime, connections, known[0], skip_unreachable=unproven)
        failpoint("recover.after_end")
        borrowed = BorrowedOutbox(known[0], outbox_uuid, application)
        provers: list[_Prover] = []
        for topic_id, name, *_ in application.execute(query("outbox_topics")).fetchall():
            with runtime.control.connection() as connection:
                partitions = connection.execute(query("partition_list"), {"topic_id": topic_id}).fetchall()
            provers.append(
                _Prover(borrowed, connections, runtime.prefix, topic_id, skip_unreachable=unproven, each=suspect)
            )
            found[name] = topic_id, provers[-1].prove(partitions)
        # Nodes proven first may have lost data during the later refills.
        for prover in provers:
            prover.recheck()
    if suspect:
        # The control database lost the same commits, and with them sources and epochs that Redis knows.
        why = {"facts": Jsonb({"outbox": str(outbox_uuid), "reason": "Redis holds more than it ever numbered"})}
        runtime.control.transaction(lambda c: c.execute(query("server_replaced"), why))
    failpoint("recover.before_renumber")
    waiting = _renumber(application, outbox_uuid, found.values())
    if waiting is None:
        return None
    failpoint("recover.after_renumber")
    beyond = {name: proof.beyond for name, (_, proof) in found.items() if proof.beyond}
    missing = {name: proof.missing for name, (_, proof) in found.items() if proof.missing}
    recovered = RecoveryReport(waiting, beyond, missing, sum(proof.unasked for _, proof in found.values()))
    facts = recovered.facts()
    log.error("outbox_lost_commits", extra={"outbox": str(outbox_uuid)} | facts)
    runtime.control.transaction(lambda c: write_audit(c, runtime.actor, "outbox recover", str(outbox_uuid), facts))
    return recovered


def recover_now(runtime: Runtime, *, unproven: bool = False, anew: bool = False) -> RecoveryReport | None:
    """`recover_outbox` by hand.

    `anew`: also if only nodes say that it continues elsewhere, after an abandoned promotion.
    """
    with (
        driver_errors(runtime.outbox.address),
        # Outside the pool: arming needs a pooled connection while it locks the node's row.
        closing(connect(runtime.outbox.dsn, application="mqlayer recover")) as connection,
        armed_connections(runtime) as connections,
    ):
        if anew and (row := connection.execute(query("outbox_identity")).fetchone()) is not None:
            connection.execute(query("outbox_suspect"), {"outbox_uuid": row[0]})
        return recover_outbox(connection, runtime, connections, address=runtime.outbox.address, unproven=unproven)


@contextmanager
def armed_connections(runtime: Runtime) -> Iterator[Connections]:
    """Lend connections to nodes, armed if needed."""
    with ExitStack() as cleanup:
        connections: dict[NodeId, NodeConnection] = {}

        def connection_to(node_id: NodeId) -> NodeConnection:
            if node_id not in connections:
                connections[node_id] = cleanup.enter_context(_armed(runtime, node_id))
            return connections[node_id]

        yield connection_to


def _armed(runtime: Runtime, node_id: NodeId) -> NodeConnection:
    node = next((node for node in load_nodes(runtime.control) if node.node_id == node_id), None)
    if node is None:
        raise NotFound("node", node_id, "its row is gone from the control database")
    connection = runtime.connection(node, RedisRole.RELAY)
    try:
        # Also if it is armed: an emptied node keeps its run, and a sealed partition that it lost can only be refilled
        # under the numbers that this recovery ends.
        connection.node, _ = rearm_node(replace(runtime, actor="relay"), node.name)
        connection.connect()
    except (Conflict, NodeOutOfMemory, ConfigurationRefused) as error:
        # It needs an operator, or memory. A relay waits, as for an unavailable node.
        raise StoreUnavailable(node.address, str(error)) from error
    return connection


def _end_source(runtime: Runtime, connections: Connections, source: int, *, skip_unreachable: bool) -> None:
    # A late relay would append rows that get other numbers. Relays repeat this to a node that forgets it.
    with runtime.control.connection() as connection:
        rows = connection.execute(query("partition_nodes")).fetchall()
    for (node_id,) in rows:
        with _proving(skip_unreachable=skip_unreachable):
            node_connection = connections(NodeId(node_id))
            partitions = cluster_partitions(runtime.control, node_connection.node)
            end_sources(node_connection, runtime.prefix, [source], closed=False, partitions=partitions)


@contextmanager
def _proving(*, skip_unreachable: bool) -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as error:
        if not skip_unreachable:
            reason = f"the outbox lost commits, and this node is to prove what is in Redis: {error.reason}"
            advice = "mqlayer outbox recover --unproven goes on without it, and repeats messages"
            raise StoreUnavailable(error.address, f"{reason}; {advice}") from error


def _renumber(application: Connection, outbox_uuid: UUID, found: Iterable[tuple[int, TopicProof]]) -> int | None:
    rows = [
        (topic_id, lp, seq, fallen)
        for topic_id, proof in found
        for fallen, known in ((False, proof.proven), (True, {lp: mark for lp, (mark, _) in proof.missing.items()}))
        for lp, seq in known.items()
    ]
    facts = {name: [row[place] for row in rows] for place, name in enumerate(("topic_ids", "lps", "seqs", "fallen"))}
    with application.transaction():
        application.execute("SET LOCAL lock_timeout = '5s'")
        row = application.execute(query("outbox_recover"), facts | {"outbox_uuid": outbox_uuid}).fetchone()
    return None if row is None or row[0] is None else int(row[0])


@dataclass(slots=True)
class PartitionScan:
    """A partition's marks, and `missing` LPs whose lost messages the outbox lacks."""

    node_id: NodeId
    marks: dict[int, int]
    missing: set[int] = field(default_factory=set)


class _Prover:
    """Compares a topic's records with its rows, newest first, and refills lost ones.

    Only serving partitions count. The newest record equal to its row proves all before it. `each`: numbers may be
    reused, so proof ends at the first difference.
    """

    def __init__(
        self,
        borrowed: BorrowedOutbox,
        connections: Connections,
        prefix: str,
        topic_id: int,
        *,
        skip_unreachable: bool,
        each: bool = False,
    ) -> None:
        self._borrowed, self._connections, self._prefix = borrowed, connections, prefix
        self._topic_id, self._skip_unreachable, self._each = topic_id, skip_unreachable, each
        # Per LP: records compared, seqs equal to their rows, and the first seq that differs.
        self._seen: dict[int, int] = {}
        self._same: dict[int, set[int]] = {}
        self._broken: dict[int, int] = {}
        self._relayed: dict[int, int] = {}
        self._marks: dict[int, int] = {}
        self._proven: dict[int, int] = {}
        self._scans: dict[int, PartitionScan] = {}

    def prove(self, partitions: Sequence[tuple[Any, ...]]) -> TopicProof:
        """Prove and refill partitions, given parents first. Raises StoreUnavailable."""
        self._relayed = dict(self._rows("relayed_all"))
        # Successors first: their records are the least likely to be recorded as relayed.
        for partition, node_id, *_ in reversed(partitions):
            with _proving(skip_unreachable=self._skip_unreachable):
                marks = self._prove_partition(self._connections(NodeId(node_id)), partition)
                self._scans[partition] = PartitionScan(NodeId(node_id), marks)
        proof = TopicProof()
        for partition, _, lp_from, lp_to, state, *_ in partitions:
            lps = [lp for lp in {**self._relayed, **self._proven} if lp_from <= lp < lp_to]
            if state == "open" and not self._fill(partition, lps, proof):
                # Marks of other partitions say nothing about this one.
                proof.unasked += len(lps)
                self._proven = {lp: seq for lp, seq in self._proven.items() if lp not in lps}
        proof.proven = self._proven
        proof.beyond = {
            lp: (known + 1, mark)
            for lp, mark in self._marks.items()
            if mark > (known := max(self._proven.get(lp, 0), self._relayed.get(lp, 0)))
        }
        return proof

    def _fill(self, partition: int, lps: Iterable[int], proof: TopicProof) -> bool:
        scan = self._scans.get(partition)
        if scan is None:
            return False
        serving = Serving(partition, scan.node_id)
        for lp in lps:
            known = max(self._relayed.get(lp, 0), self._proven.get(lp, 0))
            if (mark := scan.marks.get(lp, 0)) < known:
                serving.fallen[lp] = mark, known
        filled = False
        with _proving(skip_unreachable=self._skip_unreachable):
            restore(self._borrowed, self._connections, self._prefix, self._topic_id, serving)
            filled = True
        if filled:
            now = {lp: serving.missing.get(lp, to) for lp, (_, to) in serving.fallen.items()}
            scan.marks |= now
            scan.missing |= serving.missing.keys()
            proof.missing |= {lp: (mark, serving.fallen[lp][1]) for lp, mark in serving.missing.items()}
        return filled

    def recheck(self) -> None:
        for partition, scan in self._scans.items():
            connection = self._connections(scan.node_id)
            marks = self._marks_of(connection, partition)
            for lp, seq in scan.marks.items():
                mark = marks.get(lp, 0)
                if mark < seq or (mark > seq and lp in scan.missing):
                    reason = f"LP {lp} changed while its outbox was recovered: once more"
                    raise StoreUnavailable(connection.node.address, reason)

    def _prove_partition(self, connection: NodeConnection, partition: int) -> dict[int, int]:
        marks = self._marks_of(connection, partition)
        for lp, mark in marks.items():
            self._marks[lp] = max(mark, self._marks.get(lp, 0))
        lps = {lp for lp, mark in marks.items() if mark > self._relayed.get(lp, 0)}
        pages = newest_records(connection, self._prefix, partition, self._borrowed.source, limit=MAX_RECORDS)
        while self._wants_more(lps, marks) and (page := next(pages, None)) is not None:
            self._compare(
                {
                    (lp, seq): content
                    for lp, seq, content in page
                    if lp in lps and (self._each or lp not in self._proven) and seq > self._relayed.get(lp, 0)
                }
            )
        return marks

    def _wants_more(self, lps: set[int], marks: Mapping[int, int]) -> bool:
        if not self._each:
            return any(lp not in self._proven for lp in lps)
        return any(self._seen.get(lp, 0) < marks[lp] - self._relayed.get(lp, 0) for lp in lps)

    def _compare(self, records: Mapping[tuple[int, int], Content]) -> None:
        if not records:
            return
        lps, seqs = [lp for lp, _ in records], [seq for _, seq in records]
        found = self._rows("outbox_digests", lps=lps, seqs=seqs)
        rows = {(lp, seq): content_of_row(*row) for lp, seq, *row in found}
        for (lp, seq), record in records.items():
            self._seen[lp] = self._seen.get(lp, 0) + 1
            if (lp, seq) in rows and is_of_row(record, rows[lp, seq]):
                self._same.setdefault(lp, set()).add(seq)
            elif self._each:
                self._broken[lp] = min(seq, self._broken.get(lp, seq))
        for lp in set(lps):
            same = [seq for seq in self._same.get(lp, ()) if seq < self._broken.get(lp, seq + 1)]
            self._proven.pop(lp, None)
            if same:
                self._proven[lp] = max(same)

    def _marks_of(self, connection: NodeConnection, partition: int) -> dict[int, int]:
        return marks_of(connection, self._prefix, [partition], self._borrowed.source)[0]

    def _rows(self, name: str, **facts: Any) -> list[tuple[Any, ...]]:
        return self._borrowed.outbox.execute(query(name), {"topic_id": self._topic_id, **facts}).fetchall()
