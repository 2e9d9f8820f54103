"""Metrics of real processes and of the system, as a scraper reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import mqlayer
from mqlayer.archive.schedules import create_schedule
from mqlayer.autopilot import set_policy
from mqlayer.errors import StoreUnavailable
from mqlayer.exporter import SystemExporter, control_samples
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.health import health_endpoint
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.maintenance.sampling import take_samples
from mqlayer.metrics import CATALOG, LARGE_BODY_BYTES, Meters, metrics_page, separate_meters
from mqlayer.metrics.byte_counts import ByteOperation
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.runtime.presence import Presence
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime, open_runtime
from mqlayer.settings import Settings
from mqlayer.topics import set_durability, set_node_replicas
from tests.fixtures.forked_programs import start_python
from tests.fixtures.health_probes import ask, free_ports
from tests.fixtures.scrapes import Page, scrape
from tests.fixtures.wait import wait_until
from tests.proof.world import World

MOST_SERIES = 500
GROUPS = [(topic, group) for topic in ("orders", "mails") for group in ("ledger", "search")]
PROGRAM = """
import builtins, sys, mqlayer
from mqlayer.relay import Relay
importers, load = set(), builtins.__import__

def noting(name, globals=None, *more, **facts):
    if name.startswith(("opentelemetry", "prometheus")) and (globals or {}).get("__name__", "").startswith("mqlayer"):
        importers.add(globals["__name__"])
    return load(name, globals, *more, **facts)

builtins.__import__ = noting
with mqlayer.Producer() as producer:
    producer.send('orders', body=b'x')
    print("stored")
Relay(mqlayer.Settings())
print("off:", importers)
mqlayer.Producer(mqlayer.Settings(metrics=True)).close()
print("on:", importers)
"""
"""Prints which modules of mqlayer import OpenTelemetry."""
CONSUMERS = """
import mqlayer

app = mqlayer.App()

@app.consumer("orders", group="ledger")
def handle(body: bytes) -> None:
    pass
"""
SUFFIX = re.compile(r"_(bucket|count|sum)$")
SEND = {"messaging_operation_name": "send", "messaging_destination_name": "orders"}


def page_of(settings: Settings) -> Page:
    """Return the page of this process."""
    page = metrics_page(settings)
    assert page is not None
    return Page(page().decode())


def make_group(world: World, topic: str, name: str, *, mode: Any = None) -> None:
    """Make a group that has no member."""
    runtime = world.runtime()
    routes = RouteCache(runtime.control)
    ensure_group(runtime, routes, topic=topic, name=name, settings=GroupSettings(mode=mode))
    routes.close()


def answered(port: int) -> Page | None:
    """Return a process's page once it answers."""
    with contextlib.suppress(OSError):
        return scrape(port)
    return None


def well_sent(page: Page) -> float:
    """Return how many messages this process has sent without an error, also in tests before."""
    sent = [one for one in page.of(**SEND) if one.name == "messaging_client_sent_messages_total"]
    return sum(one.value for one in sent if "error_type" not in one.labels)


def sampled(port: int) -> Page | None:
    """Return the exporter's page once it has a sample."""
    page = answered(port)
    return page if page is not None and "mqlayer_group_lag" in page.names() else None


