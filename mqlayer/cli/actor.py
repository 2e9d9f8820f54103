"""Who acts: what audit rows and the history of routes say of a command."""

from __future__ import annotations

import getpass
import os
import socket


def actor() -> str:
    """Return the user and host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number that has no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
