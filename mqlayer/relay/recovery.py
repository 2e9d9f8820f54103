"""An outbox whose Postgres lost commits: a standby that lagged was promoted, or a backup took the original's place.

Seqs that were given out in the lost commits are given out again, to other messages, while partitions hold the lost ones
under them: the chain would take the new ones for repetitions. So nothing is relayed on a timeline that the outbox does
not know before it goes on under a new source:

1. Nodes take nothing more of the old source: what a relay has read of it before may be sent by that at any time.
2. What of the outbox is in Redis is proven: the record of the source with the LP and seq of a row is that very message.
   What a promoted server has is a beginning of what its primary had, so all before it is there too. Where relays may
   have gone on under numbers that were given out again (no new timeline told of it), only up to the first record that
   is another message than its row.
3. What nodes lost meanwhile and Postgres has as relayed, thus from before the loss, is appended again under its own
   numbers: handlers that were given it already know it by these.
4. Where no timeline but the marks told of it, the control database is taken for one that lost commits too.
5. In one transaction what is proven is recorded as relayed, all behind it is numbered anew, the timeline noted.
6. The old source ends; a relay's next session opens another one.

A crash before 5 leaves all to the next session; after it, the next one does the rest. Messages in Redis whose commits
are gone (phantoms) stay where they are: they may be handled already. They are counted in the log and the audit.
What was trimmed from Redis before it was recorded as relayed can't be proven, and is sent again under the new source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from mqlayer.domain.routing import NodeId
from mqlayer.errors import ConfigurationRefused, Conflict, NodeOutOfMemory, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database, connect, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.postgres.server_identity import SUSPECT
from mqlayer.redis.node_connection import NodeConnection, connection_of
from mqlayer.redis.partition_scripts import end_sources
from mqlayer.redis.roles import RedisRole
from mqlayer.relay.outbox_source import end_former_sources, refuse_copy, refuse_former
from mqlayer.relay.restore import Fallen, Serving, restore
from mqlayer.relay.stored_records import Content, content_of_row, is_of_row, marks_of, newest_records
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.settings import Settings
from mqlayer.topics.nodes import rearm_node
from mqlayer.topics.outbox_access import is_replaced
from mqlayer.topics.outbox_resend import BorrowedOutbox

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 200_000
"""So many of a partition's newest records are compared at the most; what lies before them counts as not proven."""
MAX_SHOWN: Final = 100

Connections = Callable[[NodeId], NodeConnection]


class SourceEnded(StoreUnavailable):
    """Nodes take nothing more under an outbox's source: somebody recovers it, did, or gave that up."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address,
            "nodes take nothing more under its outbox's numbers: it is recovered on another server, or goes on there; "
            "if this one stays after all, run `mqlayer outbox recover --anew`",
        )


@dataclass(slots=True)
class TopicProof:
    """What is proven of a topic: up to which seq each LP's rows are in Redis; and what Redis holds beyond that.

    `missing`: of LPs of which neither a node nor the outbox holds all, up to which seq Redis does, and up to which it
    did.
    `unasked`: how many LPs count as recorded, for want of the node that serves them.
    """

    proven: dict[int, int] = field(default_factory=dict)
    beyond: dict[int, tuple[int, int]] = field(default_factory=dict)
    missing: Fallen = field(default_factory=dict)
    unasked: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What became of an outbox: how many messages wait, and by topic and LP which seqs of the old source are in Redis
    and not proven: phantoms, whose commits are gone, and what is sent again because its records were trimmed.

    `missing`: up to which seq Redis holds LPs of which the outbox does not hold all the rest, and up to which it did;
    they wait for an operator. `unasked`: how many LPs count as recorded, for want of the nodes that serve them.
    """

    waiting: int
    beyond: dict[str, dict[int, tuple[int, int]]]
    missing: dict[str, Fallen] = field(default_factory=dict)
    unasked: int = 0

    @property
    def count(self) -> int:
        """How many messages in Redis are not proven."""
        return sum(last - first + 1 for lps in self.beyond.values() for first, last in lps.values())

    @property
    def missing_count(self) -> int:
        """How many messages are held back: those that neither nodes nor the outbox hold any more, and behind these."""
        return sum(last - mark for lps in self.missing.values() for mark, last in lps.values())

    def facts(self) -> dict[str, Any]:
        """Return it for an audit row."""
        named = [f"{topic}/{lp}:{a}-{b}" for topic, lps in self.beyond.items() for lp, (a, b) in sorted(lps.items())]
        facts = {"waiting": self.waiting, "unproven": self.count, "ranges": named[:MAX_SHOWN]}
        more = {"gone": self.missing_count, "unasked": self.unasked}
        return facts | {name: count for name, count in more.items() if count}