@pytest.mark.world(partitions=2)
def test_processes_tell_of_appends_deliveries_failures_and_turns(world: World) -> None:
    """A producer, a relay and members with plain and async handlers, behind one endpoint."""
    port = free_ports()
    # A lease that ends on a busy machine has messages sent, and handled, once more.
    settings = world.settings(metrics=True, health_port=port, lease_s=10.0)
    app = mqlayer.App(settings)
    failing = {"key-1"}

    @app.consumer("orders", group="plain", backoff_s=(0.01,))
    def plain(_body: bytes, context: mqlayer.Context) -> None:
        if context.key in failing:
            failing.discard(context.key)
            raise KeyError(context.key)

    @app.consumer("orders", group="slow", options=mqlayer.MemberOptions(concurrency=2))
    async def slow(_body: bytes) -> None:
        await asyncio.sleep(0.02)

    before = page_of(settings)

    def told() -> Page | None:
        # A turn ends, and an append is counted, behind what settles the messages.
        page = scrape(port)
        turns = page.value("messaging_process_duration_seconds_sum", messaging_consumer_group_name="slow")
        return page if turns >= 30 * 0.02 and well_sent(page) - well_sent(before) >= 30 else None

    world.publish(20)
    with (
        health_endpoint(settings, app.health),
        world.relay(metrics=True, lease_s=10.0),
        world.producer(metrics=True) as producer,
    ):
        assert scrape(port).value("mqlayer_process_ready") == 0
        app.start()
        producer.send_many("orders", [mqlayer.Message(f"key-{number}", b"x") for number in range(10)])
        wait_until(lambda: all(member.stats.settled == 30 for member in app.members), what="all is settled")
        page = wait_until(told, what="the last turn and append to be told")
        members = [member.member_id for member in app.members]
        app.stop()
    assert page is not None
    assert page.value("mqlayer_process_ready") == 1
    assert well_sent(page) - well_sent(before) == 30
    assert page.value("messaging_client_operation_duration_seconds_count", **SEND) >= 2
    assert page.value("mqlayer_producer_messages_total", topic="orders", outcome="stored") >= 10
    assert page.value("mqlayer_producer_messages_total", topic="orders", outcome="failed") == 0
    assert page.value("mqlayer_relay_lp_sets") == 16
    assert page.value("mqlayer_relay_delay_seconds_count") >= 1
    of_plain = {"topic": "orders", "group": "plain"}
    assert page.value("mqlayer_consumer_messages_total", outcome="handled", **of_plain) == 30
    assert page.value("mqlayer_consumer_messages_total", outcome="failed", **of_plain) == 1
    assert page.value("mqlayer_consumer_failures_total", error_type="KeyError", **of_plain) == 1
    assert page.value("messaging_client_consumed_messages_total", messaging_consumer_group_name="plain") == 31
    assert page.value("mqlayer_consumer_settled_total", **of_plain) == 30
    assert page.value("mqlayer_consumer_partitions", **of_plain) == 2
    process = "messaging_process_duration_seconds"
    assert page.value(f"{process}_count", messaging_consumer_group_name="plain", error_type="KeyError") == 1
    # A turn is a key's waiting messages, each of 20 ms, which is beyond the bound of 10.
    assert 10 <= page.value(f"{process}_count", messaging_consumer_group_name="slow") <= 30
    assert page.value(f"{process}_bucket", messaging_consumer_group_name="slow", le="0.01") == 0
    assert page.value(f"{process}_sum", messaging_consumer_group_name="slow") >= 30 * 0.02
    text = json.dumps(page.series)
    assert not any(word in text for word in (*members, "key-1"))
    after = page_of(settings)
    assert after.value("mqlayer_consumer_messages_total", outcome="handled", **of_plain) == 30
    assert "mqlayer_consumer_partitions" not in after.names()


@pytest.mark.world(partitions=1)
def test_a_relay_tells_of_a_class_that_is_not_held(
    world: World, reader_meters: tuple[Callable[[str], list[float]], Meters]
) -> None:
    set_node_replicas(world.runtime(), "node-1", 1)
    set_durability(world.runtime(), "orders", "replica")
    settings = world.settings(metrics=True)
    world.publish(1)

    def waits() -> Page | None:
        page = page_of(settings)
        return page if page.of(durability="replica") and page.value("mqlayer_relay_progress_waits_total") else None

    with world.relay(metrics=True):
        page = wait_until(waits, what="a wait without a replica")
    assert page is not None
    assert page.value("mqlayer_relay_progress_delay_seconds", durability="replica") >= 1
    assert page_of(settings).value("mqlayer_relay_progress_waits_total", durability="replica") >= 1
    assert "mqlayer_relay_progress_delay_seconds" not in page_of(settings).names()
    take, meters = reader_meters
    end = meters.add_confirmations(lambda: {"disk": 3}, lambda: {"disk": 4.0})
    meters.add_confirmations(lambda: {"disk": 2}, lambda: {"disk": 7.0})
    assert (take("mqlayer.relay.progress.waits"), take("mqlayer.relay.progress.delay")) == ([5], [7.0])
    end()
    assert take("mqlayer.relay.progress.waits") == [5]


