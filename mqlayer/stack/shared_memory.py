"""The shared memory that a killed Postgres leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Final

# <sys/ipc.h>: the same on Linux, macOS and the BSDs.
IPC_RMID: Final = 0
# Postgres, "Layout of postmaster.pid": the seventh line has the key and the id of the segment.
SEGMENT_LINE: Final = 6


def release_shared_memory(data: Path) -> None:
    """Remove the segment of a server that ended without it, before its data directory goes.

    A start on the same data would remove it; without the data it stays until the machine restarts, and a machine has
    4,096 of them.
    """
    if (segment := segment_of(data)) is not None:
        # The kernel waits for the last process that is attached.
        ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)


def segment_of(data: Path) -> int | None:
    """Return the id of the segment in use, or left behind; None after a clean end."""
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        return int((data / "postmaster.pid").read_text().splitlines()[SEGMENT_LINE].split()[1])
    return None
