"""Checks that Postgres still has the rows of Redis' records, since a crash may take commits back.

See `docs/design/relay-term.md`. On a difference the outbox is marked as suspect, unless another relay has renumbered
it, and the next session recovers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import TermToken, set_term
from mqlayer.relay.outbox_source import OutboxSource, refuse_other_term
from mqlayer.relay.stored_records import Content, content_of_row, is_of_row, marks_of, newest_records
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

MAX_RECORDS: Final = 20_000
"""Newest records searched per partition; an older one counts as equal to its row."""

TopicLp = tuple[int, int]
"""Topic id and LP."""
Connections = Callable[[NodeId], NodeConnection]


class CheckedNodeTerm(NamedTuple):
    """A node's token for appends, and its partitions compared since."""

    token: TermToken
    partitions: frozenset[int]


@dataclass(frozen=True, slots=True)
class CommitChecker:
    """Compares nodes' records of a source with the outbox's rows. Thread-safe."""

    runtime: Runtime
    source: OutboxSource

    def compare_node(self, connection: NodeConnection, connections: Connections) -> CheckedNodeTerm:
        """Register our term with a node, so that it refuses other terms' rows, then compare its partitions.

        `connections` reaches nodes of parents. Raises StoreUnavailable if commits are lost (after marking the outbox),
        our term is over, or the node or Postgres is unavailable.
        """
        token = self._send_term(connection, [partition for partition, _ in self._partitions(connection)])
        # Query after registering: a partition opened before that may have accepted rows of another term.
        return CheckedNodeTerm(token, self._compare_partitions(connection, self._partitions(connection), connections))

    def compare_more(
        self, connection: NodeConnection, partitions: Collection[int], connections: Connections, token: TermToken
    ) -> frozenset[int]:
        """Compare partitions that came to a node later. Raises as `compare_node`.

        Return those compared, without any whose record is on an unavailable node. Partitions of a cluster get our term
        first, and `token` their tokens.
        """
        rows = [
            (partition, topic_id) for partition, topic_id in self._partitions(connection) if partition in partitions
        ]
        if not isinstance(token, str):
            later = self._send_term(connection, [partition for partition, _ in rows])
            token.update(later if isinstance(later, dict) else {})
        return self._compare_partitions(connection, rows, connections)

    def _send_term(self, node_connection: NodeConnection, partitions: Sequence[int]) -> TermToken:
        failpoint("relay.before_term")
        token = set_term(
            node_connection, self.runtime.prefix, self.source.source_id, self.source.term, partitions=partitions
        )
        failpoint("relay.after_term")
        with self.runtime.outbox.connection() as connection:
            refuse_other_term(connection, self.source, self.runtime.outbox.address)
        return token

    def _partitions(self, node_connection: NodeConnection) -> list[tuple[int, int]]:
        with self.runtime.control.connection() as connection:
            return connection.execute(query("partitions_of_node"), {"node_id": node_connection.node.node_id}).fetchall()

    def _compare_partitions(
        self, connection: NodeConnection, rows: Sequence[tuple[int, int]], connections: Connections
    ) -> frozenset[int]:
        partitions = [partition for partition, _ in rows]
        marks: dict[TopicLp, int] = {}
        holders: dict[TopicLp, list[int]] = {}
        found = marks_of(connection, self.runtime.prefix, partitions, self.source.source_id)
        for (partition, topic_id), of_partition in zip(rows, found, strict=True):
            for lp, mark in of_partition.items():
                marks[topic_id, lp] = max(mark, marks.get((topic_id, lp), 0))
                holders.setdefault((topic_id, lp), []).append(partition)
        unknown = self._compare(
            marks, lambda node_id: connection if node_id == connection.node.node_id else connections(node_id)
        )
        return frozenset(partitions).difference(*(holders[topic_lp] for topic_lp in unknown))

    def _compare(self, marks: Mapping[TopicLp, int], connections: Connections) -> set[TopicLp]:
        ahead = self._ahead(marks)
        lost = {topic_lp for topic_lp, counter in ahead.items() if counter < marks[topic_lp]}
        unknown: set[TopicLp] = set()
        for topic_id in {topic for topic, _ in ahead.keys() - lost}:
            wanted = {lp: marks[topic_id, lp] for topic, lp in ahead.keys() - lost if topic == topic_id}
            records, unreachable = self._records(topic_id, wanted, connections)
            rows = self._rows(topic_id, {lp: wanted[lp] for lp in records})
            lost |= {(topic_id, lp) for lp, one in records.items() if lp not in rows or not is_of_row(one, rows[lp])}
            unknown |= {(topic_id, lp) for lp in unreachable}
        # Rows recorded as relayed meanwhile may also be rotated away.
        if lost and (still := lost & self._ahead({topic_lp: marks[topic_lp] for topic_lp in lost}).keys()):
            self._note(still, marks)
        return unknown

    def _ahead(self, marks: Mapping[TopicLp, int]) -> dict[TopicLp, int]:
        facts = {
            "topic_ids": [topic_id for topic_id, _ in marks],
            "lps": [lp for _, lp in marks],
            "seqs": list(marks.values()),
        }
        with self.runtime.outbox.connection() as connection:
            rows = connection.execute(query("marks_ahead"), facts).fetchall()
        return {(topic_id, lp): counter for topic_id, lp, counter in rows}

    def _records(
        self, topic_id: int, wanted: Mapping[int, int], connections: Connections
    ) -> tuple[dict[int, Content], set[int]]:
        with self.runtime.control.connection() as connection:
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
        for page in newest_records(
            connection, self.runtime.prefix, partition, self.source.source_id, limit=MAX_RECORDS
        ):
            found |= {lp: content for lp, seq, content in page if wanted.get(lp) == seq}
            if len(found) == len(wanted):
                break
        return found

    def _rows(self, topic_id: int, wanted: Mapping[int, int]) -> dict[int, Content]:
        facts = {"topic_id": topic_id, "lps": list(wanted), "seqs": list(wanted.values())}
        with self.runtime.outbox.connection() as connection:
            rows: list[tuple[Any, ...]] = connection.execute(query("outbox_digests"), facts).fetchall()
        return {lp: content_of_row(facts, key, body) for lp, _, facts, key, body in rows}

    def _note(self, lost: Iterable[TopicLp], marks: Mapping[TopicLp, int]) -> None:
        address, facts = self.runtime.outbox.address, {"outbox_uuid": self.source.outbox_uuid}
        with self.runtime.outbox.connection() as connection:
            if connection.execute(query("outbox_identity_now"), facts).fetchone() is None:
                raise StoreUnavailable(address, "its outbox goes on under other numbers since")
        failpoint("recover.before_suspect")
        topic_lps = sorted(lost)
        topic_id, lp = topic_lps[0]
        shown = {"topic_id": topic_id, "lp": lp, "seq": marks[topic_id, lp], "lps": len(topic_lps)}
        with self.runtime.outbox.connection() as connection:
            connection.execute(query("outbox_suspect"), facts)
        log.error("outbox_behind_redis", extra=shown)
        raise StoreUnavailable(address, "it lost commits whose messages are in Redis")