@pytest.mark.slow
@pytest.mark.world(partitions=2)
def test_several_processes_answer_each_on_a_port_of_its_own(world: World, tmp_path: Path) -> None:
    (tmp_path / "metered_program.py").write_text(CONSUMERS)
    first = free_ports(3)
    variables = {"PYTHONPATH": str(tmp_path), "MQLAYER_METRICS": "1", "MQLAYER_HEALTH_PORT": str(first)}
    # A process is ready while it has a lease: a short one comes and goes on a busy machine.
    variables["MQLAYER_LEASE_S"] = "10"
    process = start_python(
        "mqlayer",
        "consume",
        "metered_program:app",
        "--processes",
        "2",
        env=world.environment(**variables),
        cwd=tmp_path,
    )
    try:

        def owned() -> list[float]:
            pages = [page for port in (first + 1, first + 2) if (page := answered(port)) is not None]
            names = "mqlayer_consumer_partitions"
            return [page.value(names, topic="orders") for page in pages if names in page.names()]

        wait_until(lambda: owned() == [1, 1], timeout_s=30.0, what="a partition for each process")
        wait_until(lambda: scrape(first).value("mqlayer_process_ready") == 1, what="the supervisor is ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.world(relayed=6, keys=3)
def test_receivers_tell_of_acks_and_nacks(world: World) -> None:
    settings = world.settings(metrics=True)
    with mqlayer.Receiver("orders", group="popped", settings=settings) as receiver:
        messages = [message for _ in range(2) for message in receiver.receive(wait_s=5.0)]
        receiver.ack(messages[:1])
        receiver.nack(messages[-1])
        page = page_of(settings)
    of_group = {"topic": "orders", "group": "popped"}
    assert page.value("mqlayer_consumer_messages_total", outcome="handled", **of_group) == 1
    assert page.value("mqlayer_consumer_messages_total", outcome="failed", **of_group) == 1
    settles = {"messaging_operation_name": "settle", "messaging_consumer_group_name": "popped"}
    assert page.value("messaging_client_operation_duration_seconds_count", **settles) == 2
    assert_received(page, "popped", len(messages))


def assert_received(page: Page, group: str, messages: int) -> None:
    """A receiver's calls to nodes, and its messages, each at its delivery."""
    receives = {"messaging_operation_name": "receive", "messaging_consumer_group_name": group}
    assert page.value("messaging_client_operation_duration_seconds_count", **receives) >= 2
    of_group = page.of(messaging_consumer_group_name=group)
    consumed = [one for one in of_group if one.name == "messaging_client_consumed_messages_total"]
    assert [(one.labels["messaging_operation_name"], one.value) for one in consumed] == [("receive", messages)]


@pytest.mark.world(relayed=6, keys=3)
def test_an_async_receiver_tells_of_its_calls_and_messages(world: World) -> None:
    settings = world.settings(metrics=True)

    async def work() -> None:
        async with mqlayer.AsyncReceiver("orders", group="awaited", settings=settings) as receiver:
            for _ in range(2):
                await receiver.ack(await receiver.receive(3, wait_s=5.0))

    asyncio.run(work())
    page = page_of(settings)
    assert_received(page, "awaited", 6)
    settles = {"messaging_operation_name": "settle", "messaging_consumer_group_name": "awaited"}
    assert page.value("messaging_client_operation_duration_seconds_count", **settles) >= 2


@pytest.mark.world(relayed=10, keys=5)
def test_the_exporter_shows_lag_outbox_nodes_jobs_and_failures_under_the_right_to_view(world: World) -> None:
    for name in ("ledger", "idle"):
        make_group(world, "orders", name)
    make_group(world, "orders", "cast", mode="broadcast")
    world.publish(3)
    world.rows(
        "INSERT INTO mqlayer.dead_message (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, "
        "reason, attempts, actor) SELECT group_id, 1, 1, 1, 1, 1, 'k', '', '', 'exhausted', 'r', 3, 'a' "
        "FROM mqlayer.consumer_group WHERE name = 'ledger' RETURNING 1"
    )
    world.rows("INSERT INTO mqlayer.job (name, last_at) VALUES ('trim', now() - interval '1 minute') RETURNING 1")
    world.right = Right.VIEW
    port = free_ports()
    words = ("exporter", "--port", str(port), "--every", "1", "--partitions")
    process = start_python("mqlayer", *words, env=world.environment())
    try:
        page = wait_until(lambda: sampled(port), timeout_s=30.0, what="a sample")
        assert ask(port, "/ready").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    assert page is not None
    of_ledger = {"topic": "orders", "group": "ledger"}
    assert page.value("mqlayer_group_lag", **of_ledger) == 10
    assert 0 < page.value("mqlayer_group_lag_age_seconds", **of_ledger) < 120
    assert page.value("mqlayer_partition_lag", **of_ledger) == 10
    assert page.value("mqlayer_group_stuck_partitions", reason="no_owner", **of_ledger) == 2
    assert page.value("mqlayer_group_partitions", **of_ledger) == 2
    assert page.value("mqlayer_group_members", **of_ledger) == 0
    assert page.value("mqlayer_group_unknown_partitions", **of_ledger) == 0
    assert page.value("mqlayer_group_dead", **of_ledger) == 1
    assert page.value("mqlayer_group_parked_keys", **of_ledger) == 0
    assert page.value("mqlayer_group_events_total", outcome="dead", **of_ledger) >= 0
    assert page.of(group="cast") == []
    assert page.value("mqlayer_outbox_backlog") == 3
    assert 0 < page.value("mqlayer_outbox_age_seconds") < 120
    assert page.value("mqlayer_relays_unowned_lp_sets") == 16
    assert page.value("mqlayer_nodes", state="armed") == 1
    assert page.value("mqlayer_nodes", state="unreachable") == 0
    assert 59 < page.value("mqlayer_jobs_age_seconds", name="trim") < 120
    assert page.value("mqlayer_route_changes_unfinished") == 0
    assert page.value("mqlayer_exporter_failures_total") == 0


@pytest.mark.world(own_node=True, relayed=4)
def test_a_silent_node_is_a_number_and_a_silent_postgres_leaves_no_old_samples(
    world: World, node: Any, reader_meters: tuple[Any, Meters]
) -> None:
    make_group(world, "orders", "ledger")
    take, meters = reader_meters
    with open_runtime(world.settings(socket_timeout_s=5.0), name="mqlayer exporter") as runtime:
        exporter = SystemExporter(runtime, meters, every_s=60.0)
        exporter.sample()
        assert take("mqlayer.group.lag") == [4]
        node.kill()
        exporter.sample()
        assert take("mqlayer.group.unknown_partitions") == [2]
        assert sorted(take("mqlayer.nodes")) == [0, 0, 0, 1, 1]
    with Database("postgresql://nobody@127.0.0.1:1/none", timeout_s=0.2) as away:
        runtime = Runtime(away, world.settings(), world.database)
        exporter = SystemExporter(runtime, Meters(MeterProvider(shutdown_on_exit=False)))
        with pytest.raises(StoreUnavailable):
            exporter.sample()
        assert list(exporter._values("mqlayer.group.lag")) == []
        assert [value for value, _ in exporter._values("mqlayer.outbox.backlog")] == [0]


@pytest.fixture
def reader_meters() -> Iterator[tuple[Callable[[str], list[float]], Meters]]:
    """Meters, and a way to read the values of one instrument."""
    reader = InMemoryMetricReader()

    def take(name: str) -> list[float]:
        data = reader.get_metrics_data()
        assert data is not None
        metrics = [
            one for resource in data.resource_metrics for scope in resource.scope_metrics for one in scope.metrics
        ]
        found: list[Any] = [point for metric in metrics if metric.name == name for point in metric.data.data_points]
        return [point.value for point in found]

    yield take, Meters(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
    reader.shutdown()


@pytest.mark.slow
@pytest.mark.world(partitions=0)
def test_a_thousand_partitions_make_at_most_500_series_and_no_more_statements(
    world: World, monkeypatch: pytest.MonkeyPatch, reader_meters: tuple[Any, Meters]
) -> None:
    """Of a system with four groups: the exporter's, and those of a process of each kind."""
    statements = Counter[str]()
    run = psycopg.Connection.execute

    def counted(connection: Any, statement: Any, *arguments: Any, **more: Any) -> Any:
        statements["all"] += 1
        return run(connection, statement, *arguments, **more)

    def taken() -> int:
        statements.clear()
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "execute", counted)
            control_samples(world.runtime())
        return statements["all"]

    world.add_topic("few", partitions=2)
    make_group(world, "few", "g")
    few = taken()
    for topic, group in GROUPS:
        if group == "ledger":
            world.add_topic(topic, partitions=500, archived=True)
            set_policy(world.runtime(), topic, mode="on")
        make_group(world, topic, group)
    create_schedule(world.runtime(), "nightly", every_s=86_400)
    world.rows(
        "WITH lake AS (INSERT INTO mqlayer_archive.lake (location) VALUES ('s3://bucket/lake') RETURNING lake_id) "
        "INSERT INTO mqlayer_archive.lake_topic (lake_id, topic_id, first_batch, batch) "
        "SELECT lake_id, min(topic_id), 1, 0 FROM mqlayer_archive.topic CROSS JOIN lake GROUP BY lake_id RETURNING 1"
    )
    names = [job.name for job in PERIODIC_JOBS]
    world.rows("INSERT INTO mqlayer.job (name, last_at) SELECT unnest(%s::text[]), now() RETURNING 1", names)
    world.rows("UPDATE mqlayer_archive.topic SET last_pass_at = now() RETURNING 1")
    with world.producer() as producer:
        producer.send("orders", body=b"x")
    assert taken() == few
    take_samples(world.runtime())
    Presence(world.database, "producer", "test").beat()

    meters, written = separate_meters()
    with open_runtime(world.settings()) as runtime:
        SystemExporter(runtime, meters).sample()
    tell_everything(meters)
    page = Page(written().decode())
    assert page.value("mqlayer_group_partitions") == 2002
    found = [one for one in page.series if one.labels.get("topic") != "few"]
    told = {SUFFIX.sub("", one.name) for one in found}
    assert {one.series for one in CATALOG.values() if "partition" not in one.labels} - told == set()
    assert len(found) <= MOST_SERIES, Counter(one.name for one in found)


def tell_everything(meters: Meters) -> None:
    """Record what a process of each kind does, each failure by one class."""
    operations: tuple[ByteOperation, ...] = ("written", "read", "removed")
    for operation, store in product(operations, ("postgres", "s3")):
        LARGE_BODY_BYTES.add(operation, store, 1)
    for topic, group in GROUPS:
        member = meters.member(topic, group)
        member.count(dict, lambda: 1)
        member.turn_timer().timed(partial(member.failed, KeyError()))()
        member._turn(0.1, "")
        # A receiver has its receives in place of both turns.
        member.settling(len, ())
    for topic in {topic for topic, _ in GROUPS}:
        meters.sent(topic, 1, 0.1)
        meters.sent(topic, 1, 0.1, "BacklogFull")
    failed = {(topic, "failed", "BacklogFull"): 1 for topic, _ in GROUPS}
    meters.add_producer(lambda: failed, lambda: 0)
    meters.add_relay(lambda: 16)
    meters.relay_delay(0.1)
    classes = ("disk", "replica", "quorum")
    meters.add_confirmations(lambda: dict.fromkeys(classes, 1), lambda: dict.fromkeys(classes, 0.1))
    meters.ready = lambda: True


def test_a_process_without_the_setting_imports_nothing_of_opentelemetry(world: World) -> None:
    """redis-py imports it by itself where it is installed, so the importer counts."""
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, env=world.environment(), check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["stored", "off: set()", "on: {'mqlayer.metrics.meters'}"]
