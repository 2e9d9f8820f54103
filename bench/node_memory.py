"""Bytes of a node and of Postgres per record, partition, group, mark, key and row: the figures of `mqlayer size`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

import psycopg

import mqlayer
from bench.bloat import LEASE_S, record_of, ref_of
from bench.fill import fill
from bench.rebalance import new_group
from bench.registry import Line, bench, compared
from bench.stage import BATCH, Stage, System
from mqlayer.archive import archive_pass
from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.domain.sizing import Figures, mark_bytes, record_bytes
from mqlayer.groups import join, leave, send_heartbeat
from mqlayer.parking.store import KeyEntry, ParkingBatch, ParkingStore
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import (
    LockHolder,
    MessageRun,
    acquire_command,
    append_command,
    append_reply,
    attempt_command,
    attempt_reply,
)
from mqlayer.topics import create_topic, list_nodes, set_archived

COUNT: Final = 10_000
BODIES: Final = (0, 256, 1_024, 5_000)
BODY: Final = b"x" * 256
KEYS: Final = tuple(f"customer-{number:03}" for number in range(1_000))
"""Of 12 bytes."""
FACTS: Final = b"1764214567890"
WIDE: Final = 64
GROUPS: Final = 4
SOURCES: Final = 4
NUMBERS: Final = range(1, COUNT + 1)

TABLES: Final = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c JOIN pg_namespace n
ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND n.nspname || '.' || c.relname ~ %s
"""

Session = psycopg.Connection[tuple[object, ...]]


@bench("node_memory")
def node_memory(stage: Stage) -> Iterator[Line]:
    """Bytes per record waiting on a node, partition, group, mark and failed message; per row of Postgres with its
    indexes and without its body. All against the figures with which `mqlayer size` computes."""
    yield from of_records(stage)
    yield from of_partitions(stage)
    yield from of_marks(stage)
    yield from of_attempts(stage)
    yield from of_rows(stage)


def line(what: str, measured: float, figure: float) -> Line:
    """Return a line against a figure."""
    return compared(f"node_memory[{what}]", measured, figure, unit="B", target=1.0)


def memory_of(system: System) -> int:
    """Return a node's memory without the buffers of its clients."""
    with closing(system.client()) as client:
        facts = client.info("memory")
    return int(facts["used_memory"]) - int(facts["mem_clients_normal"]) - int(facts["mem_aof_buffer"])


def of_records(stage: Stage) -> Iterator[Line]:
    """Yield a line per size of bodies; first messages make scripts and marks."""
    for size in BODIES:
        system = stage.system(fsync="everysec")
        if not size:
            yield line("node without messages", memory_of(system), Figures.empty_node)
        put = partial(fill, system, keys=KEYS, body=b"x" * size, facts=lambda _: FACTS)
        put(len(KEYS))
        before = memory_of(system)
        put(COUNT, start=len(KEYS))
        yield line(f"record of {size}", (memory_of(system) - before) / COUNT, record_bytes(size))


def of_partitions(stage: Stage) -> Iterator[Line]:
    """Yield lines of empty partitions, of such with a record, and of groups that handled it."""
    system = stage.system(fsync="everysec")
    append(system, 1, [0])
    before = memory_of(system)
    wide = replace(system, route=create_topic(system.runtime, "wide", partitions=WIDE))
    empty = (memory_of(system) - before) / WIDE
    yield line("partition without records", empty, Figures.partition)
    append(wide, 1, [one.lp_from for one in wide.route.ranges])
    in_use = memory_of(system)
    yield line("partition with a record", (in_use - before) / WIDE, Figures.partition)
    app = mqlayer.App(system.settings)
    for number in range(GROUPS):

        @app.consumer("wide", group=f"g{number}", start="earliest")
        def handle(body: bytes) -> None:
            del body

    app.start()
    while any(member.stats.settled < WIDE for member in app.members):
        time.sleep(0.05)
    app.stop()
    yield line("group on a partition", (memory_of(system) - in_use) / WIDE / GROUPS, Figures.group)


