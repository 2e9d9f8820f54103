"""Whether Postgres still has what was relayed: a crash may take commits back on the same timeline.

With `synchronous_commit = off`, with `fsync = off`, or when an older copy of its disk is put back, Postgres forgets its
last commits and tells nobody. What it has then is a beginning of what it had. It gives the seqs of the lost commits out
again, and the chain would take the messages of these for repetitions of the lost ones. So a relay records no mark that
it did not make before the record and the row of that seq were compared.

For an LP: R is recorded as relayed, M the mark in Redis, C the counter. Of what is up to R the commits survived: the
record of R was written behind them. States:

    M <= R              nothing to compare: what is behind M comes from rows
    R < M, C < M        lost, and not all of it given out again
    R < M <= C          the record of M is compared with the row of M. The same: that commit survived, thus all before
                        it. Another one, or no row: lost, and given out again
    R < M <= C, and no partition has the record of M any more: not known, taken for the same

A relay compares a node as it connects, before it sends anything there, and a partition that came to the node since
before it sends that anything: its marks are its parents', which may be from before a crash. Where a record is on a node
that is away, the partition waits for that node.

A relay, a line or a node that was stuck over the crash may bring rows of before it later than that. So the relay
first tells the node its term, and the node takes nothing of the source that was read in another one from then on
(`lua/source_term.lua`). A term is one life of the outbox's Postgres: from a start, or its recovery from a crash, to the
next. In one term no commit is taken back, so two relays read the same rows in it. After the telling, the relay asks
Postgres whether the term is still its own: a relay that tells an old one late sends nothing by it, and the others,
refused once, tell theirs again.

    crash before the node is told       nothing of the old term is refused, and nothing of the new one was sent: the
                                        next to connect compares all that is there
    crash between telling and comparing the next to connect compares
    the node loses what it was told     it refuses everybody: they connect anew, and compare

Where they differ, the outbox is noted as one that lost commits (`outbox_suspect`). From then on no relay sends or
records anything, and the next session recovers the outbox as behind a promotion (`mqlayer.relay.recovery`). Crashes:
before the note, the next session compares again, since nothing was recorded; after it, the next session recovers.
Another relay may number the outbox anew meanwhile: then nothing is noted, rows and records were of different sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import set_term
from mqlayer.relay.outbox_source import OutboxSource, refuse_other_term
from mqlayer.relay.stored_records import Content, content_of_row, is_of_row, marks_of, newest_records

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 20_000
"""So many of a partition's newest records are looked at for the ones of marks; what lies before them is not known."""

TopicLp = tuple[int, int]
"""Topic id and LP."""
Connections = Callable[[NodeId], NodeConnection]


class CheckedNodeTerm(NamedTuple):
    """What a node was told, as appends carry it, and which of its partitions were compared since."""

    token: str
    partitions: frozenset[int]


