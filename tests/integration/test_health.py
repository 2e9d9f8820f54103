"""Liveness and readiness of real processes, while their stores come and go."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from mqlayer.health import reports
from mqlayer.stack import RedisServer
from tests.fixtures.appender import Appender
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.forked_programs import CELERY_STOP_S, Process, start_python
from tests.fixtures.health_probes import ask, ask_until, free_ports
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.scrapes import scrape
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.world import QUICK, World

PROGRAM = """
import mqlayer

app = mqlayer.App()

@app.consumer("orders", group="ledger")
def handle(body: bytes) -> None:
    pass
"""
CELERY = """
import sys
from celery.__main__ import main
from mqlayer.workers import health
health.UNSENT_S = 3.0
sys.argv = ["celery", "-A", "mqlayer.workers.app", *sys.argv[1:]]
main()
"""
"""Celery's command, with less patience for a broker."""
START_S = 30.0

Start = Callable[..., Process]


@pytest.fixture
def proxy(database_dsn: str) -> Iterator[TcpProxy]:
    """A way to Postgres that a test may break."""
    with TcpProxy("127.0.0.1", int(conninfo_to_dict(database_dsn)["port"] or 0)) as way:
        yield way


@pytest.fixture
def proxied_dsn(database_dsn: str, proxy: TcpProxy) -> str:
    """The database by that way."""
    return database_dsn.replace(f":{conninfo_to_dict(database_dsn)['port']}/", f":{proxy.port}/")


@pytest.fixture
def orders(database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[Appender]:
    """The topic."""
    appender = Appender(database_dsn, redis_url, topic="orders", prefix=key_prefix)
    yield appender
    appender.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What programs write to their errors."""
    return tmp_path / "log"


@pytest.fixture
def start(proxied_dsn: str, key_prefix: str, tmp_path: Path, log: Path) -> Iterator[Start]:
    """Start a program; it is killed after the test, and its log shown where that failed."""
    (tmp_path / "orders_program.py").write_text(PROGRAM)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path),
        "MQLAYER_LEASE_S": "1", "MQLAYER_DSN": proxied_dsn, "MQLAYER_KEY_PREFIX": key_prefix,
    }  # fmt: skip
    with ExitStack() as cleanup, log.open("wb") as said:

        def run(*words: str, **variables: str) -> Process:
            process = start_python(*words, env=environment | variables, cwd=tmp_path, stderr=said, new_session=True)
            cleanup.callback(end, process)
            return process

        yield run
    sys.stderr.write(log.read_text())


def end(process: Process) -> None:
    """Kill it with all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_consumer_is_ready_while_its_lease_holds_and_live_throughout(
    start: Start, orders: Appender, proxy: TcpProxy
) -> None:
    """Postgres away for longer than the lease: it pauses, and goes on by itself."""
    port = free_ports()
    process = start("mqlayer", "consume", "orders_program:app", MQLAYER_HEALTH_PORT=str(port))
    ask_until(port, "/ready", 200, timeout_s=START_S)
    proxy.refuse_new()
    proxy.reset_all()
    ask_until(port, "/ready", 503, "group ledger of topic orders: the lease ran out")
    assert ask(port, "/live").status == 200
    proxy.heal()
    ask_until(port, "/ready", 200)
    process.terminate()
    assert process.wait(20) == 0
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/live")


@pytest.mark.full
def test_each_process_of_a_supervisor_answers_on_a_port_of_its_own(
    start: Start, orders: Appender, proxy: TcpProxy, proxied_dsn: str
) -> None:
    """The supervisor on the first: it serves when all its children have started."""
    proxy.half_open()
    port = free_ports(3)
    process = start(
        *("mqlayer", "consume", "orders_program:app", "-p", "2"),
        MQLAYER_HEALTH_PORT=str(port), MQLAYER_DSN=f"{proxied_dsn}?connect_timeout=2",
    )  # fmt: skip
    ask_until(port, "/ready", 503, "process 1 has not started | process 2 has not started", timeout_s=START_S)
    ask_until(port + 1, "/ready", 503, "not all groups are joined", timeout_s=START_S)
    assert [ask(port + number, "/live").status for number in range(2)] == [200, 200]
    proxy.heal()
    for number in range(3):
        ask_until(port + number, "/ready", 200, timeout_s=START_S)
    process.terminate()
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["mqlayer", "consume", "orders_program:app"],
        ["mqlayer", "relay"],
        ["celery", "-A", "mqlayer.workers.app", "worker", "--mqlayer-app", "orders_program:app"],
        ["celery", "-A", "mqlayer.workers.app", "worker"],
        ["celery", "-A", "mqlayer.workers.app", "beat"],
    ],
    ids=["consume", "relay", "worker", "bare_worker", "beat"],
)
def test_a_port_in_use_ends_the_start_with_the_name_of_the_setting(
    start: Start, orders: Appender, proxy: TcpProxy, words: list[str], log: Path
) -> None:
    process = start(*words, MQLAYER_HEALTH_PORT=str(proxy.port))
    assert process.wait(START_S) == 1
    said = log.read_text().splitlines()[-1]
    assert f"health port {proxy.port} of 127.0.0.1 is in use: set MQLAYER_HEALTH_PORT" in said


