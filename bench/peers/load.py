"""The load that each system gets: bodies that tell their key, number and time, and the handler that reads them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

BODY_BYTES: Final = 256
KEYS: Final = 1_000
BATCH: Final = 500
HANDLERS: Final = 8
# A process that stops reports within this time, or is killed.
STOP_WITHIN_S: Final = 20.0


class KeyedBody(NamedTuple):
    """A message for any system. The body is plain ASCII: some systems carry text only."""

    key: str
    body: bytes


def keyed_body(number: int, keys: int, at_ns: int) -> KeyedBody:
    """Return message `number`; the keys come in turn."""
    key, seq = number % keys, number // keys
    return KeyedBody(f"key-{key}", (b"%06d %08d %020d " % (key, seq, at_ns)).ljust(BODY_BYTES, b"x"))


def keyed_bodies(first: int, last: int, keys: int) -> list[KeyedBody]:
    """Return the messages from `first` up to `last`, exclusive."""
    now_ns = time.monotonic_ns()
    return [keyed_body(number, keys, now_ns) for number in range(first, last)]


class CheckedHandler:
    """The handler: it notes times, order and repetitions, and `done` once each of `expected` messages has come.

    A message is out of order where its key's last ended one is not the one before it. `pause_ms`: the longest time
    that a message takes. Any thread may call it.
    """

    def __init__(self, expected: int, *, pause_ms: float = 0.0) -> None:
        self.done, self.began = threading.Event(), threading.Event()
        self.out_of_order = self.repeated = 0
        self.latencies_ns: list[int] = []
        self.first_ns = self.last_ns = 0
        self._expected, self._pause_ms = expected, pause_ms
        self._seen: set[tuple[int, int]] = set()
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._random = random.Random(7)

    def __call__(self, body: bytes | str) -> None:
        """Handle a message in this thread."""
        key, seq = self._begin(body)
        if self._pause_ms:
            time.sleep(self._random.uniform(0, self._pause_ms) / 1e3)
        self._end(key, seq)

    async def handle(self, body: bytes | str) -> None:
        """Handle a message in this task."""
        key, seq = self._begin(body)
        if self._pause_ms:
            await asyncio.sleep(self._random.uniform(0, self._pause_ms) / 1e3)
        self._end(key, seq)

    def _begin(self, body: bytes | str) -> tuple[int, int]:
        key, seq, sent_ns = (int(part) for part in body.split(None, 3)[:3])
        with self._lock:
            self.last_ns = time.monotonic_ns()
            self.first_ns = self.first_ns or self.last_ns
            self.began.set()
            if (key, seq) in self._seen:
                self.repeated += 1
            else:
                self._seen.add((key, seq))
                self.latencies_ns.append(self.last_ns - sent_ns)
                self.out_of_order += self._ended.get(key, -1) != seq - 1
        return key, seq

    def _end(self, key: int, seq: int) -> None:
        with self._lock:
            self._ended[key] = max(seq, self._ended.get(key, -1))
            if len(self._seen) >= self._expected:
                self.done.set()

    def per_second(self) -> float:
        """Return the rate between the first and the last message."""
        return max(0, len(self._seen) - 1) / max(1e-9, (self.last_ns - self.first_ns) / 1e9)


def quantile_ms(latencies_ns: Sequence[int], share: float) -> float:
    """Return a quantile in ms; NaN of nothing."""
    ordered = sorted(latencies_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6 if ordered else float("nan")


def part_of(key: str, parts: int = HANDLERS) -> int:
    """Return the part of a key, for systems whose applications divide keys themselves."""
    return int(key.rpartition("-")[2]) % parts
