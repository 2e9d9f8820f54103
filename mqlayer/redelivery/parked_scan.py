"""Periodic work on parked keys: overdue keys, abandoned jobs, old attempts. Safe to run concurrently."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from functools import partial
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import ANY_KEY, count_action, raise_parking_version
from mqlayer.redelivery.bulk_worker import work_on
from mqlayer.redelivery.redelivery_job import claim_abandoned, new_worker
from mqlayer.redelivery.replay import work_on_replay

log = event_logger(__name__)

OVERDUE_S: Final = 5.0
"""A key due for longer makes its group be notified again."""
ATTEMPTS_HORIZON_S: Final = 7 * 86_400.0
"""Age at which failed attempts of messages neither parked nor dead are deleted."""
LONGEST_WAIT_S: Final = 1.0
"""A job whose rate demands a longer wait is left for a later scan."""
ROWS_AT_ONCE: Final = 5_000
ROUNDS: Final = 200


def retry_scan(database: Database, *, at_most_s: float = 5.0) -> int:
    """Notify groups with overdue keys again, and continue abandoned jobs; return how many groups were notified.

    Takes `at_most_s`, plus a batch.
    """
    until = time.monotonic() + at_most_s
    notified = _notify_overdue(database)
    _work_on_abandoned(database, until)
    return notified


def clean_attempts(database: Database) -> int:
    """Delete old failed attempts, in bounded steps; return how many."""
    gone = 0
    begin = datetime(1970, 1, 1, tzinfo=UTC)
    for _ in range(ROUNDS):
        facts = {"horizon_s": ATTEMPTS_HORIZON_S, "from": begin, "limit": ROWS_AT_ONCE}
        with database.connection() as connection:
            ((last, looked_at, deleted),) = connection.execute(query("attempts_clean"), facts).fetchall()
        gone += deleted
        if looked_at < ROWS_AT_ONCE or (last == begin and not deleted):
            break
        begin = last
    if gone:
        log.info("attempts_cleaned", extra={"rows": gone})
    return gone


def _notify_overdue(database: Database) -> int:
    with database.connection() as connection:
        found = connection.execute(query("parked_overdue"), {"for_s": OVERDUE_S}).fetchall()
    notified = []
    for group_id, topic, group in found:
        try:
            database.transaction(partial(_notify_group, group_id=group_id))
        except MqlayerError as error:
            # Consumers write these rows: notify the other groups all the same.
            log.warning("overdue_notice_delayed", extra={"group_id": group_id, "reason": str(error)})
            continue
        emit(Event("overdue", topic, group))
        notified.append(group_id)
    if notified:
        log.info("parked_keys_overdue", extra={"groups": notified})
    return len(notified)


def _notify_group(connection: Connection, group_id: int) -> None:
    raise_parking_version(connection, group_id, ANY_KEY)
    count_action(connection, group_id, "overdue")


def _work_on_abandoned(database: Database, until: float) -> None:
    with database.connection() as connection:
        left = connection.execute(query("redrives_left")).fetchall()
    for number, (redrive_id, kind) in enumerate(left):
        remaining = until - time.monotonic()
        worker = new_worker()
        if remaining <= 0:
            return
        if not claim_abandoned(database, redrive_id, worker):
            continue
        failpoint("scan.after_claim")
        stop = threading.Event()
        timer = threading.Timer(remaining / (len(left) - number), stop.set)
        timer.daemon = True
        timer.start()
        try:
            go_on = work_on_replay if kind in ("replay", "backfill") else work_on
            go_on(database, redrive_id, worker=worker, stop=stop, longest_wait_s=LONGEST_WAIT_S)
        except MqlayerError as error:
            log.warning("redrive_blocked", extra={"redrive": redrive_id, "reason": str(error)})
        except Exception as error:  # noqa: BLE001  # consumers write the row: continue with other jobs
            log.warning("redrive_blocked", extra={"redrive": redrive_id, "reason": type(error).__name__})
        finally:
            timer.cancel()
