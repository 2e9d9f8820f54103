"""A client's process: `python -m bench.peers.client PEER publish|pace|consume URL QUEUE COUNT KEYS PAUSE_MS`.

`publish` sends COUNT messages in batches, `pace` one by one at RATE_PER_S, `consume` handles COUNT.
It prints `began` with a consumer's first message, and a JSON object with its figures at the end.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from typing import Any, Final

from bench.peers.catalogue import peer_named
from bench.peers.load import BATCH, STOP_WITHIN_S, CheckedHandler, keyed_bodies, keyed_body, quantile_ms, usual_ms
from bench.peers.peer import Peer

RATE_PER_S: Final = 500
PACERS: Final = 4
OPEN_WITHIN_S: Final = 30.0
WARM_UP_SHARE: Final = 0.1


def publish(peer: Peer, url: str, queue: str, count: int, keys: int) -> dict[str, Any]:
    """Publish in batches, each of which is stored before the next."""
    with peer.publisher(url, queue) as send:
        cpu_s, began = used_cpu_s(), time.perf_counter()
        for first in range(0, count, BATCH):
            send(keyed_bodies(first, min(first + BATCH, count), keys))
        elapsed = time.perf_counter() - began
        return {"per_s": count / elapsed, "cpu_s": used_cpu_s() - cpu_s}


def pace(peer: Peer, url: str, queue: str, count: int, keys: int) -> dict[str, Any]:
    """Publish at a steady rate; a key's messages come from one thread."""
    opened, starts_at = threading.Barrier(PACERS + 1), 0.0

    def send_share(thread: int) -> None:
        with peer.publisher(url, queue) as send:
            # Connecting takes some libraries a second, which is no message's latency.
            opened.wait(OPEN_WITHIN_S)
            opened.wait(OPEN_WITHIN_S)
            for number in range(thread, count, PACERS):
                due = starts_at + number / RATE_PER_S
                time.sleep(max(0.0, due - time.monotonic()))
                # The clock runs from the time when it was due: a publisher that falls behind must not hide it.
                send([keyed_body(number, keys, int(due * 1e9))])

    threads = [threading.Thread(target=send_share, args=(thread,)) for thread in range(PACERS)]
    for thread in threads:
        thread.start()
    opened.wait(OPEN_WITHIN_S)
    starts_at = time.monotonic() + 0.1
    opened.wait(OPEN_WITHIN_S)
    for thread in threads:
        thread.join()
    return {}


def consume(peer: Peer, url: str, queue: str, count: int, pause_ms: float) -> None:
    """Handle the messages, then report; a client library that does not stop is left behind."""
    handler, cpu_s = CheckedHandler(count, pause_ms=pause_ms), used_cpu_s()
    stopped = threading.Event()

    def report() -> None:
        handler.began.wait()
        say("began")
        handler.done.wait()
        used_s, handled = used_cpu_s() - cpu_s, handler.judged()
        counted = handled.latencies_ns[int(count * WARM_UP_SHARE) :]
        figures = {
            "per_s": handled.per_s,
            "cpu_s": used_s,
            "p50_ms": usual_ms(counted, 0.5),
            "p99_ms": usual_ms(counted, 0.99),
            "worst_ms": quantile_ms(counted, 1.0),
            "out_of_order": handled.out_of_order,
            "repeated": handled.repeated,
            "handled": len(handled.latencies_ns),
        }
        stopped.wait(STOP_WITHIN_S)
        say(json.dumps(figures))
        os._exit(0)

    # An exception of the library ends the process, with no wait for the reporter.
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    peer.consume(url, queue, handler)
    stopped.set()
    reporter.join()


def used_cpu_s() -> float:
    """Return the processor time of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Play the role that is named."""
    name, role, url, queue, count, keys, pause_ms = sys.argv[1:]
    peer = peer_named(name)
    if role == "consume":
        consume(peer, url, queue, int(count), float(pause_ms))
    else:
        play = {"publish": publish, "pace": pace}[role]
        say(json.dumps(play(peer, url, queue, int(count), int(keys))))


if __name__ == "__main__":
    main()