def recover_outbox(
    application: Connection,
    control: Database,
    connections: Connections,
    *,
    prefix: str,
    address: str,
    unproven: bool = False,
    actor: str,
) -> RecoveryReport | None:
    """Let an outbox that lost commits go on; None where there is nothing to do, or somebody did it meanwhile.

    `connections` gives connections to nodes, armed where they have to be. Raises StoreUnavailable where a node that may
    prove something is away, unless `unproven`: what was there is sent again then, and no fence knows it. Raises
    ConfigurationRefused for a copy: its original's source is not its own to end; and for a former primary, or a backup
    of before it was recovered: nothing of it can be proven, since what it has is there under other numbers.
    """
    if not is_replaced(application):
        return None
    identity = application.execute(query("outbox_identity")).fetchone()
    server = application.execute(query("outbox_server")).fetchone()
    if identity is None or server is None:
        return None
    (outbox_uuid, _, cluster), suspect = identity, server[1] == SUSPECT
    failpoint("recover.before_source")
    # A node that is to prove something may have to be armed: what it lost of these would be waited for.
    end_former_sources(application, control)
    with control.connection() as connection:
        known = connection.execute(query("source_of_outbox"), {"outbox_uuid": outbox_uuid}).fetchone()
    found: dict[str, tuple[int, TopicProof]] = {}
    if known is None:
        if application.execute(query("outbox_identity")).fetchone() != identity:
            # Somebody recovered it since it was looked at, and ended its source.
            return None
        refuse_former(control, outbox_uuid, address)
    else:
        refuse_copy(address, known[1], cluster, known[0])
        _end_source(control, connections, prefix, known[0], skip_unreachable=unproven)
        failpoint("recover.after_end")
        borrowed = BorrowedOutbox(known[0], outbox_uuid, application)
        provers: list[_Prover] = []
        for topic_id, name, *_ in application.execute(query("outbox_topics")).fetchall():
            with control.connection() as connection:
                partitions = connection.execute(query("partition_list"), {"topic_id": topic_id}).fetchall()
            provers.append(_Prover(borrowed, connections, prefix, topic_id, skip_unreachable=unproven, each=suspect))
            found[name] = topic_id, provers[-1].prove(partitions)
        # The first ones may have lost something while the last ones were filled up.
        for prover in provers:
            prover.recheck()
    if suspect:
        # With these commits the control database lost what it gave out in them: sources that Redis knows, epochs.
        why = {"facts": Jsonb({"outbox": str(outbox_uuid), "reason": "Redis holds more than it ever numbered"})}
        control.transaction(lambda c: c.execute(query("server_replaced"), why))
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
    control.transaction(lambda c: write_audit(c, actor, "outbox recover", str(outbox_uuid), facts))
    return recovered


def recover_now(
    application: Database,
    control: Database,
    settings: Settings,
    *,
    unproven: bool = False,
    anew: bool = False,
    actor: str = "api",
) -> RecoveryReport | None:
    """Do that by hand, see `recover_outbox`.

    `anew`: also where only nodes say that it goes on elsewhere. For a promotion that was begun and given up.
    """
    with (
        driver_errors(application.address),
        # Not of the pool: who arms a node needs one of its connections with the node's row in hand.
        closing(connect(application.dsn, application="mqlayer recover")) as connection,
        armed_connections(control, application, settings) as connections,
    ):
        if anew and (row := connection.execute(query("outbox_identity")).fetchone()) is not None:
            connection.execute(query("outbox_suspect"), {"outbox_uuid": row[0]})
        return recover_outbox(
            connection,
            control,
            connections,
            prefix=settings.key_prefix,
            address=application.address,
            unproven=unproven,
            actor=actor,
        )


@contextmanager
def armed_connections(control: Database, application: Database, settings: Settings) -> Iterator[Connections]:
    """Lend connections to nodes, armed again where they have to be."""
    with ExitStack() as cleanup:
        connections: dict[NodeId, NodeConnection] = {}

        def connection_to(node_id: NodeId) -> NodeConnection:
            if node_id not in connections:
                connections[node_id] = cleanup.enter_context(_armed(control, application, settings, node_id))
            return connections[node_id]

        yield connection_to