@dataclass(frozen=True, slots=True)
class CommitChecker:
    """Compares what nodes hold of an outbox's source with the outbox's rows. For any thread."""

    control: Database
    application: Database
    prefix: str
    source: OutboxSource

    def compare_node(self, connection: NodeConnection, connections: Connections) -> CheckedNodeTerm:
        """Have a node take nothing of the source but what is read in our term, and compare what it holds of it.

        `connections` gives connections to other nodes, for parents of its partitions. Raises StoreUnavailable where
        commits are lost, which is noted, where our term is over, and where the node or Postgres is away.
        """
        token = self._send_term(connection)
        # Asked behind the telling: one that was opened before it may have taken what was read in another term.
        return CheckedNodeTerm(token, self._compare_partitions(connection, self._partitions(connection), connections))

    def compare_more(
        self, connection: NodeConnection, partitions: Collection[int], connections: Connections
    ) -> frozenset[int]:
        """Compare partitions that came to a node since: their marks are their parents'. Return those that are compared.

        Raises StoreUnavailable as `compare_node`.
        """
        rows = [
            (partition, topic_id) for partition, topic_id in self._partitions(connection) if partition in partitions
        ]
        return self._compare_partitions(connection, rows, connections)

    def _send_term(self, node_connection: NodeConnection) -> str:
        partitions = [partition for partition, _ in self._partitions(node_connection)]
        failpoint("relay.before_term")
        token = set_term(node_connection, self.prefix, self.source.source_id, self.source.term, partitions=partitions)
        failpoint("relay.after_term")
        with self.application.connection() as connection:
            refuse_other_term(connection, self.source, self.application.address)
        return token

    def _partitions(self, node_connection: NodeConnection) -> list[tuple[int, int]]:
        """Return the partitions of a node, with their topics."""
        with self.control.connection() as connection:
            return connection.execute(query("partitions_of_node"), {"node_id": node_connection.node.node_id}).fetchall()

    def _compare_partitions(
        self, connection: NodeConnection, rows: Sequence[tuple[int, int]], connections: Connections
    ) -> frozenset[int]:
        """Compare partitions; return them, but for those whose marks wait for a node that is away."""
        partitions = [partition for partition, _ in rows]
        marks: dict[TopicLp, int] = {}
        holders: dict[TopicLp, list[int]] = {}
        found = marks_of(connection, self.prefix, partitions, self.source.source_id)
        for (partition, topic_id), of_partition in zip(rows, found, strict=True):
            for lp, mark in of_partition.items():
                marks[topic_id, lp] = max(mark, marks.get((topic_id, lp), 0))
                holders.setdefault((topic_id, lp), []).append(partition)
        unknown = self._compare(
            marks, lambda node_id: connection if node_id == connection.node.node_id else connections(node_id)
        )
        return frozenset(partitions).difference(*(holders[topic_lp] for topic_lp in unknown))

    def _compare(self, marks: Mapping[TopicLp, int], connections: Connections) -> set[TopicLp]:
        """Compare the records of some seqs with their rows; return those whose record is on a node that is away.

        Raises StoreUnavailable where commits are lost.
        """
        ahead = self._ahead(marks)
        lost = {topic_lp for topic_lp, counter in ahead.items() if counter < marks[topic_lp]}
        unknown: set[TopicLp] = set()
        for topic_id in {topic for topic, _ in ahead.keys() - lost}:
            wanted = {lp: marks[topic_id, lp] for topic, lp in ahead.keys() - lost if topic == topic_id}
            records, unreachable = self._records(topic_id, wanted, connections)
            rows = self._rows(topic_id, {lp: wanted[lp] for lp in records})
            lost |= {(topic_id, lp) for lp, one in records.items() if lp not in rows or not is_of_row(one, rows[lp])}
            unknown |= {(topic_id, lp) for lp in unreachable}
        # What was recorded as relayed since may have been rotated away since, too.
        if lost and (still := lost & self._ahead({topic_lp: marks[topic_lp] for topic_lp in lost}).keys()):
            self._note(still, marks)
        return unknown

    def _ahead(self, marks: Mapping[TopicLp, int]) -> dict[TopicLp, int]:
        """Return those of the marks that are past what is recorded as relayed, with their counters."""
        facts = {
            "topic_ids": [topic_id for topic_id, _ in marks],
            "lps": [lp for _, lp in marks],
            "seqs": list(marks.values()),
        }
        with self.application.connection() as connection:
            rows = connection.execute(query("marks_ahead"), facts).fetchall()
        return {(topic_id, lp): counter for topic_id, lp, counter in rows}

    def _records(
        self, topic_id: int, wanted: Mapping[int, int], connections: Connections
    ) -> tuple[dict[int, Content], set[int]]:
        """Return the records of LPs' seqs, by LP, and the LPs whose record may be on a node that is away.

        The youngest partition's first. A node that was removed has none, and what it held is gone for good.
        """
        with self.control.connection() as connection:
            partitions = connection.execute(query("partition_list"), {"topic_id": topic_id}).fetchall()
        found: dict[int, Content] = {}
        unreachable: set[int] = set()
        for partition, node_id, lp_from, lp_to, *_ in reversed(partitions):
            left = {lp: seq for lp, seq in wanted.items() if lp_from <= lp < lp_to and lp not in found}
            if left:
                try:
                    found |= self._find(connections(NodeId(node_id)), partition, left)
                except NotFound:
                    continue
                except StoreUnavailable as error:
                    log.debug("relay_record_unreachable", extra={"partition": partition, "reason": str(error)})
                    unreachable |= left.keys()
        return found, unreachable - found.keys()

    def _find(self, connection: NodeConnection, partition: int, wanted: Mapping[int, int]) -> dict[int, Content]:
        found: dict[int, Content] = {}
        for page in newest_records(connection, self.prefix, partition, self.source.source_id, limit=MAX_RECORDS):
            found |= {lp: content for lp, seq, content in page if wanted.get(lp) == seq}
            if len(found) == len(wanted):
                break
        return found

    def _rows(self, topic_id: int, wanted: Mapping[int, int]) -> dict[int, Content]:
        facts = {"topic_id": topic_id, "lps": list(wanted), "seqs": list(wanted.values())}
        with self.application.connection() as connection:
            rows: list[tuple[Any, ...]] = connection.execute(query("outbox_digests"), facts).fetchall()
        return {lp: content_of_row(facts, key, body) for lp, _, facts, key, body in rows}

    def _note(self, lost: Iterable[TopicLp], marks: Mapping[TopicLp, int]) -> None:
        address, facts = self.application.address, {"outbox_uuid": self.source.outbox_uuid}
        with self.application.connection() as connection:
            if connection.execute(query("outbox_identity_now"), facts).fetchone() is None:
                raise StoreUnavailable(address, "its outbox goes on under other numbers since")
        failpoint("recover.before_suspect")
        topic_lps = sorted(lost)
        topic_id, lp = topic_lps[0]
        shown = {"topic_id": topic_id, "lp": lp, "seq": marks[topic_id, lp], "lps": len(topic_lps)}
        with self.application.connection() as connection:
            connection.execute(query("outbox_suspect"), facts)
        log.error("outbox_behind_redis", extra=shown)
        raise StoreUnavailable(address, "it lost commits whose messages are in Redis")
