"""A process that consumes for `bench.growth`: `mqlayer consume bench.growth.consumer:app`.

The environment says: `BENCH_TOPIC`, `BENCH_GROUP` (the start of its groups' names), `BENCH_GROUPS`, `BENCH_START`,
`BENCH_WAIT_MS` (how long a handler waits), `BENCH_NOTES` (a file of `bench.consumer_notes`; in place of the partition,
it has the microseconds since the time in the body, 0 without one).
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final

import mqlayer
from bench.consumer_notes import NOTE

FLUSH_S: Final = 0.01
LONGEST_US: Final = 2**31 - 1

_file = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
_wait_s = float(os.environ["BENCH_WAIT_MS"]) / 1e3
_start: Any = os.environ["BENCH_START"]
_handled: list[tuple[int, int]] = []

app = mqlayer.App()


def handle(body: bytes) -> None:
    """Wait, and note the message."""
    if _wait_s:
        time.sleep(_wait_s)
    # The file is written by another thread: a system call per message would cost as much as the library.
    _handled.append((int.from_bytes(body[:8], "big"), time.monotonic_ns()))


def write_notes() -> None:
    """Write the notes of handled messages for ever."""
    written = 0
    while True:
        time.sleep(FLUSH_S)
        count = len(_handled)
        notes = _handled[written:count]
        if notes:
            os.write(_file, b"".join(NOTE.pack(microseconds(*note), note[1]) for note in notes))
            written = count


def microseconds(sent_ns: int, at_ns: int) -> int:
    """Return the time from sending to handling."""
    return min((at_ns - sent_ns) // 1_000, LONGEST_US) if sent_ns else 0


for number in range(int(os.environ["BENCH_GROUPS"])):
    app.consumer(os.environ["BENCH_TOPIC"], group=f"{os.environ['BENCH_GROUP']}-{number}", start=_start)(handle)
threading.Thread(target=write_notes, daemon=True).start()
