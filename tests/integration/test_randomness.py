"""Running processes leave Python's global random generator to the program, and to Hypothesis."""

from __future__ import annotations

import random

import pytest

import mqlayer
from mqlayer.producing.backoff import backoff_s, route_backoff_s
from mqlayer.testing import TestApp
from tests.fixtures.consumers import Recorder
from tests.fixtures.wait import wait_until
from tests.proof.world import World


@pytest.mark.world(partitions=1)
def test_members_a_relay_and_a_producer_do_not_draw_from_it(world: World) -> None:
    """Each with a new connection to Postgres, a handler that fails, and a heartbeat."""
    app, ordered, shared = mqlayer.App(world.settings(lease_s=10.0)), Recorder(), Recorder()
    failing = {"ordered", "shared"}

    def fail_once(group: str) -> None:
        if group in failing:
            failing.discard(group)
            raise ValueError(group)

    @app.consumer("orders", group="ordered", backoff_s=(0.01,))
    def in_order(body: bytes, ctx: mqlayer.Context) -> None:
        fail_once("ordered")
        ordered(body, ctx)

    @app.consumer("orders", group="shared", mode="shared", backoff_s=(0.01,))
    async def in_any_order(body: bytes, ctx: mqlayer.Context) -> None:
        fail_once("shared")
        shared(body, ctx)

    before = random.getstate()
    with world.relay(), world.producer() as producer:
        app.start()
        world.publish(2)
        producer.send("orders", key="k", body=b"x")
        wait_until(lambda: (ordered.count(), shared.count()) == (3, 3), what="all to be handled")
        app.stop()
    assert random.getstate() == before


def test_a_test_app_and_intervals_between_tries_do_not_draw_from_it() -> None:
    app, tries = mqlayer.App(), []
    before = random.getstate()

    @app.consumer("orders", group="ledger", backoff_s=(1.0,), jitter=0.5)
    def handle(body: bytes) -> None:
        tries.append(body)
        if len(tries) == 1:
            raise ValueError(body)

    with TestApp(app) as test:
        test.publish("orders", b"x", key="k")
        test.run_until_idle(raises=False)
    assert len(tries) == 2
    waits = [wait(failures) for wait in (backoff_s, route_backoff_s) for failures in range(1, 20)]
    assert all(0 <= wait_s <= 1 for wait_s in waits)
    assert len(set(waits)) > 1
    assert random.getstate() == before
