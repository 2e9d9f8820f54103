"""Each place between two writes around an effect, hit by a kill: effects by the inbox and by versions happen once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest

from mqlayer.domain.message import Identity
from mqlayer.idempotency import InboxEntry, inbox_stats, record_effect, version_gaps
from tests.chaos.effect_actors import SINK
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.variants import some_of

ROOT: Final = Path(__file__).parents[2]


class EffectScene:
    """A topic, a sink, and the processes that a test starts."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage, self._directory = stage, directory
        self.running: list[Process] = []
        self.rows(SINK)

    def start(self, role: str, failpoints: str = "") -> Process:
        """Start a process, to be killed at a place."""
        environment = os.environ | {
            "MQLAYER_DSN": self.stage.dsn,
            "MQLAYER_KEY_PREFIX": self.stage.prefix,
            "MQLAYER_LEASE_S": "1.0",
            **armed(failpoints),
        }
        with (self._directory / "said").open("ab") as out, (self._directory / "log").open("ab") as log:
            actor = "tests.chaos.effect_actors"
            process = start_python(actor, role, cwd=ROOT, env=environment, stdout=out, stderr=log)
        self.running.append(process)
        return process

    def run(self, role: str, failpoints: str = "") -> int:
        """Run a process to its end."""
        return self.start(role, failpoints).wait(40)

    def said(self) -> list[str]:
        """Return what processes said."""
        return (self._directory / "said").read_text().splitlines()

    def rows(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement; return its rows."""
        return ask_postgres(self.stage.dsn, statement)

    def sink(self) -> dict[object, list[object]]:
        """Return the effects of each entity in their order."""
        found: dict[object, list[object]] = {}
        for entity, value in self.rows("SELECT entity, value FROM sink ORDER BY position"):
            found.setdefault(entity, []).append(value)
        return found


@pytest.fixture
def scene(start_stage: StartStage, redis_url: str, tmp_path: Path) -> Iterator[EffectScene]:
    scene = EffectScene(start_stage(redis_url), tmp_path)
    yield scene
    for process in scene.running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", some_of(["inbox.before@20", "inbox.after@20", "handler.after_success@20"], 3))
def test_a_kill_around_the_inbox_repeats_and_loses_no_effect(scene: EffectScene, place: str) -> None:
    """Case 77."""
    name, _, nth = place.partition("@")
    scene.stage.send((f"key-{number % 7}", b"%d" % number) for number in range(60))
    assert scene.run("note", f"{name}=kill@{nth}") == -9, "the place was not reached"
    scene.start("note")
    scene.stage.wait_settled()
    assert sorted(scene.sink()[""], key=lambda value: int(str(value))) == [str(number) for number in range(60)]


@pytest.mark.parametrize("place", some_of(["version.after_take@40", "handler.after_success@40"], 2))
def test_a_kill_around_a_version_repeats_loses_and_reverses_nothing(scene: EffectScene, place: str) -> None:
    """Case 78: what was held is there, what was not committed is delivered again."""
    name, _, nth = place.partition("@")
    sent = [(None, b"e%d:%d" % (entity, version)) for entity in range(4) for version in range(1, 21)]
    random.Random(5).shuffle(sent)
    scene.stage.send(sent)
    assert scene.run("version", f"{name}=kill@{nth}") == -9, "the place was not reached"
    scene.start("version")
    scene.stage.wait_settled()
    assert scene.sink() == {f"e{entity}": [str(version) for version in range(1, 21)] for entity in range(4)}


def test_a_kill_of_the_cleaning_leaves_the_rest_to_the_next(scene: EffectScene) -> None:
    with psycopg.connect(scene.stage.dsn) as connection:
        record_effect(connection, InboxEntry(1, "g", "orders", Identity(1, 2, 3)))
    assert scene.run("clean", "inbox.before_forget=kill") == -9
    assert len(inbox_stats(scene.stage.database)) == 1
    assert scene.run("clean") == 0
    assert inbox_stats(scene.stage.database) == []


def test_a_kill_before_an_alarm_is_told_leaves_the_gap_to_be_seen_and_the_next_alarm(scene: EffectScene) -> None:
    """Case 78."""
    hold_early(scene)
    scene.rows("UPDATE mqlayer_app.entity_version SET alarm_at = now()")
    assert scene.run("watch", "version.before_alarm=kill") == -9
    assert len(version_gaps(scene.stage.database, "sink")) == 1
    assert scene.run("watch") == 0
    assert scene.said() == []
    scene.rows("UPDATE mqlayer_app.entity_version SET alarm_at = alarm_at - interval '1 hour 1 second'")
    assert scene.run("watch") == 0
    assert scene.said() == ["version_gap"]


def test_a_kill_between_an_act_and_its_audit_row_leaves_the_row(scene: EffectScene) -> None:
    hold_early(scene)
    assert scene.run("say", "version.after_audit=kill") == -9
    assert scene.rows("SELECT act FROM mqlayer.audit WHERE object = 'sink/e'") == [("versions set",)]
    assert not version_gaps(scene.stage.database)[0].released
    assert scene.run("say") == 0
    assert version_gaps(scene.stage.database)[0].released


def hold_early(scene: EffectScene) -> None:
    """Have version 2 of an entity come first."""
    scene.rows("SELECT mqlayer_app.version_take_v1('sink', 'e', 2, '', '{}', '', 1, 9, 999, 9, 999, 60)")
