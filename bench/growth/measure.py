"""Measures one configuration: publish, consume out of a backlog, then latency at a fixed rate."""

from __future__ import annotations

import signal
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import redis

from bench.growth.points import LATE, Point, Setup
from bench.lease_cost import postgres_cpu_s, stat_of
from bench.processes import CONSUME, ConsumerGroup, consumer_group, wait_until
from bench.registry import note
from bench.stage import Stage, System
from mqlayer.producing import Message, Producer
from mqlayer.topics import create_topic

APP: Final = "bench.growth.consumer:app"
CHUNK: Final = 10_000
"""Messages of one call that publishes."""
CHUNK_BYTES: Final = 32_000_000
WARM_UP: Final = 2_000
WARM_UP_BYTES: Final = 4_000_000
COUNTED: Final = 0.9
"""Of the deliveries of a backlog."""
LATENCY_S: Final = 4.0
PARTS: Final = 5
PATIENCE_S: Final = 180.0
LEASE_S: Final = 60.0
"""Processes are stopped while messages are published; they keep their partitions."""
TICK_S: Final = 0.01
BODY_LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Scene:
    """A system with its nodes' clients, topic and producer."""

    system: System
    clients: Sequence[redis.Redis]
    topic: str
    producer: Producer

    def cpu_s(self, crew: ConsumerGroup) -> dict[str, float]:
        """Return processor seconds by part, so far."""
        ticks = [stat_of(worker.process.pid) for worker in crew.workers]
        return {
            "producer": time.process_time(),
            "consumers": sum(int(one[11]) + int(one[12]) for one in ticks) * TICK_S,
            "nodes": sum(node_cpu_s(client) for client in self.clients),
            "Postgres": postgres_cpu_s(self.system.dsn),
        }


def node_cpu_s(client: redis.Redis) -> float:
    """Return the processor seconds of a node."""
    facts: Any = client.info("cpu")
    return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


def measure(stage: Stage, setup: Setup) -> Point:
    """Measure a configuration on new databases and empty nodes."""
    with scene_of(stage, setup) as scene:
        with crew_of(scene, setup) as crew:
            if setup.messages <= LATE:
                start(scene, crew, setup)
            figures = backlog(scene, crew, setup)
            latencies = [] if setup.late_group else paced(scene, crew, setup)
        if setup.late_group:
            with crew_of(scene, setup, begin="latest") as crew:
                start(scene, crew, setup)
                latencies = paced(scene, crew, setup)
    point = Point(
        setup=setup,
        p50_ms=round(quantile(latencies, 0.5), 3),
        p99_ms=round(p99(latencies), 3),
        **figures,
    )
    note(
        f"  publish {point.publish:,.0f}, consume {point.consume:,.0f} msg/s, p50 {point.p50_ms}, "
        f"p99 {point.p99_ms} ms at {setup.rate:,.0f}/s, cores {point.cores}"
    )
    return point


@contextmanager
def scene_of(stage: Stage, setup: Setup) -> Iterator[Scene]:
    """Lend a new system with its topic; its nodes write no file anew meanwhile, and are empty afterwards."""
    system = stage.system(nodes=setup.nodes)
    urls = [stage.redis("always", number).url for number in range(1, setup.nodes + 1)]
    clients = [redis.Redis.from_url(url) for url in urls]
    for client in clients:
        client.config_set("auto-aof-rewrite-percentage", 0)
    topic = f"t{uuid.uuid4().hex[:8]}"
    route = create_topic(system.runtime, topic, partitions=setup.partitions, body_limit=BODY_LIMIT)
    try:
        with Producer(system.settings, name="bench") as producer:
            yield Scene(replace(system, route=route), clients, topic, producer)
    finally:
        for client in clients:
            client.flushall()
            client.bgrewriteaof()
        for client in clients:
            wait_until(lambda: not rewriting(client))  # noqa: B023
            client.config_set("auto-aof-rewrite-percentage", 100)
            client.close()


def rewriting(client: redis.Redis) -> bool:
    """Return whether a node writes its file anew."""
    facts: Any = client.info("persistence")
    return bool(facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])


@contextmanager
def crew_of(scene: Scene, setup: Setup, *, begin: str = "earliest") -> Iterator[ConsumerGroup]:
    """Lend processes that consume, none of which has started."""
    facts = {
        "BENCH_TOPIC": scene.topic,
        "BENCH_GROUPS": setup.groups,
        "BENCH_START": begin,
        "BENCH_WAIT_MS": setup.wait_ms,
        "MQLAYER_LEASE_S": LEASE_S,
    }
    with consumer_group(scene.system, **facts) as crew:
        yield crew


