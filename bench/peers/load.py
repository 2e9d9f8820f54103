"""The load that each system gets: bodies that tell their key, number and time, and the handler that reads them."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

BODY_BYTES: Final = 256
KEYS: Final = 1_000
BATCH: Final = 500
HANDLERS: Final = 8
# The key and the number within it.
IDENTITY_BYTES: Final = 15
ENDED: Final = 0
PARTS: Final = 5
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


class HandlerNotes(NamedTuple):
    """A handler's notes: each message's first latency in the order of arrival, and the faults."""

    latencies_ns: list[int]
    per_s: float
    out_of_order: int
    repeated: int


class CheckedHandler:
    """The handler: it notes when messages begin and end, and is `done` once each of `expected` messages has come.

    `pause_ms`: the longest time that a message takes. Any thread may call it: its notes need no lock, which would
    make threads wait for each other, and all that can wait is computed by `judged`.
    """

    def __init__(self, expected: int, *, pause_ms: float = 0.0) -> None:
        self.done, self.began = threading.Event(), threading.Event()
        self._expected, self._pause_ms = expected, pause_ms
        self._ended: set[bytes | str] = set()
        self._notes: list[tuple[int, bytes | str]] = []
        self._random = random.Random(7)

    def __call__(self, body: bytes | str) -> None:
        """Handle a message in this thread."""
        self._begin(body)
        if self._pause_ms:
            time.sleep(self._random.uniform(0, self._pause_ms) / 1e3)
        self._end(body)

    async def handle(self, body: bytes | str) -> None:
        """Handle a message in this task."""
        self._begin(body)
        if self._pause_ms:
            await asyncio.sleep(self._random.uniform(0, self._pause_ms) / 1e3)
        self._end(body)

    def _begin(self, body: bytes | str) -> None:
        self._notes.append((time.monotonic_ns(), body))
        if len(self._notes) == 1:
            self.began.set()

    def _end(self, body: bytes | str) -> None:
        self._notes.append((ENDED, body))
        self._ended.add(body[:IDENTITY_BYTES])
        if len(self._ended) >= self._expected:
            self.done.set()

    def judged(self) -> HandlerNotes:
        """Return the notes so far. A message is out of order where its key's last ended one is not the former."""
        latencies_ns: list[int] = []
        times_ns: list[int] = []
        out_of_order = repeated = 0
        seen: set[tuple[int, int]] = set()
        last: dict[int, int] = {}
        for at_ns, body in self._notes:
            key, seq, sent_ns = (int(part) for part in body.split(None, 3)[:3])
            if at_ns == ENDED:
                last[key] = max(seq, last.get(key, -1))
            elif (key, seq) in seen:
                repeated += 1
            else:
                seen.add((key, seq))
                times_ns.append(at_ns)
                latencies_ns.append(at_ns - sent_ns)
                out_of_order += last.get(key, -1) != seq - 1
        per_s = (len(seen) - 1) / max(1e-9, (times_ns[-1] - times_ns[0]) / 1e9) if times_ns else 0.0
        return HandlerNotes(latencies_ns, per_s, out_of_order, repeated)


def quantile_ms(latencies_ns: Sequence[int], share: float) -> float:
    """Return a quantile in ms; NaN of nothing."""
    ordered = sorted(latencies_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6 if ordered else float("nan")


def usual_ms(latencies_ns: Sequence[int], share: float) -> float:
    """Return the median of a quantile over five parts of a run in ms, so that one pause of the disk decides nothing."""
    size = max(1, -(-len(latencies_ns) // PARTS))
    parts = [latencies_ns[first : first + size] for first in range(0, len(latencies_ns), size)]
    return statistics.median(quantile_ms(part, share) for part in parts) if parts else float("nan")


def part_of(key: str, parts: int = HANDLERS) -> int:
    """Return the part of a key, for systems whose applications divide keys themselves."""
    return int(key.rpartition("-")[2]) % parts
