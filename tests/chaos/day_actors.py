"""Processes of the day in ten minutes: shoppers, whose load grows and moves, and pilots, who run the autopilot."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psycopg

import mqlayer
from mqlayer.autopilot import Times, auto_routes, explain_routes, set_policy
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from tests.chaos.actors import KEYS, TOPIC, publish_batch
from tests.proof.history import History
from tests.proof.observer import observe_retiring
from tests.proof.runtimes import runtime_of

log = logging.getLogger(__name__)

BEGAN_VARIABLE: Final = "MQLAYER_TEST_DAY_BEGAN"
SECONDS_VARIABLE: Final = "MQLAYER_TEST_DAY_S"
GROWTH: Final = 20
"""The load at noon is so many times that of midnight."""
PER_SHOPPER_S: Final = 9.0
"""Transactions at noon; each has 5.5 messages on average."""
HOT_SHARE: Final = 0.6
HOT_SPOTS: Final = (40, 480, 860)
"""The first LPs of the hot spots of the three parts of a day."""
HOT_LPS: Final = 64
PASS_S: Final = 0.5
CAPACITY_PER_S: Final = 40.0
POLICY: Final[Mapping[str, object]] = {
    "mode": "on", "capacity_per_s": CAPACITY_PER_S, "min_partitions": 4, "max_partitions": 24, "cool_down_s": 5.0,
    "changes_per_hour": 720,
}  # fmt: skip


def day_times(day_s: float) -> Times:
    """Return the autopilot's windows for so short a day."""
    look_back_s = max(8.0, day_s / 25)
    return Times(
        window_s=look_back_s / 6,
        look_back_s=look_back_s,
        settle_s=3.0,
        sample_s=1.0,
        gap_s=look_back_s / 40,
        again_s=3.0,
    )


def load_at(part: float) -> float:
    """Return the load as a part of noon's, at a part of the day."""
    low = 1 / GROWTH
    return low + (1 - low) * math.sin(math.pi * min(1.0, max(0.0, part))) ** 2


def shop(name: str, directory: Path, stopping: threading.Event) -> None:
    """Publish as the time of the day demands, most of it to the hot spot of the hour."""
    began, day_s = float(os.environ[BEGAN_VARIABLE]), float(os.environ[SECONDS_VARIABLE])
    rng, turn = random.Random(f"{name}/{os.getpid()}"), 0
    all_keys = [f"key-{number}" for number in range(KEYS)]
    hot = [[key for key in all_keys if first <= lp_of(key.encode()) < first + HOT_LPS] for first in HOT_SPOTS]
    with History(directory, name) as history:
        while not stopping.is_set():
            with contextlib.suppress(psycopg.Error), psycopg.connect(os.environ["MQLAYER_DSN"]) as connection:
                while not stopping.is_set():
                    turn += 1
                    part = (time.monotonic() - began) / day_s
                    spot = hot[min(len(hot) - 1, max(0, int(part * len(hot))))]
                    keys = [
                        rng.choice(spot if rng.random() < HOT_SHARE else all_keys) for _ in range(rng.randint(1, 10))
                    ]
                    publish_batch(connection, history, keys, rng, f"{name}/{os.getpid()}/{turn}")
                    stopping.wait(rng.uniform(0.5, 1.5) / (PER_SHOPPER_S * load_at(part)))
            stopping.wait(0.1)


def pilot(name: str, directory: Path, stopping: threading.Event) -> None:
    """Run passes of the autopilot; turn it on again where it stopped itself, as an operator would."""
    settings = mqlayer.Settings()
    times = day_times(float(os.environ[SECONDS_VARIABLE]))
    with History(directory, name) as history, Database(settings.control_dsn(), application=name) as database:
        observe_retiring(history, TOPIC)
        runtime = runtime_of(database, settings.key_prefix, application=database, actor=name)
        while not stopping.wait(PASS_S):
            try:
                if auto_routes(runtime, times=times).topics and explain_routes(runtime, TOPIC, last=0).state.stopped_at:
                    set_policy(runtime, TOPIC, mode="on")
            except mqlayer.MqlayerError as error:
                # A node or Postgres is away, or the other pilot was faster: the next pass goes on.
                log.warning("%s: %s", type(error).__name__, error)


DAY_ROLES: Final[Mapping[str, Callable[[str, Path, threading.Event], None]]] = {"pilot": pilot, "shopper": shop}
