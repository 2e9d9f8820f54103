"""What statements read as the tables fill: rows that wait in the outbox, parked keys, the fence's rows.

`BENCH_ROWS` rows of each, 100,000 by default; `BENCH_OUTBOX_ROWS`, `BENCH_PARKED_ROWS` and `BENCH_FENCE_ROWS` change
one of them. Each statement runs under EXPLAIN first, and is rolled back; pages of triggers are not counted.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import psycopg
from psycopg.pq import TransactionStatus

from bench.bloat import LEASE_S, record_of, ref_of
from bench.long_lists import FILL
from bench.rebalance import new_group
from bench.registry import Line, bench, note
from bench.stage import BATCH, KEYS, Stage, System
from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.groups import Group, join, send_heartbeat
from mqlayer.parking.store import KeyEntry, KeyRef, KeyUpdate, ParkingBatch, ParkingStore
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery import ParkedFilter, plan_bulk
from mqlayer.redelivery.bulk import start_bulk
from mqlayer.redelivery.bulk_worker import work_on
from mqlayer.redelivery.redelivery_job import new_worker
from mqlayer.runtime.runtime import Runtime

ROWS: Final = os.environ.get("BENCH_ROWS", "100000")
SIZES: Final = {name: int(os.environ.get(f"BENCH_{name.upper()}_ROWS", ROWS)) for name in ("outbox", "parked", "fence")}
FEW: Final = 2_000
STEP: Final = 1_000_000
PARKED_STEP: Final = 100_000
ROUNDS: Final = 3
PARKED_AT_ONCE: Final = 100
TABLES: Final = (
    "mqlayer_app.outbox, mqlayer_app.counter, mqlayer_app.fence_applied, mqlayer.parked_key, mqlayer.parked_message, "
    "mqlayer.bulk_item"
)
TOUCHED: Final = (
    "Actual Rows",
    "Rows Removed by Filter",
    "Rows Removed by Join Filter",
    "Rows Removed by Index Recheck",
)
RELAY_QUERIES: Final = ("outbox_scan", "outbox_of_lps", "counter_news", "outbox_backlog")
STATEMENT: Final = re.compile(r"(--[^\n]*\n|\s)*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
OUTBOX: Final = """
INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, body)
SELECT nextval('mqlayer_app.outbox_number'), 1, n %% 1024, %(slot)s, n / 1024 + 1, now(), 'key-' || n %% 100000,
       repeat('x', 64)::bytea
FROM generate_series(%(from)s::int, %(upto)s::int) AS n
"""
COUNTERS: Final = """
UPDATE mqlayer_app.counter c
SET seq = (SELECT coalesce(max(seq), 0) FROM mqlayer_app.outbox o WHERE o.topic_id = c.topic_id AND o.lp = c.lp)
"""
FENCE: Final = """
INSERT INTO mqlayer_app.fence_applied (group_id, lp, source_id, key, seq, applied_at)
SELECT %(group_id)s, n %% 1024, 1, 'key-' || n, n, now() FROM generate_series(%(from)s::int, %(upto)s::int) AS n
"""


@dataclass
class Readings:
    """What statements read: names, pages and ms, while it is on."""

    on: bool = False
    pages: int = 0
    rows: int = 0
    ms: float = 0.0

    def add(self, answer: dict[str, Any]) -> None:
        """Add a statement."""
        plan = answer["Plan"]
        self.pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        self.rows += max(map(touched, nodes(plan)))
        self.ms += answer["Execution Time"]


class Reading(NamedTuple):
    """An act's pages, rows and ms; of each statement, the rows of the node that touches most."""

    pages: float
    rows: float
    ms: float


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a plan's nodes."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def touched(node: dict[str, Any]) -> int:
    """Return how many rows a node gave or dropped."""
    return int(sum(node.get(name, 0) for name in TOUCHED) * node["Actual Loops"])


