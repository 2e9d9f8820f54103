"""The number of members that a group needs: read as a scaler does, and in a loop with a group that follows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from mqlayer.maintenance.sampling import take_samples
from mqlayer.metrics.catalog import CATALOG
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from tests.fixtures.commands import Commands
from tests.fixtures.dead_nodes import consuming, known_group
from tests.fixtures.roles import Roles
from tests.fixtures.wait import wait_until
from tests.proof.world import World

ASKED = "SELECT mqlayer.members_wanted_v1('orders', 'ledger', %s, %s)"
PUT = """
WITH ids AS (SELECT g.group_id, g.topic_id FROM mqlayer.consumer_group g WHERE g.name = 'ledger')
INSERT INTO mqlayer.sample (kind, object_id, at, lag, oldest_s, members, busy, stored)
SELECT k.kind, CASE k.kind WHEN 'group' THEN i.group_id ELSE i.topic_id END,
       date_trunc('minute', now(), 'UTC') - make_interval(mins => s.ago), s.lag, s.oldest_s, s.members, s.busy, s.stored
FROM ids i CROSS JOIN (VALUES ('group'), ('topic')) AS k (kind)
CROSS JOIN unnest(%s::int[], %s::bigint[], %s::float8[], %s::int[], %s::int[], %s::bigint[])
    AS s (ago, lag, oldest_s, members, busy, stored)
