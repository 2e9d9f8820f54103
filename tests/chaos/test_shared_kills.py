"""Members of shared groups that are killed, at each place between two writes: nothing is lost, each fenced effect is
there once, and a message is dead or pending, never both.

Cases 59, 67 and 77.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mqlayer.redelivery import DeadFilter, reclaim_shared, start_redrive, work_on
from mqlayer.redis.keys import pop_keys
from mqlayer.routes import apply_change, plan_split
from mqlayer.runtime.route_cache import load_route
from tests.chaos.actors import GROUP
from tests.fixtures.consumers import LEASE_S, Recorder, Stage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.shared_members import due, pending, share
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]
COUNT: Final = 120


class SharedScene:
    """A stage with a sink, members in processes of their own, and what they leave."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage, self.directory = stage, directory
        self.running: list[Process] = []
        self.sql("CREATE TABLE public.shared_sink (body text, source int, lp int, seq bigint)")

    def start(self, name: str, failpoints: str = "", role: str = "sharer", key_class: str = "") -> Process:
        """Start a member, to be killed at a place."""
        environment = os.environ | {
            "MQLAYER_DSN": self.stage.dsn,
            "MQLAYER_KEY_PREFIX": self.stage.prefix,
            "MQLAYER_LEASE_S": str(LEASE_S),
            **({"MQLAYER_TEST_KEY_CLASS": key_class} if key_class else {}),
            **armed(failpoints),
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            process = start_python(
                "tests.chaos.actors", role, name, str(self.directory),
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        self.running.append(process)
        return process

    def sql(self, text: str) -> list[tuple[object, ...]]:
        """Run a statement on the database."""
        with self.stage.database.connection() as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def sink(self) -> list[str]:
        """Return the effects, sorted."""
        return sorted(str(body) for (body,) in self.sql("SELECT body FROM public.shared_sink"))

    def dead(self) -> list[bytes]:
        """Return the bodies of what is dead."""
        rows = self.sql("SELECT body FROM mqlayer.dead_message WHERE redriven_at IS NULL")
        return [bytes(body) for (body,) in rows]  # type: ignore[call-overload]

    def begun(self) -> Counter[str]:
        """Return how often each body was begun."""
        lines = [line for path in self.directory.glob("*.begun") for line in path.read_text().splitlines()]
        return Counter(line.split()[0] for line in lines)


@pytest.fixture
def scene(stage: Stage, tmp_path: Path) -> Iterator[SharedScene]:
    scene = SharedScene(stage, tmp_path)
    yield scene
    for process in scene.running:
        process.kill()
        process.wait()


def send(stage: Stage, *special: bytes) -> list[str]:
    """Publish numbers, and special ones among them; return the numbers, sorted."""
    bodies = [b"%d" % number for number in range(COUNT)]
    stage.send((f"key-{at % 7}", body) for at, body in enumerate([*bodies[:30], *special, *bodies[30:]]))
    return sorted(body.decode() for body in bodies)


@pytest.mark.parametrize(
    "place",
    some_of([
        "shared.after_due@2", "shared.after_handling@2", "shared.after_settle@2", "shared.before_dead_commit",
        "shared.after_dead",
    ], 3),
)  # fmt: skip
def test_a_kill_loses_nothing_and_writes_off_what_failed_once(scene: SharedScene, place: str) -> None:
    """Case 67: exactly one of pending and dead, wherever its member dies; other places are further down."""
    numbers = send(scene.stage, b"bad")
    name, _, occurrence = place.partition("@")
    killed = scene.start("first", f"{name}=kill@{occurrence or 1}")
    assert killed.wait(40) == -9, "the place was not reached"
    scene.start("second")
    scene.stage.wait_settled(GROUP, timeout_s=40)
    assert scene.sink() == numbers
    assert scene.dead() == [b"bad"]
    assert scene.sql("SELECT count(*) FROM mqlayer.dead_message") == [(1,)]
    assert scene.begun()["bad"] <= 4
    for partition in scene.stage.partitions:
        assert sum(pending(scene.stage, partition, GROUP).values()) == 0


@pytest.mark.parametrize(
    "place",
    some_of(["shared.after_defer", "shared.before_defer", "shared.after_deferred@3"], 1),
)
def test_a_member_that_is_killed_at_a_flood_leaves_it_to_others(scene: SharedScene, place: str) -> None:
    """What it had deferred, or was about to, or had taken: handled once, by members with classes or without."""
    stage = scene.stage
    numbers = [f"{number}" for number in range(400)]
    stage.send((f"big/{body}", body.encode()) for body in numbers)
    name, _, occurrence = place.partition("@")
    killed = scene.start("first", f"{name}=kill@{occurrence or 1}", key_class="prefix:/")
    assert killed.wait(40) == -9, "the place was not reached"
    group_id = stage.group_id(GROUP)
    indexed = sum(stage.redis.zcard(pop_keys(stage.prefix, one, group_id).queues) for one in stage.partitions)
    assert indexed > 0 or name == "shared.before_defer"
    scene.start("second", key_class="prefix:/")
    stage.wait_settled(GROUP, timeout_s=40)
    assert scene.sink() == sorted(numbers)
    for partition in stage.partitions:
        assert sum(pending(stage, partition, GROUP).values()) == due(stage, partition, GROUP) == 0


def test_a_message_that_ends_its_process_each_time_dies_and_its_neighbours_do_not(scene: SharedScene) -> None:
    """Case 59: an attempt is counted before it is begun, alone at last."""
    numbers = send(scene.stage, b"fatal")
    deaths = 0
    for number in range(8):
        process = scene.start(f"m{number}")
        wait_until(lambda p=process: p.poll() is not None or settled(scene), timeout_s=40, what="ended, or done")  # type: ignore[misc]
        if process.poll() is None:
            break
        deaths += 1
    assert settled(scene)
    assert scene.sink() == numbers
    assert scene.dead() == [b"fatal"]
    assert 3 <= deaths <= 5
    assert scene.begun()["fatal"] == deaths


def settled(scene: SharedScene) -> bool:
    """Say whether the group exists and has settled everything."""
    rows = scene.sql(f"SELECT 1 FROM mqlayer.consumer_group WHERE name = '{GROUP}' AND state = 'live'")
    return bool(rows) and scene.stage.all_settled(GROUP)


def test_what_a_dead_member_had_is_due_after_a_scan_also_one_that_is_killed_and_one_that_runs_twice(
    scene: SharedScene,
) -> None:
    numbers = send(scene.stage)
    assert scene.start("first", "shared.after_read=kill").wait(40) == -9
    had = sum(sum(pending(scene.stage, p, GROUP).values()) for p in scene.stage.partitions)
    assert had > 0

    def scanned() -> bool:
        assert scene.start("scan", "shared.after_reclaim=kill", role="reclaimer").wait(40) == -9
        return sum(due(scene.stage, p, GROUP) for p in scene.stage.partitions) == had

    wait_until(scanned, timeout_s=40, what="all of it is due")
    assert reclaim_shared(scene.stage.runtime) == 0
    scene.start("second")
    scene.stage.wait_settled(GROUP, timeout_s=40)
    assert scene.sink() == numbers


def test_a_member_that_wakes_late_neither_repeats_nor_writes_off_what_others_handled(scene: SharedScene) -> None:
    """Cases 67 and 77: it was stopped for longer than the visibility timeout, at work on two messages."""
    stage = scene.stage
    stage.send([("k", b"late"), ("l", b"late-bad")])
    process = scene.start("first")
    wait_until(lambda: len(scene.begun()) == 2, timeout_s=40, what="it is at work on both")
    process.send_signal(signal.SIGSTOP)
    recorder = Recorder()
    other = share(stage, recorder, group=GROUP)
    stage.wait_settled(GROUP, timeout_s=40)
    # After a stall the other member gets its own messages again, too.
    assert set(recorder.bodies()) == {b"late", b"late-bad"}
    other.stop()
    (scene.directory / "go").touch()
    process.send_signal(signal.SIGCONT)
    # It has told what it had to tell once it has ended in order.
    wait_until(lambda: "handler_failed" in (scene.directory / "first.log").read_text(), what="its handler failed")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert scene.sql("SELECT count(*) FROM mqlayer.dead_message") == [(0,)]
    assert stage.all_settled(GROUP)


def test_a_kill_during_a_split_leaves_a_parent_that_the_next_member_drains(scene: SharedScene) -> None:
    """Case 24 without order: what was in hand is handled, each effect once."""
    stage = scene.stage
    numbers = send(stage)
    [parent, _] = stage.partitions
    line = stage.route.ranges[0]
    killed = scene.start("first", "shared.before_settle=kill@3")
    wait_until(scene.begun, timeout_s=40, what="it is at work")
    middle = (line.lp_from + line.lp_to) // 2
    plan = plan_split(stage.route, line.partition, [middle])
    apply_change(runtime_of(stage.database, stage.prefix, application=stage.database, actor="test"), plan)
    stage.route = load_route(stage.database, stage.topic)
    stage.partitions = [one.partition for one in stage.route.ranges]
    stage.send((f"key-{at % 7}", b"%d" % (COUNT + at)) for at in range(COUNT))
    numbers = sorted([*numbers, *(str(COUNT + at) for at in range(COUNT))])
    assert killed.wait(40) == -9
    scene.start("second")
    stage.wait_retired(parent)
    stage.wait_settled(GROUP, timeout_s=40)
    assert scene.sink() == numbers


def test_dead_messages_that_are_given_back_survive_kills_of_whoever_has_them(scene: SharedScene) -> None:
    """Cases 59 and 68: they are handled from Postgres; one that ends its process dies, its neighbours do not."""
    stage = scene.stage
    stage.send([("k", b"mended"), ("l", b"cursed"), ("m", b"mended"), ("n", b"mended")])
    first = scene.start("first")
    wait_until(lambda: len(scene.dead()) == 4, timeout_s=40, what="all are dead")
    first.kill()
    first.wait()
    (scene.directory / "go").touch()
    redrive = start_redrive(runtime_of(stage.database, actor="test"), stage.topic, GROUP, DeadFilter(), worker="w")
    assert work_on(stage.database, redrive, worker="w").done == 4
    assert scene.start("second", "shared.after_claim=kill").wait(40) == -9

    def over() -> bool:
        return scene.sql("SELECT 1 FROM mqlayer.parked_key") == []

    deaths = 0
    for number in range(8):
        process = scene.start(f"m{number}")
        wait_until(lambda p=process: p.poll() is not None or over(), timeout_s=40, what="ended, or done")  # type: ignore[misc]
        if process.poll() is None:
            break
        deaths += 1
    assert over()
    assert scene.sink() == ["mended"] * 3
    assert scene.dead() == [b"cursed"]
    assert deaths == 3, "as many as it has attempts"