class ExplainedDatabase(Database):
    """A database that explains its statements."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, application="mqlayer bench")
        self.readings = Readings()

    def _set_up(self, connection: Connection) -> None:
        super()._set_up(connection)
        connection.cursor_factory = self._cursor  # type: ignore[assignment]  # a callable does

    def _cursor(self, connection: Any, **options: Any) -> psycopg.Cursor[Any]:
        return ExplainingCursor(connection, lambda: self.readings, **options)


class ExplainingCursor(psycopg.Cursor[Any]):
    """Runs each statement under EXPLAIN, takes it back, and runs it."""

    def __init__(self, connection: Any, readings: Callable[[], Readings], **options: Any) -> None:
        super().__init__(connection, **options)
        self._readings = readings

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        plain = query.decode() if isinstance(query, bytes) else str(query)
        if self._readings().on and STATEMENT.match(plain):
            self._explain(plain.encode(), params)
        return super().execute(query, params, **options)

    def _explain(self, text: bytes, facts: Any) -> None:
        alone = self.connection.info.transaction_status == TransactionStatus.IDLE
        super().execute(b"BEGIN" if alone else b"SAVEPOINT explained")
        super().execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + text, facts, prepare=False)
        ((answer,),) = self.fetchall()
        self._readings().add(answer[0])
        super().execute(b"ROLLBACK" if alone else b"ROLLBACK TO SAVEPOINT explained; RELEASE SAVEPOINT explained")


@bench("filled")
def filled(stage: Stage) -> Iterator[Line]:
    """Pages that one act reads with so many rows in its table, against the same with few; its statements' ms beside.
    Late: Postgres knows another group's rows, and none of these. The target bounds the ratio."""
    small = Scene(stage.system())
    small.fill(dict.fromkeys(SIZES, FEW))
    small.analyze()
    before = small.readings()
    system = stage.system()
    known = Scene(system)
    known.fill({"outbox": 0, "fence": FEW, "parked": FEW})
    known.analyze()
    full = Scene(system)
    full.fill(SIZES)
    for state in ("late", "analyzed"):
        if state == "analyzed":
            full.analyze()
        for name, reading in full.readings().items():
            yield Line(
                name=f"filled[{name}, {state}]",
                value=reading.pages,
                unit=f"pages, {reading.rows:,.0f} rows, {reading.ms:,.1f} ms",
                baseline=before[name].pages,
                ratio=round(reading.pages / max(1, before[name].pages), 2),
                target=3.0,
            )


