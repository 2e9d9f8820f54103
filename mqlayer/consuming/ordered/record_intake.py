"""Queue read records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.message import CommandRecord, Record, pop_command, records_of, records_read
from mqlayer.domain.offsets import OffsetRange, as_ranges, joined
from mqlayer.domain.tags import TagFilter
from mqlayer.logs import event_logger
from mqlayer.redis.read_scripts import SelectedRecords

log = event_logger(__name__)


class RecordIntake:
    """Gives read records to the dispatcher. Thread-safe."""

    def __init__(
        self, settings: LiveSettings, dispatcher: Dispatcher, events: OrderedEvents, wake_settlers: Callable[[], None]
    ) -> None:
        self._settings, self._rate_limiter = settings, settings.rate_limiter
        self._dispatcher, self._events, self._wake_settlers = dispatcher, events, wake_settlers

    def put_selected(self, owned: OwnedPartition, selected: SelectedRecords, wanted: TagFilter) -> None:
        """Queue records whose tags match by name, not only by hash."""
        command = pop_command(selected.entries)
        found = records_of(selected.entries)
        records = [record for record in found if wanted.takes(record.tags)]
        unmatched: list[OffsetRange] = selected.unmatched
        if len(records) < len(found):
            taken = {record.offset for record in records}
            others = as_ranges(record.offset for record in found if record.offset not in taken)
            unmatched = joined([*unmatched, *others])
        excluded = sum(last - first + 1 for first, last in unmatched)
        if selected.last >= owned.next_read:
            missing = selected.last - owned.next_read + 1 - len(records) - excluded
            if missing > 0:
                log_missing(owned, owned.next_read, selected.last, missing)
            self._note_read(owned, selected.last)
            self._rate_limiter.consume(len(records))
            self._dispatcher.put(owned, records, last=selected.last, unmatched=unmatched)
        if excluded:
            self._events.unmatched(excluded)
            self._wake_settlers()
        self._note_command(owned, command)

    def put(self, owned: OwnedPartition, entries: list[Any]) -> None:
        """Queue the records of a read without a filter."""
        command = pop_command(entries)
        if entries:
            records = records_read(entries)
            self._check_holes(owned, records)
            self._note_read(owned, records[-1].offset)
            self._rate_limiter.consume(len(records))
            if self._settings.may_be_void:
                self._put_without_void(owned, records)
            else:
                self._dispatcher.put(owned, records)
        self._note_command(owned, command)

    def _put_without_void(self, owned: OwnedPartition, records: list[Record]) -> None:
        void = [record.offset for record in records if record.void]
        real = [record for record in records if not record.void] if void else records
        self._dispatcher.put(owned, real, last=records[-1].offset, unmatched=as_ranges(void))
        if void:
            self._events.unmatched(len(void))
            self._wake_settlers()

    def _note_read(self, owned: OwnedPartition, last: int) -> None:
        if self._settings.archived:
            owned.deliveries.note(owned.next_read, last, clock())

    def _note_command(self, owned: OwnedPartition, command: CommandRecord | None) -> None:
        if command is not None:
            owned.seal(command)
            # The settler checks whether the partition is settled.
            self._wake_settlers()

    def _check_holes(self, owned: OwnedPartition, records: list[Record]) -> None:
        first, last = records[0].offset, records[-1].offset
        missing = last - owned.next_read + 1 - len(records)
        if missing > 0:
            log_missing(owned, min(first, owned.next_read), last, missing)


def log_missing(owned: OwnedPartition, first: int, last: int, missing: int) -> None:
    """Log that somebody removed records."""
    facts = {"partition": owned.partition, "first": first, "last": last, "missing": missing}
    log.error("records_missing", extra=facts)
