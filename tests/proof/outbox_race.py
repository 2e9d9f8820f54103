"""Writers that race to publish a few keys, and a reader that races with them.

What the writers do is what applications do, at its worst: they publish the same keys from several connections without
any lock of their own, some write elsewhere first (and get their transaction id early), some take long, some roll back.
One more keeps a transaction open that never publishes, and so holds back every snapshot.

Histories tell it all: `ok` of a publish is written after its commit, `invoke` right before its statement. So what the
checker calls a real-time inversion is one that a user can see: a message published after another was committed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from mqlayer.postgres.database import Connection
from tests.proof.checker import Verdict, check
from tests.proof.history import Deliver, History, MessageEvent, Publish, read_histories
from tests.proof.planted_bugs import Outbox, Reader

GROUP: Final = "reader"
PAUSE_S: Final = 0.004
LONG_PAUSE_S: Final = 0.02
HELD_S: Final = 0.05
READ_INTERVAL_S: Final = 0.001
CATCH_UP_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Race:
    """How many race, for how long. The seed decides what each writer does, not who wins."""

    writers: int = 8
    keys: int = 4
    transactions_each: int = 40
    seed: int = 0

    def key(self, rng: random.Random) -> str:
        """Return one of the keys."""
        return f"key-{rng.randrange(self.keys)}"


def run_race(race: Race, outbox: Outbox, dsn: str, directory: Path) -> Verdict:
    """Let a reader race with the writers on a prepared outbox, and judge what it read."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        writing = pool.submit(run_writers, race, outbox, dsn, directory)
        _read_along(writing, outbox.reader(), dsn, directory)
    return check(read_histories(directory), flows=[(GROUP, outbox.topic)])


def run_writers(race: Race, outbox: Outbox, dsn: str, directory: Path) -> int:
    """Let all writers race to their end; return how many transactions committed. Their histories tell the rest."""
    with _open_transaction(dsn), ThreadPoolExecutor(max_workers=race.writers) as pool:
        writing = [pool.submit(_write, race, number, outbox, dsn, directory) for number in range(race.writers)]
        return sum(each.result() for each in writing)


def _read_along(writing: Future[int], reader: Reader, dsn: str, directory: Path) -> None:
    """Read until the writers are through and all is read, or until it can be said that the rest never comes."""
    seen_count, deadline = 0, math.inf
    with psycopg.connect(dsn, autocommit=True) as connection, History(directory, "reader") as history:
        while not writing.done() or (seen_count < writing.result() and time.monotonic() < deadline):
            if writing.done() and deadline == math.inf:
                deadline = time.monotonic() + CATCH_UP_LIMIT_S
            messages = reader.read(connection)
            for message in messages:
                history.note(delivered(message))
            seen_count += len(messages)
            if not messages:
                time.sleep(READ_INTERVAL_S)


def delivered(message: MessageEvent) -> Deliver:
    """Return the event of a message that came out on the other side."""
    facts = {name: getattr(message, name) for name in MessageEvent.__struct_fields__}
    return Deliver(**facts, group=GROUP, partition=0)


@contextmanager
def _open_transaction(dsn: str) -> Iterator[None]:
    """Hold a writing transaction open, one after the other, which never publishes and always rolls back."""
    done = threading.Event()

    def hold() -> None:
        with psycopg.connect(dsn) as connection:
            while not done.is_set():
                connection.execute("SELECT pg_current_xact_id()")
                done.wait(HELD_S)
                connection.rollback()

    with ThreadPoolExecutor(max_workers=1) as pool:
        holding = pool.submit(hold)
        try:
            yield
        finally:
            done.set()
            holding.result()


def _write(race: Race, number: int, outbox: Outbox, dsn: str, directory: Path) -> int:
    committed_count = 0
    rng = random.Random(f"{race.seed}/{number}")
    with psycopg.connect(dsn) as connection, History(directory, f"writer-{race.seed}-{number}") as history:
        for turn in range(race.transactions_each):
            value = f"{race.seed}/{number}/{turn}"
            committed_count += _run_transaction(connection, history, outbox, race.key(rng), value, rng)
    return committed_count


def _run_transaction(
    connection: Connection, history: History, outbox: Outbox, key: str, value: str, rng: random.Random
) -> bool:
    if rng.random() < 0.5:
        connection.execute("SELECT pg_current_xact_id()")  # as any write does, before it publishes
        _pause(rng, PAUSE_S)
    operation = history.begin(Publish(topic=outbox.topic, key=key, value=value))
    message = outbox.publish(connection, key, value)
    _pause(rng, PAUSE_S if rng.random() < 0.9 else LONG_PAUSE_S)
    identity = {"source": message.source, "lp": message.lp, "seq": message.seq}
    if rng.random() < 0.1:
        connection.rollback()
        operation.fail(**identity)
        return False
    connection.commit()
    operation.ok(**identity)
    return True


def _pause(rng: random.Random, longest_s: float) -> None:
    """Take some time, as the rest of a business transaction does."""
    time.sleep(rng.uniform(0, longest_s))
