"""Consumers hosted in real Celery workers: they live through broker restarts and stop with the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from celery import Celery

from mqlayer.postgres.migrations import migrate
from mqlayer.stack import RedisServer
from mqlayer.stack.processes import ProcessId, _started, children_of
from tests.fixtures.appender import Appender
from tests.fixtures.forked_programs import CELERY_STOP_S, Process, ask_python, start_python
from tests.fixtures.health_probes import free_ports
from tests.fixtures.scrapes import Page, scrape
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

PROGRAM = """
import os, pathlib
import mqlayer
from tests.fixtures.variants import some_of

app = mqlayer.App()
place = pathlib.Path(os.environ["HANDLED"])

@app.consumer("orders", group="ledger")
def handle(body: bytes) -> None:
    with place.open("a") as file:
        file.write(f"{os.getpid()} {body.decode()}\\n")
"""
TASKS = """
from celery import shared_task
from mqlayer import Producer

@shared_task(name="shop.book")
def book():
    with Producer() as producer:
        producer.send("orders", key="key-0", body=b"0")
"""
START_S = 30.0
TASK = "mqlayer.clean_dedup"


def message(**changes: object) -> bytes:
    """Return an item of a queue, a message but for the changes."""
    properties: dict[str, object] = {
        "delivery_tag": "one",
        "delivery_info": {"exchange": "", "routing_key": "mqlayer"},
        "body_encoding": "base64",
    }
    headers = {"task": "mqlayer.tasks.none", "id": "1"}
    base = {"body": "W10=", "content-type": "application/json", "content-encoding": "utf-8", "headers": headers}
    of_properties = {name: value for name, value in changes.items() if name in properties}
    return json.dumps(
        base | {"properties": properties | of_properties} | {n: v for n, v in changes.items() if n not in properties}
    ).encode()


PARTS = (
    "properties", "headers", "body", "content-type", "content-encoding", "delivery_tag", "delivery_info",
    "body_encoding",
)  # fmt: skip
VALUES: tuple[object, ...] = (
    None, 5, "text", [], ["text"], {}, {"task": []}, {"task": None}, {"task": "mqlayer.none"}, {"task": TASK},
)  # fmt: skip
NO_MESSAGES = [
    b"not json", b"\xff\xfe", b"{", b"[" * 100_000, b"null", b"5", b'"text"', b"[]", b"{}", b'{"properties": 5}',
    b'{"properties": {}}',
    *(message(**{name: value}) for name in PARTS for value in VALUES),
]  # fmt: skip
"""Items of a queue that are no message of Celery in each part of one."""

Worker = Callable[..., Process]
CELERY = ("celery", "-A", "mqlayer.workers.app")


@pytest.fixture
def handled(tmp_path: Path) -> Path:
    """The file that the program's handler writes to: a line of process and body for each message."""
    (tmp_path / "orders_program.py").write_text(PROGRAM)
    place = tmp_path / "handled"
    place.touch()
    return place


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The worker's log."""
    return tmp_path / "worker.log"


@pytest.fixture
def broker(start_redis: StartRedis) -> RedisServer:
    """A broker of the test's own."""
    return start_redis()


@pytest.fixture
def worker(handled: Path, log: Path, broker: RedisServer, key_prefix: str) -> Iterator[Worker]:
    """Start a Celery worker with the options given; it is killed after the test."""
    environment = {**os.environ, "HANDLED": str(handled), "MQLAYER_LEASE_S": "10", "MQLAYER_KEY_PREFIX": key_prefix}
    environment |= {"MQLAYER_BROKER_URL": broker.url}
    with ExitStack() as cleanup:

        def start(*options: str, **variables: str) -> Process:
            words = [*CELERY, "worker", "--loglevel", "INFO", "--without-gossip", "--without-mingle"]
            words += ["--concurrency", "1", *options]
            with log.open("ab") as output:
                process = start_python(
                    *words,
                    cwd=handled.parent,
                    env=environment | variables,
                    stdout=output,
                    stderr=output,
                    new_session=True,
                )
            cleanup.callback(end, process)
            return process

        yield start


