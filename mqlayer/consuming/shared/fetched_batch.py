"""Records that a shared member read in one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from mqlayer.consuming.shared.store import ClaimedMessage
from mqlayer.domain.message import Record
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.redis.shared_scripts import SharedGroupPartition


class FetchedBatch:
    """Records of one partition from one call; contexts use it as their partition.

    `group_partition`: None for redriven messages. `epoch`: the fence's. `suspect`: it may have killed its former
    member.
    """

    __slots__ = (
        "assignment",
        "attempts",
        "claim",
        "dropped",
        "ended",
        "epoch",
        "extended_at",
        "group_partition",
        "hung",
        "lost",
        "partition",
        "read_at",
        "records",
        "size",
        "suspect",
    )  # fmt: skip
    ordered: Final = False

    def __init__(
        self,
        one: PopPartition,
        group_partition: SharedGroupPartition | None,
        epoch: int,
        records: Sequence[Record],
        now: float,
    ) -> None:
        self.assignment, self.group_partition, self.epoch, self.records = one, group_partition, epoch, records
        self.partition = one.partition
        self.read_at = self.extended_at = now
        self.attempts: dict[int, int] = {}
        # Offsets settled or given back, and offsets that other members have.
        self.ended: set[int] = set()
        self.lost: set[int] = set()
        # Offsets left out of the last extension: their handlers run too long.
        self.hung: set[int] = set()
        self.size = sum([len(record[3]) for record in records])
        self.suspect = self.dropped = False
        # Of a redriven message.
        self.claim: ClaimedMessage | None = None

    def of_claim(self, claim: ClaimedMessage) -> None:
        """Be a redriven message's."""
        self.claim = claim

    def extended(self, at: float, hung: Collection[int] = ()) -> None:
        """Note an extension, except of `hung` offsets."""
        self.extended_at, self.hung = at, set(hung)

    def exclude(self, offsets: Iterable[int]) -> None:
        """Start none of these."""
        self.lost.update(offsets)

    def count_failed(self, attempts: Mapping[int, int], *, suspect: bool = False) -> None:
        """Note earlier failed attempts; `suspect`: it may have killed its former member."""
        self.attempts, self.suspect = dict(attempts), suspect

    @property
    def open(self) -> list[int]:
        """Offsets neither settled, given back nor lost."""
        ended, lost = self.ended, self.lost
        return [record.offset for record in self.records if record.offset not in ended and record.offset not in lost]