def test_a_relay_is_ready_while_its_lease_holds_and_live_throughout(
    start: Start, orders: Appender, proxy: TcpProxy
) -> None:
    port = free_ports()
    process = start("mqlayer", "relay", MQLAYER_HEALTH_PORT=str(port), MQLAYER_METRICS="true")
    ask_until(port, "/ready", 200, timeout_s=START_S)
    wait_until(lambda: scrape(port).value("mqlayer_process_ready") == 1, what="the metric says so")
    proxy.refuse_new()
    proxy.reset_all()
    ask_until(port, "/ready", 503, "is not available")
    assert ask(port, "/live").status == 200
    proxy.heal()
    ask_until(port, "/ready", 200)
    process.terminate()
    assert process.wait(20) == 0


def test_a_relay_that_stands_by_is_ready(database_dsn: str, redis_url: str, key_prefix: str) -> None:
    """Others have all LPs; it takes over when one of them dies."""
    world = World(database_dsn, key_prefix, [redis_url])
    taken = "UPDATE mqlayer_app.lp_set SET relay_id = 'other', lease_until = now() + interval '1 hour'"
    world.rows(taken)
    with world.relay(limits=QUICK) as relay:
        wait_until(lambda: relay.health().ready, what="it stands by")
        assert relay.health().live
    assert relay.health().waits == ("it is stopping",)


def test_a_relay_whose_node_is_not_armed_names_it_until_it_is(
    database_dsn: str, start_redis: StartRedis, key_prefix: str
) -> None:
    """Case 83. Whoever arms it waits for the node's row, which somebody else holds."""
    node = start_redis()
    world = World(database_dsn, key_prefix, [node.url])
    world.add_topic("orders")
    with world.relay(limits=QUICK, lease_s=5.0) as relay:
        world.publish(5)
        world.wait_until_whole()
        wait_until(lambda: relay.health().ready, what="it serves")
        with kept_session(database_dsn) as connection:
            connection.execute("SELECT FROM mqlayer.node FOR UPDATE")
            node.restart()
            world.publish(5)
            waits = wait_until(lambda: [r for r in relay.health().waits if "not the armed one" in r], what="it says so")
            assert "mqlayer node rearm node-1" in waits[0]
            assert relay.health().live
        wait_until(lambda: relay.health().ready, timeout_s=20, what="it serves again")
        world.wait_until_whole()


@pytest.mark.slow
def test_a_celery_worker_that_hosts_consumers_answers_for_them(
    start: Start, orders: Appender, proxy: TcpProxy, start_redis: StartRedis
) -> None:
    proxy.refuse_new()
    port = free_ports()
    process = start(
        *("celery", "-A", "mqlayer.workers.app", "worker"),
        *("--concurrency", "1", "--without-gossip", "--without-mingle"),
        MQLAYER_HEALTH_PORT=str(port), MQLAYER_CONSUMERS="orders_program:app", MQLAYER_BROKER_URL=start_redis().url,
        MQLAYER_METRICS="true",
    )  # fmt: skip
    ask_until(port, "/ready", 503, "is not available", timeout_s=START_S)
    assert ask(port, "/live").status == 200
    proxy.heal()
    ask_until(port, "/ready", 200, timeout_s=START_S)
    wait_until(lambda: scrape(port).value("mqlayer_process_ready") == 1, what="the metric says so")
    process.terminate()
    assert process.wait(CELERY_STOP_S) == 0


