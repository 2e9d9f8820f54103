"""Make what a shared member's readers read ready: records to skip are settled, records without room deferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.shared.deferrals import Deferrals
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.partitions import SharedPartition, SharedPartitions
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.domain.message import Record, pop_command, records_read
from mqlayer.logs import event_logger
from mqlayer.redis.partition_scripts import FailureHistory
from mqlayer.redis.shared_scripts import DueMessages

log = event_logger(__name__)


class SharedIntake:
    """Gives one reader's records to the prefetch."""

    def __init__(
        self,
        settings: LiveSettings,
        partitions: SharedPartitions,
        prefetch: Prefetch,
        results: SharedResults,
        queues: FailureQueues,
        deferrals: Deferrals,
    ) -> None:
        self._settings, self._rate_limiter = settings, settings.rate_limiter
        self._partitions, self._prefetch, self._results, self._queues = partitions, prefetch, results, queues
        self._deferrals = deferrals

    def put(self, partition: SharedPartition, entries: list[Any], asked: float) -> None:
        """Take the entries of a read that was asked for then."""
        command = pop_command(entries)
        if entries:
            records = records_read(entries)
            self._deferrals.note_size(records)
            taken = self._with_room(partition, records)
            if taken:
                self._deliver(partition, taken, asked)
        if command is not None:
            self._results.command_read(partition, command.entry_id)

    def _deliver(
        self,
        partition: SharedPartition,
        records: Sequence[Record],
        asked: float,
        failures: Sequence[FailureHistory | None] = (),
    ) -> None:
        batch = self._batch(partition, records, asked)
        noted_of = zip(records, failures, strict=False)
        batch.count_failed({record.offset: noted.attempts for record, noted in noted_of if noted and noted.attempts})
        self._pass_over(partition, batch)
        self._prefetch.put(batch)

    def _batch(self, partition: SharedPartition, records: Sequence[Record], asked: float) -> FetchedBatch:
        batch = self._partitions.batch(partition, records)
        self._rate_limiter.consume(len(records))
        batch.extended(asked)
        self._prefetch.add(batch)
        return batch

    def _is_passed_over(self, partition: SharedPartition, record: Record) -> bool:
        is_void = (partition.dead or partition.marks) and partition.is_void(record.identity)
        return bool(is_void) or self._is_unwanted(record)

    def _is_unwanted(self, record: Record) -> bool:
        wanted = self._settings.tag_filter
        return (self._settings.may_be_void and record.void) or (wanted is not None and not wanted.takes(record.tags))

    def _pass_over(self, partition: SharedPartition, batch: FetchedBatch) -> None:
        records = batch.records
        if partition.dead or partition.marks:
            void = [record.offset for record in records if partition.is_void(record.identity)]
            if void:
                batch.exclude(void)
                self._results.end(batch, void, "-")
                self._rate_limiter.consume(-len(void))
        if self._settings.tag_filter is not None or self._settings.may_be_void:
            others = [
                record.offset for record in records if record.offset not in batch.lost and self._is_unwanted(record)
            ]
            if others:
                batch.exclude(others)
                self._results.unmatched(batch, others)
                self._rate_limiter.consume(-len(others))

    def _with_room(self, partition: SharedPartition, records: list[Record]) -> list[Record]:
        if not self._deferrals.active:
            return records
        # What is passed over needs no room.
        others = [record for record in records if not self._is_passed_over(partition, record)]
        taken = self._deferrals.keep(partition, others)
        if len(others) < len(records):
            taken += [record for record in records if self._is_passed_over(partition, record)]
        return taken

    def put_due(
        self, partition: SharedPartition, answer: DueMessages, asked: float, *, finds_room: bool = True
    ) -> None:
        """Take due or deferred messages. `finds_room`: defer none."""
        if answer.missing:
            self._settle_missing(partition, answer.missing)
        pairs = self._unknown(partition, answer)
        usual = [record for record, noted in pairs if noted is None or noted.started != "t"]
        taken = usual if finds_room else self._with_room(partition, usual)
        if taken:
            noted_of = {record.offset: noted for record, noted in pairs}
            self._deliver(partition, taken, asked, [noted_of[record.offset] for record in taken])
        for record, noted in pairs:
            if noted is not None and noted.started == "t":
                batch = self._batch(partition, [record], asked)
                batch.count_failed({record.offset: noted.attempts} if noted.attempts else {}, suspect=True)
                self._pass_over(partition, batch)
                if batch.open:
                    self._queues.suspect(batch)

    def _settle_missing(self, partition: SharedPartition, offsets: Sequence[int]) -> None:
        log.error(
            "records_missing", extra={"partition": partition.group_partition.partition, "offsets": list(offsets)[:10]}
        )
        self._results.end(self._partitions.batch(partition, ()), list(offsets), "-")

    def _unknown(self, partition: SharedPartition, answer: DueMessages) -> list[tuple[Record, FailureHistory | None]]:
        ours = {
            offset
            for batch in self._prefetch.batches()
            if batch.group_partition == partition.group_partition
            for offset in set(batch.open)
        }
        pairs = zip(answer.records, answer.failures, strict=True)
        return [(record, noted) for record, noted in pairs if record.offset not in ours]
