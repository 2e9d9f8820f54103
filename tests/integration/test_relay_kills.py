"""Case 72 for the relay: killed at every place between two writes, and every chain is whole afterwards."""

from __future__ import annotations

import signal

import pytest

from mqlayer.domain.routing import lp_of
from mqlayer.outbox import retry_quarantined
from mqlayer.postgres.database import Database
from mqlayer.relay import relay_once
from tests.fixtures.forked_programs import Process, is_stopped
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.failpoint_names import failpoint_names
from tests.proof.partition_values import fall_back, snapshot
from tests.proof.world import QUICK, World

# Rows are voided in topics of the strategy best_effort only: test_voided.
RELAY_FAILPOINTS = sorted(name for name in failpoint_names() if name.startswith("relay.") and "voided" not in name)
ONCE = {
    "relay.after_identity",
    "relay.before_source",
    "relay.after_source",
    "relay.after_claim",
    "relay.before_lower",
    "relay.after_lower",
    "relay.before_release",
    "relay.before_term",
    "relay.after_term",
}
"""Places that a relay passes once in its life, once for a node, or once for a fall-back."""
PLACES = [(name, nth) for name in RELAY_FAILPOINTS for nth in ((1,) if name in ONCE else (1, 2))]


@pytest.fixture(autouse=True)
def _backlog(world: World) -> None:
    world.publish(60)


@pytest.mark.parametrize(("name", "nth"), some_of(PLACES, 7))
def test_a_relay_killed_at_any_failpoint_leaves_chains_that_the_next_one_completes(
    world: World, name: str, nth: int
) -> None:
    _make_reachable(world, name)
    with world.relay_process(failpoints=f"{name}=kill@{nth}", chunk_rows=8) as process:
        if name == "relay.before_release":
            world.wait_until_whole()
            process.send_signal(signal.SIGTERM)
        wait_until(lambda: _publish_until_dead(world, process), timeout_s=60, what=f"{name} to be reached")
        assert process.returncode == -signal.SIGKILL
    with world.relay():
        _repair(world)
        world.publish(20, tag="after")
        world.wait_until_whole()


@pytest.mark.parametrize("name", some_of(["relay.after_send", "relay.after_append", "relay.before_progress"], 3))
def test_a_relay_stopped_past_its_lease_wakes_up_beside_its_successor(world: World, name: str) -> None:
    with world.relay_process(failpoints=f"{name}=stop") as process:
        wait_until(lambda: is_stopped(process), timeout_s=60, what=f"{name} to be reached")
        with world.relay():
            world.publish(100, tag="while")
            world.wait_until_whole()
            process.send_signal(signal.SIGCONT)
            world.publish(100, tag="awake")
            world.wait_until_whole()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0


def test_a_relay_told_to_end_finishes_and_gives_its_lps_back(world: World) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        world.publish(100, tag=f"before-{number}")
        with world.relay_process() as process:
            world.wait_until_whole()
            process.send_signal(number)
            assert process.wait(timeout=20) == 0
        assert world.rows("SELECT count(*)::int FROM mqlayer_app.lp_set WHERE relay_id IS NOT NULL") == [(0,)]
        assert world.rows("SELECT count(*)::int FROM mqlayer_app.relay") == [(0,)]


def test_the_compensating_pass_makes_up_for_a_killed_relay(world: World) -> None:
    with world.relay_process(failpoints="relay.after_send=kill") as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    wait_until(lambda: relay_once(world.settings(), limits=QUICK) + world.whole(), what="the lease of the dead to end")
    world.wait_until_whole()


def _make_reachable(world: World, name: str) -> None:
    """Have something to do at places that a relay does not come by every day."""
    if "quarantine" in name:
        for key in ("key-1", "key-2"):
            _spoil(world, lp_of(key.encode()))
    if "of_lps" in name:
        # A backlog that is thin among the ids is read by LP.
        world.rows("SELECT setval('mqlayer_app.outbox_number', 100000)")
    if "_lower" in name:
        # The node holds nothing of what was recorded as relayed.
        before = snapshot(world)
        relay_once(world.settings(), limits=QUICK)
        fall_back(world, before)


def _publish_until_dead(world: World, process: Process) -> bool:
    world.publish(5, tag="while")
    return process.poll() is not None


def _spoil(world: World, lp: int) -> None:
    world.rows("UPDATE mqlayer_app.outbox SET key = repeat('x', 600) WHERE lp = %s AND seq = 2", lp)


def _repair(world: World) -> None:
    world.rows("UPDATE mqlayer_app.outbox SET key = 'repaired' WHERE length(key) > 512")
    with Database(world.dsn) as database:
        retry_quarantined(database)
