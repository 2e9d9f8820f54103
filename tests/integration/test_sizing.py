"""Needs that `mqlayer size` computes for a load, beside those of servers which have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psycopg
import pytest

from bench import node_memory as measured
from bench.fill import fill
from bench.rebalance import new_group
from bench.stage import BODY, KEYS, System
from mqlayer import App, Context, Message
from mqlayer.archive import archive_pass
from mqlayer.domain.sizing import DAY_S, WEEK_S, Figures, PlannedLoad, node_memory, requirements, waiting_records
from mqlayer.topics import set_archived
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until
from tests.proof.world import World

PARTITIONS = 4
COUNT = 10_000
BODIES = (256, 0, 1_024, 5_000)
ROOM = 2
"""On a busy machine, pools open up to so many times the page's count."""

pytestmark = pytest.mark.world(own_node=True, partitions=PARTITIONS)


@pytest.mark.parametrize("size", BODIES)
def test_a_node_holds_a_load_in_the_memory_that_was_computed(world: World, size: int) -> None:
    """Within 15 %: blocks of records and the allocator's classes differ by that much."""
    kept = PARTITIONS * Figures.kept_records
    load = PlannedLoad(
        rate=(COUNT - kept) / Figures.trim_s, body_bytes=size, stop_s=0, relays=0, producers=1, partitions=PARTITIONS
    )
    assert waiting_records(load) == COUNT
    before = memory(world)
    with world.producer() as producer:
        producer.send_many("orders", [Message(f"customer-{number % 1_000:03}", b"x" * size) for number in range(COUNT)])
    assert memory(world) - before == pytest.approx(sum(node_memory(load).values()), rel=0.15)


def test_postgres_holds_rows_on_the_disk_that_was_computed(world: World) -> None:
    """Within 20 %: rows lie in pages, and their indexes grow by splits."""
    system = System(world.runtime(), world.add_topic("bench", partitions=PARTITIONS), world.urls[0])
    none = PlannedLoad(rate=1, body_bytes=len(BODY), relays=0, producers=1, partitions=PARTITIONS)
    loads = {
        "outbox": PlannedLoad(rate=COUNT / Figures.outbox_s, partitions=PARTITIONS),
        "fence": replace(none, keys_per_week=COUNT),
        "inbox": replace(none, rate=COUNT / WEEK_S, inbox=True),
        "parked": replace(none, parked_messages=COUNT),
        "archive": replace(none, rate=COUNT / DAY_S, archive_days=1),
    }
    computed = {kind: needs(load)["postgres_bytes"] / COUNT for kind, load in loads.items()}
    assert dict(disk(system)) == pytest.approx(computed, rel=0.2)


def disk(system: System) -> Iterator[tuple[str, float]]:
    """Write rows of each kind; yield the bytes of one."""
    group = new_group(system).group_id
    with psycopg.connect(system.dsn, autocommit=True) as session:
        grown = partial(measured.row_bytes, session)
        yield "outbox", grown(r"^mqlayer_app\.outbox_", partial(measured.publish, session))
        yield "fence", grown(r"^mqlayer_app\.fence_applied$", partial(measured.fence, session, group))
        yield "inbox", grown(r"^mqlayer_app\.inbox$", partial(measured.put_inbox, session, group))
        yield "parked", grown(r"^mqlayer\.parked_", partial(measured.Parking(system).park, 1))
        set_archived(system.runtime, "bench", archived=True)
        fill(system, COUNT, keys=KEYS, facts=lambda _: measured.FACTS)
        yield "archive", grown(r"^mqlayer_archive\.record", lambda: archive_pass(system.runtime))


def test_processes_hold_no_more_connections_than_were_computed(world: World) -> None:
    found = needs(PlannedLoad(rate=1, groups=2, consumers_per_process=2, relays=1, workers=0, producers=1))
    before, app, handled = connections(world), App(world.settings(lease_s=5.0)), list[str]()
    for name in ("a", "b"):

        @app.consumer("orders", group=name, start="earliest")
        def handle(_body: bytes, context: Context) -> None:
            handled.append(context.group)

    app.start()
    try:
        with world.relay(), world.producer() as producer:
            producer.send("orders", key="k", body=b"1")
            world.publish(50)
            wait_until(lambda: len(handled) >= 2 * 51, what="both groups to handle all messages")
            postgres, node = (now - then for now, then in zip(connections(world), before, strict=True))
    finally:
        app.stop()
    assert 0 < postgres <= found["postgres_connections"]
    assert found["node_connections"] == 1 + 5 + 1
    assert 4 <= node <= ROOM * found["node_connections"]


def connections(world: World) -> tuple[int, int]:
    """Count mqlayer's sessions of Postgres, and the node's connections but the one that asks."""
    asked = "SELECT count(*)::int FROM pg_stat_activity WHERE application_name LIKE 'mqlayer %%' AND datname = %s"
    [(name,)] = ask_postgres(world.dsn, "SELECT current_database()", ())
    [(postgres,)] = ask_postgres(world.dsn, asked, (name,))
    with world.client() as client:
        return int(postgres), len(client.client_list()) - 1


def needs(load: PlannedLoad) -> dict[str, int]:
    """Return the needs by name."""
    return {one.name: one.value for one in requirements(load)}


def memory(world: World) -> int:
    """Return the node's memory without what its clients and its file hold for a moment."""
    with world.client() as client:
        facts = client.info("memory")
    return int(facts["used_memory"]) - int(facts["mem_clients_normal"]) - int(facts["mem_aof_buffer"])
