"""Empty the outbox's time slots."""

from __future__ import annotations

import time
from typing import Final, Literal

from mqlayer.errors import TransactionConflict
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.randomness import RNG

log = event_logger(__name__)

SLOTS: Final = 4
TRIES: Final = 5

RotationResult = Literal["emptied", "empty", "waiting", "current", "busy"]
"""`waiting`: a row is not relayed. `current`: in use or just was. `busy`: locked."""


def rotate(application: Database) -> dict[int, RotationResult]:
    """Empty every fully relayed old slot (invariant 14); return each slot's result.

    Never waits for a lock; the next call retries busy slots. Safe to run concurrently.
    """
    with application.connection() as connection:
        answers = {slot: _rotate_slot(connection, slot) for slot in range(SLOTS)}
    emptied = [slot for slot, answer in answers.items() if answer == "emptied"]
    if emptied:
        log.info("outbox_rotated", extra={"slots": emptied})
    return answers


def _rotate_slot(connection: Connection, slot: int) -> RotationResult:
    answer: RotationResult = "busy"
    for tried in range(TRIES):
        answer = _try(connection, slot)
        if answer != "busy":
            break
        time.sleep(RNG.uniform(0.01, 0.05) * (tried + 1))
    return answer


def _try(connection: Connection, slot: int) -> RotationResult:
    with connection.transaction():
        row = connection.execute(query("outbox_rotate"), {"slot": slot}).fetchone()
    if row is None:
        raise TransactionConflict("", "outbox_rotate_v1 gave no answer")
    answer: RotationResult = row[0]
    return answer
