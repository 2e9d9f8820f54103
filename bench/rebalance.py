"""The choice of who consumes what, and the transaction around it, for many partitions and members."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.domain.assignment import assign, assign_by_rate
from mqlayer.domain.routing import PartitionId
from mqlayer.groups import Group, GroupSettings, ensure_group, join, rebalance, release, send_heartbeat
from mqlayer.groups.rebalance import change_group
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import RouteCache

PARTITIONS: Final = 1_000
MEMBERS: Final = 200
LIMIT_MS: Final = 100.0
CHOICES: Final = 20
TRANSACTIONS: Final = 5

Owners = Mapping[PartitionId, str]
Choose = Callable[[Sequence[PartitionId], Sequence[str], Owners], Owners]
Case = tuple[Sequence[str], Owners]

RATES: Final = {PartitionId(number): 1_000.0 / number for number in range(1, PARTITIONS + 1)}
"""As keys often are: a few partitions have most of the messages."""

CHOOSE: Final[Mapping[str, Choose]] = {
    "rebalance_compute": assign,
    "rebalance_compute[by rate]": lambda partitions, members, now: assign_by_rate(partitions, members, now, RATES),
}
"""By line: what chooses."""


@bench("rebalance_compute")
def rebalance_compute(stage: Stage) -> Iterator[Line]:
    """Milliseconds of the worst case for 1,000 partitions and 200 members: from nothing, one joins, one leaves, all on
    one member. Then the whole transaction in Postgres, and half of the partitions given back to a second member. There
    is nothing to compare with; the target is in ms."""
    partitions = [PartitionId(number) for number in range(1, PARTITIONS + 1)]
    for name, choose in CHOOSE.items():
        figures = {
            case: median_ms(CHOICES, partial(choose, partitions, members, now))
            for case, (members, now) in cases(partitions).items()
        }
        yield worst(name, figures)
    system = stage.system(partitions=PARTITIONS)
    yield worst("rebalance_compute[transaction]", transactions(system))
    half_ms = statistics.median([give_back_ms(system) for _ in range(TRANSACTIONS + 1)][1:])
    yield worst("rebalance_compute[half given back]", {"by one member to a second": half_ms})


def cases(partitions: Sequence[PartitionId]) -> dict[str, Case]:
    """Return by name who shall consume, and who does so now."""
    crew = names(MEMBERS)
    balanced = assign(partitions, crew, {})
    return {
        "from nothing": (crew, {}),
        "one joins": (crew, assign(partitions, crew[:-1], {})),
        "one leaves": (crew[:-1], balanced),
        "all on one": (crew, dict.fromkeys(partitions, crew[0])),
    }


def names(count: int) -> list[str]:
    """Return the ids of so many members."""
    return [f"m{number:03d}" for number in range(count)]


def worst(name: str, figures: Mapping[str, float]) -> Line:
    """Return a line of the slowest case."""
    for case, figure in figures.items():
        note(f"  {name}, {case}: {figure:.2f} ms")
    value = round(max(figures.values()), 2)
    return Line(name=name, value=value, unit="ms", baseline=None, ratio=None, target=LIMIT_MS)


def median_ms(rounds: int, work: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time of some work in ms, by a clock, without its first run."""
    times = []
    for _ in range(rounds + 1):
        began = clock()
        work()
        times.append((clock() - began) * 1e3)
    return statistics.median(times[1:])


def transactions(system: System) -> dict[str, float]:
    """Return how long the transaction of each case takes."""
    partitions = [one.partition for one in system.route.ranges]
    return {
        case: statistics.median([transaction_ms(system, members, now) for _ in range(TRANSACTIONS + 1)][1:])
        for case, (members, now) in cases(partitions).items()
    }


def transaction_ms(system: System, members: Sequence[str], now: Owners) -> float:
    """Return how long it takes to bring a new group from these owners to these members."""
    group = new_group(system)
    leaving = set(now.values()) - set(members)
    with system.database.connection() as connection, connection.transaction():
        put(connection, group, [*members, *leaving], now)
        for member in leaving:
            facts = {"group_id": group.group_id, "member_id": member}
            connection.execute("UPDATE mqlayer.member SET leaving = true, lease_until = '-infinity' "
                               "WHERE group_id = %(group_id)s AND member_id = %(member_id)s", facts)  # fmt: skip
    began = time.perf_counter()
    changed = change_group(system.database, group.group_id, lambda connection: rebalance(connection, group.group_id))
    elapsed_ms = (time.perf_counter() - began) * 1e3
    if not changed:
        raise RuntimeError("the rebalance found nothing to do")
    return elapsed_ms


def give_back_ms(system: System) -> float:
    """Return how long it takes a member that has all partitions to give a second one its half."""
    group = new_group(system)
    first, _ = (
        join(system.database, group_id=group.group_id, member_id=name, lease_s=600.0) for name in ("first", "second")
    )
    asked = [
        assigned for assigned in send_heartbeat(system.database, first, lease_s=600.0).assignments if assigned.release
    ]
    began = time.perf_counter()
    release(system.database, first, *asked)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    if len(asked) != PARTITIONS // 2:
        raise RuntimeError(f"{len(asked)} partitions were asked back")
    return elapsed_ms


def new_group(system: System) -> Group:
    """Return a group of the topic without members."""
    return ensure_group(
        system.runtime,
        RouteCache(system.database),
        topic="bench",
        name=f"g{uuid.uuid4().hex[:8]}",
        settings=GroupSettings(),
    )


def put(connection: Connection, group: Group, members: Sequence[str], owners: Owners) -> None:
    """Store members and what each owns, without any choice."""
    for member in members:
        ((session,),) = connection.execute(query("member_session_next")).fetchall()
        facts = {"group_id": group.group_id, "member_id": member, "host": "bench", "pid": 1, "lease_s": 600.0}
        connection.execute(query("member_join"), facts | {"session": session, "own": None})
    rows = {"group_id": group.group_id, "partitions": list(owners), "owners": list(owners.values())}
    connection.execute(
        "INSERT INTO mqlayer.assignment (group_id, partition_id, member_id, target, epoch) "
        "SELECT %(group_id)s, p, m, m, nextval('mqlayer.epoch') "
        "FROM unnest(%(partitions)s::int[], %(owners)s::text[]) AS owner (p, m)",
        rows,
    )
