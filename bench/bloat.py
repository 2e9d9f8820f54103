"""Sizes of the outbox's, the fence's and parking's tables while many messages pass: bounded by what waits, or not.

`BENCH_MESSAGES` messages go through each of the three, 100,000 by default; `BENCH_STAGES=outbox,fence` chooses.
The ring of the outbox turns faster than in production, so that a run sees all slots many times.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import psycopg

from bench.latency import process
from bench.rebalance import new_group
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.domain.message import Record
from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.groups import join, send_heartbeat
from mqlayer.maintenance.fence_cleanup import clean_fence
from mqlayer.outbox import rotate
from mqlayer.parking.store import KeyEntry, KeyRef, KeyUpdate, ParkingBatch, ParkingStore
from mqlayer.redis.keys import partition_keys

MESSAGES: Final = int(os.environ.get("BENCH_MESSAGES", "100000"))
STAGES: Final = os.environ.get("BENCH_STAGES", "outbox,fence,parking").split(",")
SLOT_S: Final = max(1, MESSAGES // 150_000)
"""A slot of the ring, in place of 900 s."""
SAMPLES: Final = 40
BATCH: Final = 1_000
BACKLOG: Final = 20_000
BODY: Final = b"x" * 64
ACCOUNTS: Final = 10_000
"""Standing keys; the other half of the fence's messages are of keys that come and go."""
OPEN_ORDERS: Final = 5_000
EACH: Final = 10
HORIZON_S: Final = 2 * SLOT_S
"""For how long the fence's rows stay, in place of 7 days."""
KEY_MESSAGES: Final = 50
WRITE_KEYS: Final = 10
WAITING_WRITES: Final = 20
KEPT_RECORDS: Final = 20_000
SEEN_BYTES: Final = 500_000
LEASE_S: Final = 600.0

SIZES: Final = """
SELECT CASE WHEN c.relname ~ '^outbox_[0-9]$' THEN 'outbox' ELSE c.relname END AS name,
       sum(pg_table_size(c.oid))::bigint, sum(pg_indexes_size(c.oid))::bigint,
       sum(s.n_live_tup)::bigint, sum(s.n_dead_tup)::bigint, sum(s.autovacuum_count)::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND c.relkind = 'r' GROUP BY 1
"""
TIMED: Final = """
SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'mqlayer_app' AND p.prosrc LIKE '%/ 900)%'
"""
WAITING: Final = """
SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0)::bigint
FROM mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp)
"""


class Size(NamedTuple):
    """A table at one moment."""

    table: int
    indexes: int
    live: int
    dead: int
    vacuums: int

    @property
    def bytes(self) -> int:
        """Table and indexes."""
        return self.table + self.indexes


@dataclass
class Sizes:
    """Sizes of all tables over a run."""

    connection: psycopg.Connection[tuple[object, ...]]
    name: str
    samples: list[dict[str, Size]] = field(default_factory=list)

    def take(self) -> None:
        """Take a sample."""
        rows = self.connection.execute(SIZES.encode()).fetchall()
        self.samples.append({str(name): Size(*map(int, map(str, facts))) for name, *facts in rows})

    def lines(self) -> Iterator[Line]:
        """Return a line for each table that has a size: its largest of the second half against that of the first."""
        half = len(self.samples) // 2
        for name in sorted(self.samples[-1]):
            early = max(sample[name].bytes for sample in self.samples[1:half])
            late = max(sample[name].bytes for sample in self.samples[half:])
            last, dead = self.samples[-1][name], max(sample[name].dead for sample in self.samples)
            if late < SEEN_BYTES:
                continue
            note(
                f"  {name}: in the end table {last.table / 1e6:.1f}, indexes {last.indexes / 1e6:.1f} MB, "
                f"{last.live:,} live; at most {dead:,} dead; {last.vacuums} autovacuums"
            )
            yield Line(
                name=f"bloat[{self.name}, {name}]",
                value=round(late / 1e6, 2),
                unit="MB at most",
                baseline=round(early / 1e6, 2),
                ratio=round(late / early, 2),
                target=1.1,
            )


@bench("bloat")
def bloat(stage: Stage) -> Iterator[Line]:
    """MB of each table and its indexes, at most, in the second half of so many messages, against the first half: what
    is bounded by the backlog has a ratio of 1, what grows with the messages one of 2. The target bounds the ratio."""
    runs: dict[str, Callable[[System, Callable[[int], None]], None]] = {
        "outbox": through_outbox,
        "fence": through_fence,
        "parking": through_parking,
    }
    for name in STAGES:
        system = stage.system(fsync="everysec", partitions=4)
        with psycopg.connect(system.dsn, autocommit=True) as connection:
            turn_quickly(connection)
            sizes, began = Sizes(connection, name), time.monotonic()
            runs[name](system, sampler(sizes, began))
            note(f"  {name}: {MESSAGES:,} messages in {time.monotonic() - began:,.0f} s, slots of {SLOT_S} s")
            yield from sizes.lines()