@pytest.mark.parametrize(
    "words",
    some_of(
        [["worker", "--concurrency", "1", "--without-gossip", "--without-mingle"], ["beat", "--max-interval", "1"]], 2
    ),
)
def test_a_worker_without_consumers_and_a_beat_answer_for_their_broker(
    start: Start, start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Away, it makes them unready; they live, and go on by themselves."""
    broker = start_redis()
    port = free_ports()
    process = start(
        *("-c", CELERY, *words),
        MQLAYER_HEALTH_PORT=str(port), MQLAYER_BROKER_URL=broker.url, MQLAYER_METRICS="true",
    )  # fmt: skip
    ask_until(port, "/ready", 200, timeout_s=START_S)
    assert scrape(port).value("mqlayer_process_ready") == 1
    broker.kill()
    ask_until(port, "/ready", 503, "broker", timeout_s=START_S)
    assert ask(port, "/live").status == 200
    broker.start()
    ask_until(port, "/ready", 200, timeout_s=START_S)
    process.terminate()
    assert process.wait(CELERY_STOP_S) == 0


# -- members -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_member_whose_node_is_not_armed_is_not_ready_until_it_is(
    start_stage: StartStage, start_redis: StartRedis
) -> None:
    """Whoever arms it waits for the node's row, which somebody else holds."""
    node: RedisServer = start_redis()
    stage = start_stage(node.url)
    app = stage.consume(Recorder())
    wait_until(lambda: app.health().ready, what="the member serves")
    with kept_session(stage.dsn) as connection:
        connection.execute("SELECT FROM mqlayer.node FOR UPDATE")
        node.restart()
        reasons = wait_until(lambda: [r for r in app.health().waits if "not the armed one" in r], what="it says so")
        assert reasons[0].startswith("group g of topic orders: node node-1: ")
        assert app.health().live
    wait_until(lambda: app.health().ready, timeout_s=20, what="the member serves again")


def test_a_member_whose_node_is_away_names_it_and_the_partitions(
    start_stage: StartStage, start_redis: StartRedis
) -> None:
    node = start_redis()
    app = start_stage(node.url).consume(Recorder())
    wait_until(lambda: app.health().ready, what="the member serves")
    node.kill()
    wait_until(lambda: any("node node-1: " in reason for reason in app.health().waits), what="it misses the node")
    assert app.health().live
    node.start()
    wait_until(lambda: app.health().ready, timeout_s=20, what="the member serves again")


def test_a_member_without_a_partition_is_ready(stage: Stage) -> None:
    apps = [stage.consume(Recorder()) for _ in range(3)]
    wait_until(lambda: sum(len(member_of(app).owned()) for app in apps) == 2, what="two of three have a partition")
    wait_until(lambda: all(app.health().ready for app in apps), what="all are ready")


def test_an_app_that_is_not_started_or_was_replaced_is_not_well(stage: Stage) -> None:
    assert stage.app().health().waits == ("not all groups are joined",)
    app = stage.consume(Recorder(), member_id="m-1")
    wait_until(lambda: app.health().ready, what="the member serves")
    stage.consume(Recorder(), member_id="m-1")
    wait_until(lambda: "another process took" in "".join(app.health().stuck), what="it hears of it")


def test_a_heartbeat_that_waits_for_ever_is_stuck(
    stage: Stage, proxied_dsn: str, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Postgres that takes what is sent and never answers: its connection breaks by no timeout."""
    monkeypatch.setattr(reports, "STUCK_FLOOR_S", 0.5)
    app = stage.consume(
        Recorder(), settings=stage.settings(dsn=proxied_dsn, lease_s=0.5, socket_timeout_s=0.2, connect_timeout_s=0.2)
    )
    wait_until(lambda: app.health().ready, what="the member serves")
    proxy.blackhole()
    wait_until(
        lambda: any("the heartbeat has been stuck for" in reason for reason in app.health().stuck), what="it is stuck"
    )
    assert not app.health().live
    proxy.heal()
    wait_until(lambda: app.health().ready, what="it turns again")
