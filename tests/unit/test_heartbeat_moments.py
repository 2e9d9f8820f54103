"""When members of a process beat: at moments that they share."""

from __future__ import annotations

import pytest

from mqlayer.postgres.database import Database
from mqlayer.runtime import heartbeat_sender
from mqlayer.runtime.heartbeat_sender import HeartbeatSender


class Time:
    """A clock that stands at a moment."""

    now = 0.0

    def monotonic(self) -> float:
        """Return the moment."""
        return self.now


@pytest.mark.parametrize("most_s", [0.05, 0.1, 1.0, 3.3, 20.0])
def test_members_of_a_process_beat_at_few_common_moments(monkeypatch: pytest.MonkeyPatch, most_s: float) -> None:
    time, sender = Time(), HeartbeatSender(Database("postgresql://nowhere/"))
    monkeypatch.setattr(heartbeat_sender, "time", time)
    moments = set[int]()
    for number in range(200):
        time.now = 1_000_000 + most_s * number / 200
        wait_s = sender.wait_s(most_s)
        assert 0.8 * most_s <= wait_s <= most_s
        moments.add(round((time.now + wait_s) * 1e6))
    assert len(moments) <= 11


def test_processes_do_not_share_their_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_sender, "time", Time())
    assert len({HeartbeatSender(Database("postgresql://nowhere/")).wait_s(1.0) for _ in range(5)}) > 1


def test_members_that_beat_less_often_share_the_moments_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_sender, "time", Time())
    sender = HeartbeatSender(Database("postgresql://nowhere/"))
    apart_s = sender.wait_s(3.3) - sender.wait_s(1.0)
    assert apart_s % 0.125 == pytest.approx(0, abs=1e-6) or apart_s % 0.125 == pytest.approx(0.125, abs=1e-6)