def turn_quickly(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Let the ring of this database turn faster."""
    for (text,) in connection.execute(TIMED.encode()).fetchall():
        connection.execute(str(text).replace("/ 900)", f"/ {SLOT_S})").encode())


def sampler(sizes: Sizes, began: float) -> Callable[[int], None]:
    """Return what takes a sample each time that one part more of the messages has passed."""

    def passed(count: int) -> None:
        if count * SAMPLES // MESSAGES >= len(sizes.samples):
            sizes.take()
            if len(sizes.samples) % 4 == 1:
                note(f"  {sizes.name}: {count:,} after {time.monotonic() - began:,.0f} s")

    return passed


def through_outbox(system: System, passed: Callable[[int], None]) -> None:
    """Publish in transactions and relay; the streams are cut, for no group reads them."""
    client, turned = system.client(), time.monotonic()
    logs = [partition_keys(system.settings.key_prefix, part.partition).log for part in system.route.ranges]
    with relaying(system) as relay, psycopg.connect(system.dsn, autocommit=True) as connection:
        for first in range(0, MESSAGES, BATCH):
            keys = [f"order-{number // EACH}" for number in range(first, first + BATCH)]
            arguments = (["bench"] * BATCH, keys, [BODY] * BATCH)
            connection.execute("SELECT mqlayer_app.publish_many_v1(%s, %s, %s)", arguments)
            while waiting(connection) > BACKLOG:
                if relay.poll() is not None:
                    raise RuntimeError("the relay ended")
                time.sleep(0.05)
            if time.monotonic() > turned + SLOT_S / 4:
                turned = time.monotonic()
                rotate(system.runtime.outbox)
                for log in logs:
                    client.xtrim(log, maxlen=KEPT_RECORDS)
            passed(first + BATCH)
        while waiting(connection):
            time.sleep(0.05)


@contextmanager
def relaying(system: System) -> Iterator[subprocess.Popen[str]]:
    """Run a relay."""
    with process(system, "-m", "mqlayer", "relay") as relay:
        yield relay


def waiting(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    """Return how many messages are not recorded as relayed."""
    row = connection.execute(WAITING.encode()).fetchone()
    return int(str(row[0])) if row is not None else 0


def through_fence(system: System, passed: Callable[[int], None]) -> None:
    """Pass batches through the fence, with the cleanup beside."""
    group, cleaned = new_group(system), time.monotonic()
    with psycopg.connect(system.dsn, autocommit=True) as connection:
        connection.execute("SELECT mqlayer_app.fence_raise_v1(%s, 0::smallint, 1024::smallint, 1)", (group.group_id,))
        for first in range(0, MESSAGES, BATCH):
            keys = [fenced_key(number) for number in range(first, first + BATCH)]
            lps = [lp_of(key.encode()) for key in keys]
            seqs, ones = [*range(first + 1, first + BATCH + 1)], [1] * BATCH
            connection.execute(
                "SELECT mqlayer_app.fence_many_v2"
                "(%s, %s::smallint[], %s::bigint[], %s, %s::bigint[], %s::bigint[], %s)",
                (group.group_id, lps, ones, keys, seqs, ones, [0] * BATCH),
            )
            if time.monotonic() > cleaned + HORIZON_S / 5:
                cleaned = time.monotonic()
                clean_fence(system.runtime.outbox, horizon_s=HORIZON_S)
            passed(first + BATCH)


def fenced_key(number: int) -> str:
    """Return the key of a fenced message: a standing one, or one of the orders of the time."""
    if number % 2:
        return f"account-{number // 2 % ACCOUNTS}"
    order = number // 2
    return f"order-{order // (OPEN_ORDERS * EACH)}-{order % OPEN_ORDERS}"


def through_parking(system: System, passed: Callable[[int], None]) -> None:
    """Park keys, hand their messages out, end them; so many writes' keys wait at any time."""
    group = new_group(system)
    session = join(system.database, group_id=group.group_id, member_id="m", lease_s=LEASE_S)
    owned = send_heartbeat(system.database, session, lease_s=LEASE_S).assignments[0]
    store = ParkingStore(system.database, group.group_id, "m")
    parked: deque[Sequence[KeyRef]] = deque()
    each = WRITE_KEYS * KEY_MESSAGES
    for first in range(0, MESSAGES, each):
        refs = [ref_of(first + number) for number in range(WRITE_KEYS)]
        records = [
            (ref, record_of(ref, first + at * KEY_MESSAGES + number))
            for at, ref in enumerate(refs)
            for number in range(KEY_MESSAGES)
        ]
        entries = [KeyEntry(ref, "retry", 60.0, 1) for ref in refs]
        store.write(owned.partition, owned.epoch, ParkingBatch(entries=entries, messages=records))
        parked.append(refs)
        if len(parked) > WAITING_WRITES:
            end_keys(store, owned.partition, owned.epoch, parked.popleft())
        passed(first + each)


def end_keys(store: ParkingStore, partition: int, epoch: int, refs: Sequence[KeyRef]) -> None:
    """Hand out all that waits of keys, and end them."""
    updates = [KeyUpdate(ref, go_on=True) for ref in refs]
    while updates:
        given = store.write(partition, epoch, ParkingBatch(updates=updates)).next  # type: ignore[arg-type]
        updates = [KeyUpdate(ref, handled=records, go_on=True) for ref, records in given.items() if records]


def ref_of(number: int) -> KeyRef:
    """Return a key that no other message has."""
    name = f"order-{number}".encode()
    return KeyRef(lp_of(name) % LP_COUNT, name)


def record_of(ref: KeyRef, number: int) -> Record:
    """Return a record of it."""
    return Record(number + 1, b"1:%d:%d:0" % (ref.lp, number + 1), ref.name, BODY)
