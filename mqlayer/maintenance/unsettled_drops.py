"""Messages that groups never handled, by limits and times to live; drained partitions of absent groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mqlayer.errors import MqlayerError
from mqlayer.events import Event, emit
from mqlayer.groups.lineage import drained_dropped
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import columns, query
from mqlayer.redis.partition_scripts import GroupStart
from mqlayer.redis.retention_scripts import DroppedPosition
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


@dataclass(slots=True)
class Drops:
    """Losses of groups in a trimming pass."""

    positions: dict[tuple[int, int], DroppedPosition] = field(default_factory=dict)
    """By group and partition."""
    seeks: dict[int, int] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    expired: dict[tuple[int, int], int] = field(default_factory=dict)
    """By group and partition, ever."""
    names: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, partition: int, start: GroupStart, position: DroppedPosition) -> None:
        """Note a group's position."""
        self.positions[start.group_id, partition] = position
        self.seeks[start.group_id] = start.seek
        if position.lost:
            self.counts[start.group_id] += position.lost

    def add_expired(self, partition: int, starts: Sequence[GroupStart], totals: Sequence[int]) -> None:
        """Note how many expired messages groups settled."""
        for start, total in zip(starts, totals, strict=False):
            if total:
                self.expired[start.group_id, partition] = total

    def write(self, connection: Connection, actor: str) -> None:
        """Store the counts in the pass's transaction; one audit row per group and hour."""
        totals = [(*place, "dropped", one.dropped) for place, one in self.positions.items() if one.dropped]
        totals += [(*place, "expired", total) for place, total in self.expired.items()]
        if not totals:
            return
        facts = columns(("groups", "partitions", "events", "totals"), sorted(totals))
        quiet = connection.execute(query("retention_loss_quiet"), facts).fetchall()
        connection.execute(query("retention_loss_put"), facts)
        self.names = {row[0]: row[1:] for row in connection.execute(query("retention_loss_groups"), facts).fetchall()}
        for (group_id,) in quiet:
            if self.counts[group_id]:
                told = {"messages": self.counts[group_id]}
                write_audit(connection, actor, "retention drop", "/".join(self.names[group_id]), told)

    def finish(self, runtime: Runtime) -> None:
        """Report the drops; record drained partitions of absent groups."""
        for group_id, count in sorted(self.counts.items()):
            topic, group = self.names[group_id]
            log.warning("unsettled_dropped", extra={"topic": topic, "group": group, "messages": count})
            emit(Event("dropped", topic, group, count=count, cause="retention", actor=runtime.actor))
        self._drain(runtime)

    def _drain(self, runtime: Runtime) -> None:
        ended = [(*place, self.seeks[place[0]]) for place, one in sorted(self.positions.items()) if one.drained]
        if not ended:
            return
        with runtime.control.connection() as connection:
            facts = columns(("groups", "partitions", "seeks"), ended)
            due = connection.execute(query("drained_dropped_due"), facts).fetchall()
        for group_id, partition in due:
            try:
                next_offset = self.positions[group_id, partition].next_offset
                drained_dropped(runtime.control, group_id, partition, next_offset, self.seeks[group_id])
            except MqlayerError as error:
                log.warning("drained_delayed", extra={"group_id": group_id, "reason": str(error)})