def _armed(control: Database, application: Database, settings: Settings, node_id: NodeId) -> NodeConnection:
    node = next((node for node in load_nodes(control) if node.node_id == node_id), None)
    if node is None:
        raise NotFound("node", node_id, "its row is gone from the control database")
    connection = connection_of(node, settings, RedisRole.RELAY)
    prefix, unsafe = settings.key_prefix, settings.allow_unsafe_redis
    try:
        # Also where it is armed: a node that was emptied keeps its run, and a sealed partition that it lost can only be
        # filled up by the numbers that are about to be given up.
        connection.node, _ = rearm_node(
            control, node.name, prefix=prefix, application=application, actor="relay", unsafe=unsafe
        )
        connection.connect()
    except (Conflict, NodeOutOfMemory, ConfigurationRefused) as error:
        # An operator's word, or room, is needed for it. A relay waits for that, as for a node that is away.
        raise StoreUnavailable(node.address, str(error)) from error
    return connection


def _end_source(
    control: Database, connections: Connections, prefix: str, source: int, *, skip_unreachable: bool
) -> None:
    """Have nodes take nothing more of a source: another relay may have read what is to get other numbers.

    It would be there twice, and behind what is newer: a relay that was stuck, or reads the Postgres of before, sends
    it when all else is over. What a node forgets of it, those tell it again who send under the next source.
    """
    with control.connection() as connection:
        rows = connection.execute(query("partition_nodes")).fetchall()
    for (node_id,) in rows:
        with _proving(skip_unreachable=skip_unreachable):
            end_sources(connections(NodeId(node_id)), prefix, [source], closed=False)


@contextmanager
def _proving(*, skip_unreachable: bool) -> Iterator[None]:
    """Say what an operator can do where a node is away, or go on without it."""
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
    """What a partition held when it was looked at: per LP the mark; of `missing` ones the outbox lacks the rest."""

    node_id: NodeId
    marks: dict[int, int]
    missing: set[int] = field(default_factory=set)


class _Prover:
    """Compares one topic's records in Redis with its rows, newest first; and has what is missing sent again.

    What counts is what the partition has that serves an LP now. Its parents may have more: one that was moved away from
    its node while that was down holds messages that nobody reads there, since its successor has them, or is to.

    As a rule the newest record of an LP that is a row proves all before it. `each`: not where relays went on under the
    numbers that were given out again: then nothing is proven behind a record that is another message than its row.
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
        # By LP: how many records were looked at, which are those of rows, and the first that is not.
        self._seen: dict[int, int] = {}
        self._same: dict[int, set[int]] = {}
        self._broken: dict[int, int] = {}
        self._relayed: dict[int, int] = {}
        self._marks: dict[int, int] = {}
        self._proven: dict[int, int] = {}
        self._scans: dict[int, PartitionScan] = {}

    def prove(self, partitions: Sequence[tuple[Any, ...]]) -> TopicProof:
        """Return what is proven by a topic's partitions, parents first, and there. Raises StoreUnavailable."""
        self._relayed = dict(self._rows("relayed_all"))
        # Successors first: what is young is more likely to lack a record of its being relayed.
        for partition, node_id, *_ in reversed(partitions):
            with _proving(skip_unreachable=self._skip_unreachable):
                marks = self._prove_partition(self._connections(NodeId(node_id)), partition)
                self._scans[partition] = PartitionScan(NodeId(node_id), marks)
        proof = TopicProof()
        for partition, _, lp_from, lp_to, state, *_ in partitions:
            lps = [lp for lp in {**self._relayed, **self._proven} if lp_from <= lp < lp_to]
            if state == "open" and not self._fill(partition, lps, proof):
                # What others have of it says nothing of what this one has.
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
        """Have a partition that serves LPs hold what is proven or recorded of them; False where it goes on without."""
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
        """Raise StoreUnavailable where a partition lost something since, or has more of what was gone."""
        for partition, scan in self._scans.items():
            connection = self._connections(scan.node_id)
            marks = self._marks_of(connection, partition)
            for lp, seq in scan.marks.items():
                mark = marks.get(lp, 0)
                if mark < seq or (mark > seq and lp in scan.missing):
                    reason = f"LP {lp} changed while its outbox was recovered: once more"
                    raise StoreUnavailable(connection.node.address, reason)

    def _prove_partition(self, connection: NodeConnection, partition: int) -> dict[int, int]:
        """Look for what a partition proves, and return its marks."""
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
        """Say whether records of a partition's LPs can still prove something."""
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
