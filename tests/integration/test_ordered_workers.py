"""Ordered tasks in real Celery workers with a real broker: order over kills, calls that a broker brought, `consume`."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from celery import Celery

from mqlayer.errors import NotFound
from mqlayer.stack import RedisServer
from mqlayer.workers import connections
from mqlayer.workers.ordered_tasks import OrderedTask, ordered_task
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import CELERY_STOP_S, Process, start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until

PROGRAM: Final = """
import os, pathlib

import mqlayer
from celery import Celery
from mqlayer.workers.bootstep import host_consumers
from mqlayer.workers.ordered_tasks import consume_tasks, ordered_task

celery = Celery("shop", broker=os.environ["BROKER"], include=["shop_tasks"])
celery.conf.task_ignore_result = True
host_consumers(celery)
consumers = mqlayer.App()
consume_tasks(consumers, celery, topic="orders", backoff_s=(0.05,))
"""
TASKS: Final = """
import os, pathlib

from mqlayer.workers.ordered_tasks import ordered_task
from shop import celery

place = pathlib.Path(os.environ["RAN"])

def note(*words):
    with place.open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

@ordered_task(celery, topic="orders", key="key", name="shop.step", bind=True)
def step(self, key, number):
    note("begin", os.getpid(), key, number)
    if number % 7 == 3 and self.request.retries == 0:
        raise RuntimeError("once")
    note("end", os.getpid(), key, number)

@celery.task(name="shop.ordinary")
def ordinary(key, number):
    step.delay(key, number)
"""
KEYS: Final = 20
EACH: Final = 12
START_S: Final = 40.0


class TaskShop:
    """The programs of a shop, its workers, and what their bodies noted."""

    def __init__(self, stage: Stage, broker: RedisServer, directory: Path, cleanup: ExitStack) -> None:
        self.stage, self.directory, self._cleanup = stage, directory, cleanup
        self.ran, self.log = directory / "ran", directory / "log"
        (directory / "shop.py").write_text(PROGRAM)
        (directory / "shop_tasks.py").write_text(TASKS)
        self.ran.touch()
        self._environment = {**os.environ, "RAN": str(self.ran), "BROKER": broker.url, "MQLAYER_DSN": stage.dsn}
        self._environment |= {"MQLAYER_KEY_PREFIX": stage.prefix, "MQLAYER_LEASE_S": "5"}
        self._environment |= {"MQLAYER_CONSUMERS": "shop:consumers"}

    def worker(self, **variables: str) -> Process:
        """Start a worker."""
        options = ["--loglevel", "INFO", "--without-gossip", "--without-mingle", "--concurrency", "1"]
        return self.start(["celery", "-A", "shop:celery", "worker", *options], variables)

    def start(self, words: list[str], variables: Mapping[str, str]) -> Process:
        with self.log.open("ab") as output:
            process = start_python(
                *words,
                cwd=self.directory,
                env={**self._environment, **variables},
                stdout=output,
                stderr=output,
                new_session=True,
            )
        self._cleanup.callback(end, process)
        return process

    def owners(self) -> set[str | None]:
        """Return the members that have partitions; nobody before the group is there."""
        try:
            return set(self.stage.owners("tasks").values()) - {None}
        except NotFound:
            return set()

    def noted(self, word: str) -> dict[str, list[int]]:
        """Return the numbers of each key, in the order in which bodies began or ended."""
        found: dict[str, list[int]] = defaultdict(list)
        for line in self.ran.read_text().splitlines():
            what, _, key, number = line.split()
            if what == word:
                found[key].append(int(number))
        return found

    def wait_for(self, numbers: range) -> None:
        """Wait until the bodies of all keys have ended."""

        def all_there() -> bool:
            ended = self.noted("end")
            missing = {f"k{key}": set(numbers) - set(ended[f"k{key}"]) for key in range(KEYS)}
            assert not any(missing.values()), f"{missing}\n{self.log.read_text()[-3000:]}"
            return True

        wait_until(all_there, timeout_s=START_S, what="the calls")


def end(process: Process) -> None:
    """Kill a worker with its pool."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of four partitions."""
    return start_stage(redis_url, partitions=4)


@pytest.fixture
def shop(stage: Stage, start_redis: StartRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskShop]:
    """The shop's programs; calls of this process go to the same topic."""
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    connections.close()
    with ExitStack() as cleanup:
        yield TaskShop(stage, start_redis(), tmp_path, cleanup)
    connections.close()


