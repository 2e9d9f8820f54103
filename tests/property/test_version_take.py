"""`version_take_v1` against a model: each version is applied once, in order, and nothing that is held gets lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mqlayer import Versions
from mqlayer.domain.message import Identity
from mqlayer.errors import VersionsFull
from mqlayer.receiving.pop_message import PopMessage, Token

HELD: int = 3
VERSIONS = st.integers(0, 8)
numbers = itertools.count()


class Machine(RuleBasedStateMachine):
    """One entity; its state as it ought to be beside what the database has."""

    connection: psycopg.Connection

    def __init__(self) -> None:
        super().__init__()
        self.entity = f"e{next(numbers)}"
        self.versions = Versions("machine", held_messages=HELD, all_messages=1_000_000)
        self.current = 0
        self.held: dict[int, bytes] = {}

    def teardown(self) -> None:
        self.connection.rollback()

    def _run_with(self, *more: int) -> list[int]:
        have = {*self.held, *more}
        return list(itertools.takewhile(have.__contains__, itertools.count(self.current + 1)))

    def _apply(self, run: list[int]) -> None:
        self.current += len(run)
        self.held = {version: body for version, body in self.held.items() if version > self.current}

    @rule(version=VERSIONS, body=st.binary(max_size=4))
    def bring(self, version: int, body: bytes) -> None:
        message = PopMessage(None, body, {}, Identity(1, 2, 3), 1, Token(1, 1, 1, 1), 0)
        run = [] if version <= self.current else self._run_with(version)
        left = {held for held in self.held if held > self.current + len(run)}
        early = version > self.current + len(run) and version not in left
        try:
            taken = self.versions.take(self.connection, message, entity=self.entity, version=version)
        except VersionsFull:
            # The caller may go on in the same transaction: nothing was changed.
            assert early
            assert len(left) >= HELD
            return
        assert not early or len(left) < HELD
        assert [event.version for event in taken] == run
        for event in taken:
            # Which of two with one version: the one that came now, or the one that was held; never anything else.
            assert event.body in {self.held.get(event.version, body), body}
        if early:
            self.held[version] = body
        self._apply(run)

    @rule()
    def take_released(self) -> None:
        run = self._run_with()
        assert [event.version for event in self.versions.take_released(self.connection)] == run
        self._apply(run)

    @rule(version=VERSIONS)
    def say(self, version: int) -> None:
        dropped = [held for held in self.held if held <= version]
        assert self.versions.set(self.connection, entity=self.entity, version=version) == len(dropped)
        for held in dropped:
            del self.held[held]
        self.current = version

    @rule()
    def forget(self) -> None:
        assert self.versions.set(self.connection, entity=self.entity, version=None) == len(self.held)
        self.current, self.held = 0, {}

    @invariant()
    def is_what_it_ought_to_be(self) -> None:
        rows = self.connection.execute(
            "SELECT version, body FROM mqlayer_app.held_version WHERE entity = %s", (self.entity,)
        ).fetchall()
        assert {version: bytes(body) for version, body in rows} == self.held
        row = self.connection.execute(
            "SELECT version, held_messages, held_bytes, missing_since IS NOT NULL, alarm_at IS NOT NULL "
            "FROM mqlayer_app.entity_version WHERE entity = %s",
            (self.entity,),
        ).fetchone()
        size = sum(len(body) + len("{}") for body in self.held.values())
        assert row in {(self.current, len(self.held), size, bool(self.held), bool(self.held))} | (
            {None} if not self.held and self.current == 0 else set()
        )
        total = self.connection.execute(
            "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM mqlayer_app.held_total"
        ).fetchone()
        assert total == (len(self.held), size)


@pytest.fixture
def connection(database_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_dsn) as connection:
        yield connection


def test_versions_are_taken_as_the_model_says(connection: psycopg.Connection) -> None:
    """Case 78."""
    machine = type("Machine", (Machine,), {"connection": connection})
    checks = [HealthCheck.too_slow]
    limits = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=limits)
