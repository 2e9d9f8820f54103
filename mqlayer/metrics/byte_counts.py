"""Bytes of large bodies that this process moved, by operation and store."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal

ByteOperation = Literal["written", "read", "removed"]


class ByteCounts:
    """Sums that only rise; from zero in a forked child. Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Count from zero."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[ByteOperation, str]] = Counter()

    def add(self, operation: ByteOperation, store: str, size: int) -> None:
        """Count bytes."""
        with self._lock:
            self._counts[operation, store] += size

    def totals(self) -> Mapping[tuple[ByteOperation, str], int]:
        """Return the sums."""
        with self._lock:
            return dict(self._counts)


LARGE_BODY_BYTES: Final = ByteCounts()
"""Of this process."""
os.register_at_fork(after_in_child=LARGE_BODY_BYTES.forget)
