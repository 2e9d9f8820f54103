"""The actor in audit rows."""

from __future__ import annotations

import getpass
import os
import socket


def actor() -> str:
    """Return user@host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's uid may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
