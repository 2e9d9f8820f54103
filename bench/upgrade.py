"""How long publishers and partitions pause in a rolling upgrade: real processes under steady load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from bench.processes import ConsumerGroup, Note, Worker, consumer_group, wait_until
from bench.registry import Line, bench, compared, note
from bench.stage import BODY, Stage, System
from bench.takeover import keys_in_turn, longest_gap_ms
from mqlayer.domain.protocol import PROTOCOL
from mqlayer.maintenance.upgrades import finalize
from mqlayer.postgres.database import connect
from mqlayer.postgres.migrations import SCHEMAS, contract
from mqlayer.producing import Producer
from tests.fixtures.previous_release import PREVIOUS, installed, path_of

PARTITIONS: Final = 16
MEMBERS: Final = 2
RATE_PER_S: Final = 20 * PARTITIONS
CALM_S: Final = 8.0


@bench("upgrade")
def upgrade(stage: Stage) -> Iterator[Line]:
    """Longest pause in ms while all members of the previous release are replaced one by one, and the upgrade is
    finalized with its contract steps: of a publisher between two acknowledged messages, and of a partition between two
    handled ones. The baseline is the same load without an upgrade."""
    former = installed(PREVIOUS)
    system = stage.system(partitions=PARTITIONS)
    put_former_in_force(system)
    with publishing(system) as stored, consumer_group(system) as members:
        for _ in range(MEMBERS):
            members.start(place=former, path=path_of(former))
        members.await_balance(PARTITIONS)
        calm_from = time.monotonic_ns()
        time.sleep(CALM_S)
        rolled_from = time.monotonic_ns()
        gone = roll(members)
        finalize_all(system)
        until = time.monotonic_ns()
        handled = [one for worker in [*gone, *members.workers] for one in worker.notes(calm_from)]
        sent = [Note(0, at_ns) for at_ns in stored]
    partitions = {one.partition for one in handled}
    for name, notes, places in (("publish", sent, {0}), ("consume", handled, partitions)):
        calm = longest_gap_ms(notes, places, calm_from, rolled_from)
        rolled = longest_gap_ms(notes, places, rolled_from, until)
        yield compared(f"upgrade[{name}]", rolled, calm, unit="ms longest pause", target=None)


def put_former_in_force(system: System) -> None:
    """Let the schemas be as the migration leaves them: the previous release's version is in force."""
    with connect(system.dsn) as connection:
        for schema in SCHEMAS.values():
            connection.execute(
                f"UPDATE {schema}.protocol SET in_force = {PROTOCOL.least}, serves_from = {PROTOCOL.least}"
            )


def roll(members: ConsumerGroup) -> Sequence[Worker]:
    """Replace members one by one; return the former ones."""
    gone = list(members.workers)
    for former in gone:
        members.start()
        members.end(former)
        former.process.communicate()
        members.await_balance(PARTITIONS)
    return gone


def finalize_all(system: System) -> None:
    """Finalize, and run contract steps once all members have read it."""
    began = time.monotonic()
    if finalize(system.runtime) != "finalized":
        raise RuntimeError("an older process lives")
    for schema in SCHEMAS:
        contract(system.dsn, schema=schema)
    note(f"  finalized within {(time.monotonic() - began) * 1e3:.0f} ms")


@contextmanager
def publishing(system: System) -> Iterator[list[int]]:
    """Publish one by one at the rate, in a thread; lend when each was acknowledged."""
    stopping, stored = threading.Event(), list[int]()
    with Producer(system.settings, name="bench") as producer:
        keys = keys_in_turn(system)

        def run() -> None:
            began, number = time.monotonic(), 0
            while not stopping.is_set():
                time.sleep(max(0.0, began + number / RATE_PER_S - time.monotonic()))
                producer.send("bench", key=keys[number % len(keys)], body=BODY)
                stored.append(time.monotonic_ns())
                number += 1

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: bool(stored))
        try:
            yield stored
        finally:
            stopping.set()
            thread.join()
