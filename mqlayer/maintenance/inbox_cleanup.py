"""Forget inbox rows that no redelivery can reach: docs/design/decisions/0041-inbox-without-epoch.md.

The checks' order matters: a message is parked or dead in Postgres before it is settled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Final

from mqlayer.domain.message import Record
from mqlayer.failpoints import failpoint
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import columns, query
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

CLOCKS_S: Final = 86_400.0
"""Tolerated lead of publishers' clocks."""
ROWS_AT_ONCE: Final = 5_000
ROUNDS: Final = 200

Floor = float | None
"""Older messages are settled (Unix time); None: all are."""


def clean_inbox(runtime: Runtime, *, horizon_s: float, at_most_s: float = 0.0) -> int:
    """Forget rows: a million per group, more until `at_most_s`; return how many. Skips groups with a silent node."""
    until = time.monotonic() + at_most_s
    with runtime.outbox.connection() as connection:
        rows = connection.execute(query("inbox_groups"), {"horizon_s": horizon_s}).fetchall()
    floors = _floors(runtime, [group_id for (group_id,) in rows])
    gone = 0
    for group_id, floor in floors.items():
        gone += _clean_group(runtime, group_id, floor, horizon_s, until)
    if gone:
        log.info("inbox_cleaned", extra={"rows": gone})
    return gone


def _floors(runtime: Runtime, groups: Iterable[int]) -> Mapping[int, Floor]:
    floors: dict[int, Floor] = dict.fromkeys(groups)
    if not floors:
        return floors
    with runtime.control.connection() as connection:
        group_partitions = [
            GroupPartition(*row) for row in connection.execute(query("inbox_positions"), {"group_ids": list(floors)})
        ]
    positions = read_positions(runtime, load_nodes(runtime.control), group_partitions)
    for group_partition in group_partitions:
        position = positions.at(group_partition.partition, group_partition.group_id)
        if position is None:
            if floors.pop(group_partition.group_id, 0) != 0:
                log.warning(
                    "inbox_group_skipped",
                    extra={"group_id": group_partition.group_id, "partition": group_partition.partition},
                )
        elif position.head is not None and group_partition.group_id in floors:
            head = Record(position.head.offset, position.head.m, position.head.key, b"")
            known = floors[group_partition.group_id]
            at_s = head.at_ms / 1000 - CLOCKS_S
            floors[group_partition.group_id] = at_s if known is None else min(known, at_s)
    return floors


def _clean_group(runtime: Runtime, group_id: int, floor: Floor, horizon_s: float, until: float) -> int:
    gone = 0
    for tried in itertools.count(1):
        wanted = {"group_id": group_id, "horizon_s": horizon_s, "floor_s": floor, "limit": ROWS_AT_ONCE}
        with runtime.outbox.connection() as connection:
            rows = connection.execute(query("inbox_old"), wanted).fetchall()
        identities = columns(("sources", "lps", "seqs"), [row[1:] for row in rows])
        with runtime.control.connection() as connection:
            kept = connection.execute(query("inbox_wanted"), {"group_id": group_id, **identities}).fetchall()
        waiting = {tuple(row) for row in kept}
        ids: dict[bool, list[str]] = {True: [], False: []}
        for id_, *identity in rows:
            ids[tuple(identity) in waiting].append(id_)
        failpoint("inbox.before_forget")
        with runtime.outbox.connection() as connection:
            if ids[True]:
                connection.execute(query("inbox_keep"), {"group_id": group_id, "ids": ids[True]})
            facts = {"group_id": group_id, "ids": ids[False], "horizon_s": horizon_s}
            gone += connection.execute(query("inbox_forget"), facts).rowcount
        if len(rows) < ROWS_AT_ONCE or (tried >= ROUNDS and time.monotonic() >= until):
            break
    return gone
