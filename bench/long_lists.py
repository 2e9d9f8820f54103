"""Pages, counts and frequent errors of parked keys and dead messages, where there are a million of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from bench.rebalance import median_ms, new_group
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.groups import Group
from mqlayer.redelivery import (
    DeadFilter,
    ParkedFilter,
    dead_messages,
    estimate_dead,
    estimate_parked,
    parked_keys,
    plan_bulk,
    top_errors,
)

ROWS: Final = 1_000_000
STEP: Final = 100_000
ROUNDS: Final = 15
LIMIT_MS: Final = 100.0

ERROR: Final = (
    "(ARRAY['TimeoutError: no answer in 5 s (pay.py:31)', 'KeyError: ''price'' (shop.py:9)', "
    "'ConnectionError: refused (pay.py:12)'])[1 + n %% 3]"
)
FILL: Final = (
    """INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, due_at, attempts, parked_at)
       SELECT %(group_id)s, mqlayer_app.lp_v1('key-' || n), convert_to('key-' || n, 'UTF8'),
              (ARRAY['exhausted', 'retry'])[1 + n %% 2],
              CASE WHEN n %% 2 = 1 THEN now() + interval '1 day' END, n %% 20, now() - make_interval(secs => n)
       FROM generate_series(%(from)s::int, %(upto)s::int) AS n""",
    """INSERT INTO mqlayer.parked_message
           (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body)
       SELECT %(group_id)s, mqlayer_app.lp_v1('key-' || n), convert_to('key-' || n, 'UTF8'), 1, n,
              n * 16777216::bigint, %(partition)s, n,
              convert_to('key-' || n, 'UTF8'), '1:1:1:1', repeat('x', 200)::bytea
       FROM generate_series(%(from)s::int, %(upto)s::int) AS n""",
    f"""INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, failed_at, member_id, error)
       SELECT %(group_id)s, mqlayer_app.lp_v1('key-' || n), 1, n, 1, now() - make_interval(secs => n), 'm1', {ERROR}
       FROM generate_series(%(from)s::int, %(upto)s::int) AS n""",
    f"""INSERT INTO mqlayer.dead_message (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause,
                                          reason, attempts, actor, died_at)
       SELECT %(group_id)s, mqlayer_app.lp_v1('key-' || n %% 50000), 2, n, %(partition)s, n,
              convert_to('key-' || n %% 50000, 'UTF8'), '2:1:1:1',
              repeat('x', 200)::bytea, (ARRAY['exhausted', 'rejected'])[1 + n %% 2], {ERROR}, n %% 20, 'm1',
              now() - make_interval(secs => n)
       FROM generate_series(%(from)s::int, %(upto)s::int) AS n""",
)


@bench("long_lists")
def long_lists(stage: Stage) -> Iterator[Line]:
    """Milliseconds of one page of 50 rows, of a bounded count, and of the most frequent errors, with a million parked
    keys and a million dead messages of one group; then of planning bulk actions. There is nothing to compare with; the
    target is in ms."""
    system = stage.system(partitions=1)
    group = new_group(system)
    fill_group(system, group, ROWS)
    for name, figure in figures(system, group, rounds=ROUNDS).items():
        yield line(name, figure, LIMIT_MS)
    for act, wanted in (("redrive", DeadFilter(cause="rejected")), ("release", ParkedFilter(cause="exhausted"))):
        began = time.perf_counter()
        plan_bulk(system.runtime, act, group.topic, group.name, wanted, first=True)  # type: ignore[arg-type]  # literals
        yield line(f"plan {act} of 100,000", (time.perf_counter() - began) * 1e3, None)


def line(name: str, figure: float, target: float | None) -> Line:
    """Return a line of this bench."""
    name = f"long_lists[{name}]"
    return Line(name=name, value=round(figure, 2), unit="ms", baseline=None, ratio=None, target=target)


def fill_group(system: System, group: Group, rows: int) -> None:
    """Park so many keys of a group and let so many of its messages die."""
    partition = system.route.ranges[0].partition
    with system.database.connection() as connection:
        for first in range(1, rows + 1, STEP):
            facts = {"group_id": group.group_id, "partition": partition, "from": first,
                     "upto": min(first + STEP - 1, rows)}  # fmt: skip
            for statement in FILL:
                connection.execute(statement.encode(), facts)
            note(f"  {facts['upto']:,} rows")
        connection.execute("ANALYZE mqlayer.parked_key, mqlayer.parked_message, mqlayer.failed_attempt, "
                           "mqlayer.dead_message")  # fmt: skip


def figures(system: System, group: Group, *, rounds: int) -> Mapping[str, float]:
    """Return the median of each question in ms."""
    found = {}
    for name, ask in questions(system, group).items():
        found[name] = median_ms(rounds, ask)
        note(f"  {name}: {found[name]:.2f} ms")
    return found


def questions(system: System, group: Group) -> Mapping[str, Callable[[], object]]:
    """Return what a console asks, by name."""
    database = system.database
    dead = partial(dead_messages, database, topic=group.topic, group=group.name)
    count_dead = partial(estimate_dead, database, topic=group.topic, group=group.name)
    of_group = partial(ParkedFilter, group.topic, group.name)
    middle = parked_keys(database, of_group(), limit=1_000).next
    old = dead(limit=1_000).next
    age = datetime.now(UTC) - timedelta(days=5)
    return {
        "parked, first page": partial(parked_keys, database, of_group()),
        "parked, all groups": partial(parked_keys, database),
        "parked, a later page": partial(parked_keys, database, of_group(), after=middle),
        "parked, by error": partial(parked_keys, database, of_group(error="keyerror")),
        "parked, no such error": partial(parked_keys, database, of_group(error="nowhere")),
        "parked, by key": partial(parked_keys, database, of_group(key="key-777777")),
        "parked, key of any group": partial(parked_keys, database, ParkedFilter(key="key-777777")),
        "parked, by age": partial(parked_keys, database, of_group(until=age)),
        "parked, count": partial(estimate_parked, database, of_group()),
        "parked, count by error": partial(estimate_parked, database, of_group(error="keyerror")),
        "dead, first page": dead,
        "dead, all groups": partial(dead_messages, database),
        "dead, a later page": partial(dead, after=old),
        "dead, by error": partial(dead, DeadFilter(error="keyerror")),
        "dead, no such error": partial(dead, DeadFilter(error="nowhere")),
        "dead, by key": partial(dead, DeadFilter(key="key-7777")),
        "dead, by age": partial(dead, DeadFilter(until=age)),
        "dead, count": count_dead,
        "dead, count by error": partial(count_dead, DeadFilter(error="keyerror")),
        "errors of dead messages": partial(top_errors, database, group.topic, group.name),
        "errors of attempts": partial(top_errors, database, group.topic, group.name, of="attempts"),
    }
