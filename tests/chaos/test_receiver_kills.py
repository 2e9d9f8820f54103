"""Receivers of an ordered pop that are killed, at each place between two writes and at random: nothing is lost,
nothing reversed, each fenced effect is there once.

Cases 50 to 53, 57, 59, 77. MQLAYER_CHAOS_SEED repeats a choice of kills.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from pydantic import SecretStr

from mqlayer import Receiver
from mqlayer.groups import find_group
from mqlayer.groups.admin import set_group
from mqlayer.postgres.database import Database
from mqlayer.redelivery import release_all
from mqlayer.routes import apply_change, plan_split
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.chaos.actors import GROUP, SINK, TOPIC
from tests.chaos.harness.stores import drained, note_sink, note_streams
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import publish_numbered
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.checker import check
from tests.proof.history import History, read_histories
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]
COUNT: Final = 240


class ReceiverScene:
    """Messages in the partitions, receivers that are killed, and what they leave."""

    def __init__(self, database: Database, settings: Settings, directory: Path, partitions: list[int]) -> None:
        self.database, self.settings, self.directory, self.partitions = database, settings, directory, partitions
        self.running: list[Process] = []
        self.published = self.seed = 0

    def start(self, name: str, failpoints: str = "", scope: str = "key", role: str = "receiver") -> Process:
        """Start a receiver of either kind, to be killed at a place."""
        environment = os.environ | {
            "MQLAYER_DSN": self.settings.control_dsn(),
            "MQLAYER_KEY_PREFIX": self.settings.key_prefix,
            "MQLAYER_TEST_FAILING": "7",
            "MQLAYER_TEST_SCOPE": scope,
            **armed(failpoints),
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            process = start_python(
                "tests.chaos.actors", role, name, str(self.directory),
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        self.running.append(process)
        return process

    def publish(self, count: int) -> None:
        """Commit messages and bring them to the partitions."""
        publish_numbered(self.database, self.settings, self.directory, first=self.published, count=count)
        self.published += count

    def count(self) -> int:
        """Return how many effects there are."""
        [(count,)] = ask_postgres(self.settings.control_dsn(), "SELECT count(*) FROM sink")
        return int(count)

    def is_past(self, count: int) -> bool:
        """Say whether there are more effects than that."""
        return self.count() > count

    def judge(self) -> None:
        """Wait until every message has its effect, and have the histories, the streams and the sink judged."""
        dsn = self.settings.control_dsn()
        wait_until(lambda: drained(dsn), timeout_s=40, what="every message has its effect")
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait(20)
        with History(self.directory, "witness") as history:
            note_streams(history, self.settings.control_dsn(), self.settings.key_prefix, self.partitions)
            note_sink(history, self.settings.control_dsn())
        verdict = check(read_histories(self.directory), flows=[(GROUP, TOPIC)])
        assert verdict.clean, f"MQLAYER_CHAOS_SEED={self.seed}\n{verdict}"
        assert verdict.messages == self.published


@pytest.fixture
def scene(database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path) -> Iterator[ReceiverScene]:
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    ask_postgres(database_dsn, SINK)
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=redis_url)
        route = create_topic(runtime_of(database, key_prefix, application=database), TOPIC, partitions=2)
        scene = ReceiverScene(database, settings, tmp_path, [int(line.partition) for line in route.ranges])
        yield scene
    for process in scene.running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("role", some_of(["receiver", "async_receiver"], 2))
@pytest.mark.parametrize("place", some_of(["pop.after_receive@3", "pop.before_settle@2", "pop.after_settle@2"], 3))
def test_a_kill_at_work_loses_and_reverses_nothing(scene: ReceiverScene, place: str, role: str) -> None:
    name, _, occurrence = place.partition("@")
    scene.publish(COUNT)
    killed = scene.start("first", f"{name}=kill@{occurrence}", role=role)
    assert killed.wait(40) == -9, "the place was not reached"
    scene.start("second", role=role)
    scene.judge()


@pytest.mark.parametrize("place", some_of(["pop.after_receive@3", "pop.before_settle@2", "pop.after_settle@2"], 3))
def test_a_kill_beside_key_classes_loses_and_reverses_nothing(scene: ReceiverScene, place: str) -> None:
    """Keys of two classes, each with three of its keys out: those of the killed receiver come back in time."""
    here = runtime_of(scene.database, scene.settings.key_prefix, actor="test")
    with Receiver(TOPIC, group=GROUP, settings=scene.settings):
        set_group(here, TOPIC, GROUP, key_class="prefix:1", class_concurrency=3)
    name, _, occurrence = place.partition("@")
    scene.publish(COUNT)
    killed = scene.start("first", f"{name}=kill@{occurrence}")
    assert killed.wait(40) == -9, "the place was not reached"
    scene.start("second")
    scene.judge()


@pytest.mark.parametrize(
    "place",
    some_of(
        ["pop.after_park@2", "pop.after_claim@2", "pop.before_claim@2", "pop.before_parked_commit@2",
         "pop.after_parked_commit@2"],
        5,
    ),
)  # fmt: skip
def test_a_kill_while_keys_are_parked_loses_and_reverses_nothing(scene: ReceiverScene, place: str) -> None:
    """Some messages fail, and are parked at once; an operator releases them again and again."""
    here = runtime_of(scene.database, scene.settings.key_prefix, actor="test")
    with Receiver(TOPIC, group=GROUP, settings=scene.settings, policy="park", attempt_limit=1):
        scene.publish(COUNT)
    name, _, occurrence = place.partition("@")

    def released(condition: Callable[[], bool]) -> Callable[[], bool]:
        def is_so() -> bool:
            release_all(here, TOPIC, GROUP, cause="exhausted")
            return condition()

        return is_so

    killed = scene.start("first", f"{name}=kill@{occurrence}")
    wait_until(lambda: killed.poll() is not None or parked_count(scene) > 1, timeout_s=40, what="keys are parked")
    # Released, a message fails once more.
    set_group(here, TOPIC, GROUP, attempt_limit=3)
    wait_until(released(lambda: killed.poll() is not None), timeout_s=40, what="it is killed")
    assert killed.wait(1) == -9
    scene.start("second")
    wait_until(released(lambda: drained(scene.settings.control_dsn())), timeout_s=40, what="all have their effects")
    scene.judge()


def parked_count(scene: ReceiverScene) -> int:
    [(count,)] = ask_postgres(scene.settings.control_dsn(), "SELECT count(*) FROM mqlayer.parked_key")
    return int(count)


def test_a_kill_before_a_drained_partition_is_reported_leaves_it_to_the_next_one(scene: ReceiverScene) -> None:
    """Cases 20 and 29: the successors wait until somebody has said so."""
    scene.publish(40)
    database, first = scene.database, scene.start("first", "pop.before_drained=kill")
    wait_until(lambda: scene.count() == 40, timeout_s=40, what="the parents are handled")
    route = load_route(database, TOPIC)
    plan = plan_split(route, scene.partitions[0], [200])
    apply_change(runtime_of(database, scene.settings.key_prefix, application=database, actor="test"), plan)
    scene.partitions = [*scene.partitions, *(int(line.partition) for line in load_route(database, TOPIC).ranges)]
    scene.partitions = sorted(set(scene.partitions))
    assert first.wait(40) == -9, "the place was not reached"
    assert find_group(database, TOPIC, GROUP).version == 1
    scene.publish(40)
    scene.start("second")
    scene.judge()
    assert find_group(database, TOPIC, GROUP).version == 2


def test_a_message_that_kills_its_receiver_counts_each_time(scene: ReceiverScene) -> None:
    """Case 59: counted when it is given out, so also where nobody ever answers."""
    scene.publish(1)
    for number in range(3):
        assert scene.start(f"r{number}", "pop.after_receive=kill").wait(40) == -9
    with Receiver(TOPIC, group=GROUP, settings=scene.settings) as receiver:
        (message,) = wait_until(lambda: receiver.receive(wait_s=3), timeout_s=20, what="it comes again")
        assert message.attempt == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "role"), some_of([("key", "receiver"), ("partition", "receiver"), ("key", "async_receiver")], 3)
)
def test_receivers_that_are_killed_at_random_keep_every_key_in_order(
    scene: ReceiverScene, scope: str, role: str
) -> None:
    """Cases 50 to 53: three receivers, one killed after the other, each started again."""
    scene.seed = int(os.environ.get("MQLAYER_CHAOS_SEED", random.randrange(2**32)))
    rng = random.Random(scene.seed)
    scene.publish(100)
    names = ["r-0", "r-1", "r-2"]
    processes = {name: scene.start(name, scope=scope, role=role) for name in names}
    for _ in range(5):
        seen = scene.count()
        scene.publish(40)
        wait_until(partial(scene.is_past, seen), timeout_s=40, what="somebody is at work")
        name = rng.choice(names)
        time.sleep(rng.random() * 0.3)
        processes[name].kill()
        processes[name].wait()
        processes[name] = scene.start(name, scope=scope, role=role)
    scene.judge()