@pytest.fixture
def orders(database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[Appender]:
    """The topic, and a way to append to it."""
    appender = Appender(database_dsn, redis_url, topic="orders", prefix=key_prefix)
    yield appender
    appender.close()


def end(process: Process) -> None:
    """Kill the worker with the pool's processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines(handled: Path) -> list[list[str]]:
    return [line.split() for line in handled.read_text().splitlines()]


def wait_for(handled: Path, log: Path, bodies: range) -> None:
    def all_there() -> bool:
        missing = {str(number) for number in bodies} - {body for _, body in lines(handled)}
        assert not missing, log.read_text()[-2000:]
        return True

    wait_until(all_there, timeout_s=START_S, what="messages handled")


def numbered(numbers: range) -> list[tuple[str, bytes]]:
    return [(f"key-{number}", str(number).encode()) for number in numbers]


@pytest.mark.parametrize("pool", some_of(["prefork", "threads", "solo"], 3))
def test_a_worker_of_any_pool_handles_messages_in_its_main_process(
    worker: Worker, orders: Appender, handled: Path, log: Path, database_dsn: str, pool: str
) -> None:
    process = worker("--mqlayer-app", "orders_program:app", "--pool", pool, MQLAYER_DSN=database_dsn)
    orders.send(numbered(range(20)))
    wait_for(handled, log, range(20))
    process.terminate()
    assert ended(process, log) == 0, log.read_text()
    assert {pid for pid, _ in lines(handled)} == {str(process.pid)}
    assert len(lines(handled)) == 20
    assert "consumers_stopped" in log.read_text()


SENT = "messaging_client_sent_messages_total"
HANDLED = "mqlayer_consumer_messages_total"


@pytest.mark.full
def test_each_child_of_the_prefork_pool_has_a_page_that_begins_at_zero(
    worker: Worker,
    orders: Appender,
    handled: Path,
    log: Path,
    broker: RedisServer,
    redis_url: str,
    database_dsn: str,
) -> None:
    """Behind its worker's port, by its place in the pool; its successor shows neither its counts nor its parent's."""
    (handled.parent / "shop_tasks.py").write_text(TASKS)
    first = free_ports(2)
    variables = {"MQLAYER_METRICS": "1", "MQLAYER_HEALTH_PORT": str(first), "MQLAYER_DSN": database_dsn}
    process = worker("--mqlayer-app", "orders_program:app", "-I", "shop_tasks", **variables)

    def page(port: int, name: str, expected: float) -> Page | None:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            found = scrape(port)
            values = [one.value for one in found.series if one.name == name]
            return found if sum(values) == expected else None
        return None

    def book(*, sent: int) -> None:
        with Celery(broker=broker.url, set_as_current=False) as client:
            client.send_task("shop.book", queue="mqlayer")
        found = wait_until(lambda: page(first + 1, SENT, sent), timeout_s=START_S, what=f"{sent} sent by a child")
        assert found is not None
        assert found.value("mqlayer_process_ready") == 1
        assert found.value("mqlayer_producer_messages_total", topic="orders", outcome="stored") == sent
        assert not {HANDLED, "messaging_process_duration_seconds_count"} & found.names()

    book(sent=1)
    book(sent=2)
    of_parent = wait_until(lambda: page(first, HANDLED, 2), timeout_s=START_S, what="both handled")
    assert of_parent is not None
    assert SENT not in of_parent.names()
    (child,) = children_of(ProcessId(process.pid, _started(process.pid) or ""))
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: page(first + 1, SENT, 0), timeout_s=START_S, what="a successor")
    book(sent=1)


def ended(process: Process, log: Path) -> int:
    """Return the exit code of a worker that was told to stop; if it does not, show where its threads are."""
    try:
        return process.wait(CELERY_STOP_S)
    except subprocess.TimeoutExpired:
        # Celery writes the stacks of its threads.
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        pytest.fail(f"the worker does not end: {log.read_text()}")


def test_consumption_goes_on_while_the_broker_is_down_and_after(
    worker: Worker, broker: RedisServer, orders: Appender, handled: Path, log: Path, database_dsn: str
) -> None:
    process = worker("--beat", "--schedule", str(log.parent / "beat"), MQLAYER_DSN=database_dsn,
                     MQLAYER_CONSUMERS="orders_program:app")  # fmt: skip
    orders.send(numbered(range(20)))
    wait_for(handled, log, range(20))
    wait_until(lambda: " ready." in log.read_text(), timeout_s=START_S, what="the worker is ready")

    broker.stop()
    wait_until(lambda: "Connection to broker lost" in log.read_text(), timeout_s=START_S, what="it misses its broker")
    orders.send(numbered(range(20, 40)))
    wait_for(handled, log, range(20, 40))

    broker.start()
    wait_until(lambda: log.read_text().count("Connected to redis") >= 2, timeout_s=START_S, what="connected again")
    orders.send(numbered(range(40, 60)))
    wait_for(handled, log, range(40, 60))

    process.terminate()
    assert ended(process, log) == 0, log.read_text()
    assert len(lines(handled)) == 60
    assert log.read_text().count("consumers_started") == 1


@pytest.mark.full
def test_a_worker_outlives_its_broker_as_a_replica(
    worker: Worker, broker: RedisServer, start_redis: StartRedis, log: Path, database_dsn: str
) -> None:
    """It loses its connection when the primary becomes a replica, and works again with the next primary there."""
    process = worker("--hostname", "one@here", MQLAYER_DSN=database_dsn)
    wait_until(lambda: " ready." in log.read_text(), timeout_s=START_S, what="the worker is ready")
    other = start_redis()
    with redis.Redis.from_url(broker.url) as client:
        client.replicaof("127.0.0.1", str(other.port))
        wait_until(lambda: "Connection to broker lost" in log.read_text(), timeout_s=30, what="the worker notes it")
        wait_until(lambda: "Trying again in" in log.read_text(), timeout_s=30, what="a pause before the next try")
        assert "read only replica" in log.read_text()
        assert "Frequent restarts" not in log.read_text()
        assert process.poll() is None, log.read_text()[-3000:]
        client.replicaof("NO", "ONE")
    wait_until(lambda: log.read_text().count("Connected to redis") >= 2, timeout_s=START_S, what="connected again")
    ask_python(*CELERY, "call", TASK, env=os.environ | {"MQLAYER_BROKER_URL": broker.url}).check_returncode()
    wait_until(lambda: f"Task {TASK}" in log.read_text(), timeout_s=30, what="a task")
    process.terminate()
    assert ended(process, log) == 0, log.read_text()


@pytest.mark.full
@pytest.mark.slow
def test_a_worker_waits_for_stores_that_are_down_at_its_start(
    worker: Worker,
    start_postgres: StartPostgres,
    redis_url: str,
    key_prefix: str,
    handled: Path,
    log: Path,
) -> None:
    postgres = start_postgres()
    migrate(dsn := postgres.create_database("bank"))
    orders = Appender(dsn, redis_url, topic="orders", prefix=key_prefix)
    orders.send(numbered(range(20)))
    orders.close()
    postgres.stop()

    process = worker("--mqlayer-app", "orders_program:app", MQLAYER_DSN=dsn)
    wait_until(lambda: "consumers_blocked" in log.read_text(), timeout_s=START_S, what="the worker says that it waits")
    assert f"postgres at 127.0.0.1:{postgres.port}/bank is not available" in log.read_text()
    postgres.start()
    wait_for(handled, log, range(20))
    process.terminate()
    assert ended(process, log) == 0, log.read_text()


def test_a_wrong_path_ends_the_worker_with_the_reason(worker: Worker, log: Path, database_dsn: str) -> None:
    process = worker("--mqlayer-app", "no_such_shop:app", MQLAYER_DSN=database_dsn)
    assert process.wait(START_S) != 0
    assert "mqlayer consumers: unknown module 'no_such_shop'" in log.read_text()


def test_items_of_the_queue_that_are_no_messages_end_no_worker_and_hold_up_no_task(
    worker: Worker, log: Path, broker: RedisServer, database_dsn: str
) -> None:
    """In the queue, in what was not acknowledged, and among the commands for workers."""
    with redis.Redis.from_url(broker.url) as client:
        for number, item in enumerate(NO_MESSAGES):
            client.lpush("mqlayer", item)
            client.hset("unacked", f"tag-{number}", item)
            client.zadd("unacked_index", {f"tag-{number}": 1})
        process = worker("--hostname", "one@here", MQLAYER_DSN=database_dsn)
        wait_until(lambda: " ready." in log.read_text(), timeout_s=60, what="the worker is ready")
        for item in NO_MESSAGES:
            # Celery subscribes anew behind some.
            wait_until(lambda item=item: client.publish("/0.celery.pidbox", item), what="a subscriber")  # type: ignore[misc]

        def gone() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            # Ten of those without an acknowledgement are looked at in a round.
            return int(client.llen("mqlayer")) == 0 and int(client.zcard("unacked_index")) <= len(NO_MESSAGES) - 10

        wait_until(gone, timeout_s=60, what="all items are dropped")
        variables = os.environ | {"MQLAYER_BROKER_URL": broker.url}
        ping = ("inspect", "ping", "--destination", "one@here", "--timeout", "20")
        done = ask_python(*CELERY, *ping, env=variables)
        assert "pong" in done.stdout, done.stdout + done.stderr + log.read_text()[-3000:]
        ask_python(*CELERY, "call", TASK, env=variables).check_returncode()
        wait_until(lambda: f"Task {TASK}" in log.read_text(), timeout_s=30, what="a task behind them")
    assert process.poll() is None
    assert "broker_item_dropped" in log.read_text()
