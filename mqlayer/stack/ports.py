"""Free TCP ports on 127.0.0.1."""

from __future__ import annotations

import random
import socket
from typing import Final

from mqlayer.stack.errors import StackError
from mqlayer.stack.wait import comes_true

# Below the ephemeral range: no outgoing connection takes a stopped server's port.
FIRST_PORT: Final = 15_000
LAST_PORT: Final = 32_000
TRIES: Final = 200


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port(wanted: int = 0) -> int:
    """Return the wanted port if free, else a random one. Raises StackError."""
    if wanted and comes_true(lambda: is_free(wanted), within_s=1.0):
        return wanted
    randomness = random.SystemRandom()
    for _ in range(TRIES):
        port = randomness.randint(FIRST_PORT, LAST_PORT)
        if is_free(port):
            return port
    raise StackError(f"no free port between {FIRST_PORT} and {LAST_PORT} in {TRIES} tries")
