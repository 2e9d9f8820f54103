"""The partitions that a member of a shared group reads: under which epochs, and what is to be passed over in each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from mqlayer.consuming.member import MemberStats
from mqlayer.consuming.sharing.ledger import SharedLedger
from mqlayer.consuming.sharing.pool import Pool
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.membership.gates import drained_popped, seal_marks
from mqlayer.membership.groups import Group
from mqlayer.membership.popping import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.postgres.database import Database
from mqlayer.redis.sharing import SharedPlace

log = logging.getLogger(__name__)

NOWHERE: Final = NodeId(0)


class Spot:
    """A partition as a member sees it. `taken`: whether its epoch was in force when we looked last.

    `strays`: whether the node may have messages as ours that we do not know of: of a lost answer, or another epoch.
    """

    __slots__ = ("dead", "left_ms", "marks", "one", "place", "refused", "rest_until", "strays", "taken")

    def __init__(self, one: PopPartition, place: SharedPlace) -> None:
        self.one, self.place = one, place
        self.taken, self.strays = False, True
        self.left_ms, self.rest_until, self.refused = -1, 0.0, 0
        # What died, or was given back, and may come again: after a fall-back of its node, at other offsets too.
        self.dead: set[Identity] = set()
        # Of a partition that holds messages which its successors hold too: the marks that it was recorded with.
        self.marks: Mapping[str, int] = {}

    def is_void(self, identity: Identity) -> bool:
        """Say whether a record is not to be handled here: it died, or belongs to the successors."""
        source, lp, seq = identity
        return identity in self.dead or seq > self.marks.get(f"{source}:{lp}", seq)


class SharedSpots:
    """All of them. Listed by the heart, replaced as a whole: other threads may look through them at any time.

    `mend`: have a node armed again, or what it lacks mended. `nudge`: have the partitions listed now.
    """

    def __init__(
        self,
        database: Database,
        group: Group,
        ledger: SharedLedger,
        pool: Pool,
        stats: MemberStats,
        *,
        prefix: str,
        mend: Callable[[NodeId], None],
        nudge: Callable[[], None],
    ) -> None:
        self._database, self._group, self._ledger = database, group, ledger
        self._pool, self._stats, self._prefix = pool, stats, prefix
        self._mend, self._nudge = mend, nudge
        self._spots: dict[PartitionId, Spot] = {}
        self._known: dict[PartitionId, PopPartition] = {}
        self.epoch = 0
        """The highest that was listed: for the fence, one for all partitions."""

    def all(self) -> list[Spot]:
        """Return what may be read now."""
        return list(self._spots.values())

    def on(self, node_id: NodeId) -> list[Spot]:
        """Return what may be read on a node now."""
        return [spot for spot in self._spots.values() if spot.one.node == node_id]

    def known(self, partition: int) -> PopPartition:
        """Return a partition of the group; one that is gone is nowhere, and nothing of it is asked there any more."""
        gone = PopPartition(PartitionId(partition), NOWHERE, None, 1, 0, 0, cut=False, readable=False)
        return self._known.get(PartitionId(partition), gone)

    def forget(self) -> None:
        """Read nothing any more."""
        self._spots = {}

    def list(self) -> None:
        """Ask Postgres which partitions may be read under which epochs. Raises StoreUnavailable."""
        found = pop_partitions(self._database, self._group.group_id)
        self.epoch = max([self.epoch, *(one.epoch for one in found if one.epoch is not None)])
        self._known = {one.partition: one for one in found}
        self._spots = {
            one.partition: self._spot(one, one.epoch) for one in found if one.readable and one.epoch is not None
        }

    def _spot(self, one: PopPartition, epoch: int) -> Spot:
        known = self._spots.get(one.partition)
        if known is not None and known.one == one:
            return known
        spot = Spot(one, SharedPlace(self._prefix, one.partition, self._group.group_id, epoch, one.start, one.seek))
        if known is not None:
            spot.refused = known.refused
            if known.place != spot.place:
                self._drop(known.place)
        return spot

    def learn(self, spot: Spot, committed: int) -> None:
        """Ask Postgres what a partition that is taken from an offset on holds that is not to be handled."""
        spot.dead = self._ledger.dead_from(spot.place.partition, committed)
        spot.marks = seal_marks(self._database, spot.place.partition) if spot.one.cut else {}

    def say_through(self, partition: PartitionId, epoch: int, seal_id: str) -> None:
        """Tell Postgres that a sealed partition is through. Where it refuses, a later look says it again."""
        group = self._group
        if partition in self._spots and drained_popped(self._database, group.group_id, partition, epoch, seal_id):
            log.info("partition_drained", extra={"partition": str(partition), "group": group.name})
            self._nudge()

    def void(self, place: SharedPlace) -> None:
        """Drop what is in hand of a partition under an epoch that is not in force any more."""
        self._drop(place)
        spot = self._spots.get(PartitionId(place.partition))
        if spot is not None:
            spot.strays = True
        self._nudge()

    def fenced(self, spot: Spot) -> None:
        """Look for a higher epoch; where Postgres has none, its node has seen more than it gave out: ask for one."""
        self._stats.fenced += 1
        place = spot.place
        self._drop(place)
        if spot.refused == place.epoch:
            renew_pop_epoch(self._database, self._group.group_id, place.partition, place.epoch)
        spot.refused = place.epoch
        self._nudge()

    def refused(self, spot: Spot) -> None:
        """Have a node mended that does not have a partition. Raises nothing."""
        self._drop(spot.place)
        self._mend(spot.one.node)
        self._nudge()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop what is in hand of a node that is not the armed run, and have it armed. Raises nothing."""
        self._pool.drop(lambda batch: batch.claim is None and batch.assigned.node == node_id)
        for spot in self.on(node_id):
            spot.taken, spot.strays = False, True
        self._mend(node_id)
        self._nudge()

    def _drop(self, place: SharedPlace) -> None:
        self._pool.drop(lambda batch: batch.place == place)
