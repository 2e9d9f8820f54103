"""Messages lost by a node and its outbox."""

from __future__ import annotations

from mqlayer.errors import Conflict, StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import skip_marks_command
from mqlayer.topics.node_state import DesiredPartition

log = event_logger(__name__)


class LostMessages:
    """Skips and counts lost messages; `counts`: new ones per partition.

    `accept`: of all partitions; `accept_of`: of these.
    """

    def __init__(
        self,
        connection: Connection,
        node_connection: NodeConnection,
        prefix: str,
        *,
        accept: bool,
        accept_of: frozenset[int],
    ) -> None:
        self._connection, self._node_connection, self._prefix = connection, node_connection, prefix
        self._accept, self._accept_of = accept, accept_of
        self.counts: dict[int, int] = {}

    def skip(self, desired: DesiredPartition, source: int, lp: int, after: int, to: int) -> None:
        """Advance a mark past lost seqs, if accepted; the partition stores the count."""
        if not self._accept and desired.partition not in self._accept_of:
            raise Conflict(
                f"partition {desired.partition} lost messages {after + 1} to {to} of LP {lp}, and the outbox does not "
                "hold them any more, or lost commits itself and may have others under these numbers",
                f"mqlayer node rearm {self._node_connection.node.name} --accept-loss goes on without them",
            )
        passed = skip_marks_command(self._node_connection, self._prefix, desired.partition, source, lp, after, to)
        word, fact = raise_for_reply(self._node_connection.call([passed])[0], self._node_connection.node.address)
        if word != b"skipped":
            raise StoreUnavailable(
                self._node_connection.node.address, f"LP {lp} is at {fact} by now: somebody else repairs it too"
            )

    def note(self, desired: DesiredPartition, direct: int = 0) -> None:
        """Count a partition's skipped messages, and `direct` ones without outbox, once."""
        in_all = direct + self._skipped_count(desired)
        if not in_all:
            return
        row = self._connection.execute(query("lost_audited"), {"partition": str(desired.partition)}).fetchone()
        lost = in_all - (row[0] if row else 0)
        if lost > 0:
            self.counts[desired.partition] = lost
            log.error("messages_lost", extra={"partition": desired.partition, "count": lost})

    def _skipped_count(self, desired: DesiredPartition) -> int:
        (reply,) = self._node_connection.call([("HGET", partition_keys(self._prefix, desired.partition).meta, "lost")])
        return int(raise_for_reply(reply, self._node_connection.node.address) or 0)