class Scene:
    """A system whose statements are explained, with a group and the owner of its partition."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.database = ExplainedDatabase(system.dsn)
        self.runtime = Runtime(self.database, system.settings, self.database, "bench")
        self.group: Group = new_group(system)
        session = join(system.database, group_id=self.group.group_id, member_id="m", lease_s=LEASE_S)
        self.owned = send_heartbeat(system.database, session, lease_s=LEASE_S).assignments[0]
        self._number = 2_000_000_000
        with system.database.connection() as connection:
            connection.execute(query("outbox_identity_put"))
            ((outbox_uuid,),) = connection.execute(query("outbox_uuid")).fetchall()
            ((term,),) = connection.execute(query("outbox_term")).fetchall()
            self._relay = {"outbox_uuid": outbox_uuid, "term": term}
            # Else each act would make its epochs, and leave them dead.
            facts = {"group_id": self.group.group_id, "lp_from": 0, "lp_to": LP_COUNT, "epoch": 1}
            connection.execute(query("fence_raise"), facts)
            # Statistics are late until this bench takes them.
            for table in ("outbox_0", "outbox_1", "outbox_2", "outbox_3", "fence_applied"):
                connection.execute(f"ALTER TABLE mqlayer_app.{table} SET (autovacuum_enabled = off)".encode())
            for table in ("parked_key", "parked_message", "bulk_item"):
                connection.execute(f"ALTER TABLE mqlayer.{table} SET (autovacuum_enabled = off)".encode())

    def fill(self, sizes: Mapping[str, int]) -> None:
        """Fill the tables, in a session that ends: its triggers' plans are for so many rows at once."""
        with psycopg.connect(self.system.dsn, autocommit=True) as connection:
            ((slot,),) = connection.execute(
                "SELECT (floor(date_part('epoch', now()) / 900)::bigint + 2) & 3"
            ).fetchall()
            facts = {"slot": slot, "group_id": self.group.group_id}
            for name, text in (("outbox", OUTBOX), ("fence", FENCE)):
                for first in range(1, sizes[name] + 1, STEP):
                    upto = min(first + STEP - 1, sizes[name])
                    connection.execute(text.encode(), facts | {"from": first, "upto": upto})
                    note(f"  {upto:,} rows of {name}")
            if sizes["outbox"]:
                connection.execute(COUNTERS.encode())
            facts |= {"partition": self.system.route.ranges[0].partition}
            for first in range(1, sizes["parked"] + 1, PARKED_STEP):
                upto = min(first + PARKED_STEP - 1, sizes["parked"])
                for text in FILL[:2]:
                    connection.execute(text.encode(), facts | {"from": first, "upto": upto})
                note(f"  {upto:,} rows of parked")

    def analyze(self) -> None:
        """Let Postgres know the tables."""
        with self.database.connection() as connection:
            connection.execute(f"ANALYZE {TABLES}".encode())

    def readings(self) -> dict[str, Reading]:
        """Return what each act reads: the median of some rounds."""
        return {name: self.read(name, act) for name, act in self.acts().items()}

    def read(self, name: str, act: Callable[[], object]) -> Reading:
        """Return what an act reads."""
        found = []
        for _ in range(ROUNDS):
            self.database.readings = Readings()
            self._counting(True)
            act()
            self._counting(False)
            found.append(self.database.readings)
        reading = Reading(*(statistics.median(getattr(one, part) for one in found) for part in Reading._fields))
        note(f"  {name}: {reading.pages:,.0f} pages, {reading.rows:,.0f} rows, {reading.ms:,.2f} ms")
        return reading

    def _counting(self, on: bool) -> None:
        self.database.readings.on = on

    def acts(self) -> Mapping[str, Callable[[], object]]:
        """Return the acts, by name."""
        middle, batch = FEW // 2, [KEYS[number] for number in range(BATCH)]
        sets = list(range(16))
        fenced = {
            "group_id": self.group.group_id,
            "epochs": [1] * BATCH,
            "replays": [0] * BATCH,
            "sources": [1] * BATCH,
        }
        fenced |= {"keys": batch, "lps": [lp_of(key.encode()) for key in batch], "seqs": [2_000_000_000] * BATCH}
        several = {"topics": ["bench"] * BATCH, "keys": batch, "bodies": [b"x"] * BATCH, "headers": [None] * BATCH}
        asked: dict[str, tuple[str, dict[str, Any]]] = {
            "publish": ("outbox_publish", {"topic": "bench", "key": "key-1", "body": b"x", "headers": None}),
            "publish 500": ("outbox_publish_many", several),
            "relay, 250 rows": ("outbox_scan", {"after": middle, "lp_sets": sets, "limit": 250, "bytes": 4_000_000}),
            "relay, rows of two LPs": ("outbox_of_lps", {"topic_ids": [1, 1], "lps": [5, 700], "afters": [10, 0],
                                                         "each": 100, "bytes": 4_000_000}),
            "relay, sweep": ("counter_news", {"lp_sets": sets}),
            "relay, start": ("outbox_backlog", {"lp_sets": sets}),
            "trim": ("trim_work", {"topic": "bench"}),
            "fence 500": ("fence_many", fenced),
            "clean_fence, 1 MB": ("fence_clean", {"horizon_s": 604_800, "block": 0, "blocks": 128}),
        }  # fmt: skip
        return {name: partial(self._ask, *one) for name, one in asked.items()} | {
            "park 100": self.park,
            "unpark 100": self.unpark,
            "release 500": self.release,
        }

    def _ask(self, name: str, facts: Mapping[str, Any]) -> None:
        with self.database.connection() as connection, connection.transaction(force_rollback=True):
            if name in RELAY_QUERIES:
                connection.execute(query("relay_settings"))
            connection.execute(query(name), {**facts, **self._relay})

    def park(self) -> Sequence[KeyRef]:
        """Park new keys, each with a message."""
        first, self._number = self._number, self._number + PARKED_AT_ONCE
        refs = [ref_of(number) for number in range(first, first + PARKED_AT_ONCE)]
        records = [(ref, record_of(ref, first + number)) for number, ref in enumerate(refs)]
        entries = [KeyEntry(ref, "retry", 60.0, 1) for ref in refs]
        self._write(ParkingBatch(entries=entries, messages=records))
        return refs

    def unpark(self) -> None:
        """Hand out keys that were parked just now, and end them."""
        self._counting(False)
        refs = self.park()
        self._counting(True)
        given = self._write(ParkingBatch(updates=[KeyUpdate(ref, go_on=True) for ref in refs])).next
        self._write(ParkingBatch(updates=[KeyUpdate(ref, handled=given[ref], go_on=True) for ref in refs]))

    def release(self) -> None:
        """Release some keys by a bulk action; the making of its plan does not count."""
        self._counting(False)
        planned = plan_bulk(self.runtime, "release", "bench", self.group.name, ParkedFilter(), limit=BATCH, first=True)
        self._counting(True)
        worker = new_worker()
        start_bulk(self.runtime, planned.bulk_id, reason="bench", per_s=0.0, worker=worker)
        work_on(self.database, planned.bulk_id, worker=worker, batch=BATCH)

    def _write(self, batch: ParkingBatch) -> Any:
        store = ParkingStore(self.database, self.group.group_id, "m")
        return store.write(self.owned.partition, self.owned.epoch, batch)
