"""Processes of their own that consume, and note each message they handled in a file that the measuring one reads.

`mqlayer consume bench.consumer_process:app` joins at once. `python -m bench.consumer_process join` says that it is
ready, and joins when a line comes in. `python -m bench.consumer_process raw URL CONCURRENCY LOG …` reads plain streams
by a native group, with so many threads that acknowledge what they have handled of each read.

A note is the partition and a time of CLOCK_MONOTONIC, which all processes of a machine share. The environment tells:
`BENCH_GROUP`, `BENCH_NOTES` (the file), `BENCH_EACH` (each process has a file, which ends in its pid), `BENCH_WAIT_MS`
(how long a handler takes).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, Final

import redis

import mqlayer
from bench.actors import say
from bench.consumer_notes import NOTE

READ: Final = 20

_group = os.environ["BENCH_GROUP"]
_place = os.environ["BENCH_NOTES"] + (f".{os.getpid()}" if "BENCH_EACH" in os.environ else "")
_file = os.open(_place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
_wait_s = float(os.environ.get("BENCH_WAIT_MS", "0")) / 1e3

app = mqlayer.App()


@app.consumer("bench", group=_group, start="latest")
def handle(_body: bytes, context: mqlayer.Context) -> None:
    """Take the time that a handler takes, and note the message."""
    work(context.partition)


def work(partition: int) -> None:
    """Do what both kinds of handlers do."""
    if _wait_s:
        time.sleep(_wait_s)
    os.write(_file, NOTE.pack(partition, time.monotonic_ns()))


def raw(url: str, concurrency: int, logs: list[str]) -> None:
    """Handle what comes into plain streams until SIGTERM; each thread has its share of the streams."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    client, first = redis.Redis.from_url(url, protocol=2), os.getpid()
    threads = [
        threading.Thread(target=take, args=(client, logs[n % len(logs) :: concurrency], f"{first}-{n}", stopping))
        for n in range(concurrency)
    ]
    for thread in threads:
        thread.start()
    say("ready")
    for thread in threads:
        thread.join()


def take(client: redis.Redis, logs: list[str], name: str, stopping: threading.Event) -> None:
    """Be one consumer of a native group."""
    while not stopping.is_set():
        reply: Any = client.xreadgroup(_group, name, dict.fromkeys(logs, ">"), count=READ, block=100)
        for log, entries in reply or ():
            for _ in entries:
                work(0)
            client.xack(log, _group, *(entry_id for entry_id, _ in entries))


def main() -> None:
    """Play the role that is named."""
    role, *facts = sys.argv[1:]
    if role == "raw":
        raw(facts[0], int(facts[1]), facts[2:])
    else:
        say("ready")
        sys.stdin.readline()
        app.run()


if __name__ == "__main__":
    main()