@pytest.fixture
def step() -> OrderedTask:
    """The shop's task, as a process sees it that only calls it; without a broker."""
    celery = Celery("caller", broker="redis://127.0.0.1:1/0", set_as_current=False)

    @ordered_task(celery, topic="orders", key="key", name="shop.step", shared=False)
    def step(key: str, number: int) -> None:
        raise AssertionError

    task = celery.tasks["shop.step"]
    assert isinstance(task, OrderedTask)
    return task


def call_all(step: OrderedTask, numbers: range) -> None:
    """Call a task for all keys, the keys side by side."""

    def of_one(key: int) -> None:
        for number in numbers:
            step.delay(f"k{key}", number)

    with ThreadPoolExecutor(KEYS) as pool:
        list(pool.map(of_one, range(KEYS)))


@pytest.mark.slow
def test_order_per_key_holds_while_workers_are_killed_in_a_body_and_another_goes_on(
    shop: TaskShop, step: OrderedTask
) -> None:
    """None lost, none overtaken; twice only what a dead worker had under way and not settled."""
    victims = [
        shop.worker(**armed("ordered.before_body=kill@15")),
        shop.worker(**armed("ordered.after_body=kill@15")),
    ]
    survivor = shop.worker()
    wait_until(lambda: len(shop.owners()) == 3, timeout_s=START_S, what="all have a share")
    with ThreadPoolExecutor(1) as caller:
        calls = caller.submit(call_all, step, range(EACH))
        for victim in victims:
            assert victim.wait(START_S) == -signal.SIGKILL, shop.log.read_text()[-3000:]
        calls.result()
    call_all(step, range(EACH, EACH + 2))
    shop.wait_for(range(EACH + 2))
    shop.stage.wait_settled("tasks")
    survivor.terminate()
    assert survivor.wait(CELERY_STOP_S) == 0, shop.log.read_text()[-3000:]

    ended = shop.noted("end")
    assert len(ended) == KEYS
    for key, numbers in ended.items():
        # Each key's calls first ended in their order; after a death some at the end were run again, in their order too.
        firsts = list(dict.fromkeys(numbers))
        assert firsts == list(range(EACH + 2)), key
        places = [firsts.index(number) for number in numbers]
        again = sum(later <= earlier for earlier, later in pairwise(places))
        assert again <= len(victims), f"{key} was set back more often than its worker died: {numbers}"
    began = shop.noted("begin")
    for key, numbers in began.items():
        assert list(dict.fromkeys(numbers)) == list(range(EACH + 2)), key
    by_process = {line.split()[1] for line in shop.ran.read_text().splitlines()}
    assert by_process == {str(worker.pid) for worker in (*victims, survivor)}


@pytest.mark.full
def test_calls_by_name_from_the_pool_and_by_consume_all_come_to_the_topic(shop: TaskShop, step: OrderedTask) -> None:
    """A call that a broker brought is passed on, never run by the worker's pool past the order."""
    worker = shop.worker()
    caller = Celery("elsewhere", broker=shop._environment["BROKER"], set_as_current=False)
    sent = [caller.send_task("shop.step", ("k0", number)) for number in (0, 1)]
    caller.send_task("shop.ordinary", ("k1", 0))
    wait_until(lambda: sum(map(len, shop.noted("end").values())) == 3, timeout_s=START_S, what="calls by the broker")
    assert {line.split()[1] for line in shop.ran.read_text().splitlines()} == {str(worker.pid)}, "not in the pool"
    assert shop.log.read_text().count(str(sent[0].id)) >= 2, "it keeps its id"
    worker.terminate()
    assert worker.wait(CELERY_STOP_S) == 0, shop.log.read_text()[-3000:]
    caller.close()
    with shop.stage.database.connection() as connection:
        sources = connection.execute(
            "SELECT closed_at IS NOT NULL FROM mqlayer.source WHERE kind = 'direct'"
        ).fetchall()
    assert sources == [(True,)], "the pool's process closed its producer"

    consume = shop.start(["mqlayer", "consume", "shop:consumers"], {"BROKER": "redis://no.where"})
    step.delay("k2", 0)
    wait_until(lambda: shop.noted("end").get("k2") == [0], timeout_s=START_S, what="the call without a broker")
    consume.terminate()
    assert consume.wait(20) == 0, shop.log.read_text()[-3000:]