def start(scene: Scene, crew: ConsumerGroup, setup: Setup) -> None:
    """Start all processes, and wait until they share the partitions and have handled a few messages."""
    run_all(crew, setup)
    wait_until(lambda: balanced(owned(scene.system, crew.group), setup))
    count = max(setup.partitions, WARM_UP // setup.groups)
    count = min(count, 1 + WARM_UP_BYTES // setup.body_bytes)
    before = handled(crew)
    scene.producer.send_many(scene.topic, messages_of(setup, 0, count))
    wait_until(lambda: handled(crew) >= before + count * setup.groups)


def run_all(crew: ConsumerGroup, setup: Setup) -> None:
    """Start the processes."""
    for _ in range(setup.processes):
        crew.start(*CONSUME[:-1], APP, "--concurrency", str(setup.concurrency))


def balanced(shares: Sequence[int], setup: Setup) -> bool:
    """Return whether all partitions of all groups are owned in even shares."""
    members = setup.processes * setup.groups
    return len(shares) == members and sum(shares) == setup.partitions * setup.groups and max(shares) - min(shares) <= 1


def owned(system: System, group: str) -> list[int]:
    """Return how many partitions each member of the groups owns."""
    with system.database.connection() as connection:
        rows = connection.execute(
            "SELECT count(*) FROM mqlayer.assignment a JOIN mqlayer.consumer_group g USING (group_id) "
            "WHERE starts_with(g.name, %s) AND a.member_id = a.target GROUP BY a.group_id, a.member_id",
            (group + "-",),
        ).fetchall()
    return [int(row[0]) for row in rows]


def handled(crew: ConsumerGroup) -> int:
    """Return how many messages all processes have handled."""
    return sum(worker.handled for worker in crew.workers)


def messages_of(setup: Setup, first: int, count: int) -> list[Message]:
    """Make messages of the keys in turn, without a time."""
    body = bytes(setup.body_bytes)
    return [Message(f"key-{number % setup.keys}", body) for number in range(first, first + count)]


def publish(scene: Scene, setup: Setup) -> float:
    """Publish the backlog; return messages per second."""
    each = max(1, min(CHUNK, CHUNK_BYTES // setup.body_bytes))
    began = time.perf_counter()
    for first in range(0, setup.messages, each):
        scene.producer.send_many(scene.topic, messages_of(setup, first, min(each, setup.messages - first)))
    return setup.messages / (time.perf_counter() - began)


def backlog(scene: Scene, crew: ConsumerGroup, setup: Setup) -> dict[str, Any]:
    """Publish the backlog while the processes are stopped, then let them handle it; return a point's fields.

    Where the processes start behind the publishing, the clock starts with the first handled message.
    """
    # Else they would take processors from the producer.
    signal_all(crew, signal.SIGSTOP)
    before = scene.cpu_s(crew)
    rate = publish(scene, setup)
    published = scene.cpu_s(crew)
    already, began_ns = handled(crew), time.monotonic_ns()
    count = setup.deliveries
    if crew.workers:
        signal_all(crew, signal.SIGCONT)
    else:
        run_all(crew, setup)
        wait_until(lambda: handled(crew) > 0, PATIENCE_S)
        published, already, began_ns = scene.cpu_s(crew), handled(crew), time.monotonic_ns()
        count = min(count - already, LATE)
    # At the end some processes and partitions have nothing left: that counts neither as time nor as work.
    wait_until(lambda: handled(crew) >= already + count * COUNTED, PATIENCE_S)
    seconds, done, consumed = (time.monotonic_ns() - began_ns) / 1e9, handled(crew) - already, scene.cpu_s(crew)
    wait_until(lambda: handled(crew) >= already + count, PATIENCE_S)
    times = sorted(one.at_ns for worker in crew.workers for one in worker.notes(began_ns))
    counted = times[: max(1, int(len(times) * COUNTED))]
    used = {name: consumed[name] - published[name] for name in ("consumers", "nodes", "Postgres")}
    return {
        "publish": round(rate, 1),
        "consume": round(len(counted) / (counted[-1] - began_ns) * 1e9, 1),
        "publish_cpu_us": {
            name: round((published[name] - before[name]) / setup.messages * 1e6, 3) for name in ("producer", "nodes")
        },
        "consume_cpu_us": {name: round(value / done * 1e6, 3) for name, value in used.items()},
        "cores": {name: round(value / seconds, 3) for name, value in used.items()},
    }


def signal_all(crew: ConsumerGroup, number: signal.Signals) -> None:
    """Send a signal to all processes."""
    for worker in crew.workers:
        worker.process.send_signal(number)


def paced(scene: Scene, crew: ConsumerGroup, setup: Setup) -> list[int]:
    """Publish at the rate, whatever becomes of it; return the microseconds from each message's time to its handler."""
    count, already, began_ns = int(setup.rate * LATENCY_S), handled(crew), time.monotonic_ns()
    filling = bytes(max(0, setup.body_bytes - 8))
    for number in range(count):
        due_ns = began_ns + int(number / setup.rate * 1e9)
        time.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        # The clock runs from when it was due: a publisher that falls behind must not hide it.
        body = due_ns.to_bytes(8, "big") + filling
        scene.producer.send_oneway(scene.topic, key=f"key-{number % setup.keys}", body=body)
    wait_until(lambda: handled(crew) >= already + count * setup.groups, PATIENCE_S)
    notes = sorted((one.at_ns, one.partition) for worker in crew.workers for one in worker.notes(began_ns))
    # Connections and pages of the first moments do not count.
    return [latency for _, latency in notes[len(notes) // 10 :]]


def p99(latencies: Sequence[int]) -> float:
    """Return the median of the p99 of successive parts, in milliseconds: one stall of the machine is in one of them."""
    each = max(1, len(latencies) // PARTS)
    parts = [latencies[first : first + each] for first in range(0, each * PARTS, each)]
    return statistics.median(quantile(part, 0.99) for part in parts if part)


def quantile(latencies: Sequence[int], share: float) -> float:
    """Return the milliseconds within which that share of messages was handled."""
    return sorted(latencies)[min(len(latencies) - 1, int(len(latencies) * share))] / 1_000
