"""Processes whose memory is measured: `python -m bench.memory_process ROLE COUNT …` prints it once a second.

`consumer GROUPS PREFETCH GROUP`: so many consumers, of groups with that name, read ahead and finish nothing.
`relay COUNT`: a relay that has sent so many messages.
`producer LPS PENDING TOPICS`: a producer that sent a message to each of the first LPs of each of the topics `bench`,
`bench-1` and so on, and has so many more that wait for room in the full topic `full`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import mqlayer
from bench.actors import say
from bench.stage import BODY
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.domain.routing import lp_of
from mqlayer.producing import ProducerOptions
from mqlayer.relay import Relay
from mqlayer.settings import Settings

PAGE: Final = 4_096
POLL_S: Final = 0.05


def consumer(groups: int, prefetch: int, group: str) -> None:
    """Read ahead as far as the bounds allow."""
    app, never = mqlayer.App(), threading.Event()
    options = MemberOptions(prefetch_count=prefetch)
    for number in range(groups):

        @app.consumer("bench", group=f"{group}-{number}", start="earliest", options=options)
        def handle(_body: bytes) -> None:
            never.wait()

    app.start()
    show()


def relay(count: int) -> None:
    """Relay, and show memory once all is sent."""
    one = Relay(Settings())
    threading.Thread(target=one.run, daemon=True).start()
    while one.appended_count < count:
        time.sleep(POLL_S)
    show()


def producer(lps: int, pending: int, topics: int) -> None:
    """Send, and wait for room."""
    options = ProducerOptions(max_pending_messages=pending + lps + 1, max_pending_bytes=10**9)
    with mqlayer.Producer(options=options) as one:
        names = [topic_name(number) for number in range(topics)]
        keys = keys_of(lps)
        for name in names:
            for future in [one.send_async(name, key=key, body=b"") for key in keys]:
                future.result()
        waiting = [one.send_async("full", key=f"key-{number % 1_000}", body=BODY) for number in range(pending)]
        show()
        del waiting


def topic_name(number: int) -> str:
    """Return the name of a topic; the first is the stage's."""
    return f"bench-{number}" if number else "bench"


def keys_of(lps: int) -> list[str]:
    """Return a key for each of the first LPs."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < lps:
        key = f"customer-{number:05}"
        lp = lp_of(key.encode())
        if lp < lps:
            found.setdefault(lp, key)
        number += 1
    return list(found.values())


def show() -> None:
    """Print resident memory for ever."""
    while True:
        time.sleep(1)
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        say(json.dumps({"rss": pages * PAGE}))


def main() -> None:
    """Play the role that is named."""
    logging.getLogger("mqlayer").addHandler(logging.NullHandler())
    role, *facts = sys.argv[1:]
    if role == "consumer":
        consumer(int(facts[0]), int(facts[1]), facts[2])
    else:
        roles: dict[str, Callable[..., None]] = {"relay": relay, "producer": producer}
        roles[role](*map(int, facts))


if __name__ == "__main__":
    main()
