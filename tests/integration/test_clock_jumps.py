"""Case 82: the clocks of members are set forward and back by a minute, and nothing comes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.proxy import TcpProxy

JUMPS_LEASE_S = 5.0


class WallClock:
    """The wall clock of this process, off by some seconds: what Redis, Postgres and the kernel know stays as it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off_s = 0
        true, true_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: true() + self.off_s)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() + self.off_s * 10**9)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """The clock of all members here."""
    return WallClock(monkeypatch)


@pytest.fixture
def proxy(database_dsn: str) -> Iterator[TcpProxy]:
    """A way to Postgres, to be broken."""
    with TcpProxy("127.0.0.1", int(str(conninfo_to_dict(database_dsn)["port"]))) as proxy:
        yield proxy


@pytest.mark.full
@pytest.mark.slow
def test_a_clock_that_jumps_by_a_minute_moves_no_partition_and_holds_nothing_up(stage: Stage, wall: WallClock) -> None:
    """Case 82: for longer than a lease after each jump all is as it was, and no member takes its lease for over."""
    recorders, settings = [Recorder(), Recorder()], stage.settings(lease_s=JUMPS_LEASE_S)
    members = [member_of(stage.consume(recorder, settings=settings)) for recorder in recorders]
    wait_until(lambda: len(set(stage.owners().values()) - {None}) == 2, timeout_s=20, what="one partition each")
    keys = [stage.key_in(partition) for partition in stage.partitions]
    stage.send((key, b"0") for key in keys)
    stage.wait_settled()
    before, numbers, longest_s, went_on = stage.assignments(), itertools.count(1), dict[int, float](), True
    for off_s in (60, -60):
        wall.off_s = off_s
        jumped = sent = awake_s()
        longest_s[off_s] = 0.0
        went_on &= all(member._heartbeat.lease.holds() for member in members)
        while sent < jumped + 1.2 * JUMPS_LEASE_S:
            number = b"%d" % next(numbers)
            stage.send((key, number) for key in keys)
            wait_until(lambda n=number: all(r.bodies()[-1:] == [n] for r in recorders), what="handled")  # type: ignore[misc]
            longest_s[off_s], sent = max(longest_s[off_s], awake_s() - sent), awake_s()
    stage.wait_settled()
    assert went_on
    assert max(longest_s.values()) < JUMPS_LEASE_S, longest_s
    assert stage.assignments() == before
    count = next(numbers)
    assert [recorder.bodies() for recorder in recorders] == [[b"%d" % number for number in range(count)]] * 2


def test_a_clock_that_is_set_back_lets_no_member_go_on_past_its_lease(
    stage: Stage, wall: WallClock, proxy: TcpProxy
) -> None:
    """Cases 41 and 82: cut off from Postgres then, a member has stopped before its partitions are given away."""
    dsn = make_conninfo(stage.dsn, host="127.0.0.1", port=proxy.port)
    # So large a margin that this process may stand still before it asks.
    settings = stage.settings(lease_s=10.0, lease_margin=0.6, dsn=SecretStr(dsn))
    member = member_of(stage.consume(Recorder(), settings=settings))
    wait_until(lambda: len(member.owned()) == 2, what="it holds partitions")
    with stage.database.connection() as connection:
        wall.off_s = -60
        proxy.blackhole()
        wait_until(lambda: not member._heartbeat.lease.holds(), timeout_s=20, what="it stopped by itself")
        left = connection.execute("SELECT lease_until > clock_timestamp() FROM mqlayer.member").fetchone()
    proxy.heal()
    assert left == (True,)