def of_marks(stage: Stage) -> Iterator[Line]:
    """Yield lines of marks in one partition and spread over many; records are dropped before they are measured."""
    for partitions in (1, WIDE):
        system = stage.system(fsync="everysec", partitions=partitions)
        logs = [partition_keys(system.settings.key_prefix, one.partition).log for one in system.route.ranges]
        append(system, 1, [one.lp_from for one in system.route.ranges])
        before = memory_of(system)
        for source in range(2, SOURCES + 2):
            append(system, source, range(LP_COUNT))
        with closing(system.client()) as client:
            for log in logs:
                client.xtrim(log, maxlen=1, approximate=False)
        marks = SOURCES * LP_COUNT
        figure = mark_bytes(marks // partitions)
        yield line(f"mark, {partitions} partitions", (memory_of(system) - before) / marks, figure)


def append(system: System, source: int, lps: Sequence[int]) -> None:
    """Append a source's first message of each LP."""
    by_partition: dict[int, list[int]] = {}
    for lp in lps:
        by_partition.setdefault(system.partition_of(lp), []).append(lp)
    with NodeConnection(list_nodes(system.database)[0]) as connection:
        for partition, found in by_partition.items():
            for at in range(0, len(found), BATCH):
                runs = [MessageRun(lp, 1, 1, [FACTS, KEYS[0], b""]) for lp in found[at : at + BATCH]]
                command = append_command(connection, system.settings.key_prefix, partition, source, runs)
                (reply,) = connection.call([command])
                append_reply(reply, connection.node.address)


def of_attempts(stage: Stage) -> Iterator[Line]:
    """Yield the line of failed messages."""
    system = stage.system(fsync="everysec")
    fill(system, COUNT, keys=KEYS, body=b"")
    holder = LockHolder(system.settings.key_prefix, system.route.ranges[0].partition, 1, "m", 1)
    with NodeConnection(list_nodes(system.database)[0]) as connection:
        connection.call([acquire_command(connection, holder, start=1)])
        connection.call([attempt_command(connection, holder, 1, 1)])
        before = memory_of(system)
        for first in range(2, COUNT, BATCH):
            last = min(first + BATCH, COUNT)
            for reply in connection.call([attempt_command(connection, holder, n, 1) for n in range(first, last)]):
                attempt_reply(reply, connection.node.address)
        yield line("failed message", (memory_of(system) - before) / COUNT, Figures.attempt)


def of_rows(stage: Stage) -> Iterator[Line]:
    """Yield lines of rows in Postgres."""
    system = stage.system(fsync="everysec")
    group = new_group(system).group_id
    with psycopg.connect(system.dsn, autocommit=True) as session:
        measure = partial(row_bytes, session)
        outbox = measure(r"^mqlayer_app\.outbox_", partial(publish, session))
        yield line("outbox row", outbox - len(BODY), Figures.outbox_row)
        yield line("fenced key", measure(r"^mqlayer_app\.fence_applied$", partial(fence, session, group)),
                   Figures.fenced_key)  # fmt: skip
        yield line("inbox row", measure(r"^mqlayer_app\.inbox$", partial(put_inbox, session, group)), Figures.inbox_row)
        parking = Parking(system)
        one_key = measure(r"^mqlayer\.parked_", partial(parking.park, COUNT))
        yield line("parked message", one_key - len(BODY), Figures.parked_message)
        own_keys = measure(r"^mqlayer\.parked_", partial(parking.park, 1))
        yield line("parked key", own_keys - one_key, Figures.parked_key)
        set_archived(system.runtime, "bench", archived=True)
        fill(system, COUNT, keys=KEYS, body=BODY, facts=lambda _: FACTS)
        archived = measure(r"^mqlayer_archive\.record", lambda: archive_pass(system.runtime))
        yield line("archived record", archived - len(BODY), Figures.archived_record)


def row_bytes(session: Session, tables: str, write: Callable[[], object]) -> float:
    """Return by how much tables grow per row."""
    before = table_bytes(session, tables)
    write()
    return (table_bytes(session, tables) - before) / COUNT


def table_bytes(session: Session, tables: str) -> int:
    """Return the bytes of tables whose names match."""
    row = session.execute(TABLES.encode(), (tables,)).fetchone()
    return int(str(row[0])) if row else 0


def publish(session: Session) -> None:
    """Publish through the outbox."""
    keys = [KEYS[number % len(KEYS)] for number in NUMBERS]
    session.execute("SELECT mqlayer_app.publish_many_v1(%s, %s, %s)", (["bench"] * COUNT, keys, [BODY] * COUNT))


def fence(session: Session, group: int) -> None:
    """Pass a message of each of many keys through the fence."""
    keys = [f"order-{number:06}" for number in NUMBERS]
    ones, lps = [1] * COUNT, [lp_of(key.encode()) for key in keys]
    session.execute("SELECT mqlayer_app.fence_raise_v1(%s, 0::smallint, 1024::smallint, 1)", (group,))
    session.execute(
        "SELECT mqlayer_app.fence_many_v2(%s, %s::smallint[], %s::bigint[], %s, %s::bigint[], %s::bigint[], %s)",
        (group, lps, ones, keys, [*NUMBERS], ones, [0] * COUNT),
    )


def put_inbox(session: Session, group: int) -> None:
    """Put messages into the inbox."""
    session.execute(
        "SELECT mqlayer_app.inbox_put_v1(%s, 1, (n %% 1024)::smallint, n) FROM generate_series(1, %s) n", (group, COUNT)
    )


class Parking:
    """A group that parks."""

    def __init__(self, system: System) -> None:
        group = new_group(system)
        self.group, self._database = group.name, system.database
        self._session = join(system.database, group_id=group.group_id, member_id="m", lease_s=LEASE_S)
        self._owned = send_heartbeat(system.database, self._session, lease_s=LEASE_S).assignments[0]
        self._store = ParkingStore(system.database, group.group_id, "m")
        self._count = 0

    def leave(self) -> None:
        """Let another member have the group."""
        leave(self._database, self._session)

    def park(self, messages_of_a_key: int) -> None:
        """Park messages of new keys."""
        for _ in range(COUNT // BATCH):
            numbers = range(self._count, self._count + BATCH)
            self._count += BATCH
            refs = {number: ref_of(number // messages_of_a_key * messages_of_a_key) for number in numbers}
            entries = [KeyEntry(ref, "retry", LEASE_S, 1) for n, ref in refs.items() if n % messages_of_a_key == 0]
            messages = [(ref, record_of(ref, number)._replace(body=BODY)) for number, ref in refs.items()]
            self._store.write(
                self._owned.partition, self._owned.epoch, ParkingBatch(entries=entries, messages=messages)
            )
