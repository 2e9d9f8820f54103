"""A member whose handler calls a TCP server: `python -m tests.proof.downstream_member TOPIC PORT LOG MODE`.

It runs until SIGTERM, and writes a line per run of the handler, in one piece: its process, b (begun) or e (ended), key,
body, attempt.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import closing
from typing import Literal

from mqlayer import App, Context
from mqlayer.groups.group import RetrySettings


def call(port: int, body: bytes) -> None:
    """Send a body to the server and await its answer. Raises OSError."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(body)
        if not connection.recv(100):
            raise ConnectionResetError("no answer")


def main(topic: str, port: int, path: str, mode: Literal["exclusive", "shared"]) -> None:
    """Consume until SIGTERM."""
    log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    app = App()

    rules: RetrySettings = {
        "breaker_share": 0.5, "breaker_keys": 6, "attempt_limit": 2, "policy": "dead_letter",
    }  # fmt: skip

    @app.consumer(topic, group="g", mode=mode, **rules)
    def handle(body: bytes, ctx: Context) -> None:
        line = b"%s %s %d\n" % ((ctx.key or "").encode(), body, ctx.attempt)
        os.write(log, b"%d b " % os.getpid() + line)
        call(port, body)
        os.write(log, b"%d e " % os.getpid() + line)

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    app.start()
    ended.wait()
    app.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], "shared" if sys.argv[4] == "shared" else "exclusive")
