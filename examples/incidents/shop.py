"""A shop under load: its orders, what consumes them, and what can go wrong."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

import mqlayer
from mqlayer import outbox
from mqlayer.domain.routing import lp_of

TOPIC = "orders"
KEYS = [f"customer-{number}" for number in range(400)]
FAILS = Path(os.environ.get("INCIDENTS", ".")) / "deployed-with-a-bug"
HANDLING_S = 0.004

app = mqlayer.App()


@app.consumer(TOPIC, group="billing", attempt_limit=3, backoff_s=[0.2])
def bill(_: bytes, ctx: mqlayer.Context) -> None:
    """Handle an order; a release with a bug fails for some customers."""
    time.sleep(HANDLING_S)
    if FAILS.exists() and hash_of(ctx.key or "") % 50 == 0:
        raise LookupError(f"no tax class for the country of {ctx.key}")


@app.consumer(TOPIC, group="mail")
def mail(_: bytes) -> None:
    """Write a mail about it."""


def hash_of(key: str) -> int:
    """Return a number of a key that is the same in each process."""
    return sum(key.encode()) * 31 % 997


class Load(threading.Thread):
    """Publishes orders through the outbox, `per_s` of them, until it is told to stop."""

    def __init__(self, dsn: str, per_s: float) -> None:
        super().__init__(daemon=True)
        self.per_s, self.hot = per_s, False
        self._dsn, self._stopping = dsn, threading.Event()
        # An eighth of all LPs: one partition's, half of it.
        self._near = [key for key in (f"reseller-{n}" for n in range(2_000)) if lp_of(key.encode()) < 128]

    def run(self) -> None:
        """Publish batches, five a second."""
        with psycopg.connect(self._dsn) as connection:
            while not self._stopping.wait(0.2):
                keys = random.choices(KEYS, k=round(self.per_s / 5))
                if self.hot:
                    keys += random.choices(self._near, k=round(self.per_s * 4))
                for key in keys:
                    outbox.publish(connection, TOPIC, key=key, body=b'{"amount": 10}')
                connection.commit()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        self.join()


def hold_open(dsn: str) -> Callable[[], None]:
    """Publish in a transaction that stays open; return a function that ends it."""
    connection = psycopg.connect(dsn, application_name="price-import")
    outbox.publish(connection, TOPIC, key=KEYS[7], body=b"{}")
    return connection.close


if __name__ == "__main__":
    sys.exit("run it with: python -m examples.incidents")
