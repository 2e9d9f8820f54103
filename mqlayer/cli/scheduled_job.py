"""`python -m mqlayer.cli.scheduled_job WORDS`: the command `mqlayer`, ended with the process that started it.

Standard input is a pipe that the starter holds open and never writes to. Its end ends this process group, Java too,
in whatever way the starter died, and on every system; Linux' own signal for that is sent at the end of a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def watch_starter() -> None:
    """Send SIGTERM to this process group at the end of standard input."""
    threading.Thread(target=_watch, name="mqlayer-watches-starter", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    watch_starter()
    from mqlayer.cli.main import app

    app(prog_name="mqlayer")