"""


@dataclass
class Group:
    """A group whose members handle so many messages a second each; a scaler follows the number each minute."""

    connection: psycopg.Connection[Any]
    partitions: int
    per_member: float
    members: int = 1
    lag: float = 0.0
    stored: float = 0.0
    useful: int = 1_000
    """More members than this find no work."""
    wanted: list[int] = field(default_factory=list)
    oldest_s: list[float] = field(default_factory=list)
    _samples: list[tuple[int, float, int, int, int]] = field(default_factory=list)

    def run(self, minutes: int, per_s: Callable[[int], float]) -> None:
        """Live for so many minutes under a load."""
        for minute in range(minutes):
            rate = per_s(minute)
            capacity = min(self.members, self.useful) * self.per_member
            self.stored += 60 * rate
            self.lag = max(0.0, self.lag + 60 * (rate - capacity))
            waits = self.lag > 0
            in_hand = math.ceil(min(self.partitions, self.members * rate / capacity)) if capacity else 0
            busy = min(self.partitions, self.useful) if waits else in_hand
            self.oldest_s.append(self.lag / max(rate, 1.0))
            seen_lag = int(self.lag) if waits else in_hand
            self._samples.append((seen_lag, self.oldest_s[-1], self.members, busy, int(self.stored)))
            self.wanted.append(self._ask())
            self.members = self.wanted[-1]

    def _ask(self) -> int:
        last = self._samples[-361:]
        columns = [list(column) for column in zip(*last, strict=True)]
        # At one time: a minute may begin between two statements.
        with self.connection.transaction():
            self.connection.execute("DELETE FROM mqlayer.sample")
            self.connection.execute(PUT, [list(range(len(last)))[::-1], *columns])
            row = self.connection.execute(ASKED, (1, 60.0)).fetchone()
        return int(row[0]) if row and row[0] is not None else self.members


def changes(numbers: list[int]) -> int:
    return sum(one != other for one, other in pairwise(numbers))


@pytest.fixture
def connection(world: World, database: Database) -> Any:
    known_group(world, database)
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.world(partitions=32)
def test_the_number_converges_under_a_rising_load_and_does_not_flap(connection: Any) -> None:
    group = Group(connection, partitions=32, per_member=100.0)
    group.run(90, lambda minute: min(800.0, 50.0 + 50.0 * minute))
    # 800 a second need eight members, and ten with the reserve.
    assert set(group.wanted[-45:]) <= {9, 10, 11}
    assert changes(group.wanted[-45:]) <= 2
    assert max(group.oldest_s[20:]) < 120
    assert max(group.oldest_s[-45:]) < 5


@pytest.mark.world(partitions=32)
@pytest.mark.full
def test_the_number_falls_with_the_load_in_steps_and_never_below_what_it_takes(connection: Any) -> None:
    group = Group(connection, partitions=32, per_member=100.0, members=4)
    group.run(30, lambda _: 800.0)
    assert group.wanted[-1] in (10, 11)
    began = len(group.wanted)
    group.run(200, lambda _: 80.0)
    # Ten minutes of lower need first.
    assert min(group.wanted[began : began + 9]) >= 9
    assert set(group.wanted[-60:]) <= {1, 2}
    assert max(group.oldest_s[began + 10 :]) < 120
    assert changes(group.wanted[began:]) <= 12


@pytest.mark.world(partitions=32)
@pytest.mark.full
def test_noise_moves_the_number_by_little(connection: Any) -> None:
    group = Group(connection, partitions=32, per_member=100.0, members=2)
    group.run(180, lambda minute: 400.0 + 80.0 * math.sin(minute * 1.7) + 40.0 * math.cos(minute * 0.9))
    # By then its capacity is known.
    settled = group.wanted[90:]
    assert max(settled) - min(settled) <= 1
    assert changes(settled) <= 6
    assert max(group.oldest_s[90:]) < 5


@pytest.mark.world(partitions=16)
def test_a_hot_key_gets_no_members_that_do_not_help(connection: Any) -> None:
    group = Group(connection, partitions=16, per_member=100.0, useful=1)
    group.run(40, lambda _: 300.0)
    assert max(group.wanted) == 1


def test_more_members_than_partitions_are_never_wanted(connection: Any) -> None:
    group = Group(connection, partitions=2, per_member=10.0)
    group.run(15, lambda _: 500.0)
    assert max(group.wanted) == 2


def test_a_scaler_reads_one_float_by_a_role_that_may_look(
    world: World, database: Database, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_group(world, database)
    with psycopg.connect(roles.login(Right.VIEW), autocommit=True) as scaler:
        assert scaler.execute(ASKED, (0, 60.0)).fetchone() == (None,)
        with psycopg.connect(world.dsn, autocommit=True) as connection:
            Group(connection, partitions=2, per_member=10.0, members=0).run(1, lambda _: 0.0)
            assert scaler.execute(ASKED, (0, 60.0)).fetchone() == (0.0,)
            assert scaler.execute(ASKED, (1, 60.0)).fetchone() == (1.0,)
            assert scaler.execute(ASKED.replace("ledger", "other"), (1, 60.0)).fetchone() == (None,)
            group = Group(connection, partitions=2, per_member=0.0, members=0)
            group.run(2, lambda _: 1.0)
            (asleep,) = scaler.execute(ASKED, (0, 60.0)).fetchone() or (None,)
            assert isinstance(asleep, float)
            assert asleep >= 1
    with (
        psycopg.connect(roles.login(Right.PUBLISH), autocommit=True) as publisher,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        publisher.execute(ASKED, (0, 60.0))
    monkeypatch.setenv("MQLAYER_DSN", world.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", world.key_prefix)
    shown = json.loads(Commands().text("group", "show", "orders", "ledger", "--json"))
    assert shown["members_wanted"] == int(asleep)
    series = CATALOG["mqlayer.group.members_wanted"].series
    assert f'{series}{{group="ledger",topic="orders"}}' in Commands().text("exporter", "--once")


def test_samples_count_members_and_partitions_that_wait(world: World, database: Database) -> None:
    with consuming(world):
        wait_until(lambda: world.rows("SELECT count(*)::int FROM mqlayer.member") == [(1,)], what="a member")
        take_samples(world.runtime())
    assert world.rows("SELECT members, busy FROM mqlayer.sample WHERE kind = 'group'") == [(1, 0)]
