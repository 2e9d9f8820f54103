"""Processes of their own for benches, so that the measuring one's interpreter is not what is measured.

`python -m bench.actors raw URL LOG COUNT` and `python -m bench.actors member GROUP COUNT [FAILING]` take messages whose
bodies begin with a time of CLOCK_MONOTONIC, which all processes of a machine share, and print latencies as JSON at the
end.
`python -m bench.actors idle GROUP` handles nothing for ever and prints its resident memory once a second.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import redis

import mqlayer
from bench.stage import KEYS

WARM_UP = 500
"""Messages at the start that do not count: imports and first connections are still under way."""


def raw(url: str, log: str, count: int) -> None:
    """Take messages by a native group, acknowledging each read."""
    client = redis.Redis.from_url(url, protocol=2)
    client.xgroup_create(log, "raw", "0", mkstream=True)
    say("ready")
    latencies: list[int] = []
    while len(latencies) < count:
        reply: Any = client.xreadgroup("raw", "c", {log: ">"}, count=500, block=1000)
        for _, entries in reply or ():
            now = time.monotonic_ns()
            latencies += [now - int(fields[b"b"][:20]) for _, fields in entries]
            client.xack(log, "raw", *(entry_id for entry_id, _ in entries))
    report(latencies)


def member(group: str, count: int, failing: int = 0) -> None:
    """Take messages by a member of a group; those of so many keys fail for ever and are not counted."""
    app, latencies, done = mqlayer.App(), list[int](), threading.Event()
    broken = frozenset(KEYS[:failing])

    @app.consumer("bench", group=group, backoff_s=(0.1, 3600.0))
    def handle(body: bytes, ctx: mqlayer.Context) -> None:
        if broken and ctx.key in broken:
            raise ValueError("for ever")
        latencies.append(time.monotonic_ns() - int(body[:20]))
        if len(latencies) >= count:
            done.set()

    app.start()
    say("ready")
    done.wait()
    app.stop()
    report(latencies)


def idle(group: str) -> None:
    """Read ahead as far as the bounds allow, and never finish a message."""
    app = mqlayer.App()
    never = threading.Event()

    @app.consumer("bench", group=group)
    def handle(_body: bytes) -> None:
        never.wait()

    app.start()
    while not never.wait(1):
        resident_pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        say(json.dumps({"rss_mb": resident_pages * 4096 / 1e6}))


def report(latencies: list[int]) -> None:
    """Print the latencies that count, in ms."""
    counted = sorted(latencies[WARM_UP:])
    p50, p99 = (counted[int(len(counted) * q)] / 1e6 for q in (0.5, 0.99))
    say(json.dumps({"p50_ms": p50, "p99_ms": p99}))


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Play the role that is named."""
    logging.getLogger("mqlayer").addHandler(logging.NullHandler())
    role, *facts = sys.argv[1:]
    if role == "raw":
        raw(facts[0], facts[1], int(facts[2]))
    elif role == "member":
        member(facts[0], *map(int, facts[1:]))
    else:
        idle(facts[0])


if __name__ == "__main__":
    main()
