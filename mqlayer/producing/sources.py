"""A producer's incarnations: each a source that numbers messages."""

from __future__ import annotations

from mqlayer.errors import MqlayerError, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Right, require
from mqlayer.producing.backoff import backoff_s
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.scheduler import Scheduler

log = event_logger(__name__)


def open_source(database: Database, name: str) -> int:
    """Register an incarnation. Raises StoreUnavailable or SchemaMismatch."""
    with database.connection() as connection:
        require(connection, "control", Right.PUBLISH)
        check_schema(connection, "control", database.address)
        row = connection.execute(query("source_open_direct"), {"name": name}).fetchone()
    if row is None:
        raise StoreUnavailable(database.address, "no source id came back")
    return int(row[0])


class ProducerSources:
    """The sources of one producer: the first, and one after each loss."""

    def __init__(
        self, name: str, first: int, database: Database, guarded: GuardedInFlight, scheduler: Scheduler
    ) -> None:
        self._name, self._database, self._guarded, self._scheduler = name, database, guarded, scheduler
        self._opened = [first]

    def renew(self, tries: int = 1) -> None:
        """Register the next source, for queues without one; repeats itself."""
        try:
            source = open_source(self._database, self._name)
        except MqlayerError as error:
            log.warning("source_not_renewed", extra={"reason": str(error)})
            self._scheduler.schedule(lambda: self.renew(tries + 1), after_s=backoff_s(tries))
            return
        failpoint("producer.after_renewal")
        with self._guarded as in_flight:
            self._opened.append(source)
            in_flight.queues.renew(source)

    def close(self) -> None:
        """Close all; after a failure they only cost memory."""
        for source in self._opened:
            try:
                failpoint("producer.before_source_close")
                with self._database.connection() as connection:
                    connection.execute(query("source_close"), {"source_id": source})
            except MqlayerError as error:
                log.warning("source_not_closed", extra={"source": source, "reason": str(error)})
