"""Whom a change of a group's membership wakes: those that lose or gain partitions, nobody else."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from mqlayer.groups import Group, GroupSettings, MemberSession, ensure_group, join, leave, release, send_heartbeat
from mqlayer.groups.members import end_dead, start_leaving
from mqlayer.groups.wakeups import NAMED, wakes, wakeups
from mqlayer.postgres.notifications import GROUP
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Stage as ConsumerStage
from tests.fixtures.consumers import StartStage, member_of
from tests.fixtures.wait import wait_until

PARTITIONS = 12
LEASE_S = 60.0


class WokenMembers:
    """Members of a group that beat when they are woken only, and give back what is asked for."""

    def __init__(self, stage: ConsumerStage, listening: psycopg.Connection[Any]) -> None:
        self._database, self._listening = stage.database, listening
        name = f"woken-{uuid.uuid4().hex[:8]}"
        self.group: Group = ensure_group(
            stage.runtime, RouteCache(stage.database), topic=stage.topic, name=name, settings=GroupSettings()
        )
        self.sessions: dict[str, MemberSession] = {}
        self.beats: Counter[str] = Counter()

    def join(self, name: str) -> None:
        """Have one join, and all that are woken go on."""
        self.sessions[name] = join(self._database, group_id=self.group.group_id, member_id=name, lease_s=LEASE_S)
        self._beat(name)
        self.go_on()

    def leave(self, name: str) -> None:
        """Have one give all back, and leave."""
        start_leaving(self._database, self.sessions[name])
        self.go_on()
        leave(self._database, self.sessions.pop(name))
        self.go_on()

    def die(self, name: str) -> None:
        """Have somebody see one's process end."""
        end_dead(self._database, self.sessions.pop(name))
        self.go_on()

    def go_on(self) -> None:
        """Let each that is woken beat, until nobody is."""
        while woken := self._woken():
            for name in woken:
                self._beat(name)

    def held(self) -> Counter[str]:
        """Return how many partitions each has that nobody asks back."""
        found: Counter[str] = Counter()
        for name, session in self.sessions.items():
            reply = send_heartbeat(self._database, session, lease_s=LEASE_S)
            found[name] = sum(not one.release for one in reply.assignments)
        return found

    def _woken(self) -> list[str]:
        # Behind an answer, all of earlier commits have come.
        self._listening.execute("SELECT 1")
        payloads = [one.payload for one in self._listening.notifies(timeout=0)]
        return [
            name for name in self.sessions if any(wakes(payload, self.group.group_id, name) for payload in payloads)
        ]

    def _beat(self, name: str) -> None:
        self.beats[name] += 1
        session = self.sessions[name]
        asked = [one for one in send_heartbeat(self._database, session, lease_s=LEASE_S).assignments if one.release]
        if asked:
            release(self._database, session, *asked)


@contextmanager
def woken_members(stage: ConsumerStage) -> Iterator[WokenMembers]:
    """Lend a group without members."""
    with psycopg.connect(stage.dsn, autocommit=True) as listening:
        listening.execute(f"LISTEN {GROUP}")
        yield WokenMembers(stage, listening)


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> ConsumerStage:
    """A topic of 12 partitions."""
    return start_stage(redis_url, partitions=PARTITIONS)


def rolled(stage: ConsumerStage, count: int) -> tuple[int, int]:
    """Return how many heartbeats it takes to restart each of so many members, and how many the last one took."""
    with woken_members(stage) as members:
        for number in range(count):
            members.join(f"m{number}")
        assert sum(members.held().values()) == PARTITIONS
        members.beats.clear()
        last = 0
        for number in range(count):
            last = members.beats.total()
            members.leave(f"m{number}")
            members.join(f"m{number}")
        shares = members.held()
        assert sum(shares.values()) == PARTITIONS
        assert max(shares.values()) - min(shares.values()) <= 1
        return members.beats.total(), members.beats.total() - last


def test_a_rolling_restart_does_not_cost_the_square_of_the_members(stage: ConsumerStage) -> None:
    """Each is woken for what it loses or gains: with all of a group woken, three times the members took nine times."""
    (few, _), (many, last) = rolled(stage, 3), rolled(stage, 9)
    assert many <= 3 * few
    # It gives up 2 partitions and gets 1: at most three others and itself are concerned.
    assert last <= 9


def test_who_neither_loses_nor_gains_is_not_woken(stage: ConsumerStage) -> None:
    """One without a partition may come and go, and die, with nobody's notice."""
    with woken_members(stage) as members:
        for number in range(PARTITIONS):
            members.join(f"m{number}")
        members.beats.clear()
        members.join("one-more")
        members.leave("one-more")
        members.join("one-more")
        members.die("one-more")
        assert set(members.beats) == {"one-more"}
        members.die("m0")
        assert len(members.beats) == 2, "one gets a second partition"


def test_more_members_than_a_payload_holds_are_named_in_several() -> None:
    names = {f"m{number:03d}" + "x" * 59 for number in range(2 * NAMED + 1)}
    payloads = wakeups(7, names)
    assert [len(payload.split()) - 1 for payload in payloads] == [NAMED, NAMED, 1]
    assert max(len(payload.encode()) for payload in payloads) < 8_000
    assert all(sum(wakes(payload, 7, name) for payload in payloads) == 1 for name in names)
    assert not any(wakes(payload, 70, name) for payload in payloads for name in names)


def test_a_payload_without_names_is_for_all_of_its_group_and_an_empty_one_for_all() -> None:
    assert wakes("7", 7, "a")
    assert wakes("7", 7)
    assert wakes("", 8, "a")
    assert not wakes("7", 8, "a")
    assert not wakes("7 a b", 7, "c")
    assert not wakes("7 a b", 7), "a receiver is no member"


def test_a_hand_over_goes_on_without_any_notification(
    start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is lost costs the time until the next heartbeat."""
    monkeypatch.setattr("mqlayer.consuming.api.app.App._wake_members", lambda *_: None)
    stage = start_stage(redis_url, partitions=4)
    first = member_of(stage.consume(lambda _: None))
    wait_until(lambda: len(first.owned()) == 4, what="all partitions")
    second = member_of(stage.consume(lambda _: None))
    wait_until(lambda: [len(first.owned()), len(second.owned())] == [2, 2], what="half each")
